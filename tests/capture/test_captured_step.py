"""A captured step has the step's losses, whatever changes between calls, on a tape of operators and in a CUDA graph."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainstep.capture import CapturedStep, NotCapturable
from trainstep.capture.waits import Pretence, as_if_capturing
from trainstep.ops.adamw import AdamW

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)
Batch = dict[str, Tensor]


class Small(nn.Module):
    """Two layers and dropout, then a loss."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(inputs), targets)


@dataclass
class Training:
    """A model, its optimizer and a whole step of both."""

    module: Small
    optimizer: torch.optim.Optimizer

    def __call__(self, batch: Batch) -> Tensor:
        loss: Tensor = self.module(**batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def compute(self, batch: Batch) -> Tensor:
        loss: Tensor = self.module(**batch)
        loss.backward()
        return loss

    def captured(self, **options: Any) -> CapturedStep:
        return CapturedStep(self, optimizer=self.optimizer, module=self.module, **options)


def training(device: str, *, dropout: float = 0.0, optimizer: Callable[..., Any] = AdamW, **options: Any) -> Training:
    torch.manual_seed(0)
    module = Small(dropout).to(device)
    return Training(module, optimizer(module.parameters(), **({"lr": 1e-2} | options)))


def batches(device: str, count: int = 12, size: int = 5, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "inputs": torch.randn(size, 8, generator=generator).to(device),
            "targets": torch.randint(0, 4, (size,), generator=generator).to(device),
        }
        for _ in range(count)
    ]


def losses(step: Callable[[Any], Any], inputs: Iterable[Any]) -> list[float]:
    torch.manual_seed(3)
    return [step(batch).item() for batch in inputs]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    ],
)
def test_a_captured_step_has_the_losses_of_the_step(
    device: str, optimizer: Any, options: dict[str, Any], dropout: float
):
    inputs = batches(device, 20)
    expected = losses(training(device, dropout=dropout, optimizer=optimizer, **options), inputs)
    step = training(device, dropout=dropout, optimizer=optimizer, **options).captured()
    assert losses(step, inputs) == (expected if device == "cpu" else pytest.approx(expected, rel=1e-6))
    assert step.is_captured(inputs[0])
    assert step.why_not is None


def test_the_first_calls_run_uncaptured_and_none_is_lost(device: str):
    trained, calls = training(device), []

    def step(batch: Batch) -> Tensor:
        calls.append(batch)
        return trained(batch)

    captured = CapturedStep(step, optimizer=trained.optimizer, warmups=3)
    inputs = batches(device, 6)
    for batch in inputs:
        captured(batch)
    assert len(calls) == 4  # three uncaptured calls, and one that is recorded
    assert trained.optimizer.state[next(trained.module.parameters())]["step"].item() == 6


def test_every_shape_has_its_graph_up_to_the_limit(device: str):
    inputs = [batch for size in (5, 7, 9) for batch in batches(device, 8, size)]
    expected = losses(training(device), inputs)
    step = training(device).captured(most_graphs=2)
    assert losses(step, inputs) == pytest.approx(expected, rel=1e-6)
    assert [step.is_captured(inputs[index]) for index in (0, 8, 16)] == [True, True, False]
    mixed = [inputs[index] for index in (3, 11, 19, 4, 12)]
    assert len(losses(step, mixed)) == 5


def test_a_schedule_of_learning_rates_needs_no_new_graph(device: str):
    def run(captured: bool) -> tuple[list[float], Any]:
        trained = training(device)
        step = trained.captured() if captured else trained
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trained.optimizer, T_max=12)
        step_losses = []
        for index, batch in enumerate(batches(device, 12)):
            step_losses.append(step(batch).item())
            schedule.step()
            if index == 8:
                trained.optimizer.param_groups[0]["lr"] = 0.5  # set by hand
        return step_losses, step

    expected, _ = run(captured=False)
    step_losses, step = run(captured=True)
    assert step_losses == pytest.approx(expected, rel=1e-6)
    assert step.is_captured(batches(device, 1)[0])


@pytest.mark.parametrize("change", ["betas", "weight_decay", "frozen", "eval", "state"])
def test_a_change_that_a_graph_would_not_see_makes_a_new_graph(device: str, change: str):
    def run(captured: bool) -> list[float]:
        trained = training(device, dropout=0.5)
        step = trained.captured() if captured else trained
        torch.manual_seed(3)
        step_losses = []
        for index, batch in enumerate(batches(device, 12)):
            if index == 6:
                if change == "state":
                    trained.optimizer.load_state_dict(trained.optimizer.state_dict())
                elif change == "frozen":
                    trained.module.layers[0].requires_grad_(False)
                elif change == "eval":
                    trained.module.eval()
                else:
                    value = (0.5, 0.6) if change == "betas" else 0.9
                    trained.optimizer.param_groups[0][change] = value
            step_losses.append(step(batch).item())
        return step_losses

    assert run(captured=True) == pytest.approx(run(captured=False), rel=1e-6)


def test_an_optimizer_that_cannot_be_captured_steps_after_the_graph(device: str):
    def run(captured: bool) -> list[float]:
        trained = training(device, optimizer=torch.optim.AdamW, foreach=True)
        compute = CapturedStep(trained.compute, module=trained.module) if captured else trained.compute
        step_losses = []
        for batch in batches(device):
            step_losses.append(compute(batch).item())
            trained.optimizer.step()
            trained.optimizer.zero_grad()
        return step_losses

    assert run(captured=True) == pytest.approx(run(captured=False), rel=1e-6)
    trained = training(device, optimizer=torch.optim.AdamW, foreach=True)
    with pytest.raises(ValueError, match="optimizer: AdamW counts its steps on the host: build it with fused=True"):
        trained.captured()


@pytest.mark.parametrize("to_none", [True, False])
def test_accumulated_gradients_are_right_or_not_captured(device: str, to_none: bool):
    """Gradients may add up in place. A graph that makes new gradients would overwrite them, so such steps run uncaptured."""

    def run(captured: bool) -> tuple[list[float], Any]:
        trained = training(device)
        compute = CapturedStep(trained.compute, module=trained.module, strict=False) if captured else trained.compute
        step_losses = []
        for index, batch in enumerate(batches(device, 40)):
            step_losses.append(compute(batch).item())
            if index % 2:
                trained.optimizer.step()
                trained.optimizer.zero_grad(set_to_none=to_none)
        return step_losses, compute

    expected, _ = run(captured=False)
    step_losses, compute = run(captured=True)
    assert step_losses == pytest.approx(expected, rel=1e-6)
    assert ("gradients" in (compute.why_not or "")) is to_none


def test_a_list_of_micro_batches_is_captured(device: str):
    def run(captured: bool) -> list[float]:
        trained = training(device)

        def step(inputs: list[Batch]) -> Tensor:
            for batch in inputs:
                loss = trained.compute(batch)
            trained.optimizer.step()
            trained.optimizer.zero_grad()
            return loss

        step_taken = CapturedStep(step, optimizer=trained.optimizer) if captured else step
        pairs = batches(device, 16)
        return [step_taken(pairs[index : index + 2]).item() for index in range(0, 16, 2)]

    assert run(captured=True) == pytest.approx(run(captured=False), rel=1e-6)


def test_a_wait_of_the_host_is_named_with_its_line(device: str):
    trained = training(device)

    def step(batch: Batch) -> Tensor:
        loss = trained(batch)
        if loss.item() > 1e9:  # this line
            raise ArithmeticError
        return loss

    captured = CapturedStep(step, optimizer=trained.optimizer, warmups=2)
    captured(batches(device, 1)[0])
    with pytest.raises(
        NotCapturable, match=r"test_captured_step\.py:\d+: `if loss\.item\(\) > 1e9:  # this line`"
    ) as raised:
        captured(batches(device, 1)[0])
    assert len(raised.value.waits) == 1
    assert raised.value.waits[0].file == __file__


def test_a_mask_that_waits_is_named_too(device: str):
    trained = training(device)

    def step(batch: Batch) -> Tensor:
        loss = trained(batch)
        return loss + batch["inputs"][batch["inputs"] > 9].sum()

    captured = CapturedStep(step, optimizer=trained.optimizer, warmups=2, strict=False)
    for batch in batches(device, 2):
        captured(batch)
    assert captured.why_not is not None
    assert 'batch["inputs"][batch["inputs"] > 9]' in captured.why_not


def test_without_strict_the_step_runs_uncaptured(device: str):
    def run(captured: bool) -> tuple[list[float], Any]:
        trained = training(device)

        def step(batch: Batch) -> Tensor:
            loss = trained(batch)
            assert loss.item() < 1e9
            return loss

        step_taken = CapturedStep(step, optimizer=trained.optimizer, strict=False) if captured else step
        return losses(step_taken, batches(device)), step_taken

    expected, _ = run(captured=False)
    step_losses, step = run(captured=True)
    assert step_losses == pytest.approx(expected, rel=1e-6)
    assert step.why_not.startswith("the step cannot be captured; ")


def test_marks_are_reported_in_order_at_every_step(device: str):
    trained, marks = training(device), []

    def step(batch: Batch) -> Tensor:
        loss: Tensor = trained.module(**batch)
        captured.mark("forward")
        loss.backward()
        captured.mark("backward")
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        return loss

    captured = CapturedStep(step, optimizer=trained.optimizer)
    for batch in batches(device, 6):
        captured(batch, lambda label, event: marks.append((label, event)))
    assert [label for label, _ in marks] == ["forward", "backward"] * 6
    if device == "cuda":
        torch.cuda.synchronize()
        (_, begin), (_, end) = marks[-2:]
        assert begin.elapsed_time(end) > 0
    else:
        assert all(event is None for _, event in marks)


def test_outputs_are_copies(device: str):
    step = training(device).captured()
    step_losses = [step(batch) for batch in batches(device)]
    assert len({loss.data_ptr() for loss in step_losses}) == len(step_losses)
    assert not any(loss.requires_grad for loss in step_losses)


def test_losses_that_are_not_finite_are_counted_on_the_device(device: str):
    step = training(device).captured()
    inputs = batches(device, 8)
    inputs[6] = {**inputs[6], "inputs": inputs[6]["inputs"] * float("nan")}
    for batch in inputs:
        step(batch)
    assert step.losses_not_finite() == 2  # that loss, and the next one, whose weights are NaN


def test_a_batch_on_the_host_is_copied_to_the_device(device: str):
    inputs = batches("cpu")
    expected = losses(training(device), batches(device))
    step = training(device).captured()
    assert losses(step, inputs) == pytest.approx(expected, rel=1e-6)
    assert step.is_captured(inputs[0])


def test_a_step_that_changes_at_every_call_is_not_captured(device: str):
    trained = training(device, optimizer=torch.optim.SGD)  # a graph has its learning rate as a constant
    step = trained.captured(strict=False, warmups=2)
    for index, batch in enumerate(batches(device, 16)):
        trained.optimizer.param_groups[0]["lr"] = 0.1 / (1 + index)
        step(batch)
    assert step.why_not == "the step is not the same for 2 consecutive calls: lr of group 0 changed"


def test_an_error_of_the_step_is_raised_unchanged(device: str):
    trained = training(device)

    def step(batch: Batch) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        CapturedStep(step, optimizer=trained.optimizer)(batches(device, 1)[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmups": 1}, "warmups: a step runs at least twice before it is captured, not 1 times"),
        ({"most_graphs": 0}, "most_graphs: must be at least 1, not 0"),
    ],
)
def test_wrong_options_are_refused(device: str, options: dict[str, int], words: str):
    with pytest.raises(ValueError, match=words):
        training(device).captured(**options)


def test_batches_and_outputs_that_are_no_tensors_are_refused(device: str):
    step = training(device).captured()
    with pytest.raises(ValueError, match="batch: holds a object"):
        step({"inputs": object()})
    with pytest.raises(ValueError, match="device: give the optimizer or the module"):
        CapturedStep(lambda batch: batch)
    with pytest.raises(ValueError, match="function: returns a object"):
        CapturedStep(lambda _batch: object(), device=device)(batches(device, 1)[0])


def test_a_buffer_or_parameter_that_a_module_gets_later_is_noticed(device: str):
    trained = training(device)
    step = trained.captured()
    inputs = batches(device, 12)
    losses(step, inputs[:6])
    assert step.is_captured(inputs[0])
    trained.module.layers[1].register_buffer("scale", torch.ones(1, device=device))
    step(inputs[6])
    assert not step.is_captured(inputs[0])
    losses(step, inputs[7:])
    trained.module.layers[1].register_parameter("shift", nn.Parameter(torch.ones(1, device=device)))
    step(inputs[7])
    assert not step.is_captured(inputs[0])


def test_a_module_that_a_warm_up_makes_costs_no_second_capture(device: str):
    trained, calls = training(device), []

    def step(batch: Batch) -> Tensor:
        if not calls:
            trained.module.layers.append(nn.Identity())
        calls.append(None)
        return trained(batch)

    captured = CapturedStep(step, optimizer=trained.optimizer, module=trained.module)
    losses(captured, batches(device, 9))
    assert len(calls) == 4  # three uncaptured calls, and one that is recorded


class Refusing(AdamW):
    """Asks like torch's optimizers, which raise an error if they are captured and cannot be."""

    def step(self, closure: Any = None) -> Any:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not capturable")
        return super().step(closure)


def test_an_optimizer_is_not_told_of_a_capture_that_is_none(device: str):
    """Its error would end the watched step, which is a real one, between backward and the update."""
    inputs = batches(device, 8)
    expected = losses(training(device, optimizer=AdamW), inputs)
    step = training(device, optimizer=Refusing).captured(strict=False)
    assert losses(step, inputs) == pytest.approx(expected, rel=1e-6)
    assert step.is_captured(inputs[0]) == (device == "cpu")


def test_what_refuses_a_capture_is_raised_once(device: str):
    trained, errors = training(device), 0

    def step(batch: Batch) -> Tensor:
        if _asked():
            raise RuntimeError("not in a capture")
        return trained(batch)

    captured = CapturedStep(step, optimizer=trained.optimizer, module=trained.module, strict=False)
    for batch in batches(device, 8):
        try:
            captured(batch)
        except RuntimeError:
            errors += 1
    assert errors == 1
    assert "not in a capture" in (captured.why_not or "")


def _asked() -> bool:
    """As a library asks; torch's own function raises an error where torch is built without CUDA."""
    ask = torch.cuda.is_current_stream_capturing
    return ask() if isinstance(ask, Pretence) or torch.cuda.is_available() else False


def test_pretences_that_overlap_leave_the_truth_behind(device: str):
    truth = torch.cuda.is_current_stream_capturing
    first, second = as_if_capturing(), as_if_capturing()
    first.__enter__()
    second.__enter__()
    assert _asked()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert not _asked()
    torch.cuda.is_current_stream_capturing = truth


def test_a_scripted_part_of_a_module_is_captured(device: str):
    trained = training(device)
    trained.module.layers[3] = torch.jit.script(nn.Linear(16, 4).to(device))
    trained.optimizer = AdamW(trained.module.parameters(), lr=0.01)
    step = trained.captured(strict=False)
    losses(step, batches(device))
    assert step.is_captured(batches(device)[0]) == (step.why_not is None)

"""A captured step is the step: the same losses to the bit, whatever changes between calls, on a tape and in a CUDA graph alike."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainstep.capture import CapturedStep, NotCapturable
from trainstep.ops.adamw import AdamW

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)
Batch = dict[str, Tensor]


class Small(nn.Module):
    """Two layers and dropout, in a loss."""

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


def losses(step: Callable[[Any], Any], given: Iterable[Any]) -> list[float]:
    torch.manual_seed(3)
    return [step(batch).item() for batch in given]


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
def test_the_losses_are_those_of_the_step_itself(device: str, optimizer: Any, options: dict[str, Any], dropout: float):
    given = batches(device, 20)
    expected = losses(training(device, dropout=dropout, optimizer=optimizer, **options), given)
    step = training(device, dropout=dropout, optimizer=optimizer, **options).captured()
    assert losses(step, given) == (expected if device == "cpu" else pytest.approx(expected, rel=1e-6))
    assert step.is_captured(given[0])
    assert step.why_not is None


def test_the_first_calls_run_as_they_are_and_none_is_lost(device: str):
    trained, calls = training(device), []

    def step(batch: Batch) -> Tensor:
        calls.append(batch)
        return trained(batch)

    captured = CapturedStep(step, optimizer=trained.optimizer, warmups=3)
    given = batches(device, 6)
    for batch in given:
        captured(batch)
    assert len(calls) == 4  # three as they are, one to be written down
    assert trained.optimizer.state[next(trained.module.parameters())]["step"].item() == 6


def test_every_shape_has_its_graph_and_those_beyond_the_limit_run_as_they_are(device: str):
    given = [batch for size in (5, 7, 9) for batch in batches(device, 8, size)]
    expected = losses(training(device), given)
    step = training(device).captured(most_graphs=2)
    assert losses(step, given) == pytest.approx(expected, rel=1e-6)
    assert [step.is_captured(given[place]) for place in (0, 8, 16)] == [True, True, False]
    mixed = [given[place] for place in (3, 11, 19, 4, 12)]
    assert len(losses(step, mixed)) == 5


def test_a_schedule_of_learning_rates_needs_no_new_graph(device: str):
    def run(captured: bool) -> tuple[list[float], Any]:
        trained = training(device)
        step = trained.captured() if captured else trained
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trained.optimizer, T_max=12)
        found = []
        for index, batch in enumerate(batches(device, 12)):
            found.append(step(batch).item())
            schedule.step()
            if index == 8:
                trained.optimizer.param_groups[0]["lr"] = 0.5  # as people do it by hand
        return found, step

    expected, _ = run(captured=False)
    found, step = run(captured=True)
    assert found == pytest.approx(expected, rel=1e-6)
    assert step.is_captured(batches(device, 1)[0])


@pytest.mark.parametrize("change", ["betas", "weight_decay", "frozen", "eval", "state"])
def test_what_a_graph_would_keep_makes_a_new_one(device: str, change: str):
    def run(captured: bool) -> list[float]:
        trained = training(device, dropout=0.5)
        step = trained.captured() if captured else trained
        torch.manual_seed(3)
        found = []
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
            found.append(step(batch).item())
        return found

    assert run(captured=True) == pytest.approx(run(captured=False), rel=1e-6)


def test_an_optimizer_that_no_graph_can_hold_steps_behind_it(device: str):
    def run(captured: bool) -> list[float]:
        trained = training(device, optimizer=torch.optim.AdamW, foreach=True)
        compute = CapturedStep(trained.compute, module=trained.module) if captured else trained.compute
        found = []
        for batch in batches(device):
            found.append(compute(batch).item())
            trained.optimizer.step()
            trained.optimizer.zero_grad()
        return found

    assert run(captured=True) == pytest.approx(run(captured=False), rel=1e-6)
    trained = training(device, optimizer=torch.optim.AdamW, foreach=True)
    with pytest.raises(ValueError, match="optimizer: AdamW counts its steps on the host: build it with fused=True"):
        trained.captured()


@pytest.mark.parametrize("to_none", [True, False])
def test_calls_that_add_up_gradients(device: str, to_none: bool):
    """In place they add up as ever. Where gradients are made anew, the graph would overwrite them: those steps run as they are."""

    def run(captured: bool) -> tuple[list[float], Any]:
        trained = training(device)
        compute = CapturedStep(trained.compute, module=trained.module, strict=False) if captured else trained.compute
        found = []
        for index, batch in enumerate(batches(device, 40)):
            found.append(compute(batch).item())
            if index % 2:
                trained.optimizer.step()
                trained.optimizer.zero_grad(set_to_none=to_none)
        return found, compute

    expected, _ = run(captured=False)
    found, compute = run(captured=True)
    assert found == pytest.approx(expected, rel=1e-6)
    assert ("gradients" in (compute.why_not or "")) is to_none


def test_micro_batches_are_a_list(device: str):
    def run(captured: bool) -> list[float]:
        trained = training(device)

        def step(given: list[Batch]) -> Tensor:
            for batch in given:
                loss = trained.compute(batch)
            trained.optimizer.step()
            trained.optimizer.zero_grad()
            return loss

        taken = CapturedStep(step, optimizer=trained.optimizer) if captured else step
        pairs = batches(device, 16)
        return [taken(pairs[place : place + 2]).item() for place in range(0, 16, 2)]

    assert run(captured=True) == pytest.approx(run(captured=False), rel=1e-6)


def test_what_makes_the_host_wait_is_named_with_its_line(device: str):
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


def test_a_mask_is_named_too(device: str):
    trained = training(device)

    def step(batch: Batch) -> Tensor:
        loss = trained(batch)
        return loss + batch["inputs"][batch["inputs"] > 9].sum()

    captured = CapturedStep(step, optimizer=trained.optimizer, warmups=2, strict=False)
    for batch in batches(device, 2):
        captured(batch)
    assert captured.why_not is not None
    assert 'batch["inputs"][batch["inputs"] > 9]' in captured.why_not


def test_without_strict_the_step_goes_on_as_it_is(device: str):
    def run(captured: bool) -> tuple[list[float], Any]:
        trained = training(device)

        def step(batch: Batch) -> Tensor:
            loss = trained(batch)
            assert loss.item() < 1e9
            return loss

        taken = CapturedStep(step, optimizer=trained.optimizer, strict=False) if captured else step
        return losses(taken, batches(device)), taken

    expected, _ = run(captured=False)
    found, step = run(captured=True)
    assert found == pytest.approx(expected, rel=1e-6)
    assert step.why_not.startswith("the step cannot be captured; ")


def test_marks_are_told_in_order_at_every_step(device: str):
    trained, told = training(device), []

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
        captured(batch, lambda label, event: told.append((label, event)))
    assert [label for label, _ in told] == ["forward", "backward"] * 6
    if device == "cuda":
        torch.cuda.synchronize()
        (_, begin), (_, end) = told[-2:]
        assert begin.elapsed_time(end) > 0
    else:
        assert all(event is None for _, event in told)


def test_outputs_are_copies(device: str):
    step = training(device).captured()
    found = [step(batch) for batch in batches(device)]
    assert len({loss.data_ptr() for loss in found}) == len(found)
    assert not any(loss.requires_grad for loss in found)


def test_losses_that_are_no_numbers_are_counted_on_the_device(device: str):
    step = training(device).captured()
    given = batches(device, 8)
    given[6] = {**given[6], "inputs": given[6]["inputs"] * float("nan")}
    for batch in given:
        step(batch)
    assert step.losses_not_finite() == 2  # that one, and the one behind it, whose weights are NaN


def test_a_batch_on_the_host_is_copied_in(device: str):
    given = batches("cpu")
    expected = losses(training(device), batches(device))
    step = training(device).captured()
    assert losses(step, given) == pytest.approx(expected, rel=1e-6)
    assert step.is_captured(given[0])


def test_what_changes_at_every_call_is_given_up_by_name(device: str):
    trained = training(device, optimizer=torch.optim.SGD)  # whose learning rate a graph bakes in
    step = trained.captured(strict=False, warmups=2)
    for index, batch in enumerate(batches(device, 16)):
        trained.optimizer.param_groups[0]["lr"] = 0.1 / (1 + index)
        step(batch)
    assert step.why_not == "the step is not the same for 2 calls in a row: lr of group 0 changed"


def test_a_fault_of_the_step_comes_out_as_it_is(device: str):
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
def test_options_are_checked(device: str, options: dict[str, int], words: str):
    with pytest.raises(ValueError, match=words):
        training(device).captured(**options)


def test_what_is_no_tensor_is_refused_by_name(device: str):
    step = training(device).captured()
    with pytest.raises(ValueError, match="batch: holds a object"):
        step({"inputs": object()})
    with pytest.raises(ValueError, match="device: give the optimizer or the module"):
        CapturedStep(lambda batch: batch)
    with pytest.raises(ValueError, match="function: returns a object"):
        CapturedStep(lambda _batch: object(), device=device)(batches(device, 1)[0])

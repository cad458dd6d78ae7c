"""Changes that a graph alone would silently ignore: the captured step notices them, or refuses them by name."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainstep.capture import CapturedStep, NotCapturable
from trainstep.capture.tape import Tapes
from trainstep.ops.adamw import AdamW

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)
Change = Callable[[int], Any] | None
"""The caller's code after each call."""
Setup = tuple[nn.Module, torch.optim.Optimizer | None, Callable[[Any], Tensor], Change]


def layers(device: str, *more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), *(more or (nn.Tanh(), nn.Linear(8, 8)))).to(device)


def stepped(module: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], Tensor]:
    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = module(batch["x"]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def batches(device: str, count: int = 14) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, 8, generator=generator).to(device)} for _ in range(count)]


def run(
    setup: Callable[[], Setup], inputs: list[Any], *, captured: bool, **options: Any
) -> tuple[list[float], list[Tensor], Any]:
    torch.manual_seed(0)
    module, optimizer, function, change = setup()
    step: Any = CapturedStep(function, optimizer=optimizer, module=module, **options) if captured else function
    losses = []
    for index, batch in enumerate(inputs):
        losses.append(step(batch).item())
        if change:
            change(index)
    return losses, list(module.state_dict().values()), step


def check_captured(
    device: str, setup: Callable[[], Setup], make_batches: Callable[[], list[Any]] | None = None, **options: Any
) -> Any:
    """Check that the captured step has the losses and weights of the step; the captured step."""
    batches_of_run = make_batches or (lambda: batches(device))
    losses, weights, _ = run(setup, batches_of_run(), captured=False)
    captured_losses, captured_weights, step = run(setup, batches_of_run(), captured=True, **options)
    assert captured_losses == (losses if device == "cpu" else pytest.approx(losses, rel=1e-5))
    for captured_weight, weight in zip(captured_weights, weights, strict=True):
        torch.testing.assert_close(
            captured_weight, weight, rtol=0 if device == "cpu" else 1e-4, atol=0 if device == "cpu" else 1e-6
        )
    return step


def test_a_part_of_the_module_set_to_eval_is_noticed(device: str):
    def setup() -> Setup:
        module = layers(device, nn.BatchNorm1d(8), nn.Dropout(0.5))
        optimizer = AdamW(module.parameters(), lr=0.01)
        return module, optimizer, stepped(module, optimizer), lambda index: module[1].eval() if index == 6 else None

    assert check_captured(device, setup).why_not is None


def test_frozen_parameters_are_noticed_where_only_the_module_is_known(device: str):
    def setup() -> Setup:
        module = layers(device)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.1)

        def compute(batch: dict[str, Tensor]) -> Tensor:
            loss: Tensor = module(batch["x"]).pow(2).mean()
            loss.backward()
            return loss

        def change(index: int) -> None:
            optimizer.step()
            optimizer.zero_grad()
            if index == 6:
                module[0].requires_grad_(False)

        return module, None, compute, change

    check_captured(device, setup)


def test_parameters_with_other_memory_are_noticed(device: str):
    def setup() -> Setup:
        module = layers(device)
        optimizer = AdamW(module.parameters(), lr=0.01)

        def change(index: int) -> None:
            for parameter in module.parameters() if index == 6 else ():
                parameter.data = parameter.data.clone()

        return module, optimizer, stepped(module, optimizer), change

    assert check_captured(device, setup).is_captured(batches(device, 1)[0])


def test_gradients_of_parameters_without_an_optimizer_are_right(device: str):
    def setup() -> Setup:
        module = layers(device)
        optimizer = torch.optim.SGD(module[0].parameters(), lr=0.1)

        def change(_index: int) -> None:
            weight = module[2].weight
            with torch.no_grad():
                weight -= weight.grad
            module.zero_grad()

        return module, optimizer, stepped(module, optimizer), change

    assert check_captured(device, setup).why_not is None


class Averaging(nn.Module):
    """A module whose running mean is another tensor at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return inputs - self.mean


def test_a_buffer_replaced_at_each_step_is_refused(device: str):
    def setup() -> Setup:
        module = layers(device, Averaging())
        optimizer = AdamW(module.parameters(), lr=0.01)
        return module, optimizer, stepped(module, optimizer), None

    step = check_captured(device, setup, strict=False)
    assert "a buffer (replaced by another tensor; write into it instead) changed" in step.why_not


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps in a Python number, as SparseAdam does and many that are not torch's."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                parameter.grad /= state["steps"]
        return super().step(closure)


class Replacing(torch.optim.SGD):
    """An optimizer that makes a new momentum tensor at each step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["mean"] = parameter.grad = state.get("mean", 0) * 0.9 + parameter.grad
        return super().step(closure)


@pytest.mark.parametrize(("optimizer", "name"), [(Counting, "steps"), (Replacing, "mean")])
def test_an_optimizer_with_state_on_the_host_is_refused(device: str, optimizer: Any, name: str):
    def setup() -> Setup:
        module = layers(device)
        counting = optimizer(module.parameters(), lr=0.1)
        return module, counting, stepped(module, counting), None

    step = check_captured(device, setup, strict=False)
    assert f"{optimizer.__name__} changes `{name}` of its state on the host at every step" in step.why_not


def test_an_optimizer_that_counts_in_host_tensors_is_refused(device: str):
    module = layers(device)
    with pytest.raises(NotCapturable, match=r"of its state on the host|read by the host"):
        run(
            lambda: (module, a := torch.optim.Adagrad(module.parameters()), stepped(module, a), None),
            batches(device),
            captured=True,
        )


def test_optimizer_state_made_in_the_captured_step_is_refused(device: str):
    def setup() -> Setup:
        module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]).to(device)
        optimizer, calls = AdamW(module.parameters(), lr=0.01), []

        def step(batch: dict[str, Tensor]) -> Tensor:
            calls.append(None)
            loss: Tensor = module[0](batch["x"]).pow(2).mean()
            if len(calls) > 3:
                loss = loss + module[1](batch["x"]).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return module, optimizer, step, None

    assert "AdamW made state for 6 tensors that had no gradient" in check_captured(device, setup, strict=False).why_not


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_learning_rate_set_by_the_function_is_refused(device: str, by_hand: bool):
    def setup() -> Setup:
        module = layers(device)
        optimizer = AdamW(module.parameters(), lr=0.01)
        schedule, inner = torch.optim.lr_scheduler.StepLR(optimizer, 5), stepped(module, optimizer)

        def step(batch: dict[str, Tensor]) -> Tensor:
            loss = inner(batch)
            if by_hand:
                optimizer.param_groups[0]["lr"] = float(optimizer.param_groups[0]["lr"]) / 2
            else:
                schedule.step()
            return loss

        return module, optimizer, step, None

    assert "the function sets the learning rate" in check_captured(device, setup, strict=False).why_not


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_with_dropout_is_right_or_refused(device: str, reentrant: bool):
    class Checkpointed(nn.Sequential):
        def forward(self, inputs: Tensor) -> Tensor:
            return checkpoint(super().forward, self[0](inputs), use_reentrant=reentrant)

    def setup() -> Setup:
        module = Checkpointed(nn.Linear(8, 8), nn.Dropout(0.5)).to(device)
        optimizer = AdamW(module.parameters(), lr=0.01)
        return module, optimizer, stepped(module, optimizer), None

    # A graph of torch 2.11 or later repeats the masks, which `check_captured` has compared; a tape cannot.
    step = check_captured(device, setup, strict=False)
    assert device == "cuda" or step.why_not is not None


def test_a_function_may_write_into_its_batch(device: str):
    def setup() -> Setup:
        module = layers(device)
        optimizer = AdamW(module.parameters(), lr=0.01)
        inner = stepped(module, optimizer)

        def step(batch: dict[str, Tensor]) -> Tensor:
            batch["x"].mul_(0.9)
            return inner({"x": batch["x"] + batch["y"]})

        return module, optimizer, step, None

    def one_batch() -> list[Any]:
        x = batches(device, 1)[0]["x"]
        return [{"x": x, "y": x}] * 12  # the same tensor twice, and at each call

    assert check_captured(device, setup, one_batch).why_not is None


@pytest.mark.parametrize(("tensor", "words"), [("grad", "requires grad"), ("sparse", "a sparse tensor")])
def test_unsupported_tensors_in_a_batch_are_refused(device: str, tensor: str, words: str):
    eye = torch.eye(8, device=device)
    step = CapturedStep(lambda batch: batch.sum(), device=device)
    with pytest.raises(ValueError, match=f"batch: holds .*{words}"):
        step(eye.requires_grad_() if tensor == "grad" else eye.to_sparse())


def test_without_strict_such_a_batch_runs_uncaptured(device: str):
    step = CapturedStep(lambda batch: batch["x"].sum(), device=device, strict=False)
    for batch in batches(device, 5):
        assert step({**batch, "of": object()}).item() == batch["x"].sum().item()
    assert "batch: holds a object" in step.why_not


def test_a_batch_with_other_strides_has_its_own_graph(device: str):
    step = CapturedStep(lambda batch: batch[0], device=device)
    matrix = torch.arange(16.0, device=device).reshape(4, 4)
    for _ in range(4):
        step(matrix)
    assert step.is_captured(matrix)
    assert not step.is_captured(matrix.T)


def test_calls_without_autograd_or_with_autocast_have_their_own_graph(device: str):
    module = layers(device)
    step = CapturedStep(lambda batch: module(batch["x"]).sum(), module=module)
    inputs = batches(device, 1)[0]
    for _ in range(4):
        step(inputs)
    assert step.is_captured(inputs)
    with torch.no_grad():
        assert not step.is_captured(inputs)
    with torch.autocast(device, torch.bfloat16):
        assert not step.is_captured(inputs)


def test_autocast_around_many_calls_casts_the_weights_of_each(device: str):
    def setup() -> Setup:
        module = layers(device)
        optimizer = AdamW(module.parameters(), lr=0.01)
        return module, optimizer, stepped(module, optimizer), None

    with torch.autocast(device, torch.bfloat16, cache_enabled=False):
        expected, _, _ = run(setup, batches(device), captured=False)
    with torch.autocast(device, torch.bfloat16):
        captured_losses, _, _ = run(setup, batches(device), captured=True)
    assert captured_losses == pytest.approx(expected, rel=0 if device == "cpu" else 1e-3)


def test_a_captured_step_in_another_is_a_part_of_its_graph(device: str):
    def setup() -> Setup:
        module = layers(device)
        optimizer = AdamW(module.parameters(), lr=0.01)
        weigh = CapturedStep(lambda batch: module(batch["x"]).detach().mean(), module=module)

        def step(batch: dict[str, Tensor]) -> Tensor:
            loss = module(batch["x"]).pow(2).mean() * weigh(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return module, optimizer, step, None

    assert check_captured(device, setup).is_captured(batches(device, 1)[0])


class Mark:
    """An object that lives as long as the autograd node that refers to it."""


def test_outputs_do_not_keep_activations_alive(device: str):
    module, marks = layers(device), []

    def forward(batch: dict[str, Tensor]) -> Tensor:
        hidden = module[1](module[0](batch["x"]))
        hidden.grad_fn.metadata["mark"] = mark = Mark()
        marks.append(weakref.ref(mark))
        return module[2](hidden).sum()

    step = CapturedStep(forward, module=module)
    for batch in batches(device, 4):
        step(batch)
    gc.collect()
    assert step.is_captured(batches(device, 1)[0])
    assert marks[-1]() is None


class Failing(Tapes):
    """A recorder that records without running, as a GPU's does, and then fails."""

    takes_step = False

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def record(self, run: Callable[[], Any], on_mark: Any) -> Any:
        run()
        raise self.error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("of memory"), KeyboardInterrupt(), RuntimeError("capture")])
def test_a_capture_that_fails_leaves_no_gradients(device: str, error: BaseException):
    module = layers(device)

    def compute(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = module(batch["x"]).pow(2).mean()
        loss.backward()
        return loss

    step: Any = CapturedStep(compute, module=module)
    step._recorder = Failing(error)
    for batch in batches(device, 3):
        step(batch)
        module.zero_grad()
    with pytest.raises(NotCapturable if isinstance(error, RuntimeError) and "capture" in str(error) else type(error)):
        step(batches(device, 1)[0])
    assert all(parameter.grad is None for parameter in module.parameters())

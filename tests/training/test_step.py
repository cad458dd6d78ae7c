"""A training step runs its phases in order, and its gradients are those of one large batch, clipped if requested."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from numerics import assert_as_accurate_as
from trainstep.config.run import MODES, Phase
from trainstep.training.step import TrainStep

FORWARD, BACKWARD, GRAD_SYNC, OPTIMIZER = Phase
EXPECTED = {
    "forward": ["forward of 1", FORWARD],
    "forward_no_grad": ["forward of 1", FORWARD],
    "forward_backward": ["forward of 1", FORWARD, "gradient", BACKWARD],
    "step": ["forward of 1", FORWARD, "gradient", BACKWARD, "update", OPTIMIZER],
}


class Sync:
    """A gradient synchronisation that calls `finish` at its end."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.finish_gradient_synchronization = finish
        self.no_sync = nullcontext


class Model(nn.Module):
    """A small regression that logs when it runs."""

    def __init__(self, log: list[Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.log = log if log is not None else []
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.log.append(f"forward of {len(x)}")
        return (self.second(torch.tanh(self.first(x))).squeeze(-1) - y).square().mean()


class LoggingSgd(torch.optim.SGD):
    log: list[Any]

    def step(self, closure: Any = None) -> None:
        self.log.append("update")
        super().step(closure)


def batch(rows: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 4, generator=generator), "y": torch.randn(rows, generator=generator)}


def logged(mode: str = "step", **named: Any) -> tuple[TrainStep, list[Any]]:
    log: list[Any] = []
    model = Model(log)
    model.first.bias.register_post_accumulate_grad_hook(lambda _: log.append("gradient"))
    optimizer = LoggingSgd(model.parameters(), lr=1.0)
    optimizer.log = log
    return TrainStep(model, optimizer if mode == "step" else None, mode=mode, **named), log


@pytest.mark.parametrize("mode", MODES)
def test_phases_run_in_order(mode: str):
    step, log = logged(mode)
    step([batch(1)], log.append)
    assert log == EXPECTED[mode]


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_synchronized_once_after_all_micro_batches(mode: str):
    step, log = logged(mode)
    step.gradient_sync = Sync(lambda: log.append("synchronized"))
    step([batch(1), batch(2)], log.append)
    passes = EXPECTED[mode][:4]
    expected = [*passes, *(event if event != "forward of 1" else "forward of 2" for event in passes)]
    if "backward" in mode or mode == "step":
        expected += ["synchronized", GRAD_SYNC]
    assert log == expected + (["update", OPTIMIZER] if mode == "step" else [])


def test_the_running_phase_is_set():
    running = []

    class LogsRunning(nn.Module):
        def forward(self) -> Tensor:
            running.append(("forward", step.running))
            return loss

    weight = nn.Parameter(torch.ones(()))
    weight.register_hook(lambda _: running.append(("backward", step.running)))
    loss = weight * 2
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: running.append(("optimizer", step.running)))
    step = TrainStep(LogsRunning(), optimizer)
    step.gradient_sync = Sync(lambda: running.append(("grad_sync", step.running)))
    step([{}])
    assert [expected for expected, _ in running] == ["forward", "backward", "grad_sync", "optimizer"]
    assert all(expected == phase for expected, phase in running)


def test_modes_change_weights_and_gradients_as_they_should():
    for mode in MODES:
        step, _ = logged(mode)
        before = [parameter.clone() for parameter in step.module.parameters()]
        loss = step([batch(5)])
        assert not loss.requires_grad
        unchanged = all(torch.equal(a, b) for a, b in zip(before, step.module.parameters(), strict=True))
        assert unchanged == (mode != "step")
        has_gradients = {parameter.grad is not None for parameter in step.module.parameters()}
        assert has_gradients == {mode == "forward_backward"}
        step.clear_gradients()
        assert all(parameter.grad is None for parameter in step.module.parameters())


def test_no_grad_builds_no_graph():
    graphs = []
    for mode in ("forward", "forward_no_grad"):
        step, _ = logged(mode)
        step.module.register_forward_hook(lambda _module, _inputs, output: graphs.append(output.grad_fn is not None))
        step([batch(1)])
    assert graphs == [True, False]


def test_a_step_needs_an_optimizer():
    with pytest.raises(ValueError, match="optimizer: mode step needs an optimizer"):
        TrainStep(Model(), None)


@pytest.mark.parametrize("output", [torch.ones(2), None, SimpleNamespace(logits=torch.ones(())), 1.0])
def test_an_output_that_is_no_loss_is_refused(output: Any):
    class Returns(nn.Module):
        def forward(self) -> Any:
            return output

    with pytest.raises(ValueError, match=r"model: its forward must return a scalar loss or an object with \.loss"):
        TrainStep(Returns(), None, mode="forward")([{}])


def test_an_output_may_be_an_object_with_a_loss():
    class Returns(Model):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return SimpleNamespace(loss=super().forward(x, y), logits=None)

    loss, wrapped_loss = (TrainStep(model, None, mode="forward")([batch(3)]) for model in (Model(), Returns()))
    assert torch.equal(loss, wrapped_loss)


@pytest.mark.parametrize("micro_batches", [2, 3, 6])
def test_accumulated_gradients_are_those_of_one_large_batch(micro_batches: int):
    large = batch(12)
    parts = [
        dict(zip(large, split, strict=True))
        for split in zip(*(tensor.chunk(micro_batches) for tensor in large.values()), strict=True)
    ]
    truth = Model().double()
    wide = {name: tensor.double() for name, tensor in large.items()}
    gradients = []
    for model, batches in ((Model(), parts), (Model(), [large]), (truth, [wide])):
        TrainStep(model, None, mode="forward_backward")(batches)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert_as_accurate_as(*gradients)


@pytest.mark.parametrize("limit", [1e-3, 0.1, 1e3])
def test_the_update_is_the_clipped_gradient(limit: float):
    """With SGD at rate 1 the change of the weights is the clipped gradient."""
    model, by_hand = Model(), Model()
    by_hand(**batch(8)).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in by_hand.parameters()])
    norm = sum(value.item() ** 2 for value in gradient) ** 0.5
    assert 0.1 < norm < 1e3, "one limit clips and one does not"
    before = torch.cat([parameter.detach().clone().flatten() for parameter in model.parameters()])
    TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), clip_grad_norm=limit)([batch(8)])
    change = before - torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(change, gradient * min(1.0, limit / norm), atol=3e-7, rtol=1e-4)


def test_gradients_do_not_accumulate_over_steps():
    step, _ = logged()
    expected = Model()
    sgd = torch.optim.SGD(expected.parameters(), lr=1.0)
    for seed in range(3):
        step([batch(4, seed)])
        sgd.zero_grad()
        expected(**batch(4, seed)).backward()
        sgd.step()
    assert all(torch.equal(a, b) for a, b in zip(step.module.parameters(), expected.parameters(), strict=True))

"""The tape that stands in for a graph on a CPU: it runs operators again exactly, and names values read past them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainstep.capture import CapturedStep, NotCapturable


def batches(count: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 8, generator=generator) for _ in range(count)]


def losses(
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    *,
    captured: bool,
    strict: bool = True,
) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    module = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(batch: Tensor) -> Tensor:
        loss = loss_of(module, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step_taken: Any = CapturedStep(step, optimizer=optimizer, module=module, strict=strict) if captured else step
    return [step_taken(batch).item() for batch in batches()], step_taken


def masked(module: nn.Module, batch: Tensor) -> Tensor:
    batch = batch.clone()
    batch[batch > 0] = 0.5
    return module(batch).pow(2).mean()


def transposed_in_place(module: nn.Module, batch: Tensor) -> Tensor:
    scores = (module(batch) @ module(batch).T).tanh()
    weights = (scores * 2).detach()
    weights.t_()
    return (scores * weights).mean() + (scores.detach() + 1).unsqueeze_(0).mul(scores).mean()


@pytest.mark.parametrize(
    ("make", "loss_of"),
    [
        pytest.param(lambda: nn.LSTM(8, 8, 2), lambda module, batch: module(batch)[0].pow(2).mean(), id="LSTM"),
        pytest.param(
            lambda: nn.Linear(8, 8), lambda module, batch: torch.func.vmap(module)(batch).pow(2).mean(), id="vmap"
        ),
        pytest.param(lambda: nn.Linear(8, 8), transposed_in_place, id="views in place"),
        pytest.param(lambda: nn.Linear(8, 8), masked, id="a mask filled with a number"),
    ],
)
def test_operators_run_again_as_they_ran(make: Callable[[], nn.Module], loss_of: Any):
    expected, _ = losses(make, loss_of, captured=False)
    captured_losses, step = losses(make, loss_of, captured=True)
    assert captured_losses == expected
    assert step.is_captured(batches(1)[0])


@pytest.mark.parametrize("read", [Tensor.tolist, Tensor.numpy, Tensor.cpu, str], ids=["tolist", "numpy", "cpu", "str"])
def test_values_read_outside_of_operators_are_named(read: Callable[[Tensor], Any]):
    def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
        read(batch.sum())  # here
        return module(batch).pow(2).mean()

    with pytest.raises(
        NotCapturable, match=r"test_tape\.py:\d+: `read\(batch\.sum\(\)\)  # here`: a tensor's value is read"
    ):
        losses(lambda: nn.Linear(8, 8), loss_of, captured=True)


@pytest.mark.parametrize("strict", [True, False])
def test_a_value_read_only_in_the_captured_call_is_named(strict: bool):
    calls: list[None] = []

    def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = module(batch).pow(2).mean()
        calls.append(None)
        if len(calls) % 4 == 0:
            loss.item()
        return loss

    if strict:
        with pytest.raises(NotCapturable, match=r"test_tape\.py:\d+: `loss\.item\(\)`"):
            losses(lambda: nn.Linear(8, 8), loss_of, captured=True)
    else:
        expected, _ = losses(lambda: nn.Linear(8, 8), loss_of, captured=False)
        calls.clear()
        captured_losses, step = losses(lambda: nn.Linear(8, 8), loss_of, captured=True, strict=False)
        assert captured_losses == expected
        assert "loss.item()" in step.why_not

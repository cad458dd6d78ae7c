"""What a strategy says it holds is what it holds: the process is searched for tensors, at every point of a step."""

from contextlib import nullcontext

import pytest
from torch import Tensor, nn

from held_bytes import Holdings, storage_bytes
from parallel_strategies import BF16_STRATEGIES, STRATEGIES, Run
from parallel_training import OPTIMIZERS, Case, batches, built, loss_of
from ranks import run_ranks
from trainstep.parallel.ranks import Ranks

ALL = {**STRATEGIES, **BF16_STRATEGIES}
QUICK = ("flat", "bucketed", "sharded", "sharded_flat", "fsdp", "bucketed bf16", "fsdp bf16")
"""Every kind of buffer once; the others are slow tests."""


def told_bytes(run: Run, model: nn.Module) -> int:
    """What the module has, what strategy and optimizer say they hold, and the optimizer's state."""
    held = [one.held_tensors() for one in (run.sync, run.optimizer) if hasattr(one, "held_tensors")]
    owned = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    gradients = [one.grad for one in (*model.parameters(), *owned) if one.grad is not None]
    states = [value for state in run.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    tensors = [tensor for one in held for tensor in one]
    return sum(storage_bytes([*model.parameters(), *gradients, *states, *tensors]).values())


def held_and_told(ranks: Ranks, name: str) -> dict[str, tuple[int, int]]:
    """At each point of two steps of two micro-batches: bytes found in the process, bytes told."""
    case = Case(unused="somewhere", accumulation=2)
    steps = list(batches(case, ranks.world_size))[:2]
    model = built(case)
    holdings = Holdings(model)
    run = ALL[name](model, ranks, OPTIMIZERS["adamw"])
    found: dict[str, tuple[int, int]] = {}

    def look(point: str) -> None:
        found[point] = holdings.settled_bytes(), told_bytes(run, model)

    look("start")
    for step, ranks_batches in enumerate(steps):
        for number, batch in enumerate(ranks_batches[ranks.rank]):
            with run.sync.no_sync() if number == 0 else nullcontext():
                loss_of(model, batch, case, ranks.rank).backward()
            look(f"{step}: backward {number}")
        run.sync.finish_gradient_synchronization()
        look(f"{step}: averaged")
        run.optimizer.step()
        look(f"{step}: updated")
        run.optimizer.zero_grad()
        look(f"{step}: cleared")
    return found


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ALL]
)
def test_a_strategy_tells_all_that_it_holds(name: str):
    for found in run_ranks(2, held_and_told, name):
        assert {point: held for point, (held, _) in found.items()} == {p: told for p, (_, told) in found.items()}

"""A strategy reports all tensors that it holds: the process is searched for tensors at every point of a step."""

from contextlib import nullcontext

import pytest
from torch import Tensor, nn

from held_bytes import Holdings, storage_bytes
from parallel_strategies import BF16_STRATEGIES, STRATEGIES, Run
from parallel_training import OPTIMIZERS, Case, batches, built, loss_of
from ranks import run_ranks
from trainstep.parallel.ranks import Ranks

ALL = {**STRATEGIES, **BF16_STRATEGIES}
QUICK = ("flat", "sharded", "sharded_flat", "bucketed bf16", "fsdp bf16")
"""Every kind of buffer once (in bf16 a strategy has all that it has in fp32); the others are slow tests."""


def reported_bytes(run: Run, model: nn.Module) -> int:
    """Bytes of the module, of the tensors that strategy and optimizer report, and of the optimizer's state."""
    held = [owner.held_tensors() for owner in (run.sync, run.optimizer) if hasattr(owner, "held_tensors")]
    owned = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in (*model.parameters(), *owned) if parameter.grad is not None]
    states = [value for state in run.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    tensors = [tensor for of_owner in held for tensor in of_owner]
    return sum(storage_bytes([*model.parameters(), *gradients, *states, *tensors]).values())


def held_and_reported(ranks: Ranks, name: str) -> dict[str, tuple[int, int]]:
    """Bytes found in the process and bytes reported, at each point of two steps of two micro-batches."""
    case = Case(unused="somewhere", accumulation=2)
    steps = list(batches(case, ranks.world_size))[:2]
    model = built(case)
    holdings = Holdings(model)
    run = ALL[name](model, ranks, OPTIMIZERS["adamw"])
    sizes: dict[str, tuple[int, int]] = {}

    def look(point: str) -> None:
        sizes[point] = holdings.settled_bytes(), reported_bytes(run, model)

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
    return sizes


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ALL]
)
def test_a_strategy_reports_all_tensors_that_it_holds(name: str):
    for sizes in run_ranks(2, held_and_reported, name):
        reported = {point: reported for point, (_, reported) in sizes.items()}
        assert {point: held for point, (held, _) in sizes.items()} == reported

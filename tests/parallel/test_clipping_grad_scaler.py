"""A gradient that overflows on one rank makes all ranks skip the step and halve the scale, whatever steps the optimizer."""

from typing import Any

import pytest
import torch
from torch import nn

from ranks import run_ranks
from trainstep.ops.adamw import AdamW
from trainstep.parallel.clipping import RankedGradScaler
from trainstep.parallel.ranks import Ranks, alone
from trainstep.parallel.sharded_optimizer import ShardedOptimizer

SCALE = 1024.0


def optimizer_of(kind: str, parameter: nn.Parameter, ranks: Ranks) -> torch.optim.Optimizer:
    if kind == "sharded fused":
        return ShardedOptimizer([parameter], torch.optim.AdamW, ranks=ranks, lr=0.1, fused=True)
    if kind == "sharded ours":
        return ShardedOptimizer([parameter], AdamW, ranks=ranks, lr=0.1)
    return torch.optim.AdamW([parameter], lr=0.1, **{kind: True})


def stepped(ranks: Ranks, kind: str, unscaled: bool, planted: str) -> list[tuple[bool, float]]:
    """Take three steps, the second of which overflows on rank 1; for each, whether the parameter moved, and the scale after it."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = optimizer_of(kind, parameter, ranks)
    scaler = RankedGradScaler(ranks, init_scale=SCALE)
    steps = []
    for step in range(3):
        scaler.scale(parameter.sum() * 0.5).backward()
        assert parameter.grad is not None
        if step == 1 and ranks.rank == 1:
            parameter.grad[1] = float(planted)
        before = parameter.detach().clone()
        if unscaled:
            scaler.unscale_(optimizer)
            if step != 1:
                assert torch.equal(parameter.grad, torch.full((3,), 0.5))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.append((not torch.equal(before, parameter.detach()), scaler.get_scale()))
    return steps


@pytest.mark.parametrize("planted", ["inf", "nan"])
@pytest.mark.parametrize("unscaled", [True, False])
@pytest.mark.parametrize("kind", ["fused", "foreach", "sharded fused", "sharded ours"])
def test_all_ranks_skip_a_step_that_overflows_on_one(kind: str, unscaled: bool, planted: str):
    expected = [(True, SCALE), (False, SCALE / 2), (True, SCALE / 2)]
    assert run_ranks(2, stepped, kind, unscaled, planted) == [expected, expected]


def step_without_gradients(ranks: Ranks) -> float:
    """Step where only rank 0 has a gradient, which is infinite; the scale after it."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = RankedGradScaler(ranks, init_scale=SCALE)
    scaler.scale(torch.zeros(()))
    if ranks.rank == 0:
        parameter.grad = torch.full((3,), torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter.detach(), torch.ones(3))
    assert scaler.collectives.traffic.payload_bytes == ({"all_reduce": 4} if ranks.world_size > 1 else {})
    return float(scaler.get_scale())


def test_a_rank_without_gradients_takes_part():
    assert run_ranks(3, step_without_gradients) == [SCALE / 2] * 3
    assert step_without_gradients(alone()) == SCALE / 2


def step_with_a_disabled_scaler(ranks: Ranks) -> Any:
    parameter = nn.Parameter(torch.ones(1))
    scaler = RankedGradScaler(ranks, enabled=False)
    scaler.scale(parameter.sum()).backward()
    scaler.step(torch.optim.SGD([parameter], lr=1.0))
    scaler.update()
    return parameter.item(), scaler.collectives.traffic.messages.total()


def test_a_disabled_scaler_sends_nothing():
    assert run_ranks(2, step_with_a_disabled_scaler) == [(0.0, 0)] * 2

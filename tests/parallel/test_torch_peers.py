"""torch's own strategies behind trainstep's protocol; their parity with one process is in test_parity.py."""

from typing import Any

import pytest
import torch
from torch import nn

from parallel_strategies import TORCH_STRATEGIES
from parallel_training import OPTIMIZERS, Case, built, train_together
from ranks import RankFailed, run_ranks
from trainstep.parallel.ranks import Ranks, alone
from trainstep.parallel.torch_peers import TorchDDP, TorchFSDP2, torch_zero


def trained(ranks: Ranks) -> Any:
    return train_together(ranks, TORCH_STRATEGIES["torch_ddp"], Case(unused="everywhere"), "sgd")


def test_ddp_refuses_unused_parameters_by_default():
    with pytest.raises(RankFailed, match="Expected to have finished reduction"):
        run_ranks(2, trained)


def gradient(sync: Any, value: float) -> float:
    sync.module.zero_grad()
    sync.module(torch.full((1, 1), value)).backward()
    sync.finish_gradient_synchronization()
    grad = next(sync.module.parameters()).grad
    return float(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)


def protocol(ranks: Ranks, kind: str) -> dict[str, Any]:
    sync = {"ddp": TorchDDP, "fsdp2": TorchFSDP2}[kind](nn.Linear(1, 1, bias=False), ranks)
    value = float(1 + 2 * ranks.rank)
    assert list(sync.held_tensors()) == []
    results: dict[str, Any] = {"traffic": sync.traffic, "averaged": gradient(sync, value)}
    results["norm"] = float(sync.clip_grad_norm_(0.5))
    if kind == "ddp":
        with sync.no_sync():
            results["alone"] = gradient(sync, value)
        sync.detach()
        results["detached"] = gradient(sync, value)
        results["module"] = type(sync.module).__name__
    else:
        with pytest.raises(RuntimeError, match="cannot be taken off"):
            sync.detach()
    return results


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_torchs_strategies_average_clip_and_detach(kind: str):
    for rank, results in enumerate(run_ranks(2, protocol, kind)):
        expected = {"traffic": None, "averaged": 2.0, "norm": 2.0}
        if kind == "ddp":
            expected |= {"alone": 1.0 + 2 * rank, "detached": 1.0 + 2 * rank, "module": "Linear"}
        assert results == expected


@pytest.mark.parametrize(
    "peer", [TorchDDP, TorchFSDP2, lambda model, ranks: torch_zero(model.parameters(), OPTIMIZERS["sgd"], ranks=ranks)]
)
def test_a_process_on_its_own_is_refused(peer: Any):
    with pytest.raises(ValueError, match="ranks: torch's wrappers need a process group"):
        peer(built(Case()), alone())

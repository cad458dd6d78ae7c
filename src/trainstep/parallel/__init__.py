"""Parallel strategies: gradient synchronisation and sharding for any nn.Module, usable alone.

Usage, under torchrun:

    from trainstep.parallel import DDP, start_ranks, stop_ranks

    ranks = start_ranks()
    model.to(ranks.device)
    model = DDP(model, ranks)    # an nn.Module around it
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches:    # as many on every rank: unequal numbers end the job with an error that says so
        model(**batch).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    del optimizer, model
    stop_ranks(ranks)    # whoever ends without it counts as dead, and the others leave

Names here are loaded, and torch with them, when they are first used. `DDP` is BucketedDDP.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainstep.parallel.agreement import ReplicasDisagree, check_agreement
    from trainstep.parallel.checkpoint import load_checkpoint, save_checkpoint
    from trainstep.parallel.ddp_bucketed import BucketedDDP
    from trainstep.parallel.ddp_bucketed import BucketedDDP as DDP
    from trainstep.parallel.ddp_flat import FlatDDP
    from trainstep.parallel.ddp_naive import NaiveDDP
    from trainstep.parallel.ddp_overlapped import OverlappedDDP
    from trainstep.parallel.flat_optimizer import FlatShardedOptimizer
    from trainstep.parallel.fsdp import FSDP
    from trainstep.parallel.grad_scaler import RankedGradScaler
    from trainstep.parallel.gradient_sync import GradientSync
    from trainstep.parallel.process_group import start_ranks, stop_ranks
    from trainstep.parallel.ranks import Ranks, alone, ranks_of_default_group
    from trainstep.parallel.sharded_flat import ShardedGradients
    from trainstep.parallel.sharded_optimizer import ShardedOptimizer
    from trainstep.parallel.sharded_state import merge_state_dicts
    from trainstep.parallel.torch_peers import TorchDDP, TorchFSDP2, torch_zero

__all__ = [
    "DDP",
    "FSDP",
    "BucketedDDP",
    "FlatDDP",
    "FlatShardedOptimizer",
    "GradientSync",
    "NaiveDDP",
    "OverlappedDDP",
    "RankedGradScaler",
    "Ranks",
    "ReplicasDisagree",
    "ShardedGradients",
    "ShardedOptimizer",
    "TorchDDP",
    "TorchFSDP2",
    "alone",
    "check_agreement",
    "load_checkpoint",
    "merge_state_dicts",
    "ranks_of_default_group",
    "save_checkpoint",
    "start_ranks",
    "stop_ranks",
    "torch_zero",
]

_NAMES_OF = {
    "agreement": ("ReplicasDisagree", "check_agreement"),
    "checkpoint": ("load_checkpoint", "save_checkpoint"),
    "ddp_bucketed": ("BucketedDDP",),
    "ddp_flat": ("FlatDDP",),
    "ddp_naive": ("NaiveDDP",),
    "ddp_overlapped": ("OverlappedDDP",),
    "flat_optimizer": ("FlatShardedOptimizer",),
    "fsdp": ("FSDP",),
    "grad_scaler": ("RankedGradScaler",),
    "gradient_sync": ("GradientSync",),
    "process_group": ("start_ranks", "stop_ranks"),
    "ranks": ("Ranks", "alone", "ranks_of_default_group"),
    "sharded_flat": ("ShardedGradients",),
    "sharded_optimizer": ("ShardedOptimizer",),
    "sharded_state": ("merge_state_dicts",),
    "torch_peers": ("TorchDDP", "TorchFSDP2", "torch_zero"),
}
"""Module -> what it defines of these."""


def __getattr__(name: str) -> Any:
    """What a module below defines under this name."""
    wanted = "BucketedDDP" if name == "DDP" else name
    for module, names in _NAMES_OF.items():
        if wanted in names:
            found = globals()[name] = getattr(import_module(f"{__name__}.{module}"), wanted)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

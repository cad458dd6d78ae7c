"""Parallel strategies: gradient synchronisation and sharding for any nn.Module, usable alone.

Usage, under torchrun:

    from trainstep.parallel import DDP, start_ranks, stop_ranks

    ranks = start_ranks()
    model.to(ranks.device)
    model = DDP(model, ranks)    # an nn.Module around it
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches:    # every rank needs the same number of batches, else the job ends with an error that says so
        model(**batch).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    del optimizer, model
    stop_ranks(ranks)    # a rank that ends without it counts as dead, and the others leave

Names here, and torch with them, are loaded at their first use. `DDP` is BucketedDDP.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainstep.parallel.agreement import ReplicasDisagree, check_agreement
    from trainstep.parallel.checkpoint.save_load import load_checkpoint, save_checkpoint
    from trainstep.parallel.clipping import RankedGradScaler
    from trainstep.parallel.copies.messages import CopyEngines
    from trainstep.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
    from trainstep.parallel.ddp import BucketedDDP as DDP
    from trainstep.parallel.flat_optimizer import FlatShardedOptimizer
    from trainstep.parallel.fsdp import FSDP
    from trainstep.parallel.gradient_sync import GradientSync
    from trainstep.parallel.process_group import start_ranks, stop_ranks
    from trainstep.parallel.ranks import Ranks, alone, ranks_of_default_group
    from trainstep.parallel.sharded_flat import ShardedGradients
    from trainstep.parallel.sharded_optimizer import ShardedOptimizer, merge_state_dicts
    from trainstep.parallel.torch_peers import TorchDDP, TorchFSDP2, torch_zero

__all__ = [
    "DDP",
    "FSDP",
    "BucketedDDP",
    "CopyEngines",
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
    "checkpoint.save_load": ("load_checkpoint", "save_checkpoint"),
    "clipping": ("RankedGradScaler",),
    "copies.messages": ("CopyEngines",),
    "ddp": ("BucketedDDP", "FlatDDP", "NaiveDDP", "OverlappedDDP"),
    "flat_optimizer": ("FlatShardedOptimizer",),
    "fsdp": ("FSDP",),
    "gradient_sync": ("GradientSync",),
    "process_group": ("start_ranks", "stop_ranks"),
    "ranks": ("Ranks", "alone", "ranks_of_default_group"),
    "sharded_flat": ("ShardedGradients",),
    "sharded_optimizer": ("ShardedOptimizer", "merge_state_dicts"),
    "torch_peers": ("TorchDDP", "TorchFSDP2", "torch_zero"),
}
"""Module -> the names in `__all__` that it defines."""


def __getattr__(name: str) -> Any:
    """Import the module that defines the name."""
    defined = "BucketedDDP" if name == "DDP" else name
    for module, names in _NAMES_OF.items():
        if defined in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), defined)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

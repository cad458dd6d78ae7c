"""A strategy's name becomes a wrapper and an optimizer: one constructor each of the rows in costs/strategies.py."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from trainstep.config.sync import SyncConfig
from trainstep.parallel.ddp_bucketed import BucketedDDP
from trainstep.parallel.ddp_flat import FlatDDP
from trainstep.parallel.ddp_naive import NaiveDDP
from trainstep.parallel.ddp_overlapped import OverlappedDDP
from trainstep.parallel.flat_optimizer import FlatShardedOptimizer
from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.gradient_sync import GradientSync
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.sharded_flat import ShardedGradients
from trainstep.parallel.sharded_optimizer import ShardedOptimizer
from trainstep.parallel.torch_peers import TorchDDP, TorchFSDP2, torch_zero
from trainstep.training.wrapping import OptimizerClass, Parallel, Wrapped, optimizer_over, unwrapped

OwnOptions = Mapping[str, Any]
"""Of a strategy, those that its row names."""
Constructor = Callable[[Ranks, OwnOptions, nn.Module, OptimizerClass | None, Mapping[str, Any]], Wrapped]
_DTYPES = {"own": None, "bf16": torch.bfloat16}


def parallel(ranks: Ranks, config: SyncConfig) -> Parallel:
    """These ranks, going parallel as the config says. Parameters become those of rank 0, save with sync none."""
    values = {option: getattr(config, option) for option in config.strategy.options}
    own = {option: _DTYPES.get(value, value) for option, value in values.items()}
    if config.strategy.most_in_flight:
        own["most_in_flight"] = config.strategy.most_in_flight
    return Parallel(ranks=ranks, wrap=partial(CONSTRUCTORS[config.name], ranks, own))


def _alone(_ranks: Ranks, _own: OwnOptions, *step: Any) -> Wrapped:
    return unwrapped(*step)


def _beside(wrapper: Callable[..., GradientSync], shard: OptimizerClass | None = None) -> Constructor:
    """`wrapper(module, ranks, **own)` beside the optimizer, whose state `shard` spreads over ranks."""

    def construct(
        ranks: Ranks,
        own: OwnOptions,
        module: nn.Module,
        optimizer_cls: OptimizerClass | None,
        options: Mapping[str, Any],
    ) -> Wrapped:
        sync = wrapper(module, ranks, **own)
        if optimizer_cls is not None and shard is not None:
            optimizer_cls = partial(shard, optimizer_cls=optimizer_cls, ranks=ranks)
        return Wrapped(module=sync.module, gradient_sync=sync, optimizer=optimizer_over(module, optimizer_cls, options))

    return construct


def _sharded_flat(
    ranks: Ranks,
    own: OwnOptions,
    module: nn.Module,
    optimizer_cls: OptimizerClass | None,
    options: Mapping[str, Any],
) -> Wrapped:
    """The optimizer makes its wrapper."""
    if optimizer_cls is None:
        return Wrapped(module=module, gradient_sync=ShardedGradients(module, ranks, **own), optimizer=None)
    flat = FlatShardedOptimizer(module, optimizer_cls, ranks=ranks, **own, **options)
    return Wrapped(module=module, gradient_sync=flat.gradient_sync, optimizer=flat)


def _torch_ddp(module: nn.Module, ranks: Ranks, *, bucket_mib: float | None) -> GradientSync:
    return TorchDDP(module, ranks) if bucket_mib is None else TorchDDP(module, ranks, bucket_cap_mb=bucket_mib)


def _torch_fsdp2(
    module: nn.Module, ranks: Ranks, *, compute_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, **own: Any
) -> GradientSync:
    """Gradients are averaged in fp32 unless asked otherwise: torch's would be what it computes in."""
    averaged_in = torch.float32 if compute_dtype and reduce_dtype is None else reduce_dtype
    return TorchFSDP2(module, ranks, param_dtype=compute_dtype, reduce_dtype=averaged_in, **own)


CONSTRUCTORS: Mapping[str, Constructor] = {
    "none": _alone,
    "naive": _beside(NaiveDDP),
    "flat": _beside(FlatDDP),
    "overlapped": _beside(OverlappedDDP),
    "bucketed": _beside(BucketedDDP),
    "sharded": _beside(BucketedDDP, ShardedOptimizer),
    "sharded_flat": _sharded_flat,
    "fsdp": _beside(FSDP),
    "torch_ddp": _beside(_torch_ddp),
    "torch_zero": _beside(_torch_ddp, torch_zero),
    "torch_fsdp2": _beside(_torch_fsdp2),
}
"""Of every strategy."""

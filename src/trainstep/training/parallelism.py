"""A way of going parallel, by name: the one place where it becomes a wrapper and an optimizer."""

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


def parallel(ranks: Ranks, config: SyncConfig) -> Parallel:
    """These ranks, going parallel as the config says. Parameters become those of rank 0, save with sync none."""
    return Parallel(ranks=ranks, wrap=unwrapped if config.sync == "none" else partial(_wrapped, ranks, config))


def _wrapped(
    ranks: Ranks,
    config: SyncConfig,
    module: nn.Module,
    optimizer_cls: OptimizerClass | None,
    options: Mapping[str, Any],
) -> Wrapped:
    reduce_dtype = torch.bfloat16 if config.reduce_dtype == "bf16" else None
    if config.sync == "sharded_flat" and optimizer_cls is not None:
        flat = FlatShardedOptimizer(
            module, optimizer_cls, ranks=ranks, bucket_mib=config.bucket_mib, reduce_dtype=reduce_dtype, **options
        )
        return Wrapped(module=module, gradient_sync=flat.gradient_sync, optimizer=flat)
    sync = _wrapper(config, reduce_dtype)(module, ranks)
    if optimizer_cls is not None and config.sync == "sharded":
        options = {"optimizer_cls": optimizer_cls, "ranks": ranks, **options}
        optimizer_cls = ShardedOptimizer
    elif optimizer_cls is not None and config.sync == "torch_zero":
        options = {"optimizer_cls": optimizer_cls, "ranks": ranks, **options}
        optimizer_cls = torch_zero
    return Wrapped(module=sync.module, gradient_sync=sync, optimizer=optimizer_over(module, optimizer_cls, options))


def _wrapper(config: SyncConfig, reduce_dtype: torch.dtype | None) -> Callable[[nn.Module, Ranks], GradientSync]:
    bucketed = partial(
        BucketedDDP,
        bucket_mib=config.bucket_mib,
        first_bucket_mib=config.first_bucket_mib,
        last_bucket_mib=config.last_bucket_mib,
        reduce_dtype=reduce_dtype,
        keeps_gradient_dtype=config.keeps_gradient_dtype,
    )
    torch_ddp = TorchDDP if config.bucket_mib is None else partial(TorchDDP, bucket_cap_mb=config.bucket_mib)
    reshard = config.reshard_after_forward
    compute_dtype = torch.bfloat16 if config.compute_dtype == "bf16" else None
    averaged_in = (
        torch.float32 if compute_dtype and reduce_dtype is None else reduce_dtype
    )  # torch's would be what it computes in
    wrappers: dict[str, Callable[[nn.Module, Ranks], GradientSync]] = {
        "naive": partial(NaiveDDP, reduce_dtype=reduce_dtype),
        "flat": partial(FlatDDP, reduce_dtype=reduce_dtype, keeps_gradient_dtype=config.keeps_gradient_dtype),
        "overlapped": partial(OverlappedDDP, reduce_dtype=reduce_dtype),
        "bucketed": bucketed,
        "sharded": bucketed,
        "sharded_flat": partial(ShardedGradients, bucket_mib=config.bucket_mib, reduce_dtype=reduce_dtype),
        "fsdp": partial(
            FSDP,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            reshard_after_forward=reshard,
            ahead=config.ahead,
        ),
        "torch_ddp": torch_ddp,
        "torch_zero": torch_ddp,
        "torch_fsdp2": partial(
            TorchFSDP2, param_dtype=compute_dtype, reduce_dtype=averaged_in, reshard_after_forward=reshard
        ),
    }
    return wrappers[config.sync]

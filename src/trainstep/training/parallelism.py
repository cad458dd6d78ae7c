"""A strategy's name becomes a wrapper and an optimizer: one constructor each of the rows in costs/strategies.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a constructor is asked for. `strategy_options`: those that its row names, and `most_in_flight` if it has one."""

    ranks: Ranks
    strategy_options: Mapping[str, Any]
    module: nn.Module
    optimizer_cls: OptimizerClass | None
    optimizer_options: Mapping[str, Any]


Constructor = Callable[[Request], Wrapped]
_DTYPES = {"own": None, "bf16": torch.bfloat16}


def parallel(ranks: Ranks, config: SyncConfig) -> Parallel:
    """These ranks, with the parallel strategy that the config names. Parameters become those of rank 0, save with sync none."""
    values = {option: getattr(config, option) for option in config.strategy.options}
    strategy_options = {option: _DTYPES.get(value, value) for option, value in values.items()}
    if config.strategy.most_in_flight:
        strategy_options["most_in_flight"] = config.strategy.most_in_flight

    def wrap(module: nn.Module, optimizer_cls: OptimizerClass | None, options: Mapping[str, Any]) -> Wrapped:
        request = Request(
            ranks=ranks,
            strategy_options=strategy_options,
            module=module,
            optimizer_cls=optimizer_cls,
            optimizer_options=options,
        )
        return CONSTRUCTORS[config.name](request)

    return Parallel(ranks=ranks, wrap=wrap)


def _alone(asked: Request) -> Wrapped:
    return unwrapped(asked.module, asked.optimizer_cls, asked.optimizer_options)


def _wrapper_then_optimizer(wrapper: Callable[..., GradientSync], shard: OptimizerClass | None = None) -> Constructor:
    """`wrapper(module, ranks, **strategy_options)`, then the optimizer, whose state `shard` spreads over ranks."""

    def construct(asked: Request) -> Wrapped:
        sync = wrapper(asked.module, asked.ranks, **asked.strategy_options)
        optimizer_cls = asked.optimizer_cls
        if optimizer_cls is not None and shard is not None:
            optimizer_cls = partial(shard, optimizer_cls=optimizer_cls, ranks=asked.ranks)
        optimizer = optimizer_over(asked.module, optimizer_cls, asked.optimizer_options)
        return Wrapped(module=sync.module, gradient_sync=sync, optimizer=optimizer)

    return construct


def _sharded_flat(asked: Request) -> Wrapped:
    """The optimizer makes its wrapper."""
    module, ranks, own = asked.module, asked.ranks, asked.strategy_options
    if asked.optimizer_cls is None:
        return Wrapped(module=module, gradient_sync=ShardedGradients(module, ranks, **own), optimizer=None)
    flat = FlatShardedOptimizer(module, asked.optimizer_cls, ranks=ranks, **own, **asked.optimizer_options)
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
    "naive": _wrapper_then_optimizer(NaiveDDP),
    "flat": _wrapper_then_optimizer(FlatDDP),
    "overlapped": _wrapper_then_optimizer(OverlappedDDP),
    "bucketed": _wrapper_then_optimizer(BucketedDDP),
    "sharded": _wrapper_then_optimizer(BucketedDDP, ShardedOptimizer),
    "sharded_flat": _sharded_flat,
    "fsdp": _wrapper_then_optimizer(FSDP),
    "torch_ddp": _wrapper_then_optimizer(_torch_ddp),
    "torch_zero": _wrapper_then_optimizer(_torch_ddp, torch_zero),
    "torch_fsdp2": _wrapper_then_optimizer(_torch_fsdp2),
}
"""Strategy -> what makes its wrapper and optimizer."""

"""Maps a parallel strategy's name to its wrapper and optimizer: a constructor for each row of costs/strategies.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from trainstep.config.parallel import SyncConfig
from trainstep.parallel.copies.messages import CopyEngines
from trainstep.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from trainstep.parallel.flat_optimizer import FlatShardedOptimizer
from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.gradient_sync import GradientSync
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.sharded_flat import ShardedGradients
from trainstep.parallel.sharded_optimizer import ShardedOptimizer
from trainstep.parallel.torch_peers import TorchDDP, TorchFSDP2, torch_zero
from trainstep.training.optimizer import OptimizerClass, Parallel, Wrapped, optimizer_over, unwrapped


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of a constructor. `strategy_options`: the options in the strategy's row, and its `most_in_flight`."""

    ranks: Ranks
    strategy_options: Mapping[str, Any]
    module: nn.Module
    optimizer_cls: OptimizerClass | None
    optimizer_options: Mapping[str, Any]


Constructor = Callable[[Request], Wrapped]
_DTYPES = {"own": None, "bf16": torch.bfloat16, "fp32": torch.float32}


def parallel(ranks: Ranks, config: SyncConfig) -> Parallel:
    """These ranks with the config's parallel strategy. All ranks get rank 0's parameters, except with sync none."""
    values = {option: getattr(config, option) for option in config.strategy.options}
    strategy_options = {option: _DTYPES.get(value, value) for option, value in values.items()}
    if inbox_mib := strategy_options.pop("inbox_mib", None):
        by_copies = strategy_options["transport"] == "copies"
        strategy_options["transport"] = CopyEngines(inbox_bytes=inbox_mib * 2**20) if by_copies else None
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

    return Parallel(ranks=ranks, wrap=wrap, makes_nodes=config.name in ("torch_ddp", "torch_zero"))


def _wrapper_then_optimizer(wrapper: Callable[..., GradientSync], shard: OptimizerClass | None = None) -> Constructor:
    """Constructs `wrapper(module, ranks, **strategy_options)`, then the optimizer; `shard` spreads its state over ranks."""

    def construct(request: Request) -> Wrapped:
        sync = wrapper(request.module, request.ranks, **request.strategy_options)
        optimizer_cls = request.optimizer_cls
        if optimizer_cls is not None and shard is not None:
            optimizer_cls = partial(shard, optimizer_cls=optimizer_cls, ranks=request.ranks)
        optimizer = optimizer_over(request.module, optimizer_cls, request.optimizer_options)
        return Wrapped(module=sync.module, gradient_sync=sync, optimizer=optimizer)

    return construct


def _sharded_flat(request: Request) -> Wrapped:
    module, ranks, options = request.module, request.ranks, request.strategy_options
    if request.optimizer_cls is None:
        return Wrapped(module=module, gradient_sync=ShardedGradients(module, ranks, **options), optimizer=None)
    # This optimizer constructs its own wrapper.
    flat = FlatShardedOptimizer(module, request.optimizer_cls, ranks=ranks, **options, **request.optimizer_options)
    return Wrapped(module=module, gradient_sync=flat.gradient_sync, optimizer=flat)


def _torch_ddp(module: nn.Module, ranks: Ranks, *, bucket_mib: float | None) -> GradientSync:
    return TorchDDP(module, ranks) if bucket_mib is None else TorchDDP(module, ranks, bucket_cap_mb=bucket_mib)


def _torch_fsdp2(
    module: nn.Module,
    ranks: Ranks,
    *,
    compute_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    **options: Any,
) -> GradientSync:
    # torch would average gradients in the dtype in which it computes; like ours, this averages in fp32 by default.
    averaged_in = torch.float32 if compute_dtype and reduce_dtype is None else reduce_dtype
    return TorchFSDP2(module, ranks, param_dtype=compute_dtype, reduce_dtype=averaged_in, **options)


CONSTRUCTORS: Mapping[str, Constructor] = {
    "none": lambda request: unwrapped(request.module, request.optimizer_cls, request.optimizer_options),
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
"""Strategy -> the function that constructs its wrapper and optimizer."""

"""Every parallel strategy under one name, for tests: `start(model, ranks, optimizer_of)` gives a Run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.parallel.copies.messages import CopyEngines
from trainstep.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.gradient_sync import GradientSync
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.sharded_optimizer import ShardedOptimizer
from trainstep.parallel.torch_peers import TorchDDP, TorchFSDP2, torch_zero


@dataclass(frozen=True, kw_only=True)
class Run:
    """A strategy that is ready to train. `parameters()` returns whole ones in the model's order; every rank must call it."""

    sync: GradientSync
    optimizer: Any
    parameters: Callable[[], list[Tensor]]


OptimizerOf = partial[torch.optim.Optimizer]
"""A class and its options, called with parameters."""
Start = Callable[[nn.Module, Ranks, OptimizerOf], Run]


def replicated(wrap: Callable[[nn.Module, Ranks], GradientSync]) -> Start:
    def start(model: nn.Module, ranks: Ranks, optimizer_of: OptimizerOf) -> Run:
        return Run(
            sync=wrap(model, ranks),
            optimizer=optimizer_of(model.parameters()),
            parameters=lambda: [parameter.detach() for parameter in model.parameters()],
        )

    return start


def with_optimizer(
    wrap: Callable[[nn.Module, Ranks], GradientSync], shard: Callable[..., torch.optim.Optimizer]
) -> Start:
    """`shard(parameters, optimizer_of, ranks=ranks)` spreads what `optimizer_of(parameters)` would hold."""

    def start(model: nn.Module, ranks: Ranks, optimizer_of: OptimizerOf) -> Run:
        optimizer = shard(model.parameters(), optimizer_of, ranks=ranks)
        return replicated(wrap)(model, ranks, lambda _parameters: optimizer)

    return start


def torch_fsdp2(model: nn.Module, ranks: Ranks, optimizer_of: OptimizerOf, shard_ranks: int | None = None) -> Run:
    sync = TorchFSDP2(model, ranks, units=layers(model), shard_ranks=shard_ranks)
    return Run(
        sync=sync,
        optimizer=optimizer_of(model.parameters()),
        parameters=lambda: [parameter.full_tensor().detach() for parameter in model.parameters()],  # type: ignore[attr-defined]
    )


def small_buckets(model: nn.Module, ranks: Ranks) -> BucketedDDP:
    return BucketedDDP(model, ranks, bucket_mib=SMALL_MIB)


def any_parameters(model: nn.Module, ranks: Ranks) -> TorchDDP:
    return TorchDDP(model, ranks, find_unused_parameters=True)


def no_units(_model: nn.Module) -> None:
    """No units: the whole module is one."""


def layers(model: nn.Module) -> list[nn.Module]:
    """The model's two layers as units; its other parameters form a third unit."""
    return [model.first, model.second]  # type: ignore[list-item]


def sharded_flat(units_of: Callable[[nn.Module], list[nn.Module] | None] = no_units, **options: Any) -> Start:
    def start(model: nn.Module, ranks: Ranks, optimizer_of: OptimizerOf) -> Run:
        optimizer = ShardedOptimizer.flat(
            model, optimizer_of.func, ranks=ranks, units=units_of(model), **options, **optimizer_of.keywords
        )

        def parameters() -> list[Tensor]:
            optimizer.gradient_sync.wait_for_parameters()
            return [parameter.detach().clone() for parameter in model.parameters()]

        return Run(sync=optimizer.gradient_sync, optimizer=optimizer, parameters=parameters)

    return start


def fsdp(units_of: Callable[[nn.Module], list[nn.Module] | None] = no_units, **options: Any) -> Start:
    def start(model: nn.Module, ranks: Ranks, optimizer_of: OptimizerOf) -> Run:
        sync = FSDP(model, ranks, units=units_of(model), **options)

        def parameters() -> list[Tensor]:
            whole = sync.full_state_dict()
            return [whole[name] for name, _ in model.named_parameters()]

        return Run(sync=sync, optimizer=optimizer_of(model.parameters()), parameters=parameters)

    return start


SMALL_MIB = 300 / 2**20
"""A bucket size that holds one or two tensors of the tests' models."""

STRATEGIES: dict[str, Start] = {
    "naive": replicated(NaiveDDP),
    "flat": replicated(FlatDDP),
    "overlapped": replicated(OverlappedDDP),
    "bucketed": replicated(small_buckets),
    "bucketed_ends": replicated(
        lambda model, ranks: BucketedDDP(
            model, ranks, bucket_mib=1.0, first_bucket_mib=SMALL_MIB, last_bucket_mib=SMALL_MIB
        )
    ),
    "bucketed_in_place": replicated(
        lambda model, ranks: BucketedDDP(model, ranks, bucket_mib=SMALL_MIB, in_place=True)
    ),
    "sharded": with_optimizer(small_buckets, ShardedOptimizer),
    "sharded_each": with_optimizer(small_buckets, partial(ShardedOptimizer, pack_below_mib=0)),
    "sharded_flat": sharded_flat(),
    "sharded_flat_units": sharded_flat(layers),
    "sharded_flat_joined": sharded_flat(layers, bucket_mib=1),
    "fsdp": fsdp(),
    "fsdp_units": fsdp(layers, ahead=2),
    "fsdp_kept": fsdp(layers, reshard_after_forward=False, ahead=0),
}

BF16_STRATEGIES: dict[str, Start] = {
    "naive bf16": replicated(lambda model, ranks: NaiveDDP(model, ranks, reduce_dtype=torch.bfloat16)),
    "flat bf16": replicated(lambda model, ranks: FlatDDP(model, ranks, reduce_dtype=torch.bfloat16)),
    "overlapped bf16": replicated(lambda model, ranks: OverlappedDDP(model, ranks, reduce_dtype=torch.bfloat16)),
    "bucketed bf16": replicated(
        lambda model, ranks: BucketedDDP(model, ranks, bucket_mib=SMALL_MIB, reduce_dtype=torch.bfloat16)
    ),
    "fsdp bf16": fsdp(layers, reduce_dtype=torch.bfloat16),
    "sharded_flat bf16": sharded_flat(layers, reduce_dtype=torch.bfloat16),
}

HYBRID_STRATEGIES: dict[str, Callable[[int], Start]] = {
    "bucketed": lambda size: replicated(
        lambda model, ranks: BucketedDDP(model, ranks, bucket_mib=SMALL_MIB, shard_ranks=size)
    ),
    "sharded_flat_units": lambda size: sharded_flat(layers, shard_ranks=size),
    "fsdp_units": lambda size: fsdp(layers, ahead=2, shard_ranks=size),
    "fsdp_kept": lambda size: fsdp(layers, reshard_after_forward=False, shard_ranks=size),
    "bucketed bf16": lambda size: replicated(
        lambda model, ranks: BucketedDDP(
            model, ranks, bucket_mib=SMALL_MIB, reduce_dtype=torch.bfloat16, shard_ranks=size
        )
    ),
    "sharded_flat bf16": lambda size: sharded_flat(layers, reduce_dtype=torch.bfloat16, shard_ranks=size),
    "fsdp bf16": lambda size: fsdp(layers, reduce_dtype=torch.bfloat16, shard_ranks=size),
}
"""Strategies in groups of `size` ranks."""

SMALL_COPIES = CopyEngines(inbox_bytes=3072, least_bytes=64)
"""Copies of all but the smallest messages, in many chunks."""

COPIES_STRATEGIES: dict[str, Start] = {
    "flat copies": replicated(lambda model, ranks: FlatDDP(model, ranks, transport=SMALL_COPIES)),
    "bucketed copies": replicated(
        lambda model, ranks: BucketedDDP(model, ranks, bucket_mib=SMALL_MIB, transport=SMALL_COPIES)
    ),
    "bucketed bf16 copies": replicated(
        lambda model, ranks: BucketedDDP(model, ranks, reduce_dtype=torch.bfloat16, transport=SMALL_COPIES)
    ),
    "bucketed in place copies": replicated(
        lambda model, ranks: BucketedDDP(model, ranks, bucket_mib=SMALL_MIB, in_place=True, transport=SMALL_COPIES)
    ),
    "sharded_flat copies": sharded_flat(layers, transport=SMALL_COPIES),
    "sharded_flat bf16 copies": sharded_flat(layers, reduce_dtype=torch.bfloat16, transport=SMALL_COPIES),
    "fsdp copies": fsdp(layers, transport=SMALL_COPIES),
}

TORCH_STRATEGIES: dict[str, Start] = {
    "torch_ddp": replicated(lambda model, ranks: TorchDDP(model, ranks, bucket_cap_mb=SMALL_MIB)),
    "torch_ddp_unused": replicated(any_parameters),
    "torch_zero": with_optimizer(any_parameters, torch_zero),
    "torch_fsdp2": torch_fsdp2,
}
"""Peers; their messages are not counted."""

NOT_DONE = {
    ("torch_ddp", "everywhere"): "needs find_unused_parameters: raises (test_torch_peers.py)",
    ("torch_ddp", "somewhere"): "needs find_unused_parameters: ranks wait for each other without end",
    ("torch_fsdp2", "somewhere"): "each rank reduces the gradients that it has: messages of different sizes",
}
"""Cases that a peer does not support: (strategy, Case.unused) -> the reason."""

"""torch's own parallel strategies behind our protocol, so that the same tests and the same bench cover them.

Training calls `sync` or `sync.module`, for DistributedDataParallel is itself a wrapper around the module. The messages do not go
through Collectives, so `traffic` is None; a profiler's trace shows them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainstep.costs.rank_groups import check_shard_ranks
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.gradient_sync import HeldTensors, broadcast_state
from trainstep.parallel.module_wrapper import ModuleWrapper
from trainstep.parallel.ranks import Ranks, ranks_around
from trainstep.parallel.same_setup import check_same_setup, named_in_groups, named_tensors, names_of
from trainstep.parallel.units import plan_units

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


class TorchDDP(ModuleWrapper):
    """DistributedDataParallel, with torch's options and torch's rules.

    Without `find_unused_parameters` a parameter that a forward does not use is an error at the next forward. `no_sync()` must be
    around the forward too.
    """

    traffic = None

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks | None = None,
        *,
        bucket_cap_mb: float = 25,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        broadcast_buffers: bool = False,
    ) -> None:
        super().__init__(module)
        self.ranks = _in_a_group(ranks, module.parameters())
        collectives = Collectives(self.ranks)
        options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "broadcast_buffers": broadcast_buffers,
        }
        check_same_setup(type(self).__name__, named_tensors(module), collectives, options=options)
        broadcast_state(module, collectives)  # without broadcast_buffers torch leaves buffers as they are
        vars(self)["module"] = DistributedDataParallel(
            module,
            device_ids=None if self.ranks.device.type == "cpu" else [self.ranks.device],
            process_group=self.ranks.group,
            **options,
        )

    @property
    def _named(self) -> nn.Module:
        return self.module.module if isinstance(self.module, DistributedDataParallel) else self.module

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients add up on this rank and nothing is sent."""
        assert isinstance(self.module, DistributedDataParallel)
        return self.module.no_sync()

    def finish_gradient_synchronization(self) -> None:
        """Does nothing: backward ends when gradients are averaged."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips as torch does, since gradients are equal on all ranks."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def held_tensors(self) -> HeldTensors:
        """Empty: torch does not show its buffers."""
        return HeldTensors()

    def detach(self) -> None:
        """Drop torch's wrapper: its hooks go with the last reference to it. `module` is the wrapped module from here."""
        vars(self)["module"] = self._named


class TorchFSDP2(ModuleWrapper):
    """`fully_shard` for each block and for the module around them; `units` as in plan_units.

    At the start parameters become those of rank 0, then DTensors, so make the optimizer after this, over `module.parameters()`.
    Every rank must use the same parameters: torch reduces a block's gradients without telling which of them exist.
    `state_dict()` is sharded: DTensors.
    """

    traffic = None

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks | None = None,
        *,
        units: Sequence[nn.Module] | None = None,
        reshard_after_forward: bool = True,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        shard_ranks: int | None = None,
    ) -> None:
        super().__init__(module)
        self.ranks = _in_a_group(ranks, module.parameters())
        collectives = Collectives(self.ranks)
        options = {
            "units": names_of(module, units),
            "reshard_after_forward": reshard_after_forward,
            "param_dtype": param_dtype,
            "reduce_dtype": reduce_dtype,
            "shard_ranks": shard_ranks,
        }
        check_same_setup(type(self).__name__, named_tensors(module), collectives, options=options)
        broadcast_state(module, collectives)
        mesh = _mesh(self.ranks, shard_ranks)
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        blocks = dict.fromkeys(plan.triggers[0] for plan in plan_units(module, units))
        for block in [*(block for block in blocks if block is not module), module]:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, whole gradients add up on this rank and nothing is reduced; parameters are still gathered."""
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    def finish_gradient_synchronization(self) -> None:
        """Does nothing: backward ends when gradients are reduced."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips as torch does over DTensors; the norm is that of all ranks' parts together."""
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def held_tensors(self) -> HeldTensors:
        """Empty: torch does not show its buffers."""
        return HeldTensors()

    def detach(self) -> None:
        """RuntimeError: torch cannot undo fully_shard."""
        raise RuntimeError(
            "torch's fully_shard cannot be taken off a module; build the module again and load its state"
        )

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module


def _mesh(ranks: Ranks, shard_ranks: int | None) -> DeviceMesh:
    """All ranks in one dimension; in groups of `shard_ranks` two: over the second torch shards, over the first it replicates."""
    if shard_ranks is None:
        return DeviceMesh.from_group(ranks.group, ranks.device.type)  # type: ignore[arg-type]
    check_shard_ranks(ranks.world_size, shard_ranks)
    numbers = torch.tensor(dist.get_process_group_ranks(ranks.group))
    return DeviceMesh(ranks.device.type, numbers.view(-1, shard_ranks), mesh_dim_names=("replicate", "shard"))


def torch_zero(
    params: Iterable[Tensor],
    optimizer_cls: Callable[..., torch.optim.Optimizer],
    *,
    ranks: Ranks | None = None,
    **kwargs: Any,
) -> "ZeroRedundancyOptimizer":
    """torch's ZeroRedundancyOptimizer, the peer of ShardedOptimizer, beside any gradient synchronisation."""
    # Imported here, because its import compiles with TorchScript and warns about that.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parameters = list(params)
    ranks = _in_a_group(ranks, parameters)
    tensors = named_in_groups([{"params": parameters}])
    check_same_setup("torch_zero", tensors, Collectives(ranks), options={"optimizer_cls": optimizer_cls, **kwargs})
    return ZeroRedundancyOptimizer(parameters, optimizer_cls, process_group=ranks.group, **kwargs)  # type: ignore[arg-type]


def _in_a_group(ranks: Ranks | None, tensors: Iterable[Tensor]) -> Ranks:
    ranks = ranks or ranks_around(tensors)
    if ranks.group is None:
        raise ValueError(
            "ranks: torch's wrappers need a process group, even with one rank; start one, or use trainstep's wrappers"
        )
    return ranks

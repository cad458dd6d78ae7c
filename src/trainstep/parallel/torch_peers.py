"""torch's own parallel strategies behind our protocol, so that the same tests and the same bench cover them.

`sync.module`, or `sync`, is what training calls: DistributedDataParallel wraps the module it is given. Their messages do not go
through Collectives, so `traffic` is None: a profiler's trace shows them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainstep.parallel.collectives import Collectives
from trainstep.parallel.gradient_sync import HeldTensors, broadcast_state
from trainstep.parallel.module_wrapper import ModuleWrapper
from trainstep.parallel.ranks import Ranks, ranks_around
from trainstep.parallel.same_setup import check_same_setup, named_in_groups, named_tensors, names_of
from trainstep.parallel.units import plan_units

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


class TorchDDP(ModuleWrapper):
    """DistributedDataParallel. Its options are torch's: without `find_unused_parameters` a parameter that a forward does not use
    is an error at the next forward. Inside `no_sync()` there must be the forward too."""

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
        """Nothing: backward ends when gradients are averaged."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As torch does, for gradients are equal on all ranks."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def held_tensors(self) -> HeldTensors:
        """Nothing: torch keeps its buffers out of sight."""
        return HeldTensors()

    def detach(self) -> None:
        """Let go of the wrapper: its hooks go with it, once nobody else holds it. `module` is the wrapped one from here."""
        vars(self)["module"] = self._named


class TorchFSDP2(ModuleWrapper):
    """`fully_shard`: the blocks, one by one, and what stands around them; `units` as in plan_units.

    Parameters become DTensors, so the optimizer is to be made after this, over `module.parameters()`. At the start they become
    those of rank 0. Every rank must use the same parameters: torch reduces a block's gradients without saying which there are.
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
    ) -> None:
        super().__init__(module)
        self.ranks = _in_a_group(ranks, module.parameters())
        collectives = Collectives(self.ranks)
        options = {
            "units": names_of(module, units),
            "reshard_after_forward": reshard_after_forward,
            "param_dtype": param_dtype,
            "reduce_dtype": reduce_dtype,
        }
        check_same_setup(type(self).__name__, named_tensors(module), collectives, options=options)
        broadcast_state(module, collectives)
        mesh = DeviceMesh.from_group(self.ranks.group, self.ranks.device.type)  # type: ignore[arg-type]
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        blocks = dict.fromkeys(plan.triggers[0] for plan in plan_units(module, units))
        for block in [*(block for block in blocks if block is not module), module]:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, whole gradients add up on this rank and nothing is reduced; parameters are gathered all the same."""
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    def finish_gradient_synchronization(self) -> None:
        """Nothing: backward ends when gradients are reduced."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As torch does over DTensors; the norm is of all ranks' parts together."""
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def held_tensors(self) -> HeldTensors:
        """Nothing: torch keeps its buffers out of sight."""
        return HeldTensors()

    def detach(self) -> None:
        """RuntimeError: torch has no way back."""
        raise RuntimeError("torch's fully_shard cannot be taken off a module; build the module anew and load its state")

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module


def torch_zero(
    params: Iterable[Tensor],
    optimizer_cls: Callable[..., torch.optim.Optimizer],
    *,
    ranks: Ranks | None = None,
    **kwargs: Any,
) -> "ZeroRedundancyOptimizer":
    """torch's ZeroRedundancyOptimizer, the peer of ShardedOptimizer, beside any gradient synchronisation."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # compiles with TorchScript, and warns that it does

    parameters = list(params)
    ranks = _in_a_group(ranks, parameters)
    tensors = named_in_groups([{"params": parameters}])
    check_same_setup("torch_zero", tensors, Collectives(ranks), options={"optimizer_cls": optimizer_cls, **kwargs})
    return ZeroRedundancyOptimizer(parameters, optimizer_cls, process_group=ranks.group, **kwargs)  # type: ignore[arg-type]


def _in_a_group(ranks: Ranks | None, tensors: Iterable[Tensor]) -> Ranks:
    ranks = ranks or ranks_around(tensors)
    if ranks.group is None:
        raise ValueError(
            "ranks: torch's wrappers need a process group, even of one; start one, or use a wrapper of ours"
        )
    return ranks

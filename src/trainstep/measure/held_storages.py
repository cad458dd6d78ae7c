"""Whose storage is whose at one moment of a step, however its ranks are kept together: by the tensors that refer to it.

    parameters = storages_of(module.parameters(), device)     # when the step was built: a rank's shards, where it has shards
    held_storages(assembly, parameters)                       # category -> address -> bytes

    gradients        of parameters, or of this rank's pieces of them; whole ones that fsdp keeps of micro-batches; buckets that
                     these are views of
    optimizer state  tensors of the optimizer's state
    communication    every other tensor that the parallel strategy keeps: buffers, gathered parameters

A storage may be in several of them: whoever counts takes the first that has it.
"""

from collections.abc import Iterable, Mapping
from itertools import chain

from torch import Tensor
from torch import device as Device
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainstep.parallel.sharded_optimizer import ShardedOptimizer
from trainstep.training.build import Assembly

Storages = Mapping[int, int]
"""Address -> bytes."""


def held_storages(assembly: Assembly, parameters: Storages) -> dict[str, Storages]:
    """Who holds what, now. `parameters`: what they had when the step was built."""
    step, module, device = assembly.step, assembly.module, assembly.device
    optimizer = step.optimizer
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]] if optimizer else []
    kept = [] if step.gradient_sync is None else [step.gradient_sync.held_tensors()]
    if isinstance(optimizer, ShardedOptimizer):
        kept.append(optimizer.held_tensors())
    gradients = [one.grad for one in (*module.parameters(), *owned) if one.grad is not None]
    gradients += chain.from_iterable(held.gradients for held in kept)
    return {
        "parameters": parameters,
        "gradients": storages_of(gradients, device),
        "optimizer state": storages_of(state_tensors(optimizer), device),
        "communication": storages_of(chain(module.parameters(), *kept), device),
    }


def state_tensors(optimizer: Optimizer | None) -> list[Tensor]:
    """Tensors of an optimizer's state; of torch's ZeRO, of the one within, which has the state."""
    inner = getattr(optimizer, "optim", optimizer)
    states = inner.state.values() if inner is not None else ()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def storages_of(tensors: Iterable[Tensor], device: Device) -> Storages:
    """The storages of those on this kind of device; of a DTensor, of its part here."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = [one.untyped_storage() for one in local if one.device.type == device.type]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}

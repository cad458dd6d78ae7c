"""Whose storage is whose at one moment of a step, however its ranks are kept together: by the tensors that refer to it.

    parameters = storages_of(module.parameters(), device)     # when the step was built: a rank's shards, where it has shards
    held_storages(assembly, parameters)                       # category -> address -> bytes

    gradients        of parameters, or of this rank's pieces of them; whole ones that fsdp keeps of micro-batches; buckets that
                     these are views of
    optimizer state  tensors of the optimizer's state
    communication    every other tensor that the way of going parallel keeps: buffers, gathered parameters

A storage may be in several of them: whoever counts takes the first that has it.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch import device as Device
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainstep.training.build import Assembly

_OURS = "trainstep.parallel."

Storages = Mapping[int, int]
"""Address -> bytes."""


def held_storages(assembly: Assembly, parameters: Storages) -> dict[str, Storages]:
    """Who holds what, now. `parameters`: what they had when the step was built."""
    step, module, device = assembly.step, assembly.module, assembly.device
    optimizer = step.optimizer
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]] if optimizer else []
    kept = kept_tensors([step.gradient_sync, optimizer])
    gradients = [one.grad for one in (*module.parameters(), *owned) if one.grad is not None]
    gradients += getattr(step.gradient_sync, "unsent_gradients", [])
    return {
        "parameters": parameters,
        "gradients": storages_of(gradients, device),
        "optimizer state": storages_of(state_tensors(optimizer), device),
        "communication": storages_of((*module.parameters(), *kept), device),
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


def kept_tensors(roots: Iterable[object]) -> list[Tensor]:
    """Tensors that objects of parallel/ hold: in their attributes, and in lists, dicts and objects of parallel/ among these."""
    found: list[Tensor] = []
    waiting, seen = list(roots), set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, nn.Module) or id(one) in seen:
            continue
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple | set | frozenset | deque):
            waiting += one
        elif type(one).__module__.startswith(_OURS):
            waiting += vars(one).values() if hasattr(one, "__dict__") else ()
        seen.add(id(one))
    return found

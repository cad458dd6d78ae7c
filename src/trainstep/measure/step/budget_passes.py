"""Forwards and backwards of a built step without its update, and the bytes that are there beside what they make.

On several ranks every pass sends its messages, so all ranks must run the same passes in the same order.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from trainstep.measure.step.live_bytes import LiveBytes, live_bytes
from trainstep.measure.step.lone_block import autocast_of
from trainstep.parallel.gradient_sync import HeldTensors
from trainstep.parallel.sharded_optimizer import ShardedOptimizer
from trainstep.training.batches import Batch
from trainstep.training.build import Assembly
from trainstep.training.precision import precision_named


def last_micro_batch(
    assembly: Assembly, batch: Batch, begin: Callable[[], None] = lambda: None, end: Callable[[], None] = lambda: None
) -> None:
    """Run forward and backward, with earlier gradients and a loss there if the step has several micro-batches, and its messages.

    `begin` is called before, `end` when the optimizer could update.
    """
    sync = assembly.step.gradient_sync
    if assembly.run.accumulation > 1:
        with sync.no_sync() if sync is not None else nullcontext():
            earlier = _forward_backward(assembly, batch)  # noqa: F841
    begin()
    _forward_backward(assembly, batch)
    if sync is not None:
        sync.finish_gradient_synchronization()
    end()
    clear_gradients(assembly)


def _forward_backward(assembly: Assembly, batch: Batch) -> Tensor:
    with autocast_of(assembly):
        output = assembly.step.module(**batch)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    return loss.detach()


def clear_gradients(assembly: Assembly) -> None:
    """Clear all gradients, also those of shards, which only the optimizer has."""
    if assembly.step.optimizer is not None:
        assembly.step.optimizer.zero_grad(set_to_none=True)
    assembly.step.clear_gradients()


def live_bytes_of(assembly: Assembly) -> AbstractContextManager[LiveBytes]:
    """Count, inside the block, what passes of this step allocate, with the parameters that its strategy gathers and frees."""
    return live_bytes(assembly.device, _kept_by_strategy(assembly).parameters)


def _kept_by_strategy(assembly: Assembly) -> HeldTensors:
    sync = assembly.step.gradient_sync
    return sync.held_tensors() if sync is not None else HeldTensors()


def base_bytes(assembly: Assembly) -> int:
    """Bytes that are there between steps and that live_bytes does not count: weights, buffers, optimizer state, a strategy's."""
    if assembly.device.type == "cuda":
        return 0
    optimizer = assembly.step.optimizer
    states = optimizer.state.values() if optimizer is not None else ()
    tensors = [x for values in states for x in values.values() if isinstance(x, Tensor)]
    tensors += [*assembly.module.parameters(), *assembly.module.buffers(), *_kept_by_strategy(assembly)]
    if isinstance(optimizer, ShardedOptimizer):
        tensors += optimizer.held_tensors()
    storages = [x.untyped_storage() for x in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def update_bytes(assembly: Assembly) -> int:
    """Bytes of the update's own tensors: roots of all second moments or of one; fp32 gradients for masters that are not ours."""
    optimizer, adamw = assembly.step.optimizer, assembly.run.adamw
    if optimizer is None:
        return 0
    masters = precision_named(assembly.run.precision).masters
    sizes = [x.numel() * (4 if masters else x.element_size()) for x in optimizer.state]  # what this rank updates
    roots = {"foreach": sum(sizes), "loop": 3 * max(sizes, default=0)}.get(adamw, 0)
    return roots + (sum(sizes) if masters and adamw != "trainstep" else 0)

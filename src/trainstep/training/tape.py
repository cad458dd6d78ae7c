"""Writes down every storage that a step makes and frees, on torch's fake tensors, which have shapes and storages but no memory.

    tape = Tape(module, batch)
    with tape: loss = module(**batch); tape.end_forward(); loss.backward()
    tape.tensors(), tape.forward, tape.backward, tape.work()

A storage's bytes are those that an operator gave it; what a kernel takes for itself inside an operator is not seen, but for what
op_work.py knows. A storage is free when Python and autograd have let go of it, as on a GPU.

[Note: sums of gradients] Where a tensor is used twice, autograd adds the second gradient into the first. For fake tensors it makes
a new sum instead. Such a sum takes the place of the addend that is freed with it, and is no tensor of its own.
"""

import re
import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainstep.costs.exchange import ROOT
from trainstep.costs.traced_step import Event, EventKind, TracedTensor, Work
from trainstep.parallel.units import plan_units
from trainstep.training.op_work import has_own_kernel, inner_bytes, work_of

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_ENGINE = "_engine_run_backward"
"""The function of torch in which autograd's engine runs: an operator called from there is the engine's own."""
_GPU_RANDOM_STATE_BYTES = 16
_KNOWN_PACKAGES = ("torch.", "trainstep.")
_KNOWN_NAMESPACES = ("aten", "prim", "prims", "trainstep")


@dataclass(eq=False)
class _Made:
    """A storage as it was made, and what autograd did with it."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    made_by: str
    module: str
    is_weight_copy: bool
    saved_in: str = ""
    saves: int = 0


class Tape(TorchDispatchMode):
    """Records one forward and backward of a module. `custom_ops`, `custom_functions`: what it cannot look into."""

    def __init__(self, module: nn.Module, batch: Mapping[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward: list[Event] = []
        self.backward: list[Event] = []
        self.custom_ops: set[str] = set()
        self.custom_functions: set[str] = set()
        self._events = self.forward
        self._made: list[_Made] = []
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Id of a storage -> the storage and its number."""
        self._sums: dict[int, tuple[int, ...]] = {}
        """Number of a sum of gradients -> the numbers of its addends."""
        self._work: dict[Work, int] = {}
        own = [*module.parameters(), *module.buffers(), *(x for x in tree_leaves(batch) if isinstance(x, Tensor))]
        self._storages = [x.untyped_storage() for x in own]  # kept, so that no other storage gets their ids
        self._own = {id(storage) for storage in self._storages}
        self._parameters = {id(p.untyped_storage()): p.element_size() for p in module.parameters()}
        self._names = {id(part): _NUMBER.sub("*", name) for name, part in module.named_modules()}
        self._units = {id(t): plan.name for plan in plan_units(module) if plan.name != ROOT for t in plan.triggers}
        self._module = module
        self._stack: list[str] = []
        self._starts: list[int] = []
        """Autograd's sequence numbers, in order: from each on, the module at the same place of `_in_module` runs."""
        self._in_module: list[str] = []
        self._contexts = ExitStack()
        embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
        largest = max(embeddings, key=lambda part: part.weight.numel(), default=None)
        self._vocabulary = largest.num_embeddings if largest is not None else None

    # Entering and leaving.

    def __enter__(self) -> "Tape":
        handles = [
            register_module_forward_pre_hook(self._module_begins),
            register_module_forward_hook(self._module_ends, always_call=True),
            *(
                parameter.register_post_accumulate_grad_hook(self._gradient_hook(name))
                for name, parameter in self._module.named_parameters()
                if parameter.requires_grad
            ),
        ]
        for handle in handles:
            self._contexts.callback(handle.remove)
        self._contexts.enter_context(saved_tensors_hooks(self._note_saved, lambda saved: saved))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._contexts.close()

    def end_forward(self) -> None:
        """From here on, record backward."""
        self._events = self.backward

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether torch.compile may compile while this mode is on."""
        return True

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Inside, a compiled graph runs: what is made and freed in it is a tensor only if a kernel of its own makes it."""
        first = len(self._events)
        yield
        inside = self._events[first:]
        freed = {event.tensor for event in inside if event.kind is EventKind.FREED}
        passing = {
            event.tensor
            for event in inside
            if event.kind is EventKind.MADE
            and event.tensor in freed
            and not has_own_kernel(self._made[event.tensor].made_by)
        }
        self._events[first:] = [event for event in inside if event.tensor not in passing]

    # Modules.

    def _module_begins(self, module: nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._enter_module(self._names.get(id(module), type(module).__name__))
        if id(module) in self._units and self._events is self.forward:
            self._events.append(Event(EventKind.UNIT_BEGINS, name=self._units[id(module)]))

    def _module_ends(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._stack:
            self._stack.pop()
            self._mark_sequence()
        unit = self._units.get(id(module))
        if unit is None or self._events is self.backward:
            return
        self._events.append(Event(EventKind.UNIT_ENDS, name=unit))
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(self._unit_hook(unit))
                break

    def _unit_hook(self, unit: str) -> Any:
        return lambda _gradient: self._events.append(Event(EventKind.UNIT_BACKWARD, name=unit))

    def _gradient_hook(self, name: str) -> Any:
        def note(parameter: Tensor) -> None:
            assert parameter.grad is not None
            number = self._number(parameter.grad)
            self._events.append(Event(EventKind.GRADIENT, tensor=number, name=name))

        return note

    def _enter_module(self, name: str) -> None:
        self._stack.append(name)
        self._mark_sequence()

    def _mark_sequence(self) -> None:
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._in_module.append(self._stack[-1] if self._stack else "")

    def _running(self) -> str:
        """The module whose forward runs, or whose op's backward."""
        if self._stack or self._events is self.forward:
            return self._stack[-1] if self._stack else ""
        node: Any = torch._C._current_autograd_node()
        function: Any = getattr(node, "_forward_cls", None)  # of torch.autograd.Function
        if function is not None and not function.__module__.startswith(_KNOWN_PACKAGES):
            self.custom_functions.add(function.__qualname__)
        place = bisect_right(self._starts, node._sequence_nr()) if node is not None else 0
        return self._in_module[place - 1] if place else ""

    # Storages.

    def _note_saved(self, tensor: Tensor) -> Tensor:
        number = self._number(tensor)
        if number >= 0:
            made = self._made[number]
            made.saves += 1
            made.saved_in = made.saved_in or self._running()
        return tensor

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor's storage; -1 for one that was not made here."""
        _, number = self._alive.get(id(tensor.untyped_storage()), (None, -1))
        return number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return self._higher_order(func, args, kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func.namespace not in _KNOWN_NAMESPACES:
            self.custom_ops.add(func._schema.name)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = func(*args, **kwargs)
        tensors = [x for x in tree_leaves(results) if isinstance(x, Tensor)]
        module = self._running()
        known = {id(x.untyped_storage()) for x in given}
        for tensor in tensors:
            self._note(tensor, func, given, known, module)
        phase = "forward" if self._events is self.forward else "backward"
        work = work_of(func, args, kwargs, tensors, phase=phase, module=module)
        if work is not None:
            self._work[work] = self._work.get(work, 0) + 1
        self._pass_by(inner_bytes(func, args), func, module)
        return results

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that calls another: compiled code has them around operators that may draw random numbers."""
        name = func.name()
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            if name == "run_and_save_rng_state":
                return torch.empty(_GPU_RANDOM_STATE_BYTES, dtype=torch.uint8), args[0](*args[1:], **kwargs)
            if name == "run_with_rng_state":
                return args[1](*args[2:], **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)

    def _note(self, tensor: Tensor, func: Any, given: list[Tensor], known: set[int], module: str) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive or key in known or key in self._own or not storage.nbytes():
            return  # a view, of what was counted or was there before
        number = len(self._made)
        widths = [self._parameters.get(id(x.untyped_storage()), 0) for x in given[:1]]
        made = _Made(
            nbytes=storage.nbytes(),
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            made_by=_name(func),
            module=module,
            is_weight_copy=func is torch.ops.aten._to_copy.default and tensor.element_size() < widths[0],
        )
        self._made.append(made)
        self._alive[key] = weakref.ref(storage, lambda _: self._free(key)), number
        self._events.append(Event(EventKind.MADE, number))
        if func is torch.ops.aten.add.Tensor and self._events is self.backward and _is_engines():
            self._sums[number] = tuple(self._number(x) for x in given)

    def _pass_by(self, sizes: Sequence[int], func: Any, module: str) -> None:
        """Note tensors that an operator makes and frees for itself."""
        first = len(self._made)
        self._made += [
            _Made(nbytes, (nbytes,), "uint8", f"inside {_name(func)}", module, is_weight_copy=False) for nbytes in sizes
        ]
        for kind in (EventKind.MADE, EventKind.FREED):
            self._events += [Event(kind, number) for number in range(first, len(self._made))]

    def _free(self, key: int) -> None:
        _, number = self._alive.pop(key)
        self._events.append(Event(EventKind.FREED, number))

    # What was seen.

    def finish(self) -> None:
        """End the recording: what is still alive may be freed now."""
        self._alive.clear()
        self.backward[:] = _without_sums(self.backward, self._sums)

    def tensors(self) -> tuple[TracedTensor, ...]:
        """Every storage that was made, by its number."""
        return tuple(
            TracedTensor(
                nbytes=made.nbytes,
                shape=made.shape,
                dtype=made.dtype,
                made_by=made.made_by,
                module=made.module,
                saved_in=made.saved_in,
                saves=made.saves,
                is_weight_copy=made.is_weight_copy,
                is_logits=made.shape[-1:] == (self._vocabulary,) or made.made_by.startswith("nll_loss"),
            )
            for made in self._made
        )

    def work(self) -> tuple[Work, ...]:
        """The work that was computed, equal calls as one."""
        return tuple(replace(work, times=times) for work, times in self._work.items())


def _name(func: Any) -> str:
    return str(func._schema.name.partition("::")[2])


def _is_engines() -> bool:
    """Whether autograd's engine itself has called the operator that is being dispatched. [Note: sums of gradients]"""
    frame = sys._getframe(3)  # _is_engines, _note, __torch_dispatch__, its caller
    return frame.f_code.co_name == _ENGINE and not torch.is_grad_enabled()


def _without_sums(events: list[Event], sums: Mapping[int, tuple[int, ...]]) -> Iterator[Event]:
    """The events, with sums in the place of the addend that is freed next. [Note: sums of gradients]"""
    place_of: dict[int, int] = {}
    skipped: set[int] = set()
    for index, event in enumerate(events):
        if index in skipped:
            continue
        if event.kind is EventKind.MADE and event.tensor in sums:
            freed = _freed_next(events, index)
            taken = next((a for a in sums[event.tensor] if a in freed), None)
            if taken is not None:
                skipped.add(freed[taken])
                place_of[event.tensor] = place_of.get(taken, taken)
                continue
        yield event._replace(tensor=place_of.get(event.tensor, event.tensor))


def _freed_next(events: list[Event], index: int) -> dict[int, int]:
    """Tensors that are freed before the next is made, with the place of that event."""
    freed = {}
    for place in range(index + 1, len(events)):
        if events[place].kind is not EventKind.FREED:
            break
        freed[events[place].tensor] = place
    return freed

"""Hooks into a training script without changing it: its optimizers, its outermost modules, backward, its data loaders.

    hooks = Hooks(clock, on_update)
    hooks.install()
    hooks.follow(modules)     # once they are known (modules.py)
    hooks.remove()

They tell a `PhaseClock` which part of the step begins and ends, and call `on_update` after each update of the parameters. Each
costs some microseconds, and none stands inside the model: a hook in every module would cost more than small modules do, and
torch.compile would have to trace it.

Only the thread that trains is followed: the one that installed the hooks, or the one that first updates parameters. Processes
that the script forks (workers of a data loader) follow nothing. Copies and pickles of a module (`torch.save(model)`) hold nothing
of ours. Where torch.compile traces a hook it sees that the hook does nothing, so what it makes of a followed module is followed.
"""

import contextlib
import functools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trainstep.config.script import Part
from trainstep.measure.run.phase_clock import PhaseClock

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""Where a module keeps hooks of its forward: number -> hook."""
_NOBODY = -1
"""No thread has this number."""


class Hooks:
    """The hooks of one watch, and what they counted.

    `on_update(optimizer)`: called after an optimizer's step, or after a scaler left it out because of infinite gradients; an update
    inside backward is reported when that backward ends.
    """

    def __init__(self, clock: PhaseClock, on_update: Callable[[Any], None]) -> None:
        self.forwards = self.backwards = self.updates = self.skipped = 0
        self.followed: tuple[torch.nn.Module, ...] = ()
        self.called: torch.nn.Module | None = None
        """The followed module that was called first, with gradients: the one that trains."""
        self.batch_size: int | None = None
        """The batch size of the first data loader that was read; None if the loader does not know it."""
        self.workers: int | None = None
        """The worker processes of the first data loader that was read; None before one was read."""
        self._clock = clock
        self._on_update = on_update
        self._thread = threading.get_ident()
        self._undo: list[Callable[[], None]] = []
        self._undo_modules: list[Callable[[], None]] = []
        self._forward_parts: list[Part] = []
        self._updating: list[int] = []
        """Optimizers whose step runs, outermost first: an optimizer may call another's step."""
        self._updated_in_backward: Any = None

    def install(self) -> None:
        """Install all hooks but those of modules."""
        self._undo += [
            register_optimizer_step_pre_hook(self._before_update).remove,
            register_optimizer_step_post_hook(self._after_update).remove,
            _replace(torch.autograd, "backward", self._followed_backward),
            _replace(_BaseDataLoaderIter, "__next__", self._followed_loader),
            _replace(DataLoader, "__iter__", self._followed_loader),
            _replace(torch.amp.GradScaler, "step", self._followed_scaler),
            _replace(torch.jit, "script", self._without_hooks),
            _replace(torch, "compile", self._following_compiled),
            _replace(torch.nn.Module, "compile", self._following_compiled_in_place),
            _replace(torch.nn.Module, "__getstate__", _state_without_hooks),
        ]
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: _call(forget))

    def follow(self, modules: Iterable[torch.nn.Module]) -> None:
        """Follow the forward passes of these modules, in place of those followed before."""
        self.unfollow()
        self.followed = tuple(modules)
        for module in self.followed:
            compiled = getattr(module, "_compiled_call_impl", None)
            if compiled is not None:  # `module.compile()`: hooks would be traced into its graph
                followed_call = functools.partial(self._followed_call, module)
                self._undo_modules.append(_replace(module, "_compiled_call_impl", followed_call))
                continue
            before = module.register_forward_pre_hook(_ModuleHook(self._before_forward))
            # Always called, because a step that fails may be caught by the script, which then goes on
            after = module.register_forward_hook(_ModuleHook(self._after_forward), always_call=True)
            self._undo_modules += [before.remove, after.remove]

    def unfollow(self) -> None:
        """Remove the hooks of modules."""
        self.followed = ()
        while self._undo_modules:
            self._undo_modules.pop()()

    def remove(self) -> None:
        """Remove all hooks. What something else has replaced since stays as it is."""
        self.unfollow()
        while self._undo:
            self._undo.pop()()
        self._thread = _NOBODY

    def _forget(self) -> None:
        """In a forked process: follow nothing."""
        self._thread = _NOBODY

    def _followed(self) -> bool:
        """Whether this moment belongs to the thread that trains, and is not one in which torch.compile traces our hooks."""
        # is_compiling first: its value is known while torch.compile traces, but a thread's number would break the graph
        return not torch.compiler.is_compiling() and threading.get_ident() == self._thread

    def _before_update(self, optimizer: Any, arguments: Any, options: Any) -> None:
        if self.updates == 0 and self._thread != _NOBODY and not torch.compiler.is_compiling():
            self._thread = threading.get_ident()
        if not self._followed():
            return
        if id(optimizer) in self._updating:  # its last step raised an error, so that no hook saw its end
            del self._updating[self._updating.index(id(optimizer)) :]
            self._clock.leave(Part.OPTIMIZER)
        self._updating.append(id(optimizer))
        self._clock.enter(Part.OPTIMIZER)

    def _after_update(self, optimizer: Any, arguments: Any, options: Any) -> None:
        if not self._followed() or id(optimizer) not in self._updating:
            return
        del self._updating[self._updating.index(id(optimizer)) :]
        self._clock.leave(Part.OPTIMIZER)
        self.updates += 1
        if self._clock.is_open(Part.BACKWARD):
            self._updated_in_backward = optimizer
        elif not self._clock.is_open(Part.OPTIMIZER):
            self._on_update(optimizer)

    def _followed_scaler(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A gradient scaler's step. It skips the optimizer's step if a gradient is infinite, which counts as a step too."""

        @functools.wraps(step)
        def followed_step(scaler: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
            if not self._followed() or not scaler.is_enabled() or self._clock.is_open(Part.OPTIMIZER):
                return step(scaler, optimizer, *arguments, **options)
            before = self.updates
            self._clock.enter(Part.OPTIMIZER)
            try:
                result = step(scaler, optimizer, *arguments, **options)
            finally:
                self._clock.leave(Part.OPTIMIZER)
            self.skipped += self.updates == before
            self._on_update(optimizer)
            return result

        return followed_step

    def _followed_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def followed_backward(*arguments: Any, **options: Any) -> Any:
            if not self._followed():
                return backward(*arguments, **options)
            self._clock.enter(Part.BACKWARD)
            try:
                return backward(*arguments, **options)
            finally:
                self._clock.leave(Part.BACKWARD)
                self.backwards += 1
                if self._updated_in_backward is not None and not self._clock.is_open(Part.BACKWARD):
                    optimizer, self._updated_in_backward = self._updated_in_backward, None
                    self._on_update(optimizer)

        return followed_backward

    def _followed_loader(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def followed_method(loader: Any, *arguments: Any, **options: Any) -> Any:
            if not self._followed():
                return method(loader, *arguments, **options)
            if self.batch_size is None:
                self.batch_size = _batch_size_of(loader)
            if self.workers is None:
                self.workers = _workers_of(loader)
            self._clock.enter(Part.DATA)
            try:
                return method(loader, *arguments, **options)
            finally:
                self._clock.leave(Part.DATA)

        return followed_method

    def _without_hooks(self, script: Callable[..., Any]) -> Callable[..., Any]:
        """TorchScript would compile the hooks of a module, and cannot."""

        @functools.wraps(script)
        def script_without_hooks(*arguments: Any, **options: Any) -> Any:
            followed = self.followed
            self.unfollow()
            try:
                return script(*arguments, **options)
            finally:
                self.follow(followed)

        return script_without_hooks

    def _following_compiled(self, compile_: Callable[..., Any]) -> Callable[..., Any]:
        """A module that torch.compile makes of a followed one is followed as well: hooks in what is traced do nothing."""

        @functools.wraps(compile_)
        def compile_and_follow(*arguments: Any, **options: Any) -> Any:
            compiled = compile_(*arguments, **options)
            original = getattr(compiled, "_orig_mod", None)
            if any(module is original for module in self.followed):
                others = [module for module in self.followed if getattr(module, "_orig_mod", None) is not original]
                self.follow([*others, compiled])
            return compiled

        return compile_and_follow

    def _following_compiled_in_place(self, compile_: Callable[..., None]) -> Callable[..., None]:
        """`module.compile()` replaces the module's call, so the module is followed anew."""

        @functools.wraps(compile_)
        def compile_and_follow(module: torch.nn.Module, *arguments: Any, **options: Any) -> None:
            compile_(module, *arguments, **options)
            if any(module is followed for followed in self.followed):
                self.follow(self.followed)

        return compile_and_follow

    def _followed_call(self, module: torch.nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def followed_call(*arguments: Any, **options: Any) -> Any:
            self._before_forward(module)
            try:
                return call(*arguments, **options)
            finally:
                self._after_forward(module)

        return followed_call

    def _before_forward(self, module: torch.nn.Module) -> None:
        if not self._followed():
            return
        part = self._clock.now
        if part is None or part is Part.OPTIMIZER:  # an optimizer's closure computes the loss
            part = Part.FORWARD if torch.is_grad_enabled() else Part.EVALUATION
            self.called = module if self.called is None and part is Part.FORWARD else self.called
        # Else the call belongs to the open part: backward recomputes, or a module calls another outermost module
        self._forward_parts.append(part)
        self._clock.enter(part)

    def _after_forward(self, module: torch.nn.Module) -> None:
        if self._forward_parts and self._followed():
            part = self._forward_parts.pop()
            self._clock.leave(part)
            self.forwards += part is Part.FORWARD and not self._forward_parts


class _ModuleHook:
    """A hook in a module of the script. Copies and pickles of the module are without it (`_state_without_hooks`).

    Where a class of the script decides itself what of it is copied, the copy has one that does nothing and needs no trainstep.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        self._call(module)

    def __reduce__(self) -> tuple[Any, ...]:
        # A method of Python's own that takes anything and returns None
        return getattr, (contextlib.nullcontext(), "__exit__")


def _replace(owner: Any, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace a function by what `made` makes of it. Returns what restores it, unless something else has replaced it since."""
    original = getattr(owner, name)
    followed = made(original)

    def put_back() -> None:
        if getattr(owner, name) is followed:
            setattr(owner, name, original)

    setattr(owner, name, followed)
    return put_back


def _state_without_hooks(state_of: Callable[[torch.nn.Module], Any]) -> Callable[[torch.nn.Module], Any]:
    """What of a module is copied and pickled, as without us.

    A hook that does nothing could still not be scripted, and `torch.load` with `weights_only` would refuse it.
    """

    @functools.wraps(state_of)
    def state_without_hooks(module: torch.nn.Module) -> Any:
        state = state_of(module)
        if not isinstance(state, dict):  # a class with slots
            return state
        hooks = ((number, hook) for name in _HOOKS for number, hook in state.get(name, {}).items())
        ours = {number for number, hook in hooks if isinstance(hook, _ModuleHook)}
        names = (*_HOOKS, "_forward_hooks_always_called") if ours else ()
        kept = {name: OrderedDict((k, hook) for k, hook in state[name].items() if k not in ours) for name in names}
        return {**state, **kept}

    return state_without_hooks


def _call(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    bound = method()
    if bound is not None:
        bound()


def _workers_of(loader: Any) -> int:
    """Worker processes of a loader or of its iterator; 0: batches are made where they are read."""
    return int(getattr(loader, "num_workers", getattr(loader, "_num_workers", 0)))


def _batch_size_of(loader: Any) -> int | None:
    """Sequences in a batch of a loader, also if it has a sampler of batches; None for an iterator."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    return None

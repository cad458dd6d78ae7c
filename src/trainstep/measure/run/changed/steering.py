"""Steers a run: applies changes, keeps losses, and stops the script after a given number of steps.

    steering = Steering({"adamw": "fused"}, stop_after=40)
    steering.install()                      # before the script builds anything
    steering.step_ended(steps, hooks, ...)  # by the watch; raises StoppedAfter after the last step

In a run that is stopped the first steps are warm-ups, ten of forty, and the others are timed as one window. Where a proof starts
several processes together, each process waits for its turn after the third step, with the workers of its loader stopped. In its
turn it warms up again and has the machine to itself (turns.py). A process whose change found nothing to change ends instead.
After a window a process writes a record and waits for another turn: three steps to warm up, and a window as long as the first.

[Note: one window] A proof compares the mean step of a window with the device idle at both ends. The times of single steps would be
the host's: a script that replays graphs runs tens of steps ahead of the device, so a short run would measure launches. And workers
of a loader make some batches wait and others not, so a median would say little. Nothing else in the window synchronises.

[Note: losses] A step's loss is the mean of the scalars on which backward was called in it, each copied on its device and read when
the run ends. They are the losses of rank 0; with a gradient scaler, the scaled losses. Where backward is called on something else,
there are none.
"""

import atexit
import functools
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch.utils.data import dataloader

from trainstep.config.script import text_of_changes
from trainstep.measure.run.changed.applied import Applied
from trainstep.measure.run.changed.fused_loss import count_losses
from trainstep.measure.run.changed.fused_ops import fusable_parts
from trainstep.measure.run.changed.turns import Turn
from trainstep.measure.run.device_clock import matmul_precision
from trainstep.measure.run.hooks import Hooks
from trainstep.measure.run.script import StoppedAfter
from trainstep.records.facts import Fact, facts_of

WARMUP_STEPS = 10
"""Steps before the window, and steps whose losses are kept: wrong gradients show only after some updates."""
_BEFORE_TURN = 3
"""Steps before a process waits for its first turn: what compiles does so in the first two."""
_BEFORE_LATER_WINDOWS = 3
"""Steps that warm up between a later turn's beginning and its window."""

Write = Callable[[Mapping[str, Fact], Mapping[str, Mapping[str, Sequence[Any]]]], None]
"""Writes a record of the run so far, with these facts and tables beside its own."""


class Steering:
    """Applies the changes of a run and ends it. `stop_after`: None lets the script run to its end. `turn`: what it waits for."""

    def __init__(self, changes: Mapping[str, str], stop_after: int | None = None, turn: Turn | None = None) -> None:
        self.applied = Applied(changes)
        self._warmups = min(WARMUP_STEPS, (stop_after or 0) // 2)
        self._turn = turn
        self._losses: list[list[torch.Tensor]] = [[]]
        """The scalars of each step whose losses are kept."""
        self._keeps_losses = True
        self._has_changed_module = False
        self._windows = 0
        """The number of windows that have ended."""
        self._begins, self._ends = self._warmups, stop_after
        """The steps after which the window begins and ends."""
        self._began_s: float | None = None
        self._timed_s: float | None = None
        """Seconds of the last window."""
        self._ended_after: int | None = None
        self._autocast: str | None = None
        self._weights: torch.dtype | None = None
        self._batch_size: int | None = None
        self._fusable_parts: int | None = None
        self._fusable_losses: Callable[[], int] = lambda: 0

    def install(self) -> None:
        """Apply the changes, and watch what backward is called on."""
        self.applied.install()
        if not self.applied.changes:
            self._fusable_losses = count_losses()
        torch.autograd.backward = self._seen_backward(torch.autograd.backward)
        enter = torch.autocast.__enter__

        @functools.wraps(enter)
        def seen_enter(context: Any) -> Any:
            if self._autocast is None and context._enabled and torch.is_grad_enabled():
                self._autocast = "bf16_autocast" if context.fast_dtype == torch.bfloat16 else "fp16_autocast"
            return enter(context)  # type: ignore[no-untyped-call]

        torch.autocast.__enter__ = seen_enter  # type: ignore[method-assign]

    def step_ended(self, steps: int, hooks: Hooks, trained: Callable[[], Sequence[torch.Tensor]], write: Write) -> None:
        """Act at the end of a step. After the last step raises StoppedAfter, which exits, and again if the script survives it.

        `trained`: the parameters that the optimizers update. `write`: called after a window that another may follow.
        """
        if not self._has_changed_module and hooks.called is not None:
            self._has_changed_module = True
            followed = hooks.followed
            hooks.unfollow()  # hooks inside a module would be compiled with it
            if not self.applied.changes and _is_on_gpu(hooks.called):
                with suppress(Exception):  # the script goes on, whatever its modules do when somebody looks
                    self._fusable_parts = fusable_parts(hooks.called) + self._fusable_losses()
            self.applied.change_module(hooks.called)
            hooks.follow(followed)
        if self._weights is None:
            self._weights = next((parameter.dtype for parameter in trained()), None)
        self.applied.step_ended(steps)
        self._batch_size = hooks.batch_size
        self._keeps_losses = steps < WARMUP_STEPS
        if self._keeps_losses:
            self._losses.append([])
        if steps >= (self._warmups or WARMUP_STEPS):
            self.applied.in_warmups = False
        if self._ends is None:
            return
        if self._ended_after is not None:  # the script survived its end
            self._end(steps)
        if self._turn is not None and steps == min(_BEFORE_TURN, self._warmups):
            _idle_s()
            may_come = not self._has_changed_module  # changes of the module
            if (self.applied.not_applied and not may_come) or not self._turn.wait():
                self._end(steps)
        if steps == self._begins:
            self._began_s = _idle_s()
        if steps >= self._ends:
            self._end_window(steps, write)

    def _end_window(self, steps: int, write: Write) -> None:
        """End the window, or the run if it was the last window."""
        assert self._ends is not None
        if self._began_s is None:  # the script had fewer steps than it takes to warm up
            self._end(steps)
        self._timed_s = _idle_s() - self._began_s
        self._windows += 1
        if self._turn is None:
            self._end(steps)
        write(self.facts, self.tables)
        if not self._turn.wait():
            self._end(steps)
        self._began_s, length = None, self._ends - self._begins
        self._begins = steps + _BEFORE_LATER_WINDOWS
        self._ends = self._begins + length

    def _end(self, steps: int) -> NoReturn:
        if self._ended_after is None:
            atexit.register(_end_workers)
            self._ended_after = steps
        raise StoppedAfter(steps)

    @property
    def facts(self) -> dict[str, Fact]:
        """What was applied and what was not, the precision of the script, and the window's time if the run was stopped."""
        not_applied = "; ".join(f"{name}: {why}" for name, why in self.applied.not_applied.items())
        timed = self._ends - self._begins if self._timed_s is not None and self._ends else None
        return facts_of(
            applied=text_of_changes(self.applied.changes) or None,
            not_applied=not_applied or None,
            stopped_after=self._ended_after,
            timed_steps=timed,
            timed_s=self._timed_s,
            timed_windows=self._windows or None,
            script_precision=self._precision(),
            loader_batch_size=self._batch_size,
            fusable_parts=self._fusable_parts,
        )

    @property
    def tables(self) -> Mapping[str, Mapping[str, Sequence[Any]]]:
        """The losses of the first steps. They are read from the device here."""
        losses = [_mean(values) for values in self._losses if values]
        return {"losses": {"loss": losses}} if losses else {}

    def _precision(self) -> str:
        """The script's precision as config.run names it: autocast's dtype, else the weights', else that of fp32 matmuls."""
        if self._autocast is not None:
            return self._autocast
        if self._weights in (torch.bfloat16, torch.float16):
            return "bf16" if self._weights == torch.bfloat16 else "fp16"
        return "fp32" if matmul_precision() == "highest" else "tf32"

    def _seen_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def seen_backward(tensors: Any, *arguments: Any, **options: Any) -> Any:
            if self._keeps_losses and isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
                self._losses[-1].append(tensors.detach().clone())
            return backward(tensors, *arguments, **options)

        return seen_backward


def _mean(values: Sequence[torch.Tensor]) -> float | None:
    mean = sum(float(value) for value in values) / len(values)
    return mean if math.isfinite(mean) else None


def _is_on_gpu(module: torch.nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in module.parameters())


def _idle_s() -> float:
    """Wait until the device is idle, and return the time."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _end_workers() -> None:
    """End the workers of loaders whose iterators are still held somewhere, as a script's own variables are until Python ends.

    torch does so when an iterator is freed. If one never is, it waits five seconds for each worker, where memory is pinned.
    """
    for thing in gc.get_objects():
        if issubclass(type(thing), dataloader._MultiProcessingDataLoaderIter):
            with suppress(Exception):  # the process ends, whatever state a loader is in
                thing._shutdown_workers()

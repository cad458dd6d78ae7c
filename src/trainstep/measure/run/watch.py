"""Watches a training script: finds its steps, times their parts, inspects one now and then, and writes records as it goes on.

    watch = Watch(recording, schedule=Schedule())
    watch.start()
    ...                    # the script trains
    watch.stop(Ending(words="finished"))

Outside of inspected steps a step costs the hooks (hooks.py) and `_end_step`, about 0.1 ms together. An error in here
never reaches the script: the watch then ends itself, and `trouble` says why.

[Note: how often] An inspected step is slower, and reading its trace takes the script tenths of a second to seconds. So the next
inspection is due when the time taken is half a per cent of the time since: with the hooks, watching shall take at most one per cent
of a step of 10 ms. Records are written every ten seconds, later after every 2 % of the run: some hundreds in a day.
"""

import gc
import os
import resource
import statistics
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from trainstep.config.script import Part
from trainstep.measure.run.closing import Closing
from trainstep.measure.run.compilation import Compilations
from trainstep.measure.run.contention import Contention
from trainstep.measure.run.device_clock import DeviceClock, is_capturing, matmul_precision
from trainstep.measure.run.hooks import Hooks
from trainstep.measure.run.inspection import Inspection, OtherProfilers
from trainstep.measure.run.modules import inside, outermost
from trainstep.measure.run.phase_clock import PhaseClock
from trainstep.measure.run.recording import WARMUPS, Ending, Recording, StepTimes
from trainstep.records.facts import Fact, facts_of
from trainstep.traces.verdict import Unprofiled

if TYPE_CHECKING:
    from trainstep.measure.run.changed.steering import Steering  # imports kernels that few runs need

_FIRST_INSPECTED = WARMUPS + 2
_SHARE = 0.005
"""The share of the time that inspections may take."""
_WRITE_S, _WRITE_SHARE = 10.0, 0.02
_SEARCHES = 8
"""How often outermost modules are searched for: a search looks at every object, in tens of milliseconds."""
_RECENT = 64
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024

Listener = Callable[[int, Sequence[StepTimes]], None]
"""Called with the number of the last step, and the times of the steps since the last call."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which steps are inspected. `every`: one step in so many; 0: none; None: as many as take half a per cent of the time."""

    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 0:
            raise ValueError(f"inspect_every: must be a number of steps, or 0 for none, not {self.every}")


class Watch:
    """One watch of this process. `trouble`: why it ended itself, or empty; `steps`: how many steps it saw."""

    def __init__(
        self,
        recording: Recording,
        *,
        schedule: Schedule = Schedule(),
        modules: Sequence[torch.nn.Module] = (),
        optimizers: Sequence[Any] = (),
        on_record: Sequence[Listener] = (),
        on_step: Listener | None = None,
        steering: "Steering | None" = None,
    ) -> None:
        self.steps, self.trouble = 0, ""
        self.recording = recording
        self._schedule = schedule
        self._given = tuple(modules)
        # A wrapper (accelerate's) does not step itself; the optimizer inside it does
        self._only = {id(inner) for given in optimizers for inner in (given, getattr(given, "optimizer", None))} or None
        self._on_record, self._on_step, self._steering = on_record, on_step, steering
        self._clock = PhaseClock(on_change=self._part_begins)
        self._hooks = Hooks(self._clock, self._updated)
        self._closing, self._compilations = Closing(), Compilations()
        self._contention = Contention(ranks=recording.identity.ranks)
        self._device: DeviceClock | None = None
        self._inspection: Inspection | None = None
        self._others = OtherProfilers(self._abandon)
        self._optimizers: dict[int, Any] = {}
        """id -> weak reference, of each optimizer seen."""
        self._searches, self._pid = 0, os.getpid()
        self._retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)  # until the watch or its last record
        self._followed: Sequence[torch.nn.Module] = ()
        self._called_before = (0, 0)
        """(forwards, backwards) when `_followed` was chosen."""
        self._counted = (0, 0, 0)
        """(forwards, backwards, skipped) in records so far."""
        self._unfinished: deque[tuple[StepTimes, bool]] = deque()
        """Steps that the GPU may not have ended yet; whether each is a warm-up."""
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._collecting_since_ns = self._collected_ns = 0
        self._watching_s = 0.0
        """Time spent on inspections and records since the last record."""
        self._started_s = self._wrote_s = time.monotonic()
        self._inspect_at_s, self._is_on = 0.0, False

    def start(self) -> None:
        """Install the hooks. RuntimeError if this process is watched already."""
        if (other := active_watch()) is not None:
            raise RuntimeError(f"this process is watched already, into {other.recording.store.path}")
        gc.callbacks.append(self._collects)
        if self._steering is not None:  # before the hooks, which time what it changes
            self._steering.install()
        self._hooks.install()
        self._others.install()
        if self._given:
            self._follow(self._given)
        self._clock.restart()
        self._is_on = True

    def step(self) -> None:
        """End a step by hand, where no optimizer of torch.optim updates the parameters."""
        if self._is_on and os.getpid() == self._pid:
            self._guarded(self._end_step, None)

    @property
    def part(self) -> Part | None:
        """The part of the step that runs, as far as hooks see; None outside of all."""
        return self._clock.now

    def stop(self, ending: Ending) -> None:
        """Remove the hooks and write the last record, with how the script ended. ValueError if it cannot be written."""
        if not self._is_on or os.getpid() != self._pid:
            return
        part = self._clock.now
        self._uninstall()
        if not self.steps:
            return
        facts = facts_of(ending=ending.words, ending_part=None if part is None else part.value)
        if self._device is not None and not ending.words.startswith("interrupted"):
            self._guarded(self._device.wait)
        steered = self._steering
        self._write(facts | (steered.facts if steered else {}), steered.tables if steered else {})

    @property
    def why_no_step(self) -> str:
        """Why no step was found, in a sentence with the way out; empty if there were steps."""
        if self.steps:
            return ""
        by_hand = "mark the steps yourself: with trainstep.watch() as watched, and watched.step() after each"
        if self._hooks.backwards:
            return (
                f"backward ran {self._hooks.backwards} times, but no optimizer of torch.optim made a step: the update is written "
                f"by hand, or compiled; {by_hand}"
            )
        if "multiprocessing.popen_spawn_posix" in sys.modules or "multiprocessing.popen_fork" in sys.modules:
            return (
                "no optimizer made a step in this process, which started others: only the first process is watched; start each "
                "rank by torchrun: torchrun --nproc-per-node 2 -m trainstep run SCRIPT"
            )
        return f"no optimizer made a step and no backward ran; if it trains (torch.func, one compiled step), {by_hand}"

    # What hooks call

    def _updated(self, optimizer: Any) -> None:
        self._guarded(self._count_update, optimizer)

    def _count_update(self, optimizer: Any) -> None:
        if self._only is not None and id(optimizer) not in self._only:
            return
        if self._device is not None and is_capturing():  # the update is captured, not executed
            return
        if self._closing.closes(id(optimizer)):
            self._end_step(optimizer)
        elif id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)

    def _part_begins(self, part: Part | None) -> None:
        if self._device is not None:
            self._device.mark(part)
        if self._inspection is not None:
            self._inspection.part_begins(part)

    def _collects(self, phase: str, _: Mapping[str, int]) -> None:
        """Called by Python's garbage collector as it starts and stops."""
        if phase == "start":
            self._collecting_since_ns = time.perf_counter_ns()
        elif self._collecting_since_ns:
            self._collected_ns += time.perf_counter_ns() - self._collecting_since_ns

    def _guarded(self, do: Callable[..., None], *arguments: Any) -> None:
        """Do something for the watch. If it fails, the watch ends and the script goes on."""
        try:
            do(*arguments)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is ours and not the script's)
            self.trouble = f"{type(error).__name__}: {error}"
            self._uninstall()
            if self._steering is not None:  # a script that is not changed as asked must not run on
                sys.exit(f"trainstep: {self.trouble}")

    # A step ends

    def _end_step(self, optimizer: Any) -> None:
        step_ns, spent_ns = self._clock.take()
        collected_ns, self._collected_ns = self._collected_ns, 0
        self.steps += 1
        times = StepTimes(step_ns, spent_ns, collected_ns)
        inspection, self._inspection = self._inspection, None
        if inspection is not None:
            self._finish(inspection)
        else:
            self._keep(times)
        self._compilations.poll(self.steps)
        if optimizer is not None and id(optimizer) not in self._optimizers:
            self._first_update(optimizer)
        elif self._followed and self._searches < _SEARCHES:
            self._look_inside()
        now_s = time.monotonic()
        if now_s - self._wrote_s > max(_WRITE_S, _WRITE_SHARE * (now_s - self._started_s)):
            self._write({}, {})
            self._watching_s += time.monotonic() - now_s
        if self._on_step is not None:
            self._on_step(self.steps, (times,))
        if self._is_due(now_s):
            self._inspect()
        if self._steering is not None:
            self._steering.step_ended(self.steps, self._hooks, self._trained, self._write)
        self._collected_ns = 0  # garbage collected since the step's end was the watch's
        self._clock.restart()

    def _keep(self, times: StepTimes) -> None:
        """Keep a step's times, as soon as the device has ended it."""
        warmup = self.steps <= WARMUPS
        if not warmup:
            self._recent.append(times.step_s)
        if self._device is None:
            self.recording.add(times, warmup=warmup)
            return
        self._device.end_step()
        self._unfinished.append((times, warmup))
        self._keep_finished()

    def _keep_finished(self) -> None:
        for device_s in self._device.finished() if self._device else ():
            times, warmup = self._unfinished.popleft()
            self.recording.add(times._replace(device_s=device_s), warmup=warmup)

    def _first_update(self, optimizer: Any) -> None:
        """Note an optimizer that was not seen before, and find the device and the modules of its parameters."""
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        device = next((parameter.device.type for parameter in _parameters([optimizer])), "cpu")
        if device == "cuda" and self._device is None and not self._unfinished:
            self._device = DeviceClock()
            self._contention.watch_gpu(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
            self.recording.identity = replace(self.recording.identity, device="cuda")
        if not self._given and self._searches < _SEARCHES:
            self._searches += 1
            self._follow(outermost(self._trained()))

    def _follow(self, modules: Sequence[torch.nn.Module]) -> None:
        self._hooks.follow(modules)
        self._followed = modules
        self._called_before = (self._hooks.forwards, self._hooks.backwards)

    def _look_inside(self) -> None:
        """Follow the modules inside the followed ones if backward ran and none of the followed did: nobody calls those."""
        forwards, backwards = self._called_before
        if self._hooks.forwards > forwards:
            self._searches = _SEARCHES if self._given else self._searches
            self._followed = ()
        elif self._hooks.backwards > backwards + 1:
            self._searches += 1
            self._follow(inside(self._followed, self._trained()))

    def _trained(self) -> list[torch.Tensor]:
        optimizers = (reference() for reference in self._optimizers.values())
        return _parameters([optimizer for optimizer in optimizers if optimizer is not None])

    # Inspections

    def _is_due(self, now_s: float) -> bool:
        every = self._schedule.every
        if every is not None:
            return bool(every) and (self.steps + 1) % every == 0
        return self.steps + 1 == _FIRST_INSPECTED or (self.steps >= _FIRST_INSPECTED and now_s >= self._inspect_at_s)

    def _inspect(self) -> None:
        """Inspect the step that begins now, unless the script itself profiles."""
        if self._others.seen:
            return
        started_s = time.monotonic()
        if self._device is not None:
            self._device.wait()  # else the trace would hold the work of the step before
            self._keep_finished()
            self._device.drop_step()
        self._inspection = Inspection(self.steps + 1, on_gpu=self._device is not None)
        self._inspection.start(self._others)
        self._watching_s += time.monotonic() - started_s

    def _finish(self, inspection: Inspection) -> None:
        started_s, before_s = time.monotonic(), self._watching_s  # before: what starting the inspection took
        if self._device is not None:
            self._device.drop_step()
        usual_s = statistics.median(self._recent) if self._recent else None
        inspected = inspection.finish(Unprofiled(step_s=usual_s))
        del inspection
        if gc.isenabled():  # else the script's next steps would collect what reading a trace has left
            gc.collect()
        if inspected is not None:
            self._write(inspected.facts, inspected.tables)
        now_s = time.monotonic()
        self._watching_s += now_s - started_s
        self._inspect_at_s = now_s + (before_s + now_s - started_s) / _SHARE

    # Records

    def _write(self, facts: Mapping[str, Fact], tables: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
        self._keep_finished()
        compilations, breaks = self._compilations.take(), self._compilations.take_breaks()
        tables = {**tables, "compilations": _columns(compilations), "graph_breaks": _columns(breaks)}
        before, self._counted = self._counted, (self._hooks.forwards, self._hooks.backwards, self._hooks.skipped)
        forwards, backwards, skipped = (now - then for now, then in zip(self._counted, before, strict=True))
        own = facts_of(
            steps_seen=self.steps,
            forward_passes=forwards,
            backward_passes=backwards,
            skipped_updates=skipped,
            optimizers=self._closing.seen or None,
            watching_s=self._watching_s,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT,
            own_profiler=self._others.seen or None,
            loader_workers=self._hooks.workers,
            trained_elements=sum(parameter.numel() for parameter in self._trained()) or None,
            matmul_precision=matmul_precision(),
            update_share=self._clock.take_update_share(),
            **self._contention.take(),
            **self._compilations.facts,
        )
        self._watching_s = 0.0
        steps = self.recording.write(
            {**own, **self._memory_facts(), **facts},
            {name: table for name, table in tables.items() if table},
            next_step=self.steps + 1,
        )
        self._wrote_s = time.monotonic()
        for listener in self._on_record:
            listener(self.steps, steps)

    def _memory_facts(self) -> dict[str, Fact]:
        if self._device is None:
            return {}
        before, self._retries = self._retries, torch.cuda.memory_stats().get("num_alloc_retries", 0)
        return facts_of(
            allocation_retries=self._retries - before,
            peak_allocated_bytes=torch.cuda.max_memory_allocated(),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(),
        )

    def _abandon(self) -> None:
        """End an inspection without a result."""
        inspection, self._inspection = self._inspection, None
        if inspection is not None:
            inspection.abandon()

    def _uninstall(self) -> None:
        self._abandon()
        self._others.remove()
        self._hooks.remove()
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)
        self._is_on = False


def active_watch() -> Watch | None:
    """The watch of this process, if one is on: it has a callback in Python's garbage collector."""
    owners = (getattr(callback, "__self__", None) for callback in gc.callbacks)
    return next((owner for owner in owners if isinstance(owner, Watch)), None)


def _parameters(optimizers: Sequence[Any]) -> list[torch.Tensor]:
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    return [parameter for group in groups for parameter in group["params"]]


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}

"""Inspects one step of a script closely: under torch's profiler, with the lines at which the host waits.

    inspection = Inspection(step=120, on_gpu=True)
    inspection.start(others)            # OtherProfilers
    inspection.part_begins(part)        # for each part of the step, None outside
    findings = inspection.finish(Unprofiled(step_s=0.010))

The step runs as ever, but slower, so its times do not count among those of the others. Its trace is read by traces/, as that of
`trainstep profile` is.

[Note: open ranges] An inspection ends in a hook of the optimizer, where torch's own range around the update is still open, and a
script may have ranges (`record_function`) over many steps. When a range ends while any profiler is active, torch writes that into
the memory of the profiler that saw it begin. If that one is gone, the process crashes sooner or later. So ranges that began in an
inspected step are ended with it; ending them again, as the script does later, does nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.profiler import profile as autograd_profile
from torch.profiler import ProfilerActivity, profile, record_function

from trainstep.config.script import Part
from trainstep.measure.harness.files import TemporaryFolder
from trainstep.measure.harness.gloo_threads import wait_for_gloo_threads
from trainstep.measure.run.instead import seconds_instead
from trainstep.measure.run.waits import Waits
from trainstep.records.facts import Fact, facts_of
from trainstep.traces.communication import read_communication
from trainstep.traces.gradient_messages import gradient_messages
from trainstep.traces.kineto import read_trace
from trainstep.traces.patterns.table import find_patterns
from trainstep.traces.profile import profile_of
from trainstep.traces.verdict import Unprofiled
from trainstep.traces.work import read_work

_KEPT = 20
"""The kernels or operators of each phase that a record keeps."""


@dataclass(frozen=True, kw_only=True)
class Inspected:
    """What one inspected step gives to its record."""

    facts: Mapping[str, Fact]
    tables: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)


class Inspection:
    """One inspected step. After `abandon` it finds nothing."""

    def __init__(self, step: int, *, on_gpu: bool) -> None:
        self._step = step
        self._on_gpu = on_gpu
        self._waits = Waits(on_gpu=on_gpu)
        self._stack = ExitStack()
        self._range: record_function | None = None
        self._part: Part | None = None
        self._profiler: profile | None = None
        self._open = _OpenRanges()

    def start(self, others: "OtherProfilers") -> None:
        """Begin the inspection, as the step begins."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profiler = profile(activities=activities, record_shapes=True)
        others.start_own(self._profiler)
        self._open.start()
        self._stack.callback(self._open.end)
        self._stack.callback(self._waits.stop)
        self._waits.start()
        self._stack.enter_context(record_function(f"step {self._step}"))
        self._stack.callback(self._end_range)

    def part_begins(self, part: Part | None) -> None:
        """Begin a part or, with None, end the last one. Forward lasts until the next part begins, and so includes the loss."""
        if part is self._part or (part is None and self._part is Part.FORWARD):
            return
        self._end_range()
        if part is not None:
            self._range = record_function(part.value)
            self._range.__enter__()
        self._part = part

    def finish(self, unprofiled: Unprofiled) -> Inspected | None:
        """End the inspection with the step, and return what it shows; None after `abandon`."""
        if self._profiler is None:
            return None
        self._stack.close()
        if self._on_gpu:
            torch.cuda.synchronize()
        profiler, self._profiler = self._profiler, None
        wait_for_gloo_threads()
        profiler.stop()
        waits = self._waits.table()
        tables = {"waits": waits} if waits["file"] else {}
        try:
            with TemporaryFolder() as folder:
                path = folder / "trace.json"
                profiler.export_chrome_trace(str(path))
                trace = read_trace(path)
            profiled = profile_of(trace, unprofiled=unprofiled, kernels_kept=_KEPT)
            work = read_work(trace)
            messages = read_communication(work).steps
            recognised = find_patterns(work)
            patterns = recognised.table({} if self._on_gpu else seconds_instead(recognised))
            tables |= {"patterns": patterns} if patterns else {}
            sent = gradient_messages(work)
        except Exception as error:  # noqa: BLE001  (a profiler may write anything, and the script must go on)
            reason = f"{type(error).__name__}: {error}"
            return Inspected(facts=facts_of(inspected_step=self._step, trace_failed=reason), tables=tables)
        facts = facts_of(
            inspected_step=self._step,
            profiled_step_s=profiled.steps_s[0],
            device_busy_s=profiled.busy_s[0] if profiled.on_device else None,
            communication_s=sum(step.communication_s for step in messages),
            exposed_s=sum(step.exposed_s for step in messages),
            **sent,
            **recognised.sixteen_bit.numbers(),
            interrupted_share=recognised.interrupted_share,
            **{name: value for name, value in profiled.numbers().items() if value != ""},
        )
        return Inspected(facts=facts, tables={**profiled.tables, **tables})

    def abandon(self) -> None:
        """End the inspection without reading anything."""
        if self._profiler is not None:
            self._stack.close()
            profiler, self._profiler = self._profiler, None
            wait_for_gloo_threads()
            profiler.stop()

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = self._part = None


class _OpenRanges:
    """Notes the ranges that begin, until `end`, which ends those that are still open. [Note: open ranges]"""

    def __init__(self) -> None:
        self._ranges: dict[int, record_function] = {}
        self._given = record_function.__enter__, record_function.__exit__

    def start(self) -> None:
        """Begin to note them."""
        enter, leave = self._given

        def noted(opened: record_function) -> record_function:
            self._ranges[id(opened)] = opened
            enter(opened)  # type: ignore[no-untyped-call]
            return opened

        def forgotten(ended: record_function, *error: Any) -> None:
            self._ranges.pop(id(ended), None)
            leave(ended, *error)

        record_function.__enter__, record_function.__exit__ = noted, forgotten  # type: ignore[method-assign]

    def end(self) -> None:
        """End those that are open, the latest first."""
        record_function.__enter__, record_function.__exit__ = self._given  # type: ignore[method-assign]
        while self._ranges:
            self._ranges.popitem()[1].__exit__(None, None, None)


class OtherProfilers:
    """Notices when the script starts its own profiler: torch allows one per process, and a second would be an error in the script.

    `seen`: whether the script started one. `on_seen`: called just before the first. A profiler that is prepared but not started
    yet, as in a schedule's warm-up, counts too; torch itself would not tell.
    """

    def __init__(self, on_seen: Callable[[], None]) -> None:
        self.seen = False
        self._on_seen = on_seen
        self._own_starts = False

    def install(self) -> None:
        """Follow every start of a profiler from now on."""
        self.seen = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        self._prepare = prepare = autograd_profile._prepare_trace

        def followed_prepare(profiler: Any) -> Any:
            if not self.seen and not self._own_starts:
                self.seen = True
                self._on_seen()
            return prepare(profiler)  # type: ignore[no-untyped-call]

        self._followed = followed_prepare
        autograd_profile._prepare_trace = followed_prepare  # type: ignore[method-assign]

    def start_own(self, profiler: profile) -> None:
        """Start a profiler of ours."""
        self._own_starts = True
        try:
            profiler.start()
        finally:
            self._own_starts = False

    def remove(self) -> None:
        """Follow nothing any more."""
        if autograd_profile._prepare_trace is self._followed:
            autograd_profile._prepare_trace = self._prepare  # type: ignore[method-assign]

"""A measured step as a sum: floor + findings + unexplained = measured, in seconds, with nothing counted twice.

    budget = step_budget(evidence, calibration)
    budget.floor_s, budget.findings[0].cause, budget.findings[0].gain.time_s, budget.explained_share

[Note: the algebra] The step is divided first by what the device did, and each part is then divided among causes:

    measured = busy + exposed + idle             idle = max(0, measured - busy - exposed)
    busy     = sum of groups of kernels          scaled to measured if profiled kernels take longer than that
    exposed  = as profiled, at most measured - busy: a profiler lengthens the step, and its messages with it
    group    = floor of the group + excess       the floor is at most the group's time

A group's excess is its time above its floor. It is divided by removing these causes one after the other, in this order:

    clocks         t x (1 - clock / highest clock)               matmuls, if something lowered the clock
    recomputation  t x (1 - P(no recomputation) / P(now))        of each class, P: the class's time by plan
    precision      t x (1 - P(bf16) / P(now))                    matmuls, those of plain attention too
    the rest       matmul shapes, attention kernel, unfused ops, optimizer; casts and host copies have no floor

Each cause takes at most what is left above the floor, so that the parts add up. Exposed time of messages is divided by the share of
the messages' time in which the last rank had not joined: that share is the cause "stragglers". If several backward passes send
every gradient, the share of all but one is "accumulation sync"; what is left above the floor is "exposed messages". Idle time is
divided in this order, each cause taking at most what is left: first waits that were seen on the host (data, recompiles, allocator,
garbage collector, a process that took its core, synchronisations, habits); then another process, if one was seen and the host was
not busy launching; then, in a captured step, the gaps between kernels; then host launches. In an eager step host launches take all
that is left, because a device without work and without a known wait waits for launches; in a captured step they take at most what a
graph's launch takes at the slow end, and the rest is unexplained. On a CPU, host time of unknown cause between ops is host launches
as well.

Without a calibration or formulas no floor is known, so the kernels' time as they run counts as floor. Findings are then waits, and
habits: ways of computing that take longer than another way with the same result. A habit takes at most what is left of that floor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainstep.config.parallel import RanksConfig
from trainstep.explain.changes import ALL_BLOCKS, change_of
from trainstep.explain.evidence import ATTENTION_MATMUL, CASTS, HOST_COPIES, MEMORY, Evidence, Place, taken_from
from trainstep.explain.floor import ATTENTION, MATMUL, MESSAGES, OPTIMIZER, SIXTEEN_BITS, changed, floor_of
from trainstep.explain.gain import expected_share, gain_of, merged_share, no_gain_words
from trainstep.explain.room import what_fits
from trainstep.plan.step_memory import alone
from trainstep.plan.time.calibration import Calibration
from trainstep.plan.time.interval import Interval
from trainstep.plan.time.step_time import DEVIATIONS, GRAPH_LAUNCH, StepTime, step_time
from trainstep.traces.kernel_classes import OTHER, OVERHEAD

_LEAST = 1e-3
"""The least share of the step that a finding takes; smaller excesses are added to what is unexplained."""
_LAUNCHING = 0.9
"""A host that enqueues for this share of the step is busy launching."""
_MODELLED, _CALIBRATED = 0.25, 0.05
"""Relative deviation of a group's time where no profile was taken and plan divided the whole, and where one was."""
_WORK = (MATMUL, ATTENTION, MEMORY, OPTIMIZER)
_REST = {
    MATMUL: "matmul_shapes",
    ATTENTION: "attention_kernel",
    ATTENTION_MATMUL: "attention_kernel",
    MEMORY: "unfused",
    OPTIMIZER: "optimizer",
    CASTS: "casts",
    HOST_COPIES: "host_copies",
    OVERHEAD: "host_launches",
}
"""Group -> the cause of what is left above its floor."""
AS_THEY_RUN = "work as it runs"
"""The floor of kernels for which there is no formula."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An excess with its cause. `change`: fields of a config that remove it; empty where the advice is only words (causes.py)."""

    cause: str
    excess: Interval
    gain: Interval
    """What the change gains: as plan predicts for the changed config; without a prediction, from nothing to all of the excess."""
    evidence: str
    """What was seen, in words; `{name}` stands for a time of `times_s`, which the report writes as its tables do."""
    times_s: Mapping[str, float] = field(default_factory=dict)
    change: Mapping[str, Any] = field(default_factory=dict)
    is_taken: bool = False
    """Whether the config already has this change and every other known one."""
    place: Place | None = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A step's time as a sum. `floor`: seconds by part. `findings`: the longest excess first."""

    measured_s: float
    floor: Mapping[str, float]
    findings: tuple[Finding, ...]
    unexplained_s: float
    notes: tuple[str, ...] = ()
    on_device: bool = True
    is_profiled: bool = False
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase of the step, where they were measured."""
    to_see_more: str = ""
    """What shows more of the step, in words."""
    as_they_run_s: Mapping[str, float] = field(default_factory=dict)
    """Group of kernels -> its time in the part `work as it runs`; empty without a profile of a device."""

    @property
    def floor_s(self) -> float:
        return sum(self.floor.values())

    @property
    def explained_share(self) -> float:
        """The findings' share of measured - floor; 1 if nothing is above the floor."""
        above_s = self.measured_s - self.floor_s
        return 1.0 - self.unexplained_s / above_s if above_s > 1e-12 else 1.0


def step_budget(evidence: Evidence, calibration: Calibration | None) -> Budget:
    """The budget of a measured step. [Note: the algebra]"""
    parts = _Parts(evidence, calibration)
    exposed_s = min(evidence.exposed_s, max(0.0, evidence.measured_s - parts.known_work_s()))
    parts.divide_work(evidence.measured_s - exposed_s)
    parts.divide_messages(exposed_s)
    busy_s = sum(parts.groups.values())
    unexplained_s = parts.divide_idle(max(0.0, evidence.measured_s - exposed_s - busy_s)) + parts.unexplained_s
    findings = []
    for cause, excess_s in parts.excess.items():
        if excess_s < _LEAST * evidence.measured_s:
            unexplained_s += excess_s
            continue
        half_s = parts.half_width_s(cause, excess_s)
        change, is_taken = change_of(parts.config, cause)
        change, no_room = what_fits(parts.config, evidence.gpu_memory_bytes, change)
        most_s = max(excess_s, evidence.measured_s - sum(parts.floor.values()))
        high_s = min(most_s, excess_s + half_s)
        excess = Interval(time_s=excess_s, low_s=max(0.0, excess_s - half_s), high_s=high_s)
        after = None
        if change and not is_taken and parts.config is not None and calibration is not None:
            after = changed(parts.config, dict(change), calibration)
        gain = gain_of(
            excess_s,
            evidence.measured_s,
            parts.predicted,
            after,
            is_taken=is_taken or bool(no_room and not change),
            expected=parts.share_of(cause),
        )
        findings.append(
            Finding(
                cause=cause,
                excess=excess,
                gain=gain,
                evidence=parts.words.get(cause, "") + (f"; {no_room}" if no_room else "") + no_gain_words(gain, after),
                times_s=parts.times.get(cause, {}),
                change=change,
                is_taken=is_taken,
                place=evidence.places.get(cause),
            )
        )
    findings.sort(key=lambda finding: -finding.excess.time_s)
    return Budget(
        measured_s=evidence.measured_s,
        floor={part: time_s for part, time_s in parts.floor.items() if time_s > 0},
        findings=tuple(findings),
        unexplained_s=unexplained_s,
        notes=(*evidence.notes, *parts.notes),
        on_device=evidence.on_device,
        is_profiled=parts.profiled,
        phases_s=evidence.phases_s,
        to_see_more=evidence.to_see_more,
        as_they_run_s=parts.as_they_run if evidence.on_device and parts.profiled else {},
    )


class _Parts:
    """The budget under construction: `groups` of busy time, `floor` by part, `excess` by cause, `words` of evidence by cause."""

    def __init__(self, evidence: Evidence, calibration: Calibration | None) -> None:
        self.evidence = evidence
        self.groups: dict[str, float] = {}
        self.floor: dict[str, float] = {}
        self.as_they_run: dict[str, float] = {}
        self.excess: dict[str, float] = {}
        self.words: dict[str, str] = {}
        self.times: dict[str, Mapping[str, float]] = {}
        self.notes: list[str] = []
        self.unexplained_s = 0.0
        self.against_other: set[str] = set()
        """Causes whose excess is measured against another way of computing, not against a floor."""
        self.calibration = calibration
        self.config = evidence.config
        self.predicted: StepTime | None = None
        self.least: dict[str, float] = {}
        self.profiled = bool(evidence.work)
        if calibration is None or self.config is None:
            where = "for this model or machine" if evidence.on_device else "on a CPU"
            self.notes.append(f"No floor is known {where}: its work counts as it runs.")
            return
        self._predict(self.config, calibration)

    def _predict(self, config: RanksConfig, calibration: Calibration) -> None:
        """Predict the step and its floor by plan; for a strategy without formulas, those of one rank that trains alone."""
        try:
            self.predicted = step_time(config, calibration)
            self.least = floor_of(config, calibration, self.predicted)
        except ValueError as error:
            self.predicted = None
            if config.ranks == 1:
                self.notes.append(f"The floor is not known, so that work counts as it runs: {error}.")
                return
            self.notes.append(f"The floor is that of a rank by itself: {error}.")
            self.config = alone(config.run)
            self._predict(self.config, calibration)

    def add(self, cause: str, excess_s: float, words: str, **times_s: float) -> None:
        """Add to the cause's excess. Only its first `words` are kept; `{name}` in them stands for a time of `times_s`."""
        self.excess[cause] = self.excess.get(cause, 0.0) + excess_s
        if excess_s > 0 and cause not in self.words:
            self.words[cause], self.times[cause] = words, times_s

    def share_of(self, cause: str) -> float:
        """The share of the cause's excess that its change should gain where plan does not predict it."""
        sent = self.evidence
        if cause == "data":
            return sent.data_share
        if cause == "exposed_messages" and sent.message_fixed_s:
            return merged_share(sent.messages, sent.message_bytes, sent.message_fixed_s, sent.exposed_s)
        return expected_share(cause, measured_against_other=cause in self.against_other)

    def half_width_s(self, cause: str, excess_s: float) -> float:
        """Half of a 90 % interval for normal errors: of the steps' times, and of the division of device time."""
        modelled = not self.profiled and cause in _REST.values()
        relative = (self.evidence.spread**2 + (_MODELLED if modelled else _CALIBRATED) ** 2) ** 0.5
        return float(DEVIATIONS * relative) * max(excess_s, 0.1 * self.evidence.measured_s)

    # Busy time

    def known_work_s(self) -> float:
        """Busy time: as profiled; else on a CPU the phases' times, on a GPU the measured whole or else the prediction."""
        if self.evidence.work:
            return sum(self.evidence.work.values())
        if not self.evidence.on_device:  # phases are timed on the host, so they include their waits for messages
            return sum(self.evidence.phases_s.values())
        if self.evidence.busy_s is not None or self.predicted is None:
            return self.evidence.busy_s or 0.0
        return sum(self.predicted.classes[name] for name in _WORK)

    def divide_work(self, room_s: float) -> None:
        """Divide the groups of kernels into floor and excesses. `room_s`: the step's time without exposed messages."""
        self.groups = self._groups(room_s)
        for group, time_s in self.groups.items():
            if not self.least and group not in (OVERHEAD, HOST_COPIES):
                self.floor[AS_THEY_RUN] = self.floor.get(AS_THEY_RUN, 0.0) + time_s
                self.as_they_run[group] = time_s
            elif group == OTHER:
                self.unexplained_s += time_s
            else:
                self._divide_group(group, time_s)
        for habit in self.evidence.habits:
            cut_s = min(habit.excess_s, self.floor.get(AS_THEY_RUN, 0.0))
            if cut_s > 0:
                self.floor[AS_THEY_RUN] -= cut_s
                self.as_they_run = taken_from(self.as_they_run, habit.group, cut_s)
                self.against_other.add(habit.cause)
                self.add(habit.cause, cut_s, habit.what)

    def _groups(self, room_s: float) -> dict[str, float]:
        """Busy time by group: as profiled, else the measured whole divided in plan's proportions, else as plan predicts it."""
        evidence = self.evidence
        if evidence.work:
            groups = dict(evidence.work)
        elif self.predicted is not None:
            groups = {name: self.predicted.classes[name] for name in _WORK}
            whole_s, busy_s = sum(groups.values()), evidence.busy_s
            self.notes.append(
                "No profile: kernels are divided as plan predicts them, and their whole is "
                + ("the measured busy time." if busy_s is not None else "predicted, too.")
            )
            if busy_s is not None and whole_s:
                groups = {name: time_s * busy_s / whole_s for name, time_s in groups.items()}
        else:
            return {OTHER: min(room_s, room_s if evidence.busy_s is None else evidence.busy_s)}
        scale = min(1.0, room_s / (sum(groups.values()) or 1.0))
        if not evidence.on_device:  # a profiler slows the ops of a CPU: only their shares are true
            scale = self._host_room_s(room_s) / (sum(groups.values()) or 1.0)
        return {name: time_s * scale for name, time_s in groups.items()}

    def _host_room_s(self, room_s: float) -> float:
        evidence = self.evidence
        waits_s = evidence.data_s + evidence.recompile_s + evidence.collector_s + evidence.contended_s
        return max(0.0, room_s - waits_s)

    def _divide_group(self, group: str, time_s: float) -> None:
        part = ATTENTION if group == ATTENTION_MATMUL else group
        taken_s = self.floor.get(part, 0.0)
        floor_s = min(time_s, max(0.0, self.least.get(part, 0.0) - taken_s))
        self.floor[part] = taken_s + floor_s
        left_s = time_s - floor_s
        for cause, share, words in self._removals(group):
            cut_s = min(left_s, share * time_s)
            self.add(cause, cut_s, words)
            left_s, time_s = left_s - cut_s, time_s - cut_s
        if group in (MATMUL, ATTENTION, MEMORY) and self.predicted is None:
            self.unexplained_s += left_s
            return
        floor_words = ", at least {least}" if self.floor[part] else ""
        words = f"{group} takes {{takes}}{floor_words}"
        self.add(_REST[group], left_s, words, takes=left_s + floor_s, least=self.floor[part])

    def _removals(self, group: str) -> list[tuple[str, float, str]]:
        """The causes to remove from a group, in order: name, share of the group's remaining time, words of evidence."""
        removals, evidence = [], self.evidence
        if group == MATMUL and evidence.clock < 1:
            words = f"the clock was {100 * evidence.clock:.0f} % of the highest: {evidence.throttle}"
            removals.append(("clocks", 1 - evidence.clock, words))
        if self.config is None or self.predicted is None or self.calibration is None:
            return removals
        run, now = self.config.run, self.predicted
        part = MATMUL if group == ATTENTION_MATMUL else group
        if run.recompute != "none" and part in now.classes:
            without = changed(self.config, {"recompute": "none", **ALL_BLOCKS}, self.calibration)
            if without is not None and now.classes[part]:
                share = 1 - without.classes[part] / now.classes[part]
                removals.append(("recomputation", max(0.0, share), f"blocks recompute in mode {run.recompute}"))
        dtypes = {line.dtype for line in now.lines if line.what == MATMUL}
        if part == MATMUL and dtypes.isdisjoint(SIXTEEN_BITS):
            sixteen = changed(self.config, {"precision": "bf16_autocast"}, self.calibration)
            if sixteen is not None and now.classes[MATMUL]:
                share = 1 - sixteen.classes[MATMUL] / now.classes[MATMUL]
                removals.append(("precision", max(0.0, share), f"matmuls are computed in {', '.join(sorted(dtypes))}"))
        return removals

    # Messages

    def divide_messages(self, exposed_s: float) -> None:
        """Divide exposed time into floor, stragglers, gradients sent in every pass, and exposed messages."""
        if not exposed_s:
            return
        late_s = exposed_s * self.evidence.late_share
        floor_s = min(exposed_s - late_s, self.least.get(MESSAGES, 0.0))
        self.floor[MESSAGES] = floor_s
        words = f"for {100 * self.evidence.late_share:.0f} % of the messages' time a rank had not joined"
        self.add("stragglers", late_s, words)
        if (passes := self.evidence.synchronised_passes) > 1:
            again_s = (exposed_s - late_s) * (1 - 1 / passes)
            words = f"each of {passes} backward passes sends every gradient"
            self.add("accumulation_sync", again_s, words, exposed=exposed_s)
            exposed_s -= again_s
        count, nbytes = self.evidence.messages, self.evidence.message_bytes
        counted = f", counted as {self.evidence.message_dtype}" if self.evidence.message_dtype else ""
        sizes = f" in {count:,} messages of {nbytes / count / 2**20:.3g} MiB on average{counted}" if count else ""
        words = f"nothing is computed for {{exposed}} while messages are in flight{sizes}"
        if not self.evidence.on_device:  # exposed time on a CPU counts what the sending threads take from computing
            words = f"messages take {{exposed}} from computing{sizes}"
        self.add("exposed_messages", exposed_s - late_s - floor_s, words, exposed=exposed_s)

    # Idle time

    def divide_idle(self, idle_s: float) -> float:
        """Divide idle time among the host's waits, in the order of the note. Returns the unexplained rest."""
        evidence, left_s = self.evidence, idle_s
        for cause, time_s, words in (
            ("data", evidence.data_s, "the step waits {time} for its batch"),
            ("recompiles", evidence.recompile_s, "torch.compile compiled functions again, spread over all steps"),
            ("allocator", evidence.allocator_s, "the allocator asked the driver for memory in the step"),
            ("garbage_collector", evidence.collector_s, "Python collected garbage in the step"),
            ("another_process", evidence.contended_s, evidence.others),
            (
                "synchronisations",
                evidence.blocked_s,
                "calls that wait for the device, and what is launched late after them, take {time}",
            ),
            *((habit.cause, habit.gap_s, habit.what) for habit in evidence.habits),
        ):
            cut_s = min(left_s, time_s)
            self.add(cause, cut_s, words, time=time_s)
            left_s -= cut_s
        if not left_s or not (evidence.on_device or self.profiled):
            return left_s
        enqueues = evidence.enqueue_s is not None and evidence.enqueue_s >= _LAUNCHING * evidence.measured_s
        if evidence.others and not evidence.contended_s and not enqueues:
            self.add("another_process", left_s, evidence.others)
            return 0.0
        is_captured = self.predicted is not None and self.predicted.is_captured
        if is_captured and self.calibration is not None and self.predicted is not None:
            pieces = evidence.pieces or sum(line.count for line in self.predicted.lines)
            gap_s = min(left_s, pieces * self.calibration.gaps.get("graph", 0.0))
            self.add("small_kernels", gap_s, f"{pieces:,.0f} kernels with a gap before each")
            left_s -= gap_s
            launch_s = min(left_s, GRAPH_LAUNCH["high_s"] * pieces * self.calibration.gaps.get("graph launch", 0.0))
            self.add("host_launches", launch_s, "the device waits for the graph's launch")
            return left_s - launch_s
        enqueue = "; the host enqueues for {enqueue}" if evidence.enqueue_s else ""
        many = f" {evidence.pieces:,.0f} kernels" if evidence.pieces else ""
        words = f"the device has no work for {{idle}} while the host launches{many}{enqueue}"
        self.add("host_launches", left_s, words, idle=left_s, enqueue=evidence.enqueue_s or 0.0)
        return 0.0

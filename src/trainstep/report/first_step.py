"""Where the first step's extra time goes, and from which step on times are steady. Numbers from one record's steps."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.records.record import Record, Samples

PARTS = {
    "compile_s": "compiling",
    "allocation_s": "device memory (cudaMalloc)",
    "clock_s": "SM clock still climbing",
    "rest_s": "the rest: lazy loading of kernels and libraries",
}
"""Part -> its name. The last is what the others leave; on a CPU also pages of memory touched for the first time."""
_TOLERANCE = 0.02
_STEADY_IN_A_ROW = 3


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """The steps of a cell from the very first, and the split of what the first took over the steady median.

    Parts were measured on their own, so their sum may exceed the extra time: then `rest_s` is negative.
    """

    steps_s: tuple[float, ...]
    warmups: int
    steady_s: float
    """Median of the timed steps; without warm-ups, of those after the first."""
    compile_s: float | None
    allocation_s: float | None
    clock_s: float | None
    """None where it was not measured."""
    context_s: float | None
    """Creating the CUDA context: before the first step, so no part of it."""
    allocations: int | None
    """cudaMalloc calls during the first step."""

    @property
    def first_s(self) -> float:
        return self.steps_s[0]

    @property
    def extra_s(self) -> float:
        return self.first_s - self.steady_s

    @property
    def rest_s(self) -> float:
        return self.extra_s - sum(part or 0.0 for part in (self.compile_s, self.allocation_s, self.clock_s))

    @property
    def tolerance(self) -> float:
        """How far above the median a steady step may lie: 2 %, or what 95 % of the timed steps keep to."""
        timed = sorted(self.steps_s[max(self.warmups, 1) :])
        return max(_TOLERANCE, timed[round(0.95 * (len(timed) - 1))] / self.steady_s - 1)

    @property
    def settled(self) -> int | None:
        """Number (from 1) of the first of three steps in a row that are steady; None if there is none."""
        steady = [step <= self.steady_s * (1 + self.tolerance) for step in self.steps_s]
        runs = range(len(steady) - _STEADY_IN_A_ROW + 1)
        return next((start + 1 for start in runs if all(steady[start : start + _STEADY_IN_A_ROW])), None)

    def bias_after(self, warmups: int) -> float:
        """How far above the steady median the mean lies if timing begins after so many warm-ups, with as many timed steps."""
        timed = self.steps_s[warmups : warmups + len(self.steps_s) - self.warmups]
        return statistics.fmean(timed) / self.steady_s - 1


def first_step(record: Record) -> FirstStep | None:
    """The split, or None where single steps from the first on are not known (failed, windows of k steps, too few).

    Of several rounds the first; none where they compiled, since the time told is that of the last, with its warm cache.
    """
    samples = _process(record, "step")
    if record.failure is not None or samples is None or isinstance(record.config.get("sync"), int):
        return None
    if record.fact("interleaving") == "rounds" and "compile_s" in record.facts:
        return None
    steps = (*samples.warmups, *samples.values)
    after_first = steps[max(len(samples.warmups), 1) :]
    if len(after_first) < 2:
        return None
    steady_s = statistics.median(after_first)
    reallocated_s = record.fact("reallocated_step_s")
    allocations = _series(record, "device_allocations")
    return FirstStep(
        steps_s=steps,
        warmups=len(samples.warmups),
        steady_s=steady_s,
        compile_s=record.fact("compile_s"),
        allocation_s=None if reallocated_s is None else max(0.0, reallocated_s - steady_s),
        clock_s=_clock_s(_series(record, "sm_clock"), len(samples.warmups), steady_s),
        context_s=record.fact("context_s"),
        allocations=round(allocations[0]) if allocations else None,
    )


def _clock_s(clocks: Sequence[float], warmups: int, steady_s: float) -> float | None:
    """steady_s x (f_steady / f_first - 1): what the first step lost to a clock below the steady one."""
    after_first = clocks[max(warmups, 1) :]
    if not after_first or not clocks[0]:
        return None
    return steady_s * max(0.0, statistics.median(after_first) / clocks[0] - 1)


def _process(record: Record, name: str) -> Samples | None:
    """A series as one process saw it: rounds of whole processes stand end to end, and only the first of them is taken."""
    samples = record.samples.get(name)
    if samples is None or record.fact("interleaving") != "rounds":
        return samples
    turn = record.fact("turn_steps")
    if not isinstance(turn, int) or turn < 1:
        return None
    rounds = max(-(-len(samples.values) // turn), 1)
    warmups = samples.warmups[: len(samples.warmups) // rounds]
    return Samples(unit=samples.unit, values=samples.values[:turn], warmups=warmups)


def _series(record: Record, name: str) -> tuple[float, ...]:
    samples = _process(record, name)
    return (*samples.warmups, *samples.values) if samples else ()

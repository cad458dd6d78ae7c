"""Habits of a script's step: ways of computing that cost more than another with the same result, as its inspected steps show them.

    habits_of(inspected, samples, on_device=False)     # a Habit for each cause: written-out attention, AdamW by a loop, slices, ...

[Note: times of habits] A GPU's kernels take as long under the profiler as without it. A CPU's ops take longer: each range costs
some microseconds (at most 5), which follow from the difference between a profiled phase and the usual one. This cost is subtracted,
and the rest of the phase is scaled to the usual phase; ops that were timed alone (measure/run/instead.py) are not. The median of
the quicker half of the inspected steps counts: in the other half, ops that fill new tensors take up to three times as long. Where
other processes take a share of the cores, everything that a CPU computes takes longer; that share is the cause `another_process`.
So a habit's share of a usual (median) step is applied to the mean step without that share and without compilations.

[Note: new tensors] Slices fill new tensors in backward. Under the profiler the allocator gives many of them memory that the process
did not have, which takes up to three times as long. So what the profiler adds to a phase beyond its ranges is theirs, but it is not
known how much of it: the time of slices is the middle between the phase's proportion and the least, all of it being theirs. Every
range of a step costs the profiler as much, so for the least the phase that it lengthened least, of those with patterns, says how
much.
"""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainstep.config.machine import machine_spec
from trainstep.config.script import Part
from trainstep.explain.evidence import CASTS, MEMORY, Habit
from trainstep.records.record import Record
from trainstep.records.tables import table_lines
from trainstep.traces import kernel_classes
from trainstep.traces.kernel_classes import MATMUL
from trainstep.traces.patterns.pattern import ATTENTION, FP32_ATTENTION, MASK, ODD_SIZES, OPTIMIZER, PRECISION, SLICES

_CAUSES = {
    ATTENTION: ("attention_kernel", MEMORY),
    MASK: ("attention_mask", kernel_classes.ATTENTION),
    OPTIMIZER: ("optimizer", kernel_classes.OPTIMIZER),
    SLICES: ("small_kernels", MEMORY),
    PRECISION: ("precision", MATMUL),
    FP32_ATTENTION: ("precision", kernel_classes.ATTENTION),
    ODD_SIZES: ("matmul_shapes", MATMUL),
}
"""Pattern -> its cause, and the kernels that it makes longer."""
_LONGEST_RANGE_S = 5e-6
_AS_USUAL = 1 - 1e-6
"""A phase at this scale is as long as usual, but for rounding."""
_OF_PEAKS = {PRECISION: 1.0, FP32_ATTENTION: 1.55}
"""Pattern -> its time in 16 bits over the time that the peaks of fp32 and 16 bits predict. On an H200, whose data sheet has a ratio
of 1/14.8, two GPTs took 1/14.9 and 1/15.0 of their matmuls' fp32 time, and 1/9.5 of their attention's
(results/h200/planted_fp32.jsonl)."""
_PEAKS_OF_UNKNOWN, _OF_TF32 = 1 / 15, 1 / 2
_TF32_OFF, _TF32_ON = re.compile(r"f32f32_f32f32|_sgemm"), re.compile(r"tf32|s1688gemm")
"""In names of cuBLAS' and CUTLASS' kernels for fp32 matmuls."""


def habits_of(
    inspected: Sequence[Record], samples: Mapping[str, Sequence[float]], *, on_device: bool
) -> tuple[Habit, ...]:
    """The habits of the inspected steps; `samples`: the usual times of phases, by name. [Note: times of habits]"""
    return tuple(_habits(inspected, samples, on_device=on_device))


def _habits(inspected: Sequence[Record], samples: Mapping[str, Sequence[float]], *, on_device: bool) -> Iterator[Habit]:
    """A habit for each cause and group of kernels: the median over the inspected steps."""
    by_cause: dict[tuple[str, str], list[Habit]] = {}
    if not on_device:  # [Note: times of habits]
        quickest = sorted(inspected, key=lambda record: record.fact("profiled_step_s") or 0.0)
        inspected = quickest[: (len(quickest) + 1) // 2]
    for record in inspected:
        for habit in _habits_of(record, samples, on_device=on_device):
            by_cause.setdefault((habit.cause, habit.group), []).append(habit)
    for (cause, group), habits in by_cause.items():
        absent = [0.0] * (len(inspected) - len(habits))
        yield Habit(
            cause=cause,
            excess_s=statistics.median([*absent, *(habit.excess_s for habit in habits)]),
            gap_s=statistics.median([*absent, *(habit.gap_s for habit in habits)]),
            what=habits[-1].what,
            group=group,
        )
    if on_device and inspected and (pageable_s := _pageable_s(inspected[-1])):
        words = "batches are copied from memory that is not pinned"
        yield Habit(cause="host_copies", excess_s=pageable_s, what=words, group=CASTS)


def _habits_of(record: Record, samples: Mapping[str, Sequence[float]], *, on_device: bool) -> Iterator[Habit]:
    """A habit for each pattern of an inspected step, summed over its phases."""
    excess_s: dict[str, float] = {}
    gap_s: dict[str, float] = {}
    words: dict[str, str] = {}
    rows = table_lines(record.tables.get("patterns"))
    usual_s = {row["phase"]: _usual_s(row, record, samples) for row in rows}
    least_range_s = min((_range_s(row, usual_s[row["phase"]]) for row in rows), default=0.0)
    for row in rows:
        pattern = row["pattern"]
        if pattern not in _CAUSES:
            continue
        time_s, least_s = row["time_s"], row["least_s"]
        if pattern in _OF_PEAKS:
            least_s = _share_in_16_bits(record, pattern) * time_s
        if not on_device:
            phase_s = usual_s[row["phase"]]
            range_s = _range_s(row, phase_s)
            scale = _scale(row, phase_s, range_s)
            time_s = scale * (time_s - range_s * row["ranges"])
            if pattern == SLICES and scale < _AS_USUAL:  # [Note: new tensors]
                time_s = (time_s + _at_least(row, phase_s, least_range_s)) / 2
            # The profiler only lengthens a step: an inspected step that is shorter than usual had less to do, in either way
            least_s *= max(1.0, scale) if row.get("least_is_timed") else scale
        excess_s[pattern] = excess_s.get(pattern, 0.0) + time_s - least_s
        gap_s[pattern] = gap_s.get(pattern, 0.0) + row["gap_s"]
        words[pattern] = row["what"]
    if {PRECISION, FP32_ATTENTION} <= words.keys():  # only a cause's first words are kept
        words[PRECISION] = words[FP32_ATTENTION] = "matmuls and attention of fp32 tensors"
    for pattern, time_s in excess_s.items():
        cause, group = _CAUSES[pattern]
        gap = gap_s[pattern] if on_device else 0.0
        yield Habit(cause=cause, excess_s=max(0.0, time_s), gap_s=gap, what=words[pattern], group=group)


def _share_in_16_bits(record: Record, pattern: str) -> float:
    """The time of fp32 work in 16 bits over its present time: 1/2 if it runs with TF32, else by the GPU's data sheet."""
    if (matmul_precision(record) or "high") != "highest":
        return _OF_TF32
    spec = machine_spec(record.environment.gpu)
    peaks = spec.peak_flops["fp32"] / spec.peak_flops["bf16"] if spec else _PEAKS_OF_UNKNOWN
    return min(1.0, peaks * _OF_PEAKS[pattern])


def _usual_s(row: Mapping[str, Any], record: Record, samples: Mapping[str, Sequence[float]]) -> float:
    """The usual time of a row's phase; of updates without the clipping before them, which their pattern does not contain."""
    usual = samples.get(row["phase"])
    if not usual:
        return float(row["of_s"])
    share = record.fact("update_share", 1.0) if row["phase"] == Part.OPTIMIZER else 1.0
    return float(statistics.median(usual) * share)


def _range_s(row: Mapping[str, Any], usual_s: float) -> float:
    """How much longer a phase is under the profiler, for each of its ranges."""
    range_s = (row["of_s"] - usual_s) / row["of_ranges"] if row["of_ranges"] else 0.0
    return min(max(range_s, 0.0), _LONGEST_RANGE_S)


def _scale(row: Mapping[str, Any], usual_s: float, range_s: float) -> float:
    """The usual phase's time over the profiled one's less the cost of its ranges."""
    left_s = row["of_s"] - range_s * row["of_ranges"]
    return usual_s / left_s if left_s > 0 else 0.0


def _at_least(row: Mapping[str, Any], usual_s: float, range_s: float) -> float:
    """A pattern's time without the profiler, if its ops alone are what else the profiler makes longer."""
    others_s = row["of_s"] - row["time_s"] - range_s * (row["of_ranges"] - row["ranges"])
    return max(0.0, usual_s - float(others_s))


def matmul_precision(record: Record) -> str | None:
    """torch's precision of fp32 matmuls: as noted, else by the kernels' names (`high`: with TF32); None if neither tells.

    A step with both kinds of kernels has TF32 on, because a few shapes get a kernel without it.
    """
    if noted := record.fact("matmul_precision"):
        return str(noted)
    names = [row["name"] for row in table_lines(record.tables.get("kernels")) if row["class"] == MATMUL]
    if any(_TF32_ON.search(name) for name in names):
        return "high"
    return "highest" if any(_TF32_OFF.search(name) for name in names) else None


def _pageable_s(record: Record) -> float:
    """Device time of copies from pageable memory."""
    return float(sum(row["time_s"] for row in pageable_copies(record)))


def pageable_copies(record: Record) -> list[dict[str, Any]]:
    """The kernels' rows of copies from pageable memory."""
    rows = table_lines(record.tables.get("kernels"))
    return [row for row in rows if row["name"].startswith("Memcpy HtoD (Pageable")]

"""The measurements of a script's step, put together from the records of `trainstep run`.

The script's model is unknown, so its work has no floor by formula: the budget takes the kernels' time as they run, less the cost of
known habits (traces/patterns).

[Note: turns on a GPU] The time of a GPU that other processes had is taken off the kernels. It is estimated from ops that are alike
but differ in time (traces/patterns/turns.py); without such ops, from the share of multiprocessors that the others used. Processes
that always have work take about equal turns, so N others have at most N / (N + 1), even if they use more while this process's host
is late. The estimate from ops is kept within limits: at least half of the estimate from multiprocessors, and at most 1.25 times the
multiprocessors' share.

[Note: running ahead] After an inspected step the GPU's queue is empty, and the host launches the next steps faster than the GPU
runs them, until the queue is full. The host waits for the GPU's remaining work only when the next step is inspected, and no step's
time contains that wait: by the host's clock alone, the mean of a few steps is too short. So a step's parts on the GPU begin when
the host has begun the step and the step before has ended on the GPU; the total ends when both host and GPU have ended. GPU work
outside of these parts, such as copying the batch, is not counted.

[Note: launching late] A line that waits for a GPU costs more than the wait: afterwards the GPU has nothing to do until the host
launches something. Without the wait, the step would take as long as the GPU's work or the host's own work, whichever is longer. The
host's own time of a phase is the shorter of two: its usual time, which includes waits, and its inspected time less blocked time,
which the profiler lengthens. If the line copies from pageable memory, the difference is the cost of not pinning, beside the copy
itself: with pinned memory the host need not wait.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainstep.config.machine import machine_spec
from trainstep.config.script import Part
from trainstep.explain.evidence import (
    Evidence,
    Place,
    is_generated,
    spread_of,
    with_copies_as_casts,
    work_of,
)
from trainstep.explain.gain import loaded_share
from trainstep.explain.script_changes import place_of, workers_for
from trainstep.explain.script_habits import habits_of, pageable_copies
from trainstep.explain.script_messages import messages_of
from trainstep.records.record import Record, Samples
from trainstep.records.tables import table_lines
from trainstep.traces.kernel_classes import MATMUL

_INSTALLED = "site-packages"
_MOST_BY_OPS = 1.25
"""The largest estimate from ops, as a multiple of the share of multiprocessors that others used."""
_QUIET = 0.05
"""A machine's background may take this share of a step, and use this share of the machine."""
_STAGED_S = 2e-5
"""A copy from pageable memory that takes longer is larger than the driver stages without waiting: 64 KiB take 3 us at 25 GB/s, and
a multiple of that where the link is slow or busy."""
_LONGEST_READ_S = 1e-3
"""A read that waits longer than this waits for the GPU's work; later waits find the GPU idle."""
_MOST_MATMULS = 0.8
"""The share of the matmuls' time whose FLOPs must be known, for a sentence about all of them."""
_NO_STEPS = Samples(unit="s", values=())


def script_evidence(records: Sequence[Record]) -> Evidence:
    """The evidence of one rank's run; `records` are in the order of its steps. ValueError for a run without a step of some time.

    Times are means: a batch or a compilation that is late once in many steps raises the mean, but not the median. On a CPU the
    work is the step's time less waits for data, compilations, garbage collection, other processes and exposed messages.
    [Note: running ahead]
    """
    samples: dict[str, list[float]] = {}
    for record in records:
        for name, column in record.samples.items():
            samples.setdefault(name, []).extend(column.values)
    times = samples.get("step", [])
    if not times:
        raise ValueError("run: it has no timed step, only warm-ups; let it run longer")
    inspected = [record for record in records if record.fact("inspected_step") is not None]
    inspected = [record for record in inspected if record.fact("trace_failed") is None] or inspected
    last = inspected[-1] if inspected else records[-1]
    on_device = records[-1].config["device"] == "cuda"
    waits = table_lines(last.tables.get("waits"))
    again = [row for record in records for row in table_lines(record.tables.get("compilations")) if row["reason"]]
    measured_s = _step_s(records)
    if not measured_s:
        raise ValueError("run: its steps take no time, so that there is nothing to explain")
    recompile_s = min(sum(row["time_s"] for row in again) / len(times), measured_s)
    data_s = statistics.fmean(samples.get(Part.DATA, [0.0]))
    collector_s = statistics.fmean(samples.get("garbage_collection", [0.0]))
    work = with_copies_as_casts(work_of(last.tables)) if on_device else {}
    device = [statistics.fmean(column) for name, column in samples.items() if name.startswith("device_") and column]
    busy_s: float | None = sum(work.values()) or (sum(device) if on_device and device else None)
    contended_s, others, of_gpu = _contention(records, measured_s, on_device=on_device)
    own_share = 1 - contended_s / measured_s
    if of_gpu and busy_s is not None:  # [Note: turns on a GPU]
        work = {group: own_share * time_s for group, time_s in work.items()}
        busy_s *= own_share
    habits = habits_of(inspected, samples, on_device=on_device)
    seen_s = sum(row["time_s"] or 0.0 for row in waits)
    blocked_s = max(seen_s, _late_s(inspected, samples, measured_s, busy_s or measured_s)) if on_device else 0.0
    if copied_s := _copying_share(last, waits) * (blocked_s - seen_s):  # [Note: launching late]
        blocked_s -= copied_s
        habits = tuple(replace(habit, gap_s=copied_s) if habit.cause == "host_copies" else habit for habit in habits)
    if of_gpu:
        habits = tuple(replace(habit, excess_s=own_share * habit.excess_s) for habit in habits)
    if not on_device:
        recompile_s, collector_s = own_share * recompile_s, own_share * collector_s
        own = max(0.0, measured_s - contended_s - recompile_s) / statistics.median(times)
        habits = tuple(replace(habit, excess_s=own * habit.excess_s) for habit in habits)
    messages = messages_of(records, inspected, measured_s, on_device=on_device)
    if not on_device:
        busy_s = max(0.0, measured_s - data_s - recompile_s - collector_s - contended_s - messages.exposed_s)
    return Evidence(
        measured_s=measured_s,
        spread=spread_of(tuple(times)),
        on_device=on_device,
        work=work,
        busy_s=busy_s,
        exposed_s=messages.exposed_s,
        messages=messages.messages,
        message_bytes=messages.nbytes,
        message_fixed_s=messages.fixed_s,
        message_dtype="fp32",
        synchronised_passes=messages.passes,
        data_s=data_s,
        data_share=_data_share(records[-1], data_s, measured_s),
        blocked_s=blocked_s,
        recompile_s=recompile_s,
        allocator_s=sum(row["allocation_s"] for row in table_lines(last.tables.get("host"))),
        collector_s=collector_s,
        contended_s=contended_s,
        others=others,
        habits=habits,
        pieces=last.fact("pieces", 0.0),
        places=_places(waits, again),
        notes=() if of_gpu else matmul_rate(last),
    )


def _data_share(record: Record, data_s: float, measured_s: float) -> float:
    """The share of the wait for data that should be gained by as many workers as a proof would try."""
    place = place_of(record)
    workers = workers_for(place.cores, ranks=place.ranks)
    return loaded_share(data_s, measured_s, workers=workers, now=record.fact("loader_workers"))


def matmul_rate(record: Record) -> tuple[str, ...]:
    """A sentence that compares the rate of 16-bit matmuls with the data sheet; empty if the FLOPs of too few of them are known."""
    flops, time_s = record.fact("matmul_flops"), record.fact("matmul_flops_s")
    spec = machine_spec(record.environment.gpu)
    if not flops or not time_s or spec is None or time_s < _MOST_MATMULS * work_of(record.tables).get(MATMUL, 0.0):
        return ()
    rate, peak = flops / time_s, spec.peak_flops["bf16"]
    reached = f"{rate / 1e12:,.0f} TFLOP/s, {100 * rate / peak:.0f} % of the data sheet's {peak / 1e12:,.0f}"
    return (f"The step's 16-bit matmuls reach {reached}.",)


def _step_s(records: Sequence[Record]) -> float:
    """The mean step, by the host's clock and the GPU's. [Note: running ahead]"""
    whole_s, steps = 0.0, 0
    for record in records:
        times = record.samples.get("step", _NO_STEPS).values
        parts = [column.values for name, column in record.samples.items() if name.startswith("device_")]
        columns = [column for column in parts if len(column) == len(times)]  # a foreign file may hold anything
        on_gpu = [sum(step) for step in zip(*columns, strict=True)] or [0.0] * len(times)
        host_s = gpu_s = 0.0  # time of each clock since the record began, assuming that the GPU was empty then
        for time_s, parts_s in zip(times, on_gpu, strict=True):
            gpu_s = max(gpu_s, host_s) + parts_s
            host_s += time_s
        whole_s, steps = whole_s + max(host_s, gpu_s), steps + len(times)
    return whole_s / steps


def _late_s(
    inspected: Sequence[Record], samples: Mapping[str, Sequence[float]], measured_s: float, busy_s: float
) -> float:
    """What a step would save if the host never waited; 0 unless it waits in all inspected steps. [Note: launching late]"""
    if not inspected or not all(record.tables.get("host") for record in inspected):
        return 0.0
    has_lines = all(record.tables.get("waits") for record in inspected)
    if not has_lines and not all(_has_large_pageable_copies(record) for record in inspected):
        return 0.0
    usual: dict[str, float] = {phase: _mean(samples, phase) for phase in (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER)}
    data_s = _mean(samples, Part.DATA)
    other_s = max(0.0, measured_s - sum(usual.values()) - data_s)
    own_s = data_s
    for row in table_lines(inspected[-1].tables["host"]):
        inspected_s = row["host_s"] - row["blocked_s"]
        if row["phase"] in usual:
            own_s += min(usual[row["phase"]], inspected_s)
        else:  # time outside of phases contains the wait for data
            own_s += min(other_s, max(0.0, inspected_s - data_s))
    late_s = max(0.0, measured_s - max(busy_s, own_s))
    if has_lines:
        return late_s
    # No line waits: only large pageable copies suggest late launches. They cost at most the idle time of inspected steps.
    idle_s = [sum(row["idle_s"] or 0.0 for row in table_lines(record.tables["host"])) for record in inspected]
    return float(min(late_s, statistics.median(idle_s)))


def _copying_share(record: Record, waits: Sequence[Mapping[str, Any]]) -> float:
    """The share of the waits of unknown length that are copies from pageable memory.

    It is 0 if some read waited for long, because that read then explains the late launches. A large copy waits even if it was asked
    not to block, but inside the driver, where torch notes no line.
    """
    if any((row["time_s"] or 0.0) > _LONGEST_READ_S for row in waits):
        return 0.0
    calls = sum(row["calls"] for row in waits if row["time_s"] is None)
    if not calls:
        return float(not waits and _has_large_pageable_copies(record))
    return float(min(1.0, sum(row["calls"] for row in pageable_copies(record)) / calls))


def _mean(samples: Mapping[str, Sequence[float]], name: str) -> float:
    return statistics.fmean(samples.get(name) or [0.0])


def _places(waits: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]]) -> dict[str, Place]:
    """Cause -> the line of code where it was seen."""
    places: dict[str, Place] = {}
    if waits:
        wait = max(waits, key=lambda row: row["time_s"] or 0.0)
        places["synchronisations"] = Place(file=wait["file"], line=wait["line"], source=wait["source"])
    if written := [row for row in again if not is_generated(row["file"])]:
        row = max(written, key=lambda row: (_INSTALLED not in row["file"], row["time_s"]))
        places["recompiles"] = Place(file=row["file"], line=row["line"], source=row["reason"])
    return places


def _contention(records: Sequence[Record], measured_s: float, *, on_device: bool) -> tuple[float, str, bool]:
    """(seconds of a step that other processes took, words for them, whether they took the GPU). Zero below 5 %: background.

    For cores, the share of time is that in which a thread waited for one, but at most the share of the machine that others used.
    For a GPU, see [Note: turns on a GPU].
    """
    timed = [record for record in records if record.duration_s and record.samples.get("step", _NO_STEPS).values]
    # The record of the warm-ups contains the script's start, which is not part of any step
    later = [record for record in timed if not record.samples["step"].warmups]
    if 2 * _steps_of(later) >= _steps_of(timed):
        timed = later
    whole_s = sum(record.duration_s for record in timed)

    def share(value: Any) -> float:
        return sum(value(record) for record in timed) / whole_s if whole_s else 0.0

    waited = share(lambda record: record.fact("core_wait_s") or 0.0)
    used = share(lambda record: (record.fact("others_cpu_share") or 0.0) * record.duration_s)
    count = max((record.fact("gpu_others") or 0 for record in timed), default=0)
    on_gpu = share(lambda record: (record.fact("gpu_others_share") or 0.0) * record.duration_s) if on_device else 0.0
    if count and on_gpu > _QUIET:
        processes = f"{count} other process{'es' if count > 1 else ''}"
        words = f"{processes} used {100 * on_gpu:.0f} % of the GPU's multiprocessors"
        return _others_share_of_gpu(timed, on_gpu, count) * measured_s, words, True
    if min(waited, used) > _QUIET:
        waiting = f"for {100 * waited:.0f} % of the time a thread waited for a core"
        words = f"{waiting}, and others used {100 * used:.0f} % of the machine"
        return min(waited, used) * measured_s, words, False
    return 0.0, "", False


def _others_share_of_gpu(records: Sequence[Record], on_gpu: float, count: int) -> float:
    """The share of a GPU's time that others had. [Note: turns on a GPU]"""
    by_multiprocessors = min(on_gpu, count / (count + 1))
    while_others = [record for record in records if (record.fact("gpu_others_share") or 0.0) > _QUIET]
    by_ops = [share for record in while_others if (share := record.fact("interrupted_share")) is not None]
    if not by_ops:
        return by_multiprocessors
    return max(by_multiprocessors / 2, min(float(statistics.median(by_ops)), _MOST_BY_OPS * on_gpu))


def _steps_of(records: Sequence[Record]) -> int:
    return sum(len(record.samples["step"].values) for record in records)


def _has_large_pageable_copies(record: Record) -> bool:
    """Whether some copies from pageable memory are too large for the driver to stage without waiting."""
    return any(row["mean_s"] > _STAGED_S for row in pageable_copies(record))

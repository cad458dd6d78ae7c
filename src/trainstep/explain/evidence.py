"""The measurements of a step, in seconds per step, from a record of bench, profile, parallel or numerics.

    evidence = evidence_of(record)
    evidence.measured_s, evidence.work["matmul"], evidence.data_s

Device time is from a profile, because a profiler does not slow kernels. Where a record has no profile, `work` is empty, and the
budget divides the busy time as plan does. script_evidence.py makes the same evidence from a run of somebody's script.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainstep.config.machine import machine_spec
from trainstep.config.parallel import RanksConfig
from trainstep.plan.cell_config import ranks_config
from trainstep.records.record import Record
from trainstep.records.tables import table_lines
from trainstep.traces.kernel_classes import ATTENTION, COMMUNICATION, COPIES, IDLE, MATMUL, OPTIMIZER, OTHER, OVERHEAD

MEMORY, CASTS, HOST_COPIES = "memory-bound", "casts", "host copies"
ATTENTION_MATMUL = "attention matmuls"
"""Groups of device time besides those of traces/kernel_classes.py. Plain attention's matmuls are a group of their own."""
_ONLY_OUTSIDE = "outside phases"
_HOST_COPY = ("Memcpy HtoD", "Memcpy DtoH")
_IN_ATTENTION = ("attention scores", "attention softmax", "attention values")
_BUSY_GPU, _BUSY_CPU = 0.05, 0.5
"""Other processes are named if they used more than this share; on a GPU also if the driver names some."""
_FULL_CLOCK = 0.98
_PHASES = ("forward", "backward", "optimizer")
_TYPED = ("<stdin>", "<ipython-input-")
"""Files of code that a person typed."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A line of the user's code. `source`: its text, or what was seen there."""

    file: str
    line: int
    source: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def is_generated(file: str) -> bool:
    """Whether a code's file is none that somebody can open, such as `<string>` of a dataclass's `__init__`."""
    return not file or (file.startswith("<") and not file.startswith(_TYPED))


@dataclass(frozen=True, kw_only=True)
class Habit:
    """A way of computing that costs more than another with the same result (traces/patterns).

    `excess_s`: device time that the other way saves (on a CPU, step time). `gap_s`: idle time of the device before its kernels.
    `group`: the kernels that it makes longer.
    """

    cause: str
    excess_s: float
    gap_s: float = 0.0
    what: str
    group: str = MEMORY


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A measured step; all times are seconds per step, and 0 where nothing was seen."""

    measured_s: float
    spread: float = 0.0
    """Relative deviation of the step's time: half the interquartile range over the median."""
    on_device: bool = True
    """Whether kernels run on a GPU. On a CPU the ops are the work, and the time between them is the host's."""
    work: Mapping[str, float] = field(default_factory=dict)
    """Busy time by group, without messages; empty without a profile."""
    busy_s: float | None = None
    """Busy time without messages, where it is known only as a whole."""
    exposed_s: float = 0.0
    """Time in which a message was in flight and nothing computed."""
    late_share: float = 0.0
    """Share of the messages' time in which the last rank had not joined."""
    messages: int = 0
    message_bytes: float = 0.0
    message_fixed_s: float = 0.0
    """Fixed time of a message, whatever its bytes; 0 if unknown."""
    message_dtype: str = ""
    """The dtype assumed in `message_bytes`; empty where the bytes are known."""
    data_s: float = 0.0
    data_share: float = 1.0
    """Share of `data_s` that more workers of the loader should gain."""
    blocked_s: float = 0.0
    """Host time in calls that wait for the device."""
    recompile_s: float = 0.0
    allocator_s: float = 0.0
    collector_s: float = 0.0
    enqueue_s: float | None = None
    pieces: float = 0.0
    clock: float = 1.0
    """The clock over the highest, if something lowered it."""
    throttle: str = ""
    others: str = ""
    """Who else used the machine, in words."""
    contended_s: float = 0.0
    """Time in which other processes had the core or GPU that the step could have used."""
    habits: tuple[Habit, ...] = ()
    synchronised_passes: int = 1
    """Backward passes of a step that each sent every gradient."""
    config: RanksConfig | None = None
    """None for a step that plan cannot predict: on a CPU, of a script or a trace, or of a model without formulas."""
    gpu_memory_bytes: int | None = None
    """Memory of the step's GPU, as the driver or else the data sheet says; None if unknown."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """Cause -> where it was seen in the user's code."""
    notes: tuple[str, ...] = ()
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase of the step, where they were measured."""
    to_see_more: str = ""
    """What shows more of the step, in words."""


def evidence_of(record: Record) -> Evidence:
    """The evidence of a cell's record. ValueError for a failure, and for a record without a time of a step."""
    if record.failure is not None:
        raise ValueError(f"record: its cell failed ({record.failure.kind}), so that there is no step to explain")
    times = _step_times(record)
    verdict = {name: values[0] for name, values in record.tables.get("verdict", {}).items() if values}
    on_device = record.config.get("device") == "cuda"
    try:
        config = ranks_config(record) if on_device else None
    except ValueError:
        config = None
    waiting, communication = record.fact("waiting_s"), record.fact("communication_s")
    work = work_of(record.tables)
    measured_s = statistics.median(times)
    busy_s = record.fact("device_busy_s")
    sheet = machine_spec(record.environment.gpu)
    profiled_exposed_s = verdict.get("exposed_share", 0.0) * verdict.get("step_s", 0.0)
    exposed_s = record.fact("exposed_s", profiled_exposed_s) or 0.0
    host = [row for row in table_lines(record.tables.get("host")) if row["phase"] != _ONLY_OUTSIDE]
    return Evidence(
        measured_s=measured_s,
        spread=spread_of(times),
        on_device=on_device,
        work=work,
        busy_s=None if busy_s is None or exposed_s else busy_s,
        exposed_s=exposed_s,
        late_share=min(1.0, waiting / communication) if waiting and communication else 0.0,
        messages=sum(record.tables.get("traffic", {}).get("messages", ())),
        message_bytes=float(sum(record.tables.get("traffic", {}).get("bytes", ()))),
        blocked_s=sum(row["blocked_s"] for row in host),
        allocator_s=max(sum(row["allocation_s"] for row in host), _retries_s(record, measured_s)),
        enqueue_s=_median(record, "enqueue"),
        pieces=record.fact("pieces", 0.0),
        clock=_clock(record),
        throttle=record.fact("throttle_reasons") or "",
        others=_others(record),
        config=config,
        gpu_memory_bytes=record.environment.gpu_memory_bytes or (sheet.memory_bytes if sheet else None),
        phases_s={name: time_s for name in _PHASES if (time_s := _median(record, name))},
    )


def work_of(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Device time by group from a profile's tables; each kernel is in one group.

    Kernels of the phase `optimizer` count for the optimizer, whatever their class. The parts of plain attention (table `attention`)
    count for attention: its matmuls are taken out of the class matmul, the rest out of softmax, element-wise and copies. The
    remaining copies are casts, or copies between host and device.
    """
    groups: dict[str, float] = {}
    for row in table_lines(tables.get("classes")):
        kind = OPTIMIZER if row["phase"] == "optimizer" and row["class"] not in (COMMUNICATION, IDLE) else row["class"]
        kind = kind if kind in (MATMUL, ATTENTION, OPTIMIZER, COPIES, OTHER, OVERHEAD, COMMUNICATION, IDLE) else MEMORY
        if kind not in (COMMUNICATION, IDLE):
            groups[kind] = groups.get(kind, 0.0) + row["time_s"]
    inner = {True: 0.0, False: 0.0}
    for row in table_lines(tables.get("attention")):
        inner[row["part"] == "matmuls"] += row["time_s"]
    kernels = [
        row for row in table_lines(tables.get("kernels")) if row["class"] == COPIES and row["phase"] != "optimizer"
    ]
    copies_s = groups.pop(COPIES, 0.0)
    host_s = min(copies_s, sum(row["time_s"] for row in kernels if row["name"].startswith(_HOST_COPY)))
    attention_s = sum(row["time_s"] for row in kernels if row["span"] in _IN_ATTENTION)
    copies_inside_s = min(attention_s, inner[False], copies_s - host_s)
    if inner[True]:
        taken_s = min(inner[True], groups.get(MATMUL, 0.0))
        groups[MATMUL] = groups.get(MATMUL, 0.0) - taken_s
        groups[ATTENTION_MATMUL] = taken_s
    if inner[False]:
        taken_s = min(inner[False] - copies_inside_s, groups.get(MEMORY, 0.0))
        groups[MEMORY] = groups.get(MEMORY, 0.0) - taken_s
        groups[ATTENTION] = groups.get(ATTENTION, 0.0) + taken_s + copies_inside_s
    groups |= {HOST_COPIES: host_s, CASTS: copies_s - host_s - copies_inside_s}
    return {group: time_s for group, time_s in groups.items() if time_s > 0}


def with_copies_as_casts(work: Mapping[str, float]) -> dict[str, float]:
    """The groups with host copies counted as casts: copies from pinned memory may be hidden, and the others are a habit."""
    groups = dict(work)
    if HOST_COPIES in groups:
        groups[CASTS] = groups.get(CASTS, 0.0) + groups.pop(HOST_COPIES)
    return groups


def taken_from(groups: Mapping[str, float], first: str, time_s: float) -> dict[str, float]:
    """The groups less `time_s`, which is taken from `first`, and what `first` lacks from the other groups, longest first."""
    left = {first: 0.0, **dict(sorted(groups.items(), key=lambda item: -item[1]))}
    for group in left:
        cut_s = min(time_s, left[group])
        left[group] -= cut_s
        time_s -= cut_s
    return {group: group_s for group, group_s in left.items() if group_s > 0}


def spread_of(times: tuple[float, ...]) -> float:
    """Half of the distance between the quartiles, over the median."""
    if len(times) < 2:
        return 0.1
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle if middle else 0.0


def _step_times(record: Record) -> tuple[float, ...]:
    """Times of steps: from windows of steps if the record has them, because steps overlap there as in training."""
    for name in ("window_step", "step"):
        samples = record.samples.get(name)
        if samples is not None and min(samples.values, default=0.0) > 0:
            return tuple(samples.values)
    raise ValueError(
        f"record: a record of {record.workload} holds no time of a step to explain; give one of bench or profile"
    )


def _median(record: Record, name: str) -> float | None:
    samples = record.samples.get(name)
    return statistics.median(samples.values) if samples is not None and samples.values else None


def _retries_s(record: Record, measured_s: float) -> float:
    """Seconds that the allocator adds if it asked the driver for memory in the median step.

    A bench measures them only by the slow step after an emptied cache.
    """
    after_s = record.fact("reallocated_step_s")
    if not after_s or not (record.fact("allocation_retries") and _median(record, "device_allocations")):
        return 0.0
    return float(min(max(0.0, after_s - measured_s), measured_s))


def _clock(record: Record) -> float:
    highest, clock = record.fact("sm_clock_max_hz"), _median(record, "sm_clock")
    if not highest or not clock or not record.fact("throttle_reasons"):
        return 1.0
    ratio = clock / highest
    return ratio if ratio < _FULL_CLOCK else 1.0


def _others(record: Record) -> str:
    gpu, cpu, count = (record.fact(name) or 0 for name in ("gpu_busy_before", "cpu_busy_before", "gpu_other_processes"))
    if gpu > _BUSY_GPU or count:
        processes = f"{count} other process{'es' if count > 1 else ''} on the GPU" if count else "another process"
        return f"{processes}, which used {100 * gpu:.0f} % of it just before" if gpu else processes
    return f"other processes used {100 * cpu:.0f} % of the CPU just before" if cpu > _BUSY_CPU else ""

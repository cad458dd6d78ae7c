"""Evidence of a step from a profiler's trace alone: `trace_evidence(record)`, for a record of report/explain/trace_row.py.

The step's time is that under the profiler, which slows the host. Where the host limits the step, launches count for too much.
"""

import statistics

from trainstep.config.script import Part
from trainstep.explain.evidence import Evidence, spread_of, with_copies_as_casts, work_of
from trainstep.explain.script_evidence import matmul_rate
from trainstep.explain.script_habits import habits_of, matmul_precision
from trainstep.records.record import Record
from trainstep.records.tables import table_lines
from trainstep.traces.kernel_classes import COMMUNICATION, IDLE
from trainstep.traces.patterns.pattern import PRECISION

_PROFILED = "profiled_step"
_NOTE = "The times are those of a profiler's trace, in which the host is slower than without it."
_WITHOUT_SHAPES = "The trace has no shapes, so that habits cannot be seen: record it with record_shapes=True."
_TF32_UNKNOWN = "A trace does not say whether TF32 was on; it is assumed to be on."


def is_of_trace(record: Record) -> bool:
    """Whether a record is of a trace alone: its steps were never timed without a profiler."""
    return record.workload == "profile" and _PROFILED in record.samples and "step" not in record.samples


def check_provable(record: Record) -> None:
    """ValueError for the record of a trace, because its step cannot be built again."""
    if is_of_trace(record):
        raise ValueError(
            "prove: a trace does not say how its step is built, so nothing can be measured; leave out --prove, or explain a run of "
            "the script: trainstep run train.py"
        )


def trace_evidence(record: Record) -> Evidence:
    """The evidence of a trace's steps, by their median. ValueError if they take no time."""
    times = record.samples[_PROFILED].values
    measured_s = statistics.median(times) if times else 0.0
    if not measured_s:
        raise ValueError("trace: its steps take no time; record it around whole steps")
    on_device = record.config["device"] == "cuda"
    data = record.samples.get(Part.DATA)
    data_s = statistics.median(data.values) if data is not None and data.values else 0.0
    verdict = {name: values[0] for name, values in record.tables.get("verdict", {}).items() if values}
    exposed_s = verdict.get("exposed_share", 0.0) * measured_s
    host = table_lines(record.tables.get("host"))
    work = with_copies_as_casts(work_of(record.tables)) if on_device else {}
    busy_s = sum(work.values()) if on_device else max(0.0, measured_s - data_s - exposed_s)
    return Evidence(
        measured_s=measured_s,
        spread=spread_of(tuple(times)),
        on_device=on_device,
        work=work,
        busy_s=busy_s,
        exposed_s=exposed_s,
        data_s=data_s,
        blocked_s=sum(row["blocked_s"] for row in host) if on_device else 0.0,
        allocator_s=sum(row["allocation_s"] for row in host),
        habits=habits_of([record], {}, on_device=on_device),
        pieces=record.fact("pieces", 0.0),
        notes=_notes(record),
        phases_s=_phases_s(record, busy_s),
        to_see_more=_to_see_more(record),
    )


def _has_shapes(record: Record) -> bool:
    return "patterns" in record.tables  # the table is empty where no habit was seen


def _notes(record: Record) -> tuple[str, ...]:
    if not _has_shapes(record):
        return (_NOTE, _WITHOUT_SHAPES)
    has_fp32 = PRECISION in record.tables["patterns"].get("pattern", ())
    unknown = (_TF32_UNKNOWN,) if has_fp32 and matmul_precision(record) is None else ()
    return (_NOTE, *unknown, *matmul_rate(record))


def _phases_s(record: Record, busy_s: float) -> dict[str, float]:
    """Work by phase, without messages, scaled down where parallel threads sum to more than `busy_s`."""
    phases: dict[str, float] = {}
    for row in table_lines(record.tables.get("classes")):
        if row["class"] not in (COMMUNICATION, IDLE):
            phases[row["phase"]] = phases.get(row["phase"], 0.0) + row["time_s"]
    scale = min(1.0, busy_s / (sum(phases.values()) or 1.0))
    return {phase: scale * time_s for phase, time_s in phases.items() if time_s > 0}


def _to_see_more(record: Record) -> str:
    shows = f"`{record.fact('command') or 'trainstep profile --from FILE'}` shows the ops."
    return shows if _has_shapes(record) else f"Record it with record_shapes=True, so that habits can be seen; {shows}"

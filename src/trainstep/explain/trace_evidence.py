"""What a profiler's trace shows of a step, where there is nothing else: `trace_evidence(record)` of report/explain/trace_row.py.

The step's time is that under the profiler, which makes hosts slower: where the host limits, launches count for more than they are.
"""

import statistics

from trainstep.config.script import Part
from trainstep.explain.evidence import CASTS, HOST_COPIES, Evidence, rows_of, spread_of, work_of
from trainstep.explain.script_evidence import habits_of
from trainstep.records.record import Record

_PROFILED = "profiled_step"
_NOTE = "The times are those of a profiler's trace, in which the host is slower than without it."
_WITHOUT_SHAPES = "The trace has no shapes, so that habits cannot be seen: record it with record_shapes=True."


def is_of_trace(record: Record) -> bool:
    """Whether a record is of a trace alone: its steps were never timed without a profiler."""
    return record.workload == "profile" and _PROFILED in record.samples and "step" not in record.samples


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
    host = list(rows_of(record.tables.get("host")))
    work = work_of(record.tables) if on_device else {}
    if HOST_COPIES in work:
        work[CASTS] = work.get(CASTS, 0.0) + work.pop(HOST_COPIES)
    has_shapes = "patterns" in record.tables
    return Evidence(
        measured_s=measured_s,
        spread=spread_of(tuple(times)),
        on_device=on_device,
        work=work,
        busy_s=sum(work.values()) if on_device else max(0.0, measured_s - data_s - exposed_s),
        exposed_s=exposed_s,
        data_s=data_s,
        blocked_s=sum(row["blocked_s"] for row in host) if on_device else 0.0,
        allocator_s=sum(row["allocation_s"] for row in host),
        habits=habits_of([record], {}, on_device=on_device),
        pieces=record.fact("pieces", 0.0),
        notes=(_NOTE,) if has_shapes else (_NOTE, _WITHOUT_SHAPES),
    )

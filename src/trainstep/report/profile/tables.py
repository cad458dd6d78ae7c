"""Tables of profiles: the limit of each cell, shares of time by class, kernels, host times and outliers.

`detail_tables(tables)` shows one profile, from a record's tables or from a trace. `trace_record` makes a foreign trace a record.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import trainstep
from trainstep.config.machine import MachineSpec, machine_spec, matmul_dtype
from trainstep.records.facts import facts_of, is_number
from trainstep.records.record import Environment, Record, Samples
from trainstep.records.tables import table_lines
from trainstep.report.kit.forms import (
    BYTE_RATE,
    FLOP_RATE,
    GIGA,
    MS,
    WHOLE,
    Form,
    in_percent,
    percent,
    shortened,
    three_digits,
)
from trainstep.report.kit.rows import Row, quantities, shown_facts, words
from trainstep.report.kit.tables import Column, Line, Table, doubts_column, filled, point_columns
from trainstep.report.profile.answer import Columns, verdict_reason, verdict_word
from trainstep.traces.kernel_classes import CLASSES, IDLE
from trainstep.traces.profile import Profile

DETAILED_CELLS = 4
"""The most cells whose kernels are listed together; more would scroll on a terminal for minutes."""

_ORDER = {
    "kernels": "Kernels by phase",
    "classes": "Classes by phase",
    "attention": "Attention: matmuls and softmax",
    "host": "Host",
    "spans": "Spans by phase",
    "layers": "Layers by phase",
    "outliers": "Outliers among the profiled steps",
    "verdict": "What the verdict rests on",
    "alike": "Forward and backward, on the host and on the GPU",
    "stall": "Between backward and optimizer",
    "replay": "The replayed step beside an eager one",
}
_FOLDED = ("spans", "layers", "outliers", "verdict", "alike", "stall")
_WHOLE_ONLY = ("layers", "verdict", "alike", "stall")
"""Shown only on the page and in JSON: the first is long, and sentences have the numbers of the others."""
_OUTLIERS_SHOWN = 3
HELP = {
    "phase": "forward, backward, grad_sync, optimizer, or outside phases, such as the upload of the batch",
    "class": "kind of work, by the kernel's name; idle: the GPU was idle before work of this phase",
    "span": "the named range of the model's code that the work belongs to; a backward kernel has its forward op's",
    "layers": "the layers in whose spans it ran",
    "name": "the kernel's name without template arguments (on a CPU: the op's name)",
    "calls": "calls per step; torch's table calls it # of calls",
    "time_s": "time of all calls of a step: on a GPU torch's Self CUDA, on a CPU its Self CPU",
    "share": "share of all device time; in tables by phase, of the phase's; for idle, of busy and idle time",
    "mean_s": "mean time of a call",
    "min_s": "time of the shortest call",
    "max_s": "time of the longest call",
    "host_s": "time of the phase on the host's main thread (torch's CPU total of its range)",
    "device_s": "time of the phase's kernels and copies (torch's CUDA total)",
    "idle_s": "time for which the GPU was idle before work of this phase",
    "launches": "kernel launches per step",
    "launch_s": "host time in launch calls",
    "lead_s": "median time from a launch on the host to the kernel's start: if it is long, the GPU is the limit; if it is "
    "microseconds, the host is",
    "blocked_s": "host time in cudaDeviceSynchronize, cudaStreamSynchronize and cudaEventSynchronize",
    "allocations": "calls of cudaMalloc and cudaFree per step",
    "allocation_s": "host time in cudaMalloc and cudaFree",
    "queue_full": "launches that waited for room in the driver's queue",
    "queue_full_s": "host time for which launches waited",
    "part": "part of plain attention: its matmuls, its softmax, and the work between them",
    "flops": "floating-point operations of a step, from the shapes",
    "bytes": "the least bytes read and written in a step, from the shapes",
    "flops_per_s": "operations over time",
    "bytes_per_s": "bytes over time",
    "layer": "number of the block",
    "step": "number of the profiled step, from 0",
    "median_s": "the same span's time in the median step",
    "cause": "other differences of that step",
    "ops": "ops that Inductor fused into the kernel, by the kernel's name",
    "kind": "the limit of the step; for a stall, why the host stalls",
    "on_device": "yes: kernels on a GPU; no: ops on a CPU",
    "profiled_step": "whether the time is a profiled step's, because no step was timed without the profiler",
    "step_s": "time of the step",
    "busy_s": "time for which the GPU worked",
    "enqueue_s": "host time until the last work was issued, without the profiler",
    "exposed_share": "share of the step: communication without computation at the same time",
    "matmul_share": "share of device time without messages: matmuls and fused attention",
    "overhead_share": "share of a CPU's time between ops",
    "pieces": "kernels and copies of a step; on a CPU ops",
    "gap_s": "host time from backward's return to the optimizer's first launch",
    "eager_s": "time of the phase's kernels in one step without a graph",
    "replayed_s": "time of the phase's kernels in a replay, per step; each is placed where the same one of the eager step belongs",
    "behind_s": "how far the GPU was behind the host at that launch",
}
TORCH_COLUMNS = (
    "torch's table of the same trace has other names: Self CPU is an op's time on the host without the ops that it calls, and "
    "CPU total is with them; Self CUDA is the time of the kernels that it launched itself, and CUDA total is with those of the "
    "ops that it calls; # of calls counts all profiled steps, while calls here are per step."
)
_TITLES = {
    "time_s": "time (ms)",
    "share": "share (%)",
    "lead_s": "lead (µs)",
    "name": "kernel",
    "queue_full": "queue full",
    "flops": "GFLOP",
    "bytes": "GB",
    "flops_per_s": "FLOP/s",
    "bytes_per_s": "bytes/s",
}
_LONGEST = 56
"""The most characters of a kernel's name in a table; the record has more."""
_MICROSECONDS = ("mean_s", "min_s", "max_s", "lead_s")
_NAMES = ("phase", "class", "span", "layers", "name", "part", "layer", "step")
_MORE = {
    "kernels": ("class", "layers", "mean_s", "min_s", "max_s", "ops"),
    "attention": ("bytes", "bytes_per_s"),
    "host": ("launch_s", "lead_s", "blocked_s", "allocations", "allocation_s", "queue_full", "queue_full_s"),
}
"""Table -> its columns that only --all shows on a terminal."""
_WORDS = ("phase", "class", "span", "layers", "name", "part", "layer", "cause", "ops", "kind")
_SHARE = Form(text=percent, sort=in_percent)
_US = Form(text=lambda seconds: three_digits(seconds * 1e6), sort=lambda seconds: seconds * 1e6)
_FORMS = {"flops": GIGA, "bytes": GIGA, "flops_per_s": FLOP_RATE, "bytes_per_s": BYTE_RATE}


def profile_tables(rows: Sequence[Row]) -> list[Table]:
    """All tables of these profiles, with those of each cell if there are few."""
    tables = filled(verdict_table(rows), shares_table(rows))
    ran = [row for row in rows if row.record.failure is None]
    if len(ran) <= DETAILED_CELLS:
        for row in ran:
            tables += row_tables(row, title=f"{row.label()}: " if len(ran) > 1 else "")
    return tables


def row_tables(row: Row, *, title: str = "", whole: bool = False) -> list[Table]:
    """The tables of one cell, with attention's rates as shares of its GPU's peaks."""
    on_gpu = row.record.config.get("device") == "cuda"
    return detail_tables(
        row.record.tables,
        title=title,
        whole=whole,
        spec=machine_spec(row.record.environment.gpu) if on_gpu and "precision" in row.record.config else None,
        dtype=matmul_dtype(str(row.record.config.get("precision"))),
        point=row.point,
    )


def detail_tables(
    tables: Mapping[str, Columns],
    *,
    title: str = "",
    whole: bool = False,
    spec: MachineSpec | None = None,
    dtype: str = "fp32",
    point: Mapping[str, Any] | None = None,
) -> list[Table]:
    """The tables of one profile in the order of reading; `whole`: with long tables and all outliers."""
    shown_tables = []
    for name, heading in _ORDER.items():
        lines = table_lines(tables.get(name))
        if not lines or (name in _WHOLE_ONLY and not whole):
            continue
        columns = [replace(_column(column), more=column in _MORE.get(name, ())) for column in tables[name]]
        if name == "attention" and spec is not None:
            lines = _with_ceilings(lines, spec, dtype)
            columns += [
                Column("of peak (%)", _SHARE, "flops_share", help=f"of {dtype}'s peak ({spec.source})"),
                Column("of memory (%)", _SHARE, "bytes_share", help=f"of the memory's peak ({spec.source})"),
            ]
        shown = lines if whole or name != "outliers" else lines[:_OUTLIERS_SHOWN]
        left_out = len(lines) - len(shown)
        shown_tables.append(
            Table.of(
                f"{title}{heading}",
                shown,
                columns,
                note=f"And {left_out} more: the page and --json have them." if left_out else "",
                raw=({**(point or {}), "table": name, **line} for line in lines),
                folded=name in _FOLDED,
            )
        )
    return shown_tables


def verdict_table(rows: Sequence[Row]) -> Table:
    """The limit of each cell, and the numbers of the verdict."""
    why = doubts_column(
        lambda row: " ".join(map(verdict_reason, table_lines(row.record.tables.get("verdict")))), title="why"
    )
    columns = [*point_columns(rows), *_VERDICT, why]
    raw = ({**row.point, "table": "verdict", **_verdict_numbers(row)} for row in rows)
    return Table.of("What limits each step", rows, columns, raw=raw)


def shares_table(rows: Sequence[Row]) -> Table:
    """A row per cell with each class's share of device time over all phases, to compare modes; empty for a single cell."""
    ran = [row for row in rows if row.record.tables.get("classes")]
    lines = [Line(row, class_shares(row.record.tables["classes"])) for row in (ran if len(ran) > 1 else ())]
    shares = [
        Column(f"{name} (%)", _SHARE, name, help=HELP["share"], optional=True) for name in CLASSES if name != IDLE
    ]
    # The profiler slows the profiled step, so its idle time does not fit the busy time of the unprofiled step: only with --all.
    idle = Column("idle of the profiled step (%)", _SHARE, IDLE, help=HELP["idle_s"], optional=True, more=True)
    raw = ({**row.point, "table": "class_shares", **by_class} for row, by_class in lines)
    return Table.of("Share of device time by class", lines, [*point_columns(lines), *shares, idle], raw=raw)


def class_shares(classes: Columns, phases: Sequence[str] | None = None) -> dict[str, float]:
    """Class -> its share of device time over these phases (default: all); `idle`: its share of busy and idle time."""
    times: dict[str, float] = {}
    for phase, name, time_s in zip(classes["phase"], classes["class"], classes["time_s"], strict=True):
        if phases is None or phase in phases:
            times[name] = times.get(name, 0.0) + time_s
    idle_s = times.pop(IDLE, None)
    busy_s = sum(times.values())
    shares = {name: time_s / busy_s if busy_s else 0.0 for name, time_s in times.items()}
    return shares if idle_s is None else {**shares, IDLE: idle_s / (busy_s + idle_s) if idle_s else 0.0}


_VERDICT = (
    Column("verdict", get=lambda row: _of_verdict(row, verdict_word)),
    Column("step (ms)", MS, lambda row: _of_verdict(row, lambda limit: limit["step_s"]), help="unprofiled, the median"),
    Column(
        "busy (ms)",
        MS,
        lambda row: quantities(row).get("busy_median_s"),
        help="time for which the GPU worked in a profiled step: a profiler slows the host, not the kernels",
    ),
    Column(
        "kernels", WHOLE, lambda row: row.record.fact("pieces", 0), help="kernels and copies of a step; on a CPU ops"
    ),
    Column(
        "launches",
        WHOLE,
        lambda row: row.record.fact("launches", 0),
        help="launches of a step; a CUDA graph is one launch for all its kernels",
        more=True,
    ),
    Column(
        "profiled / unprofiled",
        Form(text=lambda ratio: f"{ratio:.2f}"),
        "profiler_slowdown",
        help="time of a profiled step over that of an unprofiled step",
        more=True,
    ),
)


def _of_verdict(row: Row, read: Callable[[Mapping[str, Any]], Any]) -> Any:
    """A value read from the numbers of the row's verdict; None if it has no verdict."""
    return next(map(read, table_lines(row.record.tables.get("verdict"))), None)


def _verdict_numbers(row: Row) -> Mapping[str, Any]:
    """The row for programs: the verdict with its numbers, and the profile's facts."""
    if row.record.failure is not None:
        return {"failure": row.record.failure.kind}
    [numbers, *_] = table_lines(row.record.tables.get("verdict")) or [{}]
    # The verdict by the current rule, also for records of earlier versions.
    verdict = {"kind": verdict_word(numbers), "verdict": verdict_word(numbers)} if numbers else {}
    return {**numbers, **shown_facts(row.record), **verdict}


def _with_ceilings(lines: Sequence[dict[str, Any]], spec: MachineSpec, dtype: str) -> list[dict[str, Any]]:
    """The lines with attention's rates as shares of the data sheet's peaks."""
    peaks = {"flops": spec.peak_flops[dtype], "bytes": spec.memory_bytes_per_s}
    extended = []
    for line in lines:
        rates = {name: line[f"{name}_per_s"] for name in peaks}
        shares = {f"{name}_share": None if rate is None else rate / peaks[name] for name, rate in rates.items()}
        extended.append(line | shares)
    return extended


def _column(name: str) -> Column:
    """The column for a value of a profile's tables."""
    unit = " (µs)" if name in _MICROSECONDS else " (ms)" if name.endswith("_s") else ""
    title = _TITLES.get(name) or f"{name.removesuffix('_s').replace('_', ' ')}{unit}"
    return Column(title, _form(name), name, help=HELP.get(name, ""), names=name in _NAMES)


def _form(name: str) -> Form:
    if name.endswith("share"):
        return _SHARE
    if name in _MICROSECONDS:
        return _US
    if name not in _FORMS and name.endswith("_s"):
        return MS
    return _FORMS.get(name) or Form(
        text=_words, sort=lambda value: value if is_number(value) else None, number=name not in _WORDS
    )


def _words(value: Any) -> str:
    if isinstance(value, str):
        return shortened(value, _LONGEST)
    return words(value) if isinstance(value, bool) else f"{value:,.4g}"


def trace_record(profile: Profile, path: Path, gpu: str | None) -> Record:
    """The record of a trace, named after its file. Fields that no trace contains, such as the machine, are empty."""
    return Record(
        workload="profile",
        key=path.name,
        config={"model": {"name": path.name}, "device": "cuda" if profile.on_device else "cpu"},
        environment=Environment(
            hostname="",
            os="",
            cpu="" if profile.on_device else "an unnamed CPU",
            cores=0,
            memory_bytes=0,
            python="",
            trainstep=trainstep.__version__,
            source="",
            gpu=(gpu or "an unnamed GPU") if profile.on_device else None,
        ),
        started_at=datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        duration_s=sum(profile.steps_s),
        samples={
            "busy": Samples(unit="s", values=profile.busy_s),
            "profiled_step": Samples(unit="s", values=profile.steps_s),
        },
        facts=facts_of(
            command=shlex.join(["trainstep", "profile", "--from", str(path)]),
            **profile.numbers(),
            trace_split=profile.split or None,
        ),
        tables=profile.tables,
    )

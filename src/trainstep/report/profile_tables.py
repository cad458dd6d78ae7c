"""Tables of profiles: what limits each cell, how classes share its time, then each cell's kernels, host and outliers.

`detail_tables(tables)` shows one profile, from a record's tables or from a trace read just now.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainstep.config.machine import MachineSpec, machine_spec, matmul_dtype
from trainstep.records.values import is_number
from trainstep.report.forms import (
    BYTE_RATE,
    FLOP_RATE,
    GIGA,
    MS,
    WHOLE,
    Form,
    in_percent,
    percent,
    three_digits,
)
from trainstep.report.profile_words import verdict_reason, verdict_word
from trainstep.report.rows import Row, quantities, shown_facts, table_lines, words
from trainstep.report.tables import Column, Line, Table, doubts_column, filled, point_columns
from trainstep.traces.kernel_classes import CLASSES, IDLE

DETAILED_CELLS = 4
"""More cells than this show their kernels on their own page only: a terminal would scroll for minutes."""
Columns = Mapping[str, Sequence[Any]]

_ORDER = {
    "kernels": "Kernels by phase",
    "classes": "Classes by phase",
    "attention": "Attention: matmuls and softmax",
    "host": "Host",
    "spans": "Spans by phase",
    "layers": "Layers by phase",
    "outliers": "Outliers among the profiled steps",
    "verdict": "What the verdict rests on",
    "alike": "Forward and backward, on the host and on the device",
    "stall": "Between backward and optimizer",
}
_FOLDED = ("spans", "layers", "outliers", "verdict", "alike", "stall")
_WHOLE_ONLY = ("layers", "verdict", "alike", "stall")
"""Shown on the page and in JSON: the first is long, the others are said in sentences."""
_OUTLIERS_SHOWN = 3


HELP = {
    "phase": "forward, backward, grad_sync, optimizer, or outside phases: the batch's upload and the like",
    "class": "kind of work, by the kernel's name; idle: the device had nothing to do before work of this phase",
    "span": "the named range of the model's code that the work belongs to; a backward kernel has its forward op's",
    "layers": "which layers' spans it ran in",
    "name": "the kernel's name, template arguments left out (on a CPU: the op's)",
    "calls": "how often a step; torch's table calls it # of calls",
    "time_s": "time of a step's calls together: on a GPU torch's Self CUDA, on a CPU its Self CPU",
    "share": "of all device time; in tables by phase, of the phase's; of idle, the part of busy and idle together",
    "mean_s": "time of one call, mean",
    "min_s": "time of the shortest call",
    "max_s": "time of the longest call",
    "host_s": "time of the phase on the host's main thread (torch's CPU total of its range)",
    "device_s": "time of the phase's kernels and copies (torch's CUDA total)",
    "idle_s": "the device had nothing to do, before work of this phase",
    "launches": "kernel launches a step",
    "launch_s": "host time inside launch calls",
    "lead_s": "median time from a launch on the host to the kernel's start: long, the device is the limit; microseconds, the host",
    "blocked_s": "host time in cudaDeviceSynchronize, cudaStreamSynchronize and cudaEventSynchronize",
    "allocations": "calls of cudaMalloc and cudaFree a step",
    "allocation_s": "host time in them",
    "queue_full": "launches that had to wait for room in the driver's queue",
    "queue_full_s": "host time they waited",
    "part": "of attention written out: its matmuls, its softmax, and what lies between",
    "flops": "floating-point operations of a step, from the shapes",
    "bytes": "the least bytes read and written in a step, from the shapes",
    "flops_per_s": "operations over time",
    "bytes_per_s": "bytes over time",
    "layer": "number of the block",
    "step": "which profiled step, from 0",
    "median_s": "the same span's time in the median step",
    "cause": "what else was different in that step",
    "ops": "what Inductor fused into the kernel, as its name lists it",
    "kind": "what limits the step; of a stall, why the host stands still",
    "on_device": "whether kernels on a GPU were seen; else ops on a CPU",
    "profiled_step": "whether the step's time is a profiled one's, for want of one without the profiler",
    "step_s": "time of the step",
    "busy_s": "the device was at work",
    "enqueue_s": "host time until the last work was issued, without the profiler",
    "exposed_share": "of the step: communication with nothing computed beside it",
    "matmul_share": "of device time: matmuls and fused attention",
    "overhead_share": "of a CPU's time: what passes between ops",
    "pieces": "kernels and copies of a step; on a CPU ops",
    "gap_s": "host time from backward's return to the optimizer's first launch",
    "behind_s": "how far the device was behind the host at that launch",
}
TORCH_COLUMNS = (
    "torch's own table of the same trace has other words: Self CPU is an op's time on the host without the ops it calls, CPU "
    "total with them; Self CUDA is the time of the kernels it launched itself, CUDA total with those of the ops it calls; "
    "# of calls is over all profiled steps, here it is a step's."
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
"""Characters of a kernel's name that a table shows; the record has more."""
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
    """All tables of these profiles; each cell's own where they are few."""
    found = filled(verdict_table(rows), shares_table(rows))
    ran = [row for row in rows if row.record.failure is None]
    if len(ran) <= DETAILED_CELLS:
        for row in ran:
            found += row_tables(row, title=f"{row.label()}: " if len(ran) > 1 else "")
    return found


def row_tables(row: Row, *, title: str = "", whole: bool = False) -> list[Table]:
    """The tables of one cell, with its GPU's ceilings beside what attention achieved."""
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
    """The tables of one profile, in the order a person reads them; `whole`: the long ones too, and all outliers."""
    made = []
    for name, heading in _ORDER.items():
        lines = table_lines(tables.get(name))
        if not lines or (name in _WHOLE_ONLY and not whole):
            continue
        columns = [replace(_column(one), more=one in _MORE.get(name, ())) for one in tables[name]]
        if name == "attention" and spec is not None:
            lines = _with_ceilings(lines, spec, dtype)
            columns += [
                Column("of peak (%)", _SHARE, "flops_share", help=f"of {dtype}'s peak ({spec.source})"),
                Column("of memory (%)", _SHARE, "bytes_share", help=f"of the memory's peak ({spec.source})"),
            ]
        shown = lines if whole or name != "outliers" else lines[:_OUTLIERS_SHOWN]
        left_out = len(lines) - len(shown)
        made.append(
            Table.of(
                f"{title}{heading}",
                shown,
                columns,
                note=f"And {left_out} more: the page and --json have them." if left_out else "",
                raw=({**(point or {}), "table": name, **line} for line in lines),
                folded=name in _FOLDED,
            )
        )
    return made


def verdict_table(rows: Sequence[Row]) -> Table:
    """What limits each cell, and the numbers the verdict rests on."""
    why = doubts_column(
        lambda row: " ".join(map(verdict_reason, table_lines(row.record.tables.get("verdict")))), title="why"
    )
    columns = [*point_columns(rows), *_VERDICT, why]
    raw = ({**row.point, "table": "verdict", **_verdict_numbers(row)} for row in rows)
    return Table.of("What limits each step", rows, columns, raw=raw)


def shares_table(rows: Sequence[Row]) -> Table:
    """A row a cell: each class's share of its device time, all phases together, so that modes can be held side by side; of one
    cell none."""
    ran = [row for row in rows if row.record.tables.get("classes")]
    lines = [Line(row, class_shares(row.record.tables["classes"])) for row in (ran if len(ran) > 1 else ())]
    shares = [
        Column(f"{name} (%)", _SHARE, name, help=HELP["share"], optional=True) for name in CLASSES if name != IDLE
    ]
    # Of the profiled step, which the profiler slows: not beside busy times of the unprofiled one unless it is asked for
    idle = Column("idle of the profiled step (%)", _SHARE, IDLE, help=HELP["idle_s"], optional=True, more=True)
    raw = ({**row.point, "table": "class_shares", **its} for row, its in lines)
    return Table.of("Share of device time by class", lines, [*point_columns(lines), *shares, idle], raw=raw)


def class_shares(classes: Columns, phases: Sequence[str] | None = None) -> dict[str, float]:
    """Class -> its share of device time over these phases (all); `idle`: of busy and idle together."""
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
        help="the device was at work, in a profiled step: a profiler slows the host, not kernels",
    ),
    Column(
        "kernels", WHOLE, lambda row: row.record.fact("pieces", 0), help="kernels and copies of a step; on a CPU ops"
    ),
    Column(
        "launches",
        WHOLE,
        lambda row: row.record.fact("launches", 0),
        help="launches of a step: a CUDA graph is one for all its kernels",
        more=True,
    ),
    Column(
        "profiled / unprofiled",
        Form(text=lambda ratio: f"{ratio:.2f}"),
        "profiler_slowdown",
        help="a profiled step over an unprofiled one",
        more=True,
    ),
)


def _of_verdict(row: Row, read: Callable[[Mapping[str, Any]], Any]) -> Any:
    """What is read from the numbers of the row's verdict; None where it has none."""
    return next(map(read, table_lines(row.record.tables.get("verdict"))), None)


def _verdict_numbers(row: Row) -> Mapping[str, Any]:
    """The verdict with its numbers, and the profile's facts."""
    if row.record.failure is not None:
        return {"failure": row.record.failure.kind}
    [numbers, *_] = table_lines(row.record.tables.get("verdict")) or [{}]
    today = {"kind": verdict_word(numbers), "verdict": verdict_word(numbers)} if numbers else {}
    return {**numbers, **shown_facts(row.record), **today}


def _with_ceilings(lines: Sequence[dict[str, Any]], spec: MachineSpec, dtype: str) -> list[dict[str, Any]]:
    """What attention achieved, also as a share of the data sheet's peaks."""
    peaks = {"flops": spec.peak_flops[dtype], "bytes": spec.memory_bytes_per_s}
    return [
        line
        | {
            f"{name}_share": None if (rate := line[f"{name}_per_s"]) is None else rate / peak
            for name, peak in peaks.items()
        }
        for line in lines
    ]


def _column(name: str) -> Column:
    """The column of a value of that name."""
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
        return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"
    return words(value) if isinstance(value, bool) else f"{value:,.4g}"

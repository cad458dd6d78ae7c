"""Tables of profiles: what limits each cell, how classes share its time, then each cell's kernels, host and outliers.

`detail_tables(tables)` shows one profile, from a record's tables or from a trace read just now.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.config.machine import MachineSpec, machine_spec, matmul_dtype
from trainstep.report.forms import ABSENT, failure_sentence
from trainstep.report.hand_built import Column, point_columns
from trainstep.report.profile_columns import HELP, column, entry, share_entry, time_entry
from trainstep.report.profile_words import rows_of, verdict_reason
from trainstep.report.rows import Row
from trainstep.report.tables import Entry, Table
from trainstep.traces.kernel_classes import CLASSES, IDLE

WORKLOAD = "profile"
DETAILED_CELLS = 4
"""More cells than this show their kernels on their own page only: a terminal would scroll for minutes."""
_FACTS = (
    *("idle_s", "kernels_s", "pieces", "launches", "profiler_slowdown", "assigned_share", "fallback_share"),
    *(
        "graph_replay_s",
        "graph_replay_kernels_s",
        "graph_replay_phases",
        "graph_replay_left_out",
        "graph_replay_failed",
    ),
    *("attention_split", "trace_file"),
)
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


def profile_rows(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.record.workload == WORKLOAD]


def profile_tables(rows: Sequence[Row]) -> list[Table]:
    """All tables of these profiles; each cell's own where they are few."""
    mine = profile_rows(rows)
    if not mine:
        return []
    found = [verdict_table(mine), *shares_tables(mine)]
    ran = [row for row in mine if row.record.failure is None]
    if len(ran) <= DETAILED_CELLS:
        for row in ran:
            found += row_tables(row, title=f"{row.label()}: " if len(ran) > 1 else "")
    return found


def row_tables(row: Row, *, title: str = "", whole: bool = False) -> list[Table]:
    """The tables of one cell, with its GPU's ceilings beside what attention achieved."""
    return detail_tables(
        row.record.tables,
        title=title,
        whole=whole,
        spec=machine_spec(row.record.environment.gpu) if row.record.config.get("device") == "cuda" else None,
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
    for name, words in _ORDER.items():
        rows = rows_of(tables.get(name))
        if not rows or (name in _WHOLE_ONLY and not whole):
            continue
        columns = {one: column(one) for one in tables[name]}
        if name == "attention":
            rows, columns = _with_ceilings(rows, columns, spec, dtype)
        shown = rows if whole or name != "outliers" else rows[:_OUTLIERS_SHOWN]
        made.append(
            Table(
                title=f"{title}{words}",
                columns=tuple(columns.values()),
                entries=tuple(tuple(entry(one, row[one]) for one in columns) for row in shown),
                raw=tuple({**(point or {}), "table": name, **row} for row in rows),
                note=f"And {len(rows) - len(shown)} more: the page and --json have them."
                if len(shown) < len(rows)
                else "",
                folded=name in _FOLDED,
            )
        )
    return made


def verdict_table(rows: Sequence[Row]) -> Table:
    """What limits each cell, and the numbers the verdict rests on."""
    points = point_columns(rows)
    columns = [
        *(column for column, _ in points),
        Column(title="verdict"),
        Column(title="busy (ms)", number=True, help="the device was at work, in a profiled step"),
        Column(title="idle (ms)", number=True, help="the device had nothing to do, in a profiled step"),
        Column(title="kernels", number=True, help="kernels and copies of a step; on a CPU ops"),
        Column(title="launches", number=True, help="launches of a step: a CUDA graph is one for all its kernels"),
        Column(title="profiled / unprofiled", number=True, help="a profiled step over an unprofiled one"),
        Column(title="why"),
    ]
    entries = tuple((*(make(row) for _, make in points), *_verdict_entries(row)) for row in rows)
    raw = tuple({**row.point, "table": "verdict", **_verdict_numbers(row)} for row in rows)
    return Table(title="What limits each step", columns=tuple(columns), entries=entries, raw=raw)


def shares_tables(rows: Sequence[Row]) -> list[Table]:
    """A row a cell: each class's share of its device time, all phases together, so that modes can be held side by side."""
    ran = [row for row in rows if row.record.tables.get("classes")]
    if len(ran) < 2:
        return []
    shares = [class_shares(row.record.tables["classes"]) for row in ran]
    present = [name for name in CLASSES if any(name in one for one in shares)]
    points = point_columns(ran)
    columns = [column for column, _ in points] + [
        Column(title=f"{name} (%)", number=True, help=HELP["share"] if name != IDLE else HELP["idle_s"])
        for name in present
    ]
    entries = tuple(
        (*(make(row) for _, make in points), *(share_entry(one.get(name)) for name in present))
        for row, one in zip(ran, shares, strict=True)
    )
    raw = tuple({**row.point, "table": "class_shares", **one} for row, one in zip(ran, shares, strict=True))
    return [Table(title="Share of device time by class", columns=tuple(columns), entries=entries, raw=raw)]


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


def _verdict_entries(row: Row) -> tuple[Entry, ...]:
    record = row.record
    if record.failure is not None:
        word = Entry(text=failure_sentence(record.failure), failure=record.failure)
        return (*[Entry(text=ABSENT)] * 6, word)
    busy = record.samples["busy"].values if "busy" in record.samples else ()
    slowdown = record.fact("profiler_slowdown")
    return (
        Entry(text=str(record.fact("verdict", ABSENT))),
        time_entry(sum(busy) / len(busy) if busy else None),
        time_entry(record.fact("idle_s")),
        Entry(text=f"{record.fact('pieces', 0):,.0f}", sort=record.fact("pieces", 0)),
        Entry(text=f"{record.fact('launches', 0):,.0f}", sort=record.fact("launches", 0)),
        Entry(text=ABSENT if slowdown is None else f"{slowdown:.2f}", sort=slowdown),
        Entry(text=" ".join(map(verdict_reason, rows_of(record.tables.get("verdict"))))),
    )


def _verdict_numbers(row: Row) -> Mapping[str, Any]:
    """The verdict with its numbers, and the profile's facts."""
    if row.record.failure is not None:
        return {"failure": row.record.failure.kind}
    [numbers, *_] = rows_of(row.record.tables.get("verdict")) or [{}]
    facts = {name: row.record.fact(name) for name in _FACTS if name in row.record.facts}
    return {**numbers, **facts}


def _with_ceilings(
    rows: list[dict[str, Any]], columns: dict[str, Column], spec: MachineSpec | None, dtype: str
) -> tuple[list[dict[str, Any]], dict[str, Column]]:
    """What attention achieved as a share of the data sheet's peaks, where the GPU is known."""
    if spec is None:
        return rows, columns
    shares = []
    for row in rows:
        rates = {
            "flops_share": (row["flops_per_s"], spec.peak_flops[dtype]),
            "bytes_share": (row["bytes_per_s"], spec.memory_bytes_per_s),
        }
        shares.append({name: None if rate is None else rate / peak for name, (rate, peak) in rates.items()})
    added = {
        "flops_share": Column(title="of peak (%)", number=True, help=f"of {dtype}'s peak ({spec.source})"),
        "bytes_share": Column(title="of memory (%)", number=True, help=f"of the memory's peak ({spec.source})"),
    }
    return [{**row, **share} for row, share in zip(rows, shares, strict=True)], {**columns, **added}

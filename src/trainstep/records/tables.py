"""Every table that trainstep's workloads write, declared once with its rows, its columns and their types.

A record's tables are checked against these declarations when it is read: the tables of its workload, and `ranks`, which any
workload with several ranks has. Other tables, and further columns of these tables, may contain anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainstep.records.amounts import limits_of, unit_in_name
from trainstep.records.facts import first_wrong, type_words, value_words, wrong_fact

RANKS = "ranks"
RANK_FACTS = "rank_facts"


@dataclass(frozen=True, kw_only=True)
class TableKind:
    """The declaration of a table. A stored table without columns has no rows.

    `rows`: what a row is. `columns`: column -> type (records/facts.py). `optional`: columns that only some records have. `others`:
    type of every further column, where the names are an open set. `signed`: columns that may be negative although the unit in their
    name is not, as the difference of two readings or of two clocks.
    """

    rows: str
    columns: Mapping[str, Any]
    optional: Mapping[str, Any] = field(default_factory=dict)
    others: Any = object
    signed: Sequence[str] = ()


_RANKS = TableKind(
    rows="a rank and quantity: its raw values",
    columns={"rank": int, "quantity": str, "unit": str, "values": list[float]},
    optional={"node": str},
)
_RANK = {"rank": int}
"""Where there are several ranks, every table of `trainstep memory` has this column."""
_TIME = {"phase": str, "calls": float, "time_s": float, "share": float}
_LINES = {
    "line": str,
    "init": int | None,
    "after forward": int | None,
    "after backward": int | None,
    "after step": int | None,
}

_PARALLEL = {
    "traffic": TableKind(
        rows="an operation: its messages and bytes in a step, counted and by formula",
        columns={"operation": str, "messages": int, "bytes": int, "expected_messages": int, "expected_bytes": int},
    ),
    "memory_points": TableKind(
        rows="a rank, point of a step and line of the ledger",
        columns={"rank": int, "point": str, "line": str, "bytes": int, "expected_bytes": int | None},
        signed=("bytes",),
    ),
    "communication": TableKind(
        rows="a rank: its times of communication in a step",
        columns={"rank": int, "communication_s": float, "waiting_s": float | None, "transfer_s": float | None}
        | {"exposed_s": float, "tail_s": float},
    ),
    "buckets": TableKind(
        rows="a message of rank 0, in order of launch; times count from the beginning of the step",
        columns={"name": str, "phase": str, "bytes": int | None, "launched_s": float, "started_s": float}
        | {"finished_s": float, "waiting_s": float | None, "hidden_s": float, "exposed_s": float},
        signed=("launched_s", "started_s", "finished_s"),
    ),
}
_COLLECTIVE = {
    "links": TableKind(
        rows="two neighbouring ranks of a level: times of a message from one to the other, halves of there and back",
        columns={"rank": int, "to_rank": int, "bytes": int, "times_s": list[float]},
    ),
}
_MEMORY = {
    "ledger": TableKind(
        rows="a line of the ledger: its bytes at each moment", columns=_LINES | {"peak": int | None}, optional=_RANK
    ),
    "expected": TableKind(rows="a line of the ledger, by formula", columns=_LINES, optional=_RANK),
    "peaks": TableKind(
        rows="a phase: its highest figures",
        columns={"phase": str, "requested_bytes": int, "allocated_bytes": int | None, "reserved_bytes": int | None}
        | {"driver_bytes": int | None},
        optional=_RANK,
    ),
    "layers": TableKind(
        rows="a layer: its activations after forward", columns={"layer": str, "bytes": int}, optional=_RANK
    ),
    "timeline": TableKind(
        rows="a moment of the step: bytes by category, one column each",
        columns={"time_s": float, "phase": str},
        optional=_RANK,
        others=int,
    ),
    "allocations": TableKind(
        rows="a group of similar allocations at the peak",
        columns={"bytes": int, "count": int, "category": str, "phase": str, "layer": str, "stack": str},
        optional=_RANK,
    ),
    RANK_FACTS: TableKind(rows="a rank and fact", columns={"rank": int, "fact": str, "value": object, "unit": str}),
}
_PROFILE = {
    "kernels": TableKind(
        rows="a kernel of a phase, class and span, per step",
        columns=_TIME
        | {"class": str, "span": str, "layers": str, "name": str, "mean_s": float, "min_s": float, "max_s": float},
        optional={"ops": str},
    ),
    "classes": TableKind(rows="a class of kernels in a phase", columns=_TIME | {"class": str}),
    "spans": TableKind(rows="a span in a phase", columns=_TIME | {"span": str}),
    "layers": TableKind(rows="a layer in a phase", columns=_TIME | {"layer": int}),
    "attention": TableKind(
        rows="a part of attention in a phase",
        columns={"phase": str, "part": str, "calls": float, "time_s": float, "flops": int | None, "bytes": int | None}
        | {"flops_per_s": float | None, "bytes_per_s": float | None},
    ),
    "host": TableKind(
        rows="a phase: the host's time and calls per step",
        columns={"phase": str}
        | dict.fromkeys(("host_s", "device_s", "idle_s", "launch_s", "lead_s", "blocked_s"), float)
        | dict.fromkeys(("launches", "allocations", "allocation_s", "queue_full", "queue_full_s"), float),
        signed=("lead_s",),
    ),
    "outliers": TableKind(
        rows="a span of a step that stands out",
        columns={"phase": str, "span": str, "layer": str, "step": int, "time_s": float, "median_s": float}
        | {"cause": str},
    ),
    "verdict": TableKind(
        rows="the verdict's numbers",
        columns={"kind": str, "on_device": bool, "profiled_step": bool, "enqueue_s": float | None}
        | dict.fromkeys(("step_s", "busy_s", "exposed_share", "matmul_share", "overhead_share"), float),
    ),
    "alike": TableKind(
        rows="forward and backward, where they take about as long",
        columns={"phase": str, "time_s": float, "pieces": float, "device_s": float},
    ),
    "replay": TableKind(
        rows="a phase: the time of its kernels in an eager step, and in a replay of the captured step",
        columns={"phase": str, "eager_s": float, "replayed_s": float},
    ),
    "stall": TableKind(
        rows="what the host did between backward and optimizer",
        columns={"kind": str}
        | dict.fromkeys(("gap_s", "blocked_s", "allocation_s", "behind_s", "queue_full_s"), float),
        signed=("gap_s",),
    ),
}
_NUMERICS = {
    "dtypes": TableKind(
        rows="a module (equal blocks share a row): the dtypes of its parameters, output and gradients",
        columns=dict.fromkeys(("module", "kind", "parameters", "output", "output_gradient", "gradient"), str),
    ),
    "gradients": TableKind(
        rows="a parameter: its gradient's error",
        columns={"parameter": str, "relative_error": float | None, "reference_norm": float, "elements": int},
    ),
    "accumulation": TableKind(
        rows="a way of adding 0.01 a thousand times", columns={"how": str, "total": float, "error": float}
    ),
    "reductions": TableKind(
        rows="a sum over the model's numbers, in 16 bits",
        columns=dict.fromkeys(("what", "values", "numbers", "accumulator"), str)
        | dict.fromkeys(("error_median", "error_max", "overflow_share"), float | None),
    ),
    "ranges": TableKind(
        rows="a layer: shares of its gradients' elements that fp16 loses",
        columns={"of": str, "layer": str, "elements": int, "zero_unscaled": float, "subnormal_unscaled": float}
        | {"zero_scaled": float, "subnormal_scaled": float, "overflow_at_twice": float},
    ),
}
_TILES = {
    "candidates": TableKind(
        rows="a tile, in the order tried",
        columns=dict.fromkeys(("block_q", "block_k", "num_warps", "num_stages", "heads_together"), int)
        | {"time_s": float | None, "rounds": int, "error": float | None, "error_ratio": float | None}
        | dict.fromkeys(("registers", "spilled_bytes", "shared_bytes"), int | None)
        | {"outcome": str, "reason": str},
    ),
    "times": TableKind(rows="a sample", columns={"candidate": int, "round": int, "time_s": float}),
}
_RECOMPUTATION = {
    "recompute_curve": TableKind(
        rows="a choice of recomputation: its predicted peak and added time, and the number of blocks in each mode",
        columns={"peak_bytes": int, "added_s": float}
        | dict.fromkeys(("none", "selective", "narrow", "block", "chains"), int)
        | {"chosen": bool},
    ),
    "recompute_blocks": TableKind(
        rows="a kind of block in a mode: what its forward keeps, the most that its backward holds, and the time it adds",
        columns={"kind": int, "blocks": int, "mode": str, "kept_bytes": int, "backward_bytes": int, "added_s": float},
    ),
}
"""Tables of runs with recompute_budget_gib."""
_RUN = {
    "waits": TableKind(
        rows="a line at which the host waits for the device in an inspected step; on a CPU, at which a GPU's host would",
        columns={"file": str, "line": int, "source": str, "why": str, "calls": int, "time_s": float | None},
    ),
    "patterns": TableKind(
        rows="a way of computing that costs more than another that gives the same, in an inspected step (traces/patterns)",
        columns={"pattern": str, "phase": str, "what": str}
        | dict.fromkeys(("calls", "time_s", "least_s", "gap_s", "ranges", "of_s", "of_ranges"), float),
        optional={"least_is_timed": bool},
    ),
    "compilations": TableKind(
        rows="a function that torch.compile compiled, in the step in which it did",
        columns={"step": int, "function": str, "file": str, "line": int, "time_s": float, "reason": str},
    ),
    "graph_breaks": TableKind(
        rows="a reason and line of graph breaks", columns={"file": str, "line": int, "reason": str, "count": int}
    ),
}
_SOURCE = {"source": str}
"""Column of a calibration that was made from other records: the record that a point is from."""
_CALIBRATION = {
    "matmuls": TableKind(
        rows="a product of (m, k) and (k, n) matrices, `batch` of them: seconds of its kernel",
        columns={"dtype": str, "time_s": float} | dict.fromkeys(("m", "n", "k", "batch"), int),
        optional=_SOURCE,
    ),
    "traffic": TableKind(
        rows="a kernel that moves bytes, of a kind of plan/time/kernels.py",
        columns={"kind": str, "bytes": float, "time_s": float},
        optional=_SOURCE,
    ),
    "attention": TableKind(
        rows="causal attention in a direction: seconds of its kernels",
        columns=dict.fromkeys(("implementation", "dtype", "direction"), str)
        | dict.fromkeys(("batch_heads", "context", "head_dim"), int)
        | {"time_s": float},
        optional=_SOURCE,
    ),
    "optimizers": TableKind(
        rows="an update by an implementation of AdamW: bytes read and written, and seconds",
        columns={"name": str, "bytes": float, "time_s": float},
        optional=_SOURCE,
    ),
    "collectives": TableKind(
        rows="a collective of so many ranks on a tensor of so many bytes",
        columns={"operation": str, "ranks": int, "bytes": float, "time_s": float},
        optional=_SOURCE,
    ),
    "host": TableKind(
        rows="a cost of the host, or a gap between kernels: its middle and its range",
        columns={"what": str, "time_s": float, "low_s": float, "high_s": float},
        optional=_SOURCE,
    ),
}
_LOSSES = {
    "losses": TableKind(
        rows="one of the first steps, before those that are timed: its loss; none where it is not finite",
        columns={"loss": float | None},
    ),
}
TABLES: Mapping[str, Mapping[str, TableKind]] = {
    "train_step": _RECOMPUTATION | _LOSSES,
    "collective": _COLLECTIVE,
    "parallel": _PARALLEL | _RECOMPUTATION | _LOSSES,
    "memory": _MEMORY,
    "profile": _PROFILE | _RECOMPUTATION | _LOSSES,
    "numerics": _NUMERICS,
    "attention_tiles": _TILES,
    "run": _PROFILE | _RUN | _LOSSES,
    "calibration": _CALIBRATION,
}
"""Workload -> table name -> declaration; two workloads may use one name for different tables."""


def table_lines(table: Mapping[str, Sequence[Any]] | None) -> list[dict[str, Any]]:
    """A record's table of columns as a list of lines; an empty list if there is no table."""
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)] if table else []


def table_kind(workload: str, name: str) -> TableKind | None:
    """The declaration of that table, or None."""
    return _RANKS if name == RANKS else TABLES.get(workload, {}).get(name)


def wrong_table(workload: str, name: str, table: Any) -> str | None:
    """How a table of that workload's record contradicts its declaration, or None."""
    kind = table_kind(workload, name)
    if kind is None or table == {}:
        return None
    if not isinstance(table, Mapping) or not all(isinstance(column, Sequence) for column in table.values()):
        return "is not a mapping of columns to lists"
    for column, type_ in kind.columns.items():
        if column not in table:
            return f"has no column {column!r}"
        if (wrong := _wrong_column(column, table[column], type_, signed=column in kind.signed)) is not None:
            return wrong
    for column in table.keys() - kind.columns.keys():
        type_ = kind.optional.get(column, kind.others)
        if (wrong := _wrong_column(column, table[column], type_, signed=column in kind.signed)) is not None:
            return wrong
    lengths = {column: len(values) for column, values in table.items()}
    if len(set(lengths.values())) > 1:
        shortest, longest = (choose(lengths, key=lambda column: lengths[column]) for choose in (min, max))
        return f"has {lengths[shortest]} values of {shortest!r} beside {lengths[longest]} of {longest!r}"
    if name == RANKS:
        return _wrong_rank_values(table)
    return _wrong_rank_fact(table) if name == RANK_FACTS else None


def _wrong_column(column: str, values: Sequence[Any], type_: Any, *, signed: bool) -> str | None:
    if isinstance(values, str):
        return f"has no list in its column {column!r}"
    row, wanted = first_wrong(values, type_), type_words(type_)
    if row is None and type_ is not object and (unit := unit_in_name(column)):
        limits = limits_of(unit, signed=signed)
        row, wanted = limits.first_outside(values), str(limits)
    if row is None:
        return None
    return f"has {value_words(values[row])} in row {row + 1} of its column {column!r}; it must be {wanted}"


def _wrong_rank_values(table: Mapping[str, Sequence[Any]]) -> str | None:
    """The ranks' raw values are samples, each row in the unit of its column `unit`."""
    for row, (unit, values) in enumerate(zip(table["unit"], table["values"], strict=True), 1):
        limits = limits_of(unit)
        if (place := limits.first_outside(values)) is not None:
            return f"has {value_words(values[place])} in row {row} of its column 'values'; it must be {limits}"
    return None


def _wrong_rank_fact(table: Mapping[str, Sequence[Any]]) -> str | None:
    reasons = (wrong_fact(name, value) for name, value in zip(table["fact"], table["value"], strict=True))
    return next((f"has a fact that {reason}" for reason in reasons if reason), None)

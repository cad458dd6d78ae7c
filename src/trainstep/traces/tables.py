"""Makes a profile's tables, as columns of plain values per step: kernels, classes, spans, layers and attention.

Sums are exact: a table's row `rest` has what its other rows leave out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.config.run import Phase
from trainstep.costs.attention import matmuls_bytes, matmuls_flops, softmax_bytes, softmax_flops
from trainstep.grouping import grouped
from trainstep.traces.attribution import OUTSIDE
from trainstep.traces.kernel_classes import CLASSES, IDLE, MATMUL, inductor_ops
from trainstep.traces.work import TraceWork, Work

Columns = dict[str, list[Any]]
PHASES = (*(str(phase) for phase in Phase), OUTSIDE)
REST = "rest"
_OTHERS = "{} others"
KERNELS_KEPT = 20
"""Rows of kernels per phase in a record; the row `rest` has the others."""
SCORES, SOFTMAX, VALUES = "attention scores", "attention softmax", "attention values"
_MATMULS, _SOFTMAX, _REST = "matmuls", "softmax", "mask, scale and copies"


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The sizes of attention in one step, all layers together. `batch_heads`: batch x heads x layers x micro-batches."""

    batch_heads: int
    positions: int
    head_dim: int
    matmul_element_bytes: int
    softmax_element_bytes: int


def kernels_table(work: TraceWork, kept: int = KERNELS_KEPT) -> Columns:
    """Kernels of each phase by class, span and name, longest first; `share` is of all device time.

    A column `ops` lists what Inductor fused, if it made any of the kernels.
    """
    rows = []
    for phase in phases_of(work.pieces):
        groups = grouped(_in_phase(work.pieces, phase), lambda piece: (piece.kind, piece.place.span, piece.name))
        ordered = sorted(groups.items(), key=lambda item: -_sum_ns(item[1]))
        rows += [_kernel_row(work, phase, key, pieces) for key, pieces in ordered[:kept]]
        rest = [piece for _, pieces in ordered[kept:] for piece in pieces]
        if rest:
            rows.append(_kernel_row(work, phase, (REST, "", _OTHERS.format(len(ordered) - kept)), rest))
    columns = columns_of(rows)
    if not any(columns.get("ops", ())):
        columns.pop("ops", None)
    return columns


def top_kernels(columns: Mapping[str, Sequence[Any]], top: int) -> Columns:
    """A table of kernels cut to `top` kernels of each phase; the phase's row `rest` gets the others."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    kept: list[dict[str, Any]] = []
    for phase in dict.fromkeys(row["phase"] for row in rows):
        phase_rows = [row for row in rows if row["phase"] == phase]
        named = [row for row in phase_rows if row["class"] != REST]
        left_out = [*named[top:], *(row for row in phase_rows if row["class"] == REST)]
        kept += named[:top]
        if left_out:
            kept.append(_merged(phase, left_out))
    return columns_of(kept)


def classes_table(work: TraceWork) -> Columns:
    """Time of each class in each phase. `share` is of the phase's device time, for `idle` of its busy and idle time together."""
    rows = []
    last_phase = max(work.pieces, key=lambda piece: piece.start_ns).place.phase
    for phase in phases_of(work.pieces):
        pieces = _in_phase(work.pieces, phase)
        groups = grouped(pieces, lambda piece: piece.kind)
        total_ns = _sum_ns(pieces)
        rows += [_row(work, phase, {"class": kind}, groups[kind], total_ns) for kind in CLASSES if kind in groups]
        if not work.on_device:
            continue
        idle_ns = sum(piece.gap_ns for piece in pieces)
        if phase == last_phase:
            idle_ns += sum(step.after_ns for step in work.steps)
        share = idle_ns / (idle_ns + total_ns) if idle_ns else 0.0
        time_s = idle_ns / 1e9 / len(work.steps)
        rows.append({"phase": phase, "class": IDLE, "calls": 0.0, "time_s": time_s, "share": share})
    return columns_of(rows)


def spans_table(work: TraceWork) -> Columns:
    """Time of each named span in each phase, all layers together. `(no span)` is the time between spans."""
    rows = []
    for phase in phases_of(work.pieces):
        phase_pieces = _in_phase(work.pieces, phase)
        groups, total_ns = grouped(phase_pieces, lambda piece: piece.place.span), _sum_ns(phase_pieces)
        ordered = sorted(groups.items(), key=lambda item: -_sum_ns(item[1]))
        rows += [_row(work, phase, {"span": span or "(no span)"}, pieces, total_ns) for span, pieces in ordered]
    return columns_of(rows)


def layers_table(work: TraceWork) -> Columns:
    """Time of each layer in each phase."""
    rows = []
    for phase in phases_of(work.pieces):
        phase_pieces = _in_phase(work.pieces, phase)
        groups = grouped(phase_pieces, lambda piece: piece.place.layer)
        layers = sorted(layer for layer in groups if layer is not None)
        total_ns = _sum_ns(phase_pieces)
        rows += [_row(work, phase, {"layer": layer}, groups[layer], total_ns) for layer in layers]
    return columns_of(rows)


def replay_table(replayed: TraceWork, eager: TraceWork) -> Columns:
    """One row per phase: time of its kernels per step, run eagerly and replayed as a graph. Both ran the same step."""
    rows = [
        {
            "phase": phase,
            "eager_s": _sum_ns(_in_phase(eager.pieces, phase)) / 1e9 / len(eager.steps),
            "replayed_s": _sum_ns(_in_phase(replayed.pieces, phase)) / 1e9 / len(replayed.steps),
        }
        for phase in phases_of([*eager.pieces, *replayed.pieces])
    ]
    return columns_of(rows)


def attention_table(work: TraceWork, shape: AttentionShape | None) -> Columns:
    """Matmuls, softmax and the rest of attention that is written out in ops, by phase: time, and with a shape FLOPs and bytes.

    Empty if the trace names no spans of it. Eager only: compiled code is one kernel for several of these, and a fused attention
    has no softmax to tell apart.
    """
    rows = []
    for phase in phases_of(work.pieces):
        inside = [
            piece for piece in _in_phase(work.pieces, phase) if piece.place.span.endswith((SCORES, SOFTMAX, VALUES))
        ]
        parts: dict[str, list[Work]] = {_MATMULS: [], _SOFTMAX: [], _REST: []}
        for piece in inside:
            parts[_part(piece)].append(piece)
        rows += [_attention_row(work, phase, part, pieces, shape) for part, pieces in parts.items() if inside]
    return columns_of(rows)


def phases_of(pieces: Sequence[Work]) -> list[str]:
    """The phases present, in the order of a step."""
    present = {piece.place.phase for piece in pieces}
    return [phase for phase in PHASES if phase in present]


def columns_of(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """The columns of rows that have the same names."""
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def layers_words(layers: Sequence[int | None]) -> str:
    """Layer numbers as text: `0-11`, `3`, `0, 2` or nothing."""
    known = sorted({layer for layer in layers if layer is not None})
    if len(known) > 1 and known[-1] - known[0] == len(known) - 1:
        return f"{known[0]}-{known[-1]}"
    return ", ".join(map(str, known))


def _kernel_row(work: TraceWork, phase: str, key: tuple[str, str, str], pieces: Sequence[Work]) -> dict[str, Any]:
    kind, span, name = key
    steps = len(work.steps)
    times_ns = [piece.duration_ns for piece in pieces]
    return {
        "phase": phase,
        "class": kind,
        "span": span,
        "layers": layers_words([piece.place.layer for piece in pieces]) if kind != REST else "",
        "name": name,
        "ops": ", ".join(inductor_ops(name)),
        "calls": len(pieces) / steps,
        "time_s": sum(times_ns) / 1e9 / steps,
        "share": sum(times_ns) / work.total_ns if work.total_ns else 0.0,
        "mean_s": sum(times_ns) / len(times_ns) / 1e9,
        "min_s": min(times_ns) / 1e9,
        "max_s": max(times_ns) / 1e9,
    }


def _merged(phase: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several rows of a table of kernels as one row."""
    calls, time_s = sum(row["calls"] for row in rows), sum(row["time_s"] for row in rows)
    # A row `rest` says in its name how many kernels it has.
    number = sum(int(row["name"].partition(" ")[0]) if row["class"] == REST else 1 for row in rows)
    return {
        **dict.fromkeys(rows[0], ""),
        "phase": phase,
        "class": REST,
        "name": _OTHERS.format(number),
        "calls": calls,
        "time_s": time_s,
        "share": sum(row["share"] for row in rows),
        "mean_s": time_s / calls,
        "min_s": min(row["min_s"] for row in rows),
        "max_s": max(row["max_s"] for row in rows),
    }


def _row(work: TraceWork, phase: str, key: Mapping[str, Any], pieces: Sequence[Work], total_ns: int) -> dict[str, Any]:
    time_ns, steps = _sum_ns(pieces), len(work.steps)
    return {
        "phase": phase,
        **key,
        "calls": len(pieces) / steps,
        "time_s": time_ns / 1e9 / steps,
        "share": time_ns / total_ns if total_ns else 0.0,
    }


def _in_phase(pieces: Sequence[Work], phase: str) -> list[Work]:
    return [piece for piece in pieces if piece.place.phase == phase]


def _sum_ns(pieces: Sequence[Work]) -> int:
    return sum(piece.duration_ns for piece in pieces)


def _part(piece: Work) -> str:
    if piece.place.span.endswith(SOFTMAX):
        return _SOFTMAX
    return _MATMULS if piece.kind == MATMUL else _REST


def _attention_row(
    work: TraceWork, phase: str, part: str, pieces: Sequence[Work], shape: AttentionShape | None
) -> dict[str, Any]:
    time_s = _sum_ns(pieces) / 1e9 / len(work.steps)
    flops, byte_count = _costs(phase, part, shape)
    return {
        "phase": phase,
        "part": part,
        "calls": len(pieces) / len(work.steps),
        "time_s": time_s,
        "flops": flops,
        "bytes": byte_count,
        "flops_per_s": flops / time_s if flops and time_s else None,
        "bytes_per_s": byte_count / time_s if byte_count and time_s else None,
    }


def _costs(phase: str, part: str, shape: AttentionShape | None) -> tuple[int | None, int | None]:
    """FLOPs and bytes of a part, if they are known."""
    if shape is None or part == _REST or phase not in ("forward", "backward"):
        return None, None
    if part == _MATMULS:
        sides = shape.batch_heads, shape.positions, shape.head_dim
        return matmuls_flops(phase, *sides), matmuls_bytes(phase, *sides, shape.matmul_element_bytes)
    return (
        softmax_flops(phase, shape.batch_heads, shape.positions),
        softmax_bytes(phase, shape.batch_heads, shape.positions, shape.softmax_element_bytes),
    )

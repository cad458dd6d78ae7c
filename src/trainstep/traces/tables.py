"""Tables of a profile, as columns of plain values: kernels by phase, classes, spans and layers by phase. All times per step.

Sums are exact: what a table leaves out stands in its row `rest`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from trainstep.config.phases import Phase
from trainstep.traces.attribution import OUTSIDE
from trainstep.traces.kernel_classes import CLASSES, IDLE, inductor_ops
from trainstep.traces.work import TraceWork, Work

Columns = dict[str, list[Any]]
PHASES = (*(str(phase) for phase in Phase), OUTSIDE)
REST = "rest"
_OTHERS = "{} others"
KERNELS_KEPT = 20
"""Rows of kernels a phase keeps in a record; the others are its row `rest`."""


def kernels_table(work: TraceWork, kept: int = KERNELS_KEPT) -> Columns:
    """Kernels of each phase by class, span and name, longest first; `share` of all device time.

    With a column `ops` where Inductor made some of them: what it fused.
    """
    rows = []
    for phase in phases_of(work.pieces):
        groups = _grouped(_in_phase(work.pieces, phase), lambda one: (one.kind, one.place.span, one.name))
        ordered = sorted(groups.items(), key=lambda item: -_sum_ns(item[1]))
        rows += [_kernel_row(work, phase, key, pieces) for key, pieces in ordered[:kept]]
        rest = [one for _, pieces in ordered[kept:] for one in pieces]
        if rest:
            rows.append(_kernel_row(work, phase, (REST, "", _OTHERS.format(len(ordered) - kept)), rest))
    columns = columns_of(rows)
    if not any(columns.get("ops", ())):
        columns.pop("ops", None)
    return columns


def top_kernels(columns: Mapping[str, Sequence[Any]], top: int) -> Columns:
    """A table of kernels with at most so many of each phase; the others go into the phase's row `rest`."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    kept: list[dict[str, Any]] = []
    for phase in dict.fromkeys(row["phase"] for row in rows):
        mine = [row for row in rows if row["phase"] == phase]
        named = [row for row in mine if row["class"] != REST]
        left_out = [*named[top:], *(row for row in mine if row["class"] == REST)]
        kept += named[:top]
        if left_out:
            kept.append(_merged(phase, left_out))
    return columns_of(kept)


def classes_table(work: TraceWork) -> Columns:
    """Time of each class in each phase; `share` of the phase's device time, of `idle` the part of busy and idle together."""
    rows = []
    for phase in phases_of(work.pieces):
        mine = _in_phase(work.pieces, phase)
        groups = _grouped(mine, lambda one: one.kind)
        total_ns = _sum_ns(mine)
        rows += [_row(work, phase, {"class": kind}, groups[kind], total_ns) for kind in CLASSES if kind in groups]
        idle_ns = sum(one.gap_ns for one in mine) + (
            sum(step.after_ns for step in work.steps) if phase == _last(work) else 0
        )
        if work.on_device:
            share = idle_ns / (idle_ns + total_ns) if idle_ns else 0.0
            time_s = idle_ns / 1e9 / len(work.steps)
            rows.append({"phase": phase, "class": IDLE, "calls": 0.0, "time_s": time_s, "share": share})
    return columns_of(rows)


def spans_table(work: TraceWork) -> Columns:
    """Time of each named span in each phase, layers together; without a name: between the spans."""
    rows = []
    for phase in phases_of(work.pieces):
        mine = _in_phase(work.pieces, phase)
        groups = _grouped(mine, lambda one: one.place.span)
        ordered = sorted(groups.items(), key=lambda item: -_sum_ns(item[1]))
        rows += [_row(work, phase, {"span": span or "(no span)"}, pieces, _sum_ns(mine)) for span, pieces in ordered]
    return columns_of(rows)


def layers_table(work: TraceWork) -> Columns:
    """Time of each layer in each phase."""
    rows = []
    for phase in phases_of(work.pieces):
        mine = _in_phase(work.pieces, phase)
        groups = _grouped([one for one in mine if one.place.layer is not None], lambda one: one.place.layer)
        rows += [_row(work, phase, {"layer": layer}, groups[layer], _sum_ns(mine)) for layer in sorted(groups)]
    return columns_of(rows)


def phases_of(pieces: Sequence[Work]) -> list[str]:
    """The phases present, in the order of a step."""
    present = {one.place.phase for one in pieces}
    return [phase for phase in PHASES if phase in present]


def columns_of(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Rows with the same names as columns."""
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def layers_words(layers: Sequence[int | None]) -> str:
    """`0-11`, `3`, `0, 2` or nothing."""
    known = sorted({layer for layer in layers if layer is not None})
    if len(known) > 1 and known[-1] - known[0] == len(known) - 1:
        return f"{known[0]}-{known[-1]}"
    return ", ".join(map(str, known))


def _kernel_row(work: TraceWork, phase: str, key: tuple[str, str, str], pieces: Sequence[Work]) -> dict[str, Any]:
    kind, span, name = key
    steps = len(work.steps)
    times_ns = [one.duration_ns for one in pieces]
    return {
        "phase": phase,
        "class": kind,
        "span": span,
        "layers": layers_words([one.place.layer for one in pieces]) if kind != REST else "",
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
    """Several rows of a table of kernels as one."""
    calls, time_s = sum(row["calls"] for row in rows), sum(row["time_s"] for row in rows)
    number = sum(_other_kernels(row) for row in rows)
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


def _other_kernels(row: Mapping[str, Any]) -> int:
    return int(row["name"].partition(" ")[0]) if row["class"] == REST else 1


def _row(work: TraceWork, phase: str, key: Mapping[str, Any], pieces: Sequence[Work], total_ns: int) -> dict[str, Any]:
    time_ns, steps = _sum_ns(pieces), len(work.steps)
    return {
        "phase": phase,
        **key,
        "calls": len(pieces) / steps,
        "time_s": time_ns / 1e9 / steps,
        "share": time_ns / total_ns if total_ns else 0.0,
    }


def _grouped(pieces: Sequence[Work], key: Callable[[Work], Any]) -> dict[Any, list[Work]]:
    groups: dict[Hashable, list[Work]] = {}
    for one in pieces:
        groups.setdefault(key(one), []).append(one)
    return groups


def _in_phase(pieces: Sequence[Work], phase: str) -> list[Work]:
    return [one for one in pieces if one.place.phase == phase]


def _sum_ns(pieces: Sequence[Work]) -> int:
    return sum(one.duration_ns for one in pieces)


def _last(work: TraceWork) -> str:
    return max(work.pieces, key=lambda one: one.start_ns).place.phase

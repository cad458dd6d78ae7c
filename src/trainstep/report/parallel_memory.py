"""What a rank holds at four points of a step in each way, beside the formula; and what the driver's figure is made of."""

from collections.abc import Sequence
from typing import Any

from trainstep.report.forms import ABSENT, ByteUnit, byte_unit
from trainstep.report.hand_built import Column
from trainstep.report.parallel_rows import Way, name_columns
from trainstep.report.tables import Entry, Table

CATEGORIES = ("parameters", "gradients", "optimizer state", "communication", "activations")
_ALLOCATOR = ("unnamed", "allocated")
_POINTS = (
    "Of rank 0. A number alone is the formula's too, else the formula's stands in brackets; torch's ways have none, and buffers of "
    "their own that are not seen here. Communication: buffers, and parameters gathered from other ranks. "
    "Activations: what forward saved for backward; the formula takes it as measured."
)
_UNNAMED = "Unnamed: allocated, in none of these: batches, the loss, libraries' workspaces, temporaries, buffers of torch's ways."
_DRIVER = (
    "After a step, what nvidia-smi would show of rank 0's process: what the allocator has reserved (allocated, and cached for "
    "reuse), the CUDA context, what NCCL took while the ranks met (buffers, kernels), and the rest: kernels loaded since."
)
Held = dict[str, dict[str, tuple[int, int | None]]]
"""Point -> line -> bytes, as seen and by formula."""


def held_by(way: Way, rank: int = 0) -> Held:
    """One rank's part of the record's table; empty where the cell failed."""
    table = way.record.tables.get("memory_points", {}) if way.record.failure is None else {}
    found: Held = {}
    for of_rank, point, line, size, expected in zip(*table.values(), strict=True):
        if of_rank == rank:
            found.setdefault(point, {})[line] = (size, expected)
    return found


def points_table(ways: Sequence[Way]) -> list[Table]:
    """One row a way and point."""
    found = [(way, point, lines) for way in ways for point, lines in held_by(way).items()]
    if not found:
        return []
    points = name_columns([way for way, _, _ in found])
    unit = byte_unit(size for _, _, lines in found for pair in lines.values() for size in pair)
    on_gpu = any("allocated" in lines for _, _, lines in found)
    names = (*CATEGORIES, *(_ALLOCATOR if on_gpu else ("together",)))
    entries = tuple(
        (
            *(make(way.row) for _, make in points),
            Entry(text=point),
            *(_entry(_line(lines, name), unit) for name in names),
        )
        for way, point, lines in found
    )
    columns = [column for column, _ in points] + [Column(title="point")]
    columns += [Column(title=name, number=True) for name in names]
    note = f"{unit.name}. {_POINTS} {_UNNAMED if on_gpu else 'A CPU has no allocator that counts.'}"
    return [Table(title="What a rank holds", columns=tuple(columns), entries=entries, note=note)]


def driver_table(ways: Sequence[Way]) -> list[Table]:
    """One row a way on a GPU: the driver's figure, and what it is made of. Of variants that took turns there is none: it would be
    all of theirs."""
    found = [(way, explained) for way in ways if (explained := _explained(way))]
    if not found:
        return []
    points = name_columns([way for way, _ in found])
    unit = byte_unit(size for _, explained in found for size in explained.values())
    names = list(found[0][1])
    columns = [column for column, _ in points] + [Column(title=name, number=True) for name in names]
    entries = tuple(
        (*(make(way.row) for _, make in points), *(Entry(text=unit.words(explained[name])) for name in names))
        for way, explained in found
    )
    note = f"{unit.name}. {_DRIVER}"
    return [Table(title="What the driver sees", columns=tuple(columns), entries=entries, note=note)]


def _explained(way: Way) -> dict[str, int]:
    lines = {name: size for name, (size, _) in held_by(way).get("after step", {}).items()}
    context, nccl = way.record.fact("context_bytes"), way.record.fact("nccl_bytes", 0)
    if "driver" not in lines or context is None or way.record.fact("interleaving") == "live":
        return {}
    rest = lines["driver"] - lines["reserved"] - context - nccl
    return {
        "driver": lines["driver"],
        "allocated": lines["allocated"],
        "cached": lines["reserved"] - lines["allocated"],
        "context": context,
        "NCCL": nccl,
        "rest": rest,
    }


def _line(lines: dict[str, tuple[int, int | None]], name: str) -> tuple[int, int | None] | None:
    """`together` and `allocated` have the formula's sum beside them."""
    if name not in ("together", "allocated"):
        return lines.get(name)
    seen = [lines[one] for one in CATEGORIES if one in lines]
    formula: Any = None if any(pair[1] is None for pair in seen) else sum(pair[1] or 0 for pair in seen)
    whole = sum(pair[0] for pair in seen) if name == "together" else lines.get("allocated", (None,))[0]
    return None if whole is None else (whole, formula)


def _entry(pair: tuple[int, int | None] | None, unit: ByteUnit) -> Entry:
    if pair is None:
        return Entry(text=ABSENT)
    size, expected = pair
    aside = "" if expected is None or expected == size else f" ({unit.words(expected)})"
    return Entry(text=f"{unit.words(size)}{aside}", sort=size)

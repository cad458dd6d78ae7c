"""Names the rows of ops by op, shape, direction and dtype, groups them by configuration (the same work), and computes rates."""

from collections.abc import Sequence
from dataclasses import replace

from trainstep.config.op import IMPLEMENTATIONS
from trainstep.costs.single_op import SIZES
from trainstep.grouping import grouped
from trainstep.records.record import Record
from trainstep.report.kit.peers import Configuration, by_work, implementation, median_s, ordered
from trainstep.report.kit.rows import Row, words

_SIZES = {name for names in SIZES.values() for name in names}
_NOT_THE_WORK = ("implementation", "warmups", "steps")


def named_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows with the op's sizes as one value of their points: `8192 x 4096`."""
    return [replace(row, point=_point(row)) for row in rows]


def _point(row: Row) -> dict[str, object]:
    config = row.record.config
    first = {"op": config["op"], "shape": shape_words(row.record)}
    first |= {name: config[name] for name in ("direction", "dtype", "implementation")}
    return first | {name: value for name, value in row.point.items() if name not in (*first, *_SIZES)}


def shape_words(record: Record) -> str:
    """`8192 x 4096`; for rotary `8192 x 32 x 128`, or `8192 x 32 + 8 x 128` with fewer heads of keys than of queries."""
    sizes = {name: record.config.get(name) for name in SIZES.get(record.config["op"], ())}
    if sizes.get("key_heads") not in (None, sizes.get("heads")):
        sizes["heads"] = f"{sizes['heads']} + {sizes['key_heads']}"
    return " x ".join(words(size) for name, size in sizes.items() if name != "key_heads")


def works_of(rows: Sequence[Row]) -> list[Configuration]:
    """The configurations of rows that `named_rows` has named, in the order of appearance."""
    names = dict.fromkeys(name for row in rows for name in row.point if name not in _NOT_THE_WORK)
    works = []
    for row, alike in by_work(rows, list(names)):
        by_name = grouped(alike, implementation)
        cells = {name: _shown(by_name[name]) for name in ordered(by_name, IMPLEMENTATIONS)}
        works.append(Configuration(row=row, cells=cells, left_aside=len(alike) - len(cells)))
    return works


def _shown(rows: Sequence[Row]) -> Row:
    """The row of an implementation: the fastest where it ran with several numbers of timed passes, else the first."""
    timed = [(time_s, row) for row in rows if (time_s := median_s(row)) is not None]
    return min(timed, key=lambda pair: pair[0])[1] if timed else rows[0]


def busy_s(row: Row) -> float | None:
    """Seconds that the device works in a call; where that is unknown, the median time of a call."""
    known: float | None = row.record.fact("device_busy_s")
    return known if known and row.record.failure is None else median_s(row)


def bytes_per_s(row: Row) -> float | None:
    """The least bytes of the pass over the time that the device works."""
    return _per_s(row, "bytes")


def flops_per_s(row: Row) -> float | None:
    """The FLOPs of the pass over the time that the device works."""
    return _per_s(row, "flops")


def _per_s(row: Row, name: str) -> float | None:
    amount, time_s = row.record.fact(name), busy_s(row)
    return amount / time_s if amount and time_s else None


def copy_share(row: Row, ceilings: Sequence[Row]) -> float | None:
    """The rate over that of a copy within the same device's memory; None if `ceilings` has no such copy."""
    rate, chip = bytes_per_s(row), _chip(row)
    copies = [
        other.record.fact("rate")
        for other in ceilings
        if other.record.config["kind"] == "copy" and _chip(other) == chip
    ]
    known = [copy for copy in copies if copy]
    return rate / max(known) if rate and known else None


def _chip(row: Row) -> tuple[object, ...]:
    environment, device = row.record.environment, row.record.config.get("device")
    return (device, environment.gpu if device == "cuda" else environment.cpu)

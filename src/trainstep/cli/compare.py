"""`trainstep compare`: did it get faster? Two files of records, cell by cell, with intervals and verdicts."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trainstep.cli.reading import read_limits
from trainstep.reading import limited_here
from trainstep.records.compare import Comparison, compare_records, match_records
from trainstep.records.record import Record
from trainstep.records.store import Store


def compare(
    a: Path,
    b: Path,
    /,
    *,
    quantity: str | None = None,
    minimum_effect: float = 0.02,
    allow_mixed: Annotated[bool, Parameter(negative=())] = False,
    timeout_s: float | None = None,
    memory_limit_gib: float | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Compare B against A: each cell both hold, by the ratio of times with its interval: faster, slower or cannot tell.

    To compare variants of one run (precision, attention...), let them take turns: trainstep bench --compare.

    Examples:

        trainstep compare runs/before.jsonl runs/after.jsonl

        trainstep compare before.jsonl after.jsonl --quantity forward --json

    Parameters
    ----------
    a
        File of records: the base.
    b
        File of records: what is judged.
    quantity
        step, forward, backward, optimizer, enqueue; by default step, or the first that the cells hold (attention: time_s).
    minimum_effect
        Differences below this share are 'cannot tell'.
    allow_mixed
        Compare records of unlike machines all the same.
    timeout_s
        Seconds until reading the records is given up, by default 60.
    memory_limit_gib
        Memory in GiB that reading the records may take, by default 1.86.
    json
        Print JSON.
    """
    if not minimum_effect >= 0:
        raise ValueError(f"minimum_effect: must be a share of at least 0, not {minimum_effect}")
    with limited_here(read_limits(timeout_s, memory_limit_gib), f"{a}, {b}"):
        matches = match_records(Store(a).read(), Store(b).read())
    if not matches.pairs:
        raise ValueError(f"{a} and {b} have no cell in common: they hold other configs")
    quantity = quantity or _first_quantity([record for pair in matches.pairs for record in pair])
    held = any(quantity in record.samples for pair in matches.pairs for record in pair)
    found = [
        (
            left,
            (_lacking(left, right, quantity) if held else None)
            or compare_records(left, right, quantity=quantity, minimum_effect=minimum_effect, allow_mixed=allow_mixed),
        )
        for left, right in matches.pairs
    ]
    if json:
        from trainstep.report.visible import ascii_json

        print(ascii_json([{"config": _plain(record), **asdict(comparison)} for record, comparison in found], indent=2))
        return
    _show(found)
    for name, only in ((a, matches.only_a), (b, matches.only_b)):
        if only:
            print(f"only in {name}: {len(only)} cell{'s' * (len(only) > 1)}")


def _first_quantity(records: Sequence[Record]) -> str:
    """`step` where any has it, as training steps do; else what the first that ran timed first."""
    held = [name for record in records for name in record.samples]
    return "step" if "step" in held else next(iter(held), "step")


def _lacking(a: Record, b: Record, quantity: str) -> Comparison | None:
    """'cannot tell' where one of two cells that ran did not measure what others did (no optimizer in mode forward)."""
    for side, record in (("a", a), ("b", b)):
        if record.failure is None and quantity not in record.samples:
            known = ", ".join(record.samples) or "no samples at all"
            return Comparison(
                verdict="cannot tell", reason=f"{side} holds no {quantity}; it holds {known}", quantity=quantity
            )
    return None


def _show(found: list[tuple[Record, Comparison]]) -> None:
    """One line a cell, aligned."""
    from trainstep.report.forms import ratio_words
    from trainstep.report.rows import rows_of
    from trainstep.report.visible import one_line

    rows = rows_of([("", record) for record, _ in found])
    labels = [row.label() for row in rows]
    width = max(map(len, labels))
    for label, (_, comparison) in zip(labels, found, strict=True):
        ratio = "" if comparison.ratio is None else f"{ratio_words(comparison.ratio):>8}  "
        print(f"{label:<{width}}  {ratio}{comparison.verdict}: {one_line(comparison.reason)}")


def _plain(record: Record) -> dict[str, object]:
    from trainstep.report.rows import flat_config

    return flat_config(record)

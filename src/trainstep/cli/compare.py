"""`trainstep compare`: compare two files of records cell by cell, with intervals and verdicts."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainstep.cli.options import read_limits
from trainstep.cli.streams import tell_reading
from trainstep.reading import limited_here
from trainstep.records.compare import Comparison, Matches, compare_records, match_records
from trainstep.records.record import Record
from trainstep.records.store import Store

if TYPE_CHECKING:
    from trainstep.report.kit.answer import Answer
    from trainstep.report.step.before_after import Change


def compare(
    a: Path,
    b: Path,
    /,
    *,
    fail_if_slower: Annotated[float | None, Parameter(metavar="[PERCENT]")] = None,
    quantity: str | None = None,
    minimum_effect: float = 0.02,
    allow_mixed: Annotated[bool, Parameter(negative=())] = False,
    timeout_s: float | None = None,
    memory_limit_gib: float | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Compare B with A, cell by cell: times in ms, the ratio with its interval, faster, slower, under 2 % or cannot tell.

    To compare variants of one run (precision, attention...), interleave them: trainstep bench --compare. All runs of a
    script (trainstep run) are one cell, and a run is one value, its median step: a verdict needs five runs in each file.

    Exit codes: 0 compared; 1 with --fail-if-slower, if a cell is slower or fails now; 2 bad input, or no cell in common.

    Examples:

        trainstep compare runs/before.jsonl runs/after.jsonl

        trainstep compare before.jsonl after.jsonl --fail-if-slower 5    (in CI)

        trainstep compare before.jsonl after.jsonl --quantity forward --json

    Parameters
    ----------
    a
        File of records: the base, before.
    b
        File of records: the variant to judge, after.
    fail_if_slower
        End with exit code 1 if a cell is 'slower' and its whole interval is beyond this many percent (without a number: 0, so that
        every 'slower' counts), or if a cell fails that ran before.
    quantity
        step, forward, backward, optimizer, enqueue; by default step, or the first quantity of the cells (attention: time_s).
    minimum_effect
        Differences below this share are 'under 2 %' where the whole interval shows that, else (and in JSON) 'cannot tell'.
    allow_mixed
        Compare records even if their machines differ.
    timeout_s
        Seconds after which reading the records is stopped, by default 60.
    memory_limit_gib
        Memory in GiB for reading the records, by default 1.86.
    json
        Print JSON, which begins with `answer`.
    """
    if not minimum_effect >= 0:
        raise ValueError(f"minimum_effect: must be a share of at least 0, not {minimum_effect}")
    if fail_if_slower is not None and not 0 <= fail_if_slower < math.inf:
        raise ValueError(f"fail_if_slower: must be a percentage of at least 0, such as 5, not {fail_if_slower:g}")
    tell_reading([a, b])
    with limited_here(read_limits(timeout_s, memory_limit_gib), f"{a}, {b}"):
        records = [Store(path).read() for path in (a, b)]
    if empty := next((path for path, in_file in zip((a, b), records, strict=True) if not in_file), None):
        raise ValueError(f"{empty}: holds no records")
    matches = _matches(a, b, *records)
    quantity = quantity or _first_quantity([record for pair in matches.pairs for record in pair])
    from trainstep.report.step.before_after import changes_answer

    changes = _changes(matches, quantity, minimum_effect, allow_mixed=allow_mixed)
    answer = changes_answer(changes, quantity)
    if json:
        from trainstep.report.kit.answer import plain_answers
        from trainstep.report.kit.visible import ascii_json

        rows = [change.plain() for change in changes]
        print(ascii_json({"answer": plain_answers([answer]), "rows": rows}, indent=2))
    else:
        _show(answer, changes, quantity)
        for name, only in ((a, matches.only_a), (b, matches.only_b)):
            if only:
                print(f"only in {name}: {len(only)} cell{'s' * (len(only) > 1)}")
    return 0 if fail_if_slower is None else _gate(changes, fail_if_slower)


def _matches(a: Path, b: Path, before: Sequence[Record], after: Sequence[Record]) -> Matches:
    """The cells that both files have, all records of a script's runs as one; ValueError if there is none."""
    from trainstep.report.run.compared import whole_runs

    cells = whole_runs(before, after)
    matches = match_records(*cells)
    if not matches.pairs:
        from trainstep.report.step.before_after import nothing_in_common

        raise ValueError(f"{a} and {b} have no cell in common: {nothing_in_common(*cells)}")
    return matches


def _first_quantity(records: Sequence[Record]) -> str:
    """`step` if any record has it, as training steps do; else the first quantity of the first record with samples."""
    quantities = [name for record in records for name in record.samples]
    return "step" if "step" in quantities else next(iter(quantities), "step")


def _changes(matches: Matches, quantity: str, minimum_effect: float, *, allow_mixed: bool) -> "list[Change]":
    """The comparisons of all common cells."""
    from trainstep.report.kit.script_cells import is_of_runs, with_doubts
    from trainstep.report.step.before_after import changes_of

    known = any(quantity in record.samples for pair in matches.pairs for record in pair)
    compared = []
    for a, b in matches.pairs:
        comparison = _lacking(a, b, quantity) if known else None
        if comparison is None:
            comparison = compare_records(
                a, b, quantity=quantity, minimum_effect=minimum_effect, allow_mixed=allow_mixed
            )
            comparison = with_doubts(a, b, comparison) if is_of_runs(a) else comparison
        compared.append((a, b, comparison))
    return changes_of(compared)


def _lacking(a: Record, b: Record, quantity: str) -> Comparison | None:
    """'cannot tell' if one of two cells that ran lacks the quantity (mode forward has no optimizer, for example); else None."""
    for side, record in (("a", a), ("b", b)):
        if record.failure is None and quantity not in record.samples:
            known = ", ".join(record.samples) or "no samples at all"
            reason = f"{side} has no {quantity}; it has {known}"
            return Comparison(verdict="cannot tell", reason=reason, quantity=quantity)
    return None


def _show(answer: "Answer", changes: "Sequence[Change]", quantity: str) -> None:
    from trainstep.report.kit.answer import print_answers
    from trainstep.report.kit.terminal import print_tables
    from trainstep.report.step.before_after import changes_notes, changes_table

    print_answers([answer], sys.stdout)
    print_tables([changes_table(changes, quantity)], changes_notes(changes), sys.stdout)


def _gate(changes: "Sequence[Change]", percent: float) -> int:
    """The exit code of --fail-if-slower: 1, with the cells named on standard error, if a cell is slower or fails now; else 0."""
    reasons = [reason for change in changes if (reason := change.failure(percent))]
    for reason in reasons:
        print(f"trainstep: fail_if_slower {percent:g} %: {reason}", file=sys.stderr)
    return 1 if reasons else 0

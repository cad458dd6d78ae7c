"""Compares our implementation of an op with each peer: configurations (the same work), ratios of times, and their table.

Our implementation is compared with each peer by the ratio of times with its interval, if both ran, and by geometric means of these
ratios. kit/peer_answer.py says it in sentences.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trainstep.grouping import grouped
from trainstep.records.compare import Comparison
from trainstep.records.record import Failure, Record
from trainstep.report.kit.forms import Form, failure_word, needed_words, ratio_words, shortened
from trainstep.report.kit.ranking import Ratio, ratio_of, summary_of
from trainstep.report.kit.rows import Row, words
from trainstep.report.kit.tables import Column, Entry, Table, point_columns

OURS = "trainstep"
TIME, HOST = "time_s", "host_s"
_SHORT = 44
"""The most characters of a failure's message in a table's cell."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One piece of work. `cells`: implementation -> its row."""

    row: Row
    """Any of its rows, with a point reduced to the names of the work."""
    cells: Mapping[str, Row]
    left_aside: int
    """The number of further rows of the same work and implementation, for instance at other tiles."""

    @cached_property
    def against(self) -> Mapping[str, Ratio]:
        """Peer -> our time over its time, or why there is no ratio; empty if our kernel has no cell."""
        peers = [name for name in self.cells if name != OURS and OURS in self.cells]
        return {peer: ratio_of(self.cells[peer], self.cells[OURS], TIME) for peer in peers}

    @property
    def ratios(self) -> dict[str, Ratio]:
        """The entries of `against` that have a ratio."""
        return {peer: ratio for peer, ratio in self.against.items() if ratio.known}


def by_work(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[Row, list[Row]]]:
    """Groups of rows with equal values of these names, each after a row whose point has only these names."""
    points = grouped(rows, lambda row: tuple((name, words(row.point.get(name))) for name in names))
    return [
        (replace(alike[0], point={name: alike[0].point.get(name) for name in names}), alike)
        for alike in points.values()
    ]


def ordered(names: Iterable[str], known: Sequence[str]) -> list[str]:
    """Each of these names once: in the order of `known`, then unknown names."""
    present = dict.fromkeys(names)
    first = [name for name in known if name in present]
    return [*first, *(name for name in present if name not in first)]


def implementation(row: Row) -> str:
    return words(row.record.config.get("implementation"))


def median_s(row: Row) -> float | None:
    """The median time of a call in seconds; None if no call was timed."""
    time = summary_of(row.record, TIME)
    return time.median if time else None


def mean_ratio(ratios: Iterable[Ratio]) -> float:
    """The geometric mean of the ratios that have a number."""
    logs = [math.log(ratio.known.ratio) for ratio in ratios if ratio.known and ratio.known.ratio]
    return math.exp(sum(logs) / len(logs))


def failure_cell(record: Record) -> str:
    """The short words of a failure in a table's cell: `OOM (needs 68.7 GiB)`, `illegal tile: …`, `not for fp32`; empty if it ran.

    A message that refuses a shape, a dtype or a tile is reduced to its first clause, without names that the column repeats.
    """
    failure = record.failure
    if failure is None:
        return ""
    word = failure_word(failure)
    if failure.kind == "out_of_memory":
        needed = record.fact("needed_bytes")
        if needed is not None:
            return f"{word} (needs {needed_words(needed)})"
        return word if failure.asked_bytes is None else f"{word} (asked for {needed_words(failure.asked_bytes)})"
    message = (
        _without_field(record, failure).removeprefix(f"{record.config.get('implementation')} ").removeprefix("is ")
    )
    if failure.kind != "unsupported" and not message.startswith(("illegal tile", "not installed")):
        return word
    clause = re.split(r"; | \(", message, maxsplit=1)[0]
    return shortened(clause, _SHORT)


def failure_reason(record: Record) -> str:
    """The sentence under a table that explains `failure_cell`; all cells out of memory share one sentence."""
    failure = record.failure
    if failure is None:
        return ""
    if failure.kind == "out_of_memory":
        return (
            "OOM (needs …): out of memory; the size is that of inputs, scores, softmax, output and gradients together"
        )
    message, cell = _without_field(record, failure), failure_cell(record)
    return message if cell in message else f"{cell}: {message}"


def _without_field(record: Record, failure: Failure) -> str:
    """The message without the name of a config field at its beginning."""
    message = " ".join(failure.message.split())
    field, _, after = message.partition(": ")
    return after if field in record.config and after else message


def ratio_table(works: Sequence[Configuration], peers: Iterable[str]) -> Table:
    """A row per configuration and a column per peer, in this order."""
    ratios = [ratio for work in works for ratio in work.against.values()]
    troubles = dict.fromkeys(ratio.trouble for ratio in ratios if ratio.trouble and not ratio.failure)
    few = dict.fromkeys(ratio.known.reason for ratio in ratios if ratio.known and not ratio.interval)
    note = " ".join(
        [
            "The time of trainstep over the peer's, with its 99 % interval: below 1, trainstep is faster. “?”: cannot tell; “=”: "
            "the interval lies within 2 % of 1.",
            *(f"No ratio: {trouble}." for trouble in list(troubles)[:3]),
            *(f"No interval: {reason}." for reason in few),
        ]
    )
    columns = [
        *point_columns(works),
        *map(_ratio_column, peers),
    ]
    numbers = [_ratio_numbers(work, peer) for work in works for peer in work.against]
    return Table.of("trainstep against each peer: ratio of times", works, columns, note=note, raw=numbers)


def _ratio_column(peer: str) -> Column:
    """The column of our time over a peer's; if one of them failed, it shows the failure."""

    def get(work: Configuration) -> Comparison | Entry | None:
        ratio = work.against.get(peer)
        if ratio is None:
            return None
        failed = next((row.record for row in (ratio.base, ratio.row) if row.record.failure), None)
        if failed is not None:
            return Entry(text=failure_cell(failed), failure=failed.failure)
        return ratio.known or Entry(text="no ratio")

    return Column(f"ours / {peer}", _RATIO, get, failed=None)


def _ratio_words(comparison: Comparison) -> str:
    ends = [ratio_words(end) for end in (comparison.low, comparison.high) if end is not None]
    interval = f" [{', '.join(ends)}]" if ends else ""
    mark = {"faster": "", "slower": "", "cannot tell": " ?"}.get(comparison.word, " =")
    return f"{ratio_words(comparison.ratio or 0.0)}{interval}{mark}"


_RATIO = Form(text=_ratio_words, sort=lambda comparison: comparison.ratio)


def _ratio_numbers(work: Configuration, peer: str) -> dict[str, Any]:
    """A ratio for programs; its keys name the two cells."""
    ratio = work.against[peer]
    return {
        **work.row.point,
        "compared_along": "implementation",
        "implementation": OURS,
        "against": peer,
        **ratio.numbers(),
        **({"reason": "one of the two failed"} if ratio.failure else {}),
        "against_key": ratio.base.record.key,
    }

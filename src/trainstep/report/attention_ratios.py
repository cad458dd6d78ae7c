"""Ours against each: the ratio of times with its interval where both ran, and the geometric means of these ratios."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.records.compare import VERDICTS, Comparison, compare_records
from trainstep.report.attention_rows import (
    OURS,
    TIME,
    Configuration,
    configuration_columns,
    failed_entry,
    implementations,
)
from trainstep.report.forms import ABSENT, ratio_words
from trainstep.report.hand_built import Column
from trainstep.report.rows import Row
from trainstep.report.tables import Entry, Table

SIZES = ("seq", "keys", "head_dim", "batch", "heads", "key_heads")
"""Names along which a geometric mean goes; along the others there is one for each value."""
LONG_SEQ = 4096
"""Tokens; from here on the kernels are the time, and neither launches nor a part-filled GPU."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Our time over a peer's in one configuration, or why there is none."""

    configuration: Configuration
    peer: str
    found: Comparison | None = None
    trouble: str = ""

    @property
    def ours(self) -> Row:
        return self.configuration.cells[OURS]

    @property
    def theirs(self) -> Row:
        return self.configuration.cells[self.peer]


def ratios(found: Sequence[Configuration]) -> list[Ratio]:
    """Of every configuration that has ours and a peer, peer by peer."""
    return [
        _ratio(one, peer)
        for one in found
        if OURS in one.cells
        for peer in implementations([*one.cells.values()])
        if peer != OURS
    ]


def ratio_tables(found: Sequence[Ratio]) -> list[Table]:
    """The geometric means, then a row a configuration and a column a peer; none where ours met nobody."""
    if not found:
        return []
    any_ratio = any(one.found and one.found.ratio for one in found)
    return [*([_means_table(found)] if any_ratio else []), _ratio_table(found)]


def _ratio(configuration: Configuration, peer: str) -> Ratio:
    ours, theirs = configuration.cells[OURS].record, configuration.cells[peer].record
    if ours.failure or theirs.failure:
        return Ratio(configuration=configuration, peer=peer, trouble="one of the two failed")
    try:
        made = compare_records(theirs, ours, quantity=TIME)
    except ValueError as error:
        return Ratio(configuration=configuration, peer=peer, trouble=str(error))
    return Ratio(configuration=configuration, peer=peer, found=made, trouble="" if made.ratio else made.reason)


def _ratio_table(found: Sequence[Ratio]) -> Table:
    peers = implementations([one.theirs for one in found])
    by_configuration: dict[int, dict[str, Ratio]] = {}
    for one in found:
        by_configuration.setdefault(id(one.configuration), {})[one.peer] = one
    lines = [*by_configuration.values()]
    names = configuration_columns([next(iter(line.values())).configuration for line in lines])
    entries = tuple(
        (*(mine[place] for _, mine in names), *(_ratio_entry(line.get(peer)) for peer in peers))
        for place, line in enumerate(lines)
    )
    failed = [one for one in found if one.ours.record.failure or one.theirs.record.failure]
    troubles = dict.fromkeys(one.trouble for one in found if one.trouble and one not in failed)
    note = "Our time over theirs, with its 99 % interval: below 1 ours is faster. “?”: cannot tell."
    return Table(
        title="Ours against each: ratio of times",
        columns=(*(column for column, _ in names), *(Column(title=f"ours / {peer}", number=True) for peer in peers)),
        entries=entries,
        note=" ".join([note, *(f"No ratio: {trouble}." for trouble in list(troubles)[:3])]),
        raw=tuple(map(_ratio_numbers, found)),
    )


def _ratio_entry(one: Ratio | None) -> Entry:
    if one is None:
        return Entry(text=ABSENT)
    failed = next((row.record for row in (one.theirs, one.ours) if row.record.failure), None)
    if failed is not None:
        return failed_entry(failed)
    found = one.found
    if found is None or found.ratio is None or found.low is None or found.high is None:
        return Entry(text="no ratio")
    interval = f"{ratio_words(found.ratio)} [{ratio_words(found.low)}, {ratio_words(found.high)}]"
    return Entry(text=f"{interval}{' ?' if found.verdict == 'cannot tell' else ''}", sort=found.ratio)


def _ratio_numbers(one: Ratio) -> dict[str, Any]:
    """What a program reads of a ratio; the keys say which two cells it is of."""
    found = one.found
    return {
        **one.configuration.point,
        "compared_along": "implementation",
        "implementation": OURS,
        "against": one.peer,
        "ratio": found and found.ratio,
        "ratio_low": found and found.low,
        "ratio_high": found and found.high,
        "verdict": found.verdict if found else "cannot tell",
        "reason": found.reason if found else one.trouble,
        "key": one.ours.record.key,
        "against_key": one.theirs.record.key,
    }


def _means_table(found: Sequence[Ratio]) -> Table:
    """A row for each peer and value of what is not a size, over all lengths and over the long ones."""
    groups: dict[Any, list[Ratio]] = {}
    for one in found:
        if one.found and one.found.ratio:
            groups.setdefault((one.configuration.rest(*SIZES), one.peer), []).append(one)
    names = [name for name in found[0].configuration.point if name not in SIZES]
    entries = []
    for (rest, peer), mine in groups.items():
        long = [one for one in mine if (number_of_tokens(one) or 0) >= LONG_SEQ]
        start = (*(Entry(text=value) for _, value in rest), Entry(text=peer))
        entries.append((*start, *_mean_entries("all", mine)))
        if long and len(long) < len(mine):
            entries.append((*start, *_mean_entries(f"≥ {LONG_SEQ:,}", long)))
    columns = [*(Column(title=name) for name in names), Column(title="against"), Column(title="lengths")]
    numbers = ("configurations", "time, ours / theirs", "speed, ours / theirs", *VERDICTS)
    return Table(
        title="Ours against each: geometric means",
        columns=(*columns, *(Column(title=title, number=True) for title in numbers)),
        entries=tuple(entries),
        note="Only configurations where both ran; the verdicts are those of each configuration.",
    )


def number_of_tokens(one: Ratio) -> float | None:
    value = one.ours.record.config.get("seq")
    return value if isinstance(value, int | float) else None


def geometric_mean(found: Sequence[Ratio]) -> float | None:
    """Of the ratios that there are."""
    logs = [math.log(one.found.ratio) for one in found if one.found and one.found.ratio]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _mean_entries(lengths: str, found: Sequence[Ratio]) -> list[Entry]:
    mean = geometric_mean(found) or 1.0
    verdicts = [one.found.verdict for one in found if one.found]
    counts = [verdicts.count(verdict) for verdict in VERDICTS]
    return [
        Entry(text=lengths),
        Entry(text=str(len(found)), sort=len(found)),
        Entry(text=ratio_words(mean), sort=mean),
        Entry(text=ratio_words(1 / mean), sort=1 / mean),
        *(Entry(text=str(count), sort=count) for count in counts),
    ]

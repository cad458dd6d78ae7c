"""What several ranks found as one record: rank 0's findings, the slowest rank's times, and the table `ranks` with everyone's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainstep.records.ranks import SLOWEST
from trainstep.records.tables import RANKS

Plain = Mapping[str, Any]
_COLUMNS = ("rank", "quantity", "unit", "values")


def merged_findings(findings: Sequence[Plain]) -> dict[str, Any]:
    """Findings as a cell's process sends them, in the order of ranks. Those of SLOWEST (`step` and the like) become, value by
    value, the slowest rank's: a step is over when its last rank is. The table `ranks` has every quantity that all ranks sampled
    alike.
    """
    first = findings[0]
    common = [name for name in first["samples"] if _alike([one["samples"].get(name) for one in findings])]
    samples = dict(first["samples"])
    for name in set(common) & set(SLOWEST):
        each = [one["samples"][name] for one in findings]
        samples[name] = {**each[0], **{part: _slowest(one[part] for one in each) for part in ("values", "warmups")}}
    rows = [
        (rank, name, one["samples"][name]["unit"], list(one["samples"][name]["values"]))
        for name in common
        for rank, one in enumerate(findings)
    ]
    return {**first, "samples": samples, "tables": {**first["tables"], RANKS: _columns(rows)}}


def joined_ranks(tables: Sequence[Plain]) -> dict[str, list[Any]]:
    """The tables `ranks` of several rounds of one cell as one: values end to end."""
    rows = [list(zip(*(table[name] for name in _COLUMNS), strict=True)) for table in tables]
    later = [{(rank, name): values for rank, name, _, values in one} for one in rows[1:]]
    return _columns(
        (rank, name, unit, [*values, *(value for one in later for value in one.get((rank, name), ()))])
        for rank, name, unit, values in rows[0]
    )


def _alike(samples: Sequence[Plain | None]) -> bool:
    """Whether every rank took as many values of the same unit."""
    shapes = {None if one is None else (one["unit"], len(one["values"]), len(one["warmups"])) for one in samples}
    return len(shapes) == 1 and None not in shapes


def _slowest(of_ranks: Iterable[Sequence[float]]) -> list[float]:
    return [max(values) for values in zip(*of_ranks, strict=True)]


def _columns(rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Any]]:
    found = list(rows)
    return {name: [row[place] for row in found] for place, name in enumerate(_COLUMNS)}

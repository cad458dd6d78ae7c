"""Puts the records of a run together: its steps in their order, what was counted, and its last inspected step.

    for run in runs_of(rows): run.step_s, run.share(Part.DATA)

A run writes a record every few seconds. Ranks are runs of their own, under one name.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath
from typing import Any

from trainstep.config.script import Part
from trainstep.grouping import grouped
from trainstep.records.record import Record
from trainstep.records.tables import table_lines
from trainstep.report.kit.rows import Row
from trainstep.report.kit.script_cells import rank_words, script_words

Lines = list[dict[str, Any]]
_INSTALLED = "site-packages"


@dataclass(frozen=True)
class Run:
    """One rank of one run. `rows`: its records, in the order of their steps. `is_named`: its own name tells it from the others."""

    rows: tuple[Row, ...]
    is_named: bool = False

    @property
    def row(self) -> Row:
        """The last record's row, which stands for the run in tables."""
        return self.rows[-1]

    @property
    def last(self) -> Record:
        return self.row.record

    @property
    def name(self) -> str:
        """`train.py --lr 1`, with the run's own name where another run has the same words, and the rank if there are several."""
        config = self.last.config
        run = f", run {config['run']}" if self.is_named else ""
        return f"{script_words(config)}{run}{rank_words(config)}"

    @property
    def on_gpu(self) -> bool:
        return bool(self.last.config["device"] == "cuda")

    @cached_property
    def samples(self) -> dict[str, tuple[float, ...]]:
        """The values of all records, without warm-ups."""
        values: dict[str, list[float]] = {}
        for row in self.rows:
            for name, samples in row.record.samples.items():
                values.setdefault(name, []).extend(samples.values)
        return {name: tuple(column) for name, column in values.items() if column}

    @cached_property
    def warmups(self) -> tuple[float, ...]:
        """The times of the warm-up steps."""
        return tuple(
            value for row in self.rows if "step" in row.record.samples for value in row.record.samples["step"].warmups
        )

    @property
    def steps(self) -> int:
        """The steps that were seen, warm-ups and inspected steps among them."""
        return max((row.record.fact("steps_seen", 0) for row in self.rows), default=0)

    @property
    def step_s(self) -> float | None:
        """The median step's time; for a run with nothing but warm-ups, the last warm-up's."""
        times = self.samples.get("step") or self.warmups[-1:]
        return statistics.median(times) if times else None

    def share(self, part: str) -> float:
        """The share of the steps' whole time that this part, or `garbage_collection`, takes."""
        return self.share_of(sum(self.samples.get(part, ())))

    def share_of(self, seconds: float) -> float:
        """This time as a share of the steps' total time."""
        total_s = sum(self.samples.get("step", ()))
        return seconds / total_s if total_s else 0.0

    def shares(self) -> list[tuple[Part, float]]:
        """The parts with their shares, the largest first."""
        return sorted(((part, self.share(part)) for part in Part), key=lambda pair: -pair[1])

    def total(self, fact: str) -> float:
        """The sum of a fact over the records."""
        return float(sum(row.record.fact(fact, 0) for row in self.rows))

    def latest(self, fact: str) -> Any:
        """The fact's value in the last record that has it; None without one."""
        values = (row.record.fact(fact) for row in reversed(self.rows))
        return next((value for value in values if value is not None), None)

    @cached_property
    def inspected(self) -> list[Record]:
        """The records whose inspected step could be read, in order."""
        return [row.record for row in self.rows if row.record.tables.get("classes")]

    @property
    def exposed_share(self) -> float:
        """The exposed communication of an inspected step as a share of its time: the median over the inspected steps."""
        shares = [
            record.fact("exposed_s", 0.0) / record.fact("profiled_step_s")
            for record in self.inspected
            if record.fact("profiled_step_s")
        ]
        return statistics.median(shares) if shares else 0.0

    @cached_property
    def waits(self) -> Lines:
        """The waiting lines, with calls and seconds per inspected step; first those seen in most steps, then the longest."""
        counted = [row.record for row in self.rows if row.record.fact("inspected_step") is not None]
        places: dict[tuple[str, int], dict[str, Any]] = {}
        for record in counted:
            for line in table_lines(record.tables.get("waits")):
                place = places.setdefault(
                    (line["file"], line["line"]), {**line, "calls": 0.0, "time_s": 0.0, "steps": 0}
                )
                place["calls"] += line["calls"] / len(counted)
                place["time_s"] += (line["time_s"] or 0.0) / len(counted)
                place["steps"] += 1
        return sorted(places.values(), key=lambda line: (-line["steps"], -line["time_s"]))

    def lines(self, table: str) -> Lines:
        """The lines of a table of all records."""
        return [line for row in self.rows for line in table_lines(row.record.tables.get(table))]

    @property
    def ending(self) -> str | None:
        """How the script ended; None if no record says it."""
        ending: str | None = self.last.fact("ending")
        return ending


def runs_of(rows: Iterable[Row]) -> list[Run]:
    """The runs in these rows, in order of appearance, and the ranks of each run in order."""
    by_rank = grouped(rows, lambda row: (row.record.config["run"], row.record.config["rank"]))
    names = list(dict.fromkeys(name for name, _ in by_rank))
    ordered = sorted(by_rank.items(), key=lambda item: (names.index(item[0][0]), item[0][1]))
    runs = [Run(tuple(sorted(same, key=lambda row: int(row.record.config["first_step"])))) for _, same in ordered]
    alike = Counter(run.name for run in runs)
    return [replace(run, is_named=alike[run.name] > 1) for run in runs]


def main_runs(runs: Sequence[Run]) -> list[Run]:
    """The first rank of each run, which inspects steps."""
    return [ranks[0] for ranks in grouped(runs, lambda run: str(run.last.config["run"])).values()]


def place_words(line: Mapping[str, Any]) -> str:
    """`my_project/train.py:12`: the file and its folder; for an installed package, the path inside site-packages."""
    parts = PurePath(str(line["file"])).parts
    start = parts.index(_INSTALLED) + 1 if _INSTALLED in parts else max(0, len(parts) - 2)
    return f"{PurePath(*parts[start:])}:{line['line']}"


def is_installed(line: Mapping[str, Any]) -> bool:
    """Whether the line is in an installed package, not in the user's own code."""
    return _INSTALLED in PurePath(str(line["file"])).parts

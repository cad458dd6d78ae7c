"""A step that several processes ran at the same time, each on its own: which of them is the slowest, and by how much.

Values of different processes are durations, each by its own clock. They are compared as medians, not as pairs, because the
processes do not wait for each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from trainstep.records.compare import Comparison, compare_samples
from trainstep.records.ranks import node_of_rank, rank_on, rank_values
from trainstep.records.record import Record, Samples
from trainstep.report.kit.charts import Section
from trainstep.report.kit.forms import MS_STD, TEXT, ratio_words
from trainstep.report.kit.rows import Row, words
from trainstep.report.kit.tables import Column, Line, Table, point_columns
from trainstep.report.step.recomputation import curve_tables

_NOTE = (
    "Each process took the step by itself, all at the same time; medians ± half the interquartile range, and the ratio to "
    "all others with its 99 % interval. The table of cells has the slowest."
)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The timed steps of one process."""

    rank: int
    node: str | None
    values: Sequence[float]
    against: Comparison
    """The process's steps compared with those of all others."""

    @property
    def time(self) -> tuple[float, float | None]:
        """Median and half the interquartile range in seconds."""
        if len(self.values) < 2:
            return self.values[0], None
        low, middle, high = quantiles(self.values, n=4, method="inclusive")
        return middle, (high - low) / 2

    @property
    def ratio(self) -> str | None:
        """`1.083 (1.051 to 1.112)`."""
        against = self.against
        if against.ratio is None or against.low is None or against.high is None:
            return None if against.ratio is None else ratio_words(against.ratio)
        return f"{ratio_words(against.ratio)} ({ratio_words(against.low)} to {ratio_words(against.high)})"

    def name(self, *, alone: bool) -> str:
        """`n2`, or `rank 5 (n2)` if nodes have several processes (`alone` is False); `rank 5` on a single node."""
        return rank_on(self.node, self.rank) if self.node is None or not alone else self.node


def taken(record: Record) -> list[Taken]:
    """The steps of each process, in the order of ranks; empty if there was only one process."""
    steps = rank_values(record, "step")
    if record.failure is not None or len(steps) < 2:
        return []

    def samples(ranks: Sequence[int]) -> Samples:
        return Samples(unit="s", values=tuple(value for rank in ranks for value in steps[rank]), warmups=())

    return [
        Taken(
            rank=rank,
            node=node_of_rank(record, rank),
            values=values,
            against=compare_samples(samples([r for r in steps if r != rank]), samples([rank]), paired=False),
        )
        for rank, values in steps.items()
    ]


def slowest_sentence(row: Row, *, named: bool) -> str:
    """Which node or process is the slowest, with its ratio to the others; empty if there was only one process.

    `named`: whether the sentence also names the cell.
    """
    processes = taken(row.record)
    if not processes:
        return ""
    slowest = max(processes, key=lambda process: (median(process.values), -process.rank))
    nodes = [process.node for process in processes]
    alone = len(set(nodes)) == len(nodes)
    name, what = slowest.name(alone=alone), f"{len(nodes)} {'nodes' if alone else 'processes'}"
    where = f" in {row.label()}" if named else ""
    against = slowest.against
    if against.ratio and against.low and against.high and against.verdict == "slower":
        interval = f"99 % interval {ratio_words(against.low)} to {ratio_words(against.high)}"
        times = f"{ratio_words(against.ratio)} times as long as the others' ({interval})"
        return f"{name} is the slowest of {what}{where}: its step takes {times}."
    if against.within is not None:
        return f"The slowest of {what}{where}, {name}, differs from the others by less than {against.word.split(' ', 1)[1]}."
    return f"The slowest of {what}{where} is {name}; whether the others are faster cannot be told: {against.reason}."


def step_tables(rows: Sequence[Row]) -> list[Table]:
    """The tables of timed steps besides the common one: a table of processes, and the curves of recomputation."""
    return [*_ranks_tables(rows), *curve_tables(rows)]


def ranks_sections(rows: Sequence[Row], _ceilings: Sequence[Row] = ()) -> list[Section]:
    """The section of a page, if several processes ran a step."""
    several = [row for row in rows if taken(row.record)]
    sentences = tuple(slowest_sentence(row, named=len(several) > 1) for row in several)
    tables = tuple(_ranks_tables(rows))
    return (
        [Section(title="Each node" if _on_nodes(rows) else "Each process", paragraphs=sentences, tables=tables)]
        if tables
        else []
    )


def _on_nodes(rows: Sequence[Row]) -> bool:
    return any(process.node for row in rows for process in taken(row.record))


def _ranks_tables(rows: Sequence[Row]) -> list[Table]:
    """A line for each process of each row; none if every row had only one process."""
    lines = [Line(row, process) for row in rows for process in taken(row.record)]
    columns = [
        *point_columns(lines, without=("ranks", "nodes")),
        Column("node", TEXT, "node", names=True, optional=True),
        Column("rank", TEXT, lambda line: str(line.value.rank), names=True),
        Column("step (ms)", MS_STD, "time"),
        Column("against the others", TEXT, "ratio", optional=True),
        Column("verdict", TEXT, lambda line: line.value.against.word),
    ]
    title = "Step on each node" if _on_nodes(rows) else "Step of each process"
    return [Table.of(title, lines, columns, note=_NOTE, raw=map(_numbers, lines))] if lines else []


def _numbers(line: Line) -> dict[str, object]:
    process = line.value
    return {
        "workload": line.row.record.workload,
        **{name: words(value) for name, value in line.row.point.items()},
        "node": process.node,
        "rank": process.rank,
        "step_median_s": process.time[0],
        "step_samples_count": len(process.values),
        "ratio": process.against.ratio,
        "ratio_low": process.against.low,
        "ratio_high": process.against.high,
        "verdict": process.against.verdict,
        "key": line.row.record.key,
    }

"""The tables of `trainstep parallel`: the step, the communication and the memory of each strategy.

The baseline is the strategy `none`, whose ranks compute the same step and do not communicate.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainstep.config.parallel import STRATEGY_FIELDS, USED_BY, needless
from trainstep.costs.strategies import BASELINE
from trainstep.records.derive import tokens_per_s
from trainstep.records.record import Record
from trainstep.records.tables import table_lines
from trainstep.report.kit.forms import ABSENT, COUNT, MS, MS_STD, PERCENT, RATIO, SIZE, TEXT, WHOLE, beside, ratio_words
from trainstep.report.kit.ranking import Ratio, mean_column, median_and_range, median_of, ratio_of
from trainstep.report.kit.rows import Row, doubts, flat_config, quantities, shown_facts, words
from trainstep.report.kit.tables import Column, Entry, Line, Table, doubts_column, point_columns, rank_columns, row_of
from trainstep.report.step.recomputation import curve_tables

_DETAILED = 2
"""The most cells whose messages are listed outside the page."""
CATEGORIES = ("parameters", "gradients", "optimizer state", "communication", "activations")
_ALLOCATOR = ("unnamed", "allocated")
_POINTS = (
    "Of rank 0. A number in brackets is what the formula gives; without brackets both agree. Torch's strategies have no "
    "formula, and buffers that are not visible here. Communication: buffers, and parameters gathered from other ranks. "
    "Activations: what forward saved for backward; the formula uses the measured value."
)
_UNNAMED = (
    "Unnamed: allocated and in none of these categories: batches, the loss, workspaces of libraries, temporaries, buffers of "
    "torch's strategies."
)
_DRIVER = (
    "{unit}. Memory of rank 0's process after a step, as nvidia-smi would show it: memory that the allocator reserved "
    "(allocated, and cached for reuse), the CUDA context, memory that NCCL took when the ranks met (buffers, kernels), and "
    "the rest: kernels loaded since."
)
_STEPS = (
    f"Median ± half the interquartile range of the slowest rank. Ratio: to sync {BASELINE}, whose ranks do not communicate, "
    "from interleaved pairs (so it can differ from the quotient of the medians), with its 99 % interval or, with too few pairs, "
    "the ratio of each pair; a doubt names strategies that were not interleaved. Peak: {unit}, of rank 0."
)
_WINDOW = (
    "Window: several steps timed with no synchronisation between them, so that work left for the next step counts."
)
_COMMUNICATION = (
    "Of one profiled step; step times are of steps without a profiler. Sent: bytes of tensors; on the wire: the most that a "
    "rank sends in a ring. In brackets: the formula's number, if it differs. From the trace of the rank that waited least for "
    "others: in flight, the time with at least one message; waiting, the part of it until the last rank joins; exposed, the part "
    "of it without computation. Longer than none: the difference of the medians, which is the cost to the whole step and includes "
    "kernels that messages slow down."
)
_BELOW_0 = "Below 0: within the noise, unless the interval of the ratio excludes 1."
_BOTH = ("", "expected_")
"""Prefixes of column names in the record's table: counted, and by formula."""
Held = dict[str, dict[str, tuple[int, int | None]]]
"""Point of the step -> category -> bytes, measured and by formula."""
_MESSAGE_TIMES = ("communication", "waiting", "transfer", "exposed")
_WITHOUT_EFFECT = {"check_agreement", "inspect", "keep_trace"}
"""Config fields that change neither the step nor its time."""


def parallel_tables(rows: Sequence[Row]) -> list[Table]:
    """All tables that these records fill."""
    strategies = strategies_of(rows)
    messages = message_tables(strategies) if len(strategies) <= _DETAILED else []
    return [*time_tables(strategies), *memory_tables(strategies), *curve_tables(rows), *messages]


@dataclass(frozen=True, kw_only=True)
class StrategyRow:
    """A strategy's row, and the baseline's row of the same run; `base` is None if that is missing, failed, or is this row."""

    row: Row
    base: Row | None

    @property
    def record(self) -> Record:
        return self.row.record

    @property
    def sync(self) -> str:
        return str(self.record.config["sync"])

    @property
    def name(self) -> str:
        """`bucketed 25 MiB`: the strategy, and those of its options that vary in the report."""
        names = [name for name in USED_BY if name in self.row.point and name not in needless(self.record.config)]
        options = [_option(name, self.row.point[name]) for name in names]
        return " ".join([self.sync, *filter(None, options)])

    @property
    def place(self) -> str:
        """The point without the strategy and its options: `tiny 64`."""
        return self.row.label(without=STRATEGY_FIELDS)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of a table of the record; empty if the cell failed."""
        return table_lines(self.record.tables.get(name)) if self.record.failure is None else []

    def ratio(self, quantity: str) -> Ratio | None:
        """The strategy's time against the baseline's."""
        return None if self.base is None else ratio_of(self.base, self.row, quantity)

    @property
    def communication(self) -> Mapping[str, float | None]:
        """Times of a profiled step's messages, on the rank that waited least for others; rank 0's if it alone is recorded.

        Every rank's messages end together. A rank that comes early waits longest, which shows how late the others are; the
        messages' own time, and the part of it that is exposed, are those of the rank that comes last.
        """
        lines = [line for line in self.lines("communication") if line["waiting_s"] is not None]
        if lines:
            return min(lines, key=lambda line: line["waiting_s"])
        return {f"{name}_s": self.record.fact(f"{name}_s") for name in _MESSAGE_TIMES}

    def longer_s(self, quantity: str) -> float | None:
        """Median seconds more than the baseline's: the cost of communication to the whole step."""
        if self.base is None:
            return None
        own_s, base_s = (median_of(row.record, quantity) for row in (self.row, self.base))
        return None if own_s is None or base_s is None else own_s - base_s


def time_tables(strategies: Sequence[StrategyRow]) -> list[Table]:
    """The tables of step times and of communication."""
    of_messages = (communication_table, ranks_table, traffic_table)
    return [steps_table(strategies), *(table for tables in of_messages for table in tables(strategies))]


def steps_table(strategies: Sequence[StrategyRow]) -> Table:
    """One row per strategy: the time of a step, synchronised and in windows."""
    windows = _time_columns("window_step", "window, a step (ms)", "window's ratio", "window's 99 % interval")
    columns = [
        *name_columns(strategies),
        *_time_columns("step", "step (ms)", "ratio", "99 % interval"),
        *(replace(column, more=True, note=_WINDOW if place == 0 else "") for place, column in enumerate(windows)),
        *rank_columns("step"),
        Column("tokens/s", WHOLE, lambda strategy: tokens_per_s(strategy.record), more=True),
        Column(
            "peak",
            SIZE,
            lambda strategy: strategy.record.fact("peak_allocated_bytes", strategy.record.fact("peak_rss_bytes")),
        ),
        mean_column("step", "step"),
        mean_column("window_step", "window, a step"),
        doubts_column(_doubts),
    ]
    return Table.of("Parallel strategies", strategies, columns, note=_STEPS, raw=map(_raw, strategies))


def communication_table(strategies: Sequence[StrategyRow]) -> list[Table]:
    """One row per strategy: messages and bytes, and how much of their time is hidden behind computation."""
    shown = [
        strategy for strategy in strategies if strategy.record.failure is None and strategy.record.config["ranks"] > 1
    ]
    below_0 = _BELOW_0 if any((strategy.longer_s("step") or 0.0) < 0 for strategy in shown) else ""
    columns = [
        *name_columns(shown),
        Column("messages", beside(COUNT), lambda strategy: _totals(strategy, "messages")),
        Column("sent ({unit})", beside(SIZE), lambda strategy: _totals(strategy, "bytes")),
        Column("on the wire ({unit})", beside(SIZE), _on_the_wire, more=True),
        *(_message_time(name, more=name != "exposed") for name in _MESSAGE_TIMES),
        Column("hidden (%)", PERCENT, _hidden),
        Column("step longer than none (ms)", MS, lambda strategy: strategy.longer_s("step"), note=below_0),
        Column("window longer than none (ms)", MS, lambda strategy: strategy.longer_s("window_step"), more=True),
    ]
    return [Table.of("Communication of a step", shown, columns, note=_COMMUNICATION)] if shown else []


def traffic_table(strategies: Sequence[StrategyRow]) -> list[Table]:
    """One row per strategy and operation: messages and bytes, counted and by formula."""
    lines = [Line(strategy.row, line) for strategy in strategies for line in strategy.lines("traffic")]
    columns = [
        *name_columns(lines),
        Column("operation", names=True),
        Column("messages", COUNT),
        Column("by formula", COUNT, "expected_messages", more=True),
        Column("sent ({unit})", SIZE, "bytes"),
        Column("by formula ({unit})", SIZE, "expected_bytes", more=True),
        Column(
            "alike",
            replace(TEXT, text=words),
            lambda line: all(line.value[name] == line.value[f"expected_{name}"] for name in ("messages", "bytes")),
        ),
    ]
    note = "Of one step and rank, counted where our code calls collectives; torch's strategies call them without being counted."
    return [Table.of("Messages against the formula", lines, columns, note=note)] if lines else []


def ranks_table(strategies: Sequence[StrategyRow]) -> list[Table]:
    """One row per strategy and rank: the rank that never waits is the one for which the others wait."""
    lines = [Line(strategy.row, line) for strategy in strategies for line in strategy.lines("communication")]
    times = _seconds("in flight", "waiting", "transfer", "exposed", "after backward")
    note = "From each rank's trace. After backward: from the end of its computation to the end of the last message of gradients."
    columns = [*name_columns(lines), Column("rank", COUNT, names=True), *times]
    return [Table.of("Communication by rank", lines, columns, note=note, folded=True)] if lines else []


def message_tables(strategies: Sequence[StrategyRow]) -> list[Table]:
    """Each strategy's messages, in the order of their start; the tables are folded on the page."""
    several = len(strategies) > 1
    note = "On rank 0 in a profiled step, from the step's beginning. Waiting: until the last rank joined."
    times = ("launched", "started", "finished", "waiting", "hidden", "exposed")
    columns = [
        Column("message", TEXT, "name", names=True),
        Column("launched in", TEXT, "phase"),
        Column("{unit}", SIZE, "bytes"),
        *(Column(f"{name} (ms)", MS, f"{name}_s", more=name in ("launched", "waiting")) for name in times),
    ]
    return [
        Table.of(
            f"{strategy.place} {strategy.name}: messages of a step" if several else "Messages of a step",
            strategy.lines("buckets"),
            columns,
            note=note,
            folded=True,
        )
        for strategy in strategies
        if "buckets" in strategy.record.tables
    ]


def memory_tables(strategies: Sequence[StrategyRow]) -> list[Table]:
    """The tables of the memory that a rank holds, measured and by formula."""
    return [*_points_table(strategies), *_driver_table(strategies)]


def held_by(strategy: StrategyRow) -> Held:
    """The memory that rank 0 holds; empty if the cell failed."""
    points: Held = {}
    for line in strategy.lines("memory_points"):
        if line["rank"] == 0:
            points.setdefault(line["point"], {})[line["line"]] = (line["bytes"], line["expected_bytes"])
    return points


def _points_table(strategies: Sequence[StrategyRow]) -> list[Table]:
    """One row per strategy and point of the step."""
    points = [(strategy, point, held) for strategy in strategies for point, held in held_by(strategy).items()]
    lines = [Line(strategy.row, {**held, **_sums(held), "point": point}) for strategy, point, held in points]
    on_gpu = any("allocated" in held for _, _, held in points)
    names = (*CATEGORIES, *(_ALLOCATOR if on_gpu else ("together",)))
    columns = [*name_columns(lines), Column("point", names=True), *(Column(name, beside(SIZE)) for name in names)]
    note = f"{{unit}}. {_POINTS} {_UNNAMED if on_gpu else 'On a CPU no allocator counts.'}"
    return [Table.of("What a rank holds", lines, columns, note=note)] if lines else []


def _sums(held: Mapping[str, tuple[int, int | None]]) -> dict[str, tuple[int, int | None]]:
    """`together`, and `allocated` if it was measured, with the sum of the formulas."""
    categories = [held[name] for name in CATEGORIES if name in held]
    formulas = [formula for _, formula in categories]
    formula = None if None in formulas else sum(size or 0 for size in formulas)
    sums = {"together": (sum(size for size, _ in categories), formula)}
    return sums | {"allocated": (held["allocated"][0], formula)} if "allocated" in held else sums


def _driver_table(strategies: Sequence[StrategyRow]) -> list[Table]:
    """One row per strategy on a GPU: the memory that the driver reports, and its parts."""
    lines = [Line(strategy.row, explained) for strategy in strategies if (explained := _explained(strategy))]
    names = ("driver", "allocated", "cached", "context", "NCCL", "rest")
    columns = [*name_columns(lines), *(Column(name, SIZE) for name in names)]
    return [Table.of("What the driver sees", lines, columns, note=_DRIVER)] if lines else []


def _explained(strategy: StrategyRow) -> dict[str, int]:
    sizes = {name: size for name, (size, _) in held_by(strategy).get("after step", {}).items()}
    context, nccl = strategy.record.fact("context_bytes"), strategy.record.fact("nccl_bytes", 0)
    # The driver counts the whole GPU: with interleaved variants its figure includes all of their processes.
    if "driver" not in sizes or context is None or strategy.record.fact("interleaving") == "live":
        return {}
    rest = sizes["driver"] - sizes["reserved"] - context - nccl
    return {**sizes, "cached": sizes["reserved"] - sizes["allocated"], "context": context, "NCCL": nccl, "rest": rest}


def _seconds(*names: str) -> list[Column]:
    """Columns of seconds, each from a fact of a record or a value of a line."""
    stored = {"in flight": "communication_s", "after backward": "tail_s"}
    return [Column(f"{name} (ms)", MS, stored.get(name, f"{name}_s")) for name in names]


def _message_time(name: str, *, more: bool) -> Column:
    """A column of one of the times of a strategy's messages."""
    title = "in flight" if name == "communication" else name
    return Column(f"{title} (ms)", MS, lambda strategy: strategy.communication.get(f"{name}_s"), more=more)


def _time_columns(quantity: str, time: str, ratio: str, ends: str) -> list[Column]:
    """A quantity of time, its ratio to the baseline's, and the interval, or the ratio of each pair if there are few."""

    def middle(strategy: StrategyRow) -> float | None:
        against_none = strategy.ratio(quantity)
        return against_none.ratio if against_none else None

    def spread(strategy: StrategyRow) -> Entry | None:
        against_none = strategy.ratio(quantity)
        if against_none and against_none.interval:
            return Entry(text=" to ".join(map(ratio_words, against_none.interval[::2])))
        each = against_none.known.each if against_none and against_none.known else ()
        return Entry(text="pairs " + ", ".join(map(ratio_words, sorted(each)))) if each else None

    return [
        Column(time, MS_STD, median_and_range(quantity)),
        Column(ratio, RATIO, middle),
        Column(ends, RATIO, spread),
    ]


def _doubts(strategy: StrategyRow) -> str:
    trouble = [f"no trace: {reason}"] if (reason := strategy.record.fact("trace_failed")) else []
    if (ratio := strategy.ratio("step")) and ratio.comparison and ratio.comparison.interleaving == "none":
        trouble.append(f"not interleaved with {BASELINE}")
    return "; ".join([*doubts(strategy.record), *trouble])


def _totals(strategy: StrategyRow, what: str) -> tuple[int, int] | None:
    """The sum over all operations, counted and by formula; None if they were not counted."""
    if "traffic" not in strategy.record.tables:
        return None
    counted, expected = (sum(line[side + what] for line in strategy.lines("traffic")) for side in _BOTH)
    return counted, expected


def _on_the_wire(strategy: StrategyRow) -> tuple[int, int | None] | None:
    sent, expected = (strategy.record.fact(f"{side}wire_bytes") for side in _BOTH)
    return None if sent is None else (sent, expected)


def _hidden(strategy: StrategyRow) -> float | None:
    in_flight_s, exposed_s = (strategy.communication.get(name) for name in ("communication_s", "exposed_s"))
    return 1 - exposed_s / in_flight_s if in_flight_s and exposed_s is not None else None


def _raw(strategy: StrategyRow) -> Mapping[str, Any]:
    """The row for programs: its quantities, and the ratios and sums that the tables compute."""
    record, numbers = strategy.record, {"sync": strategy.sync} | quantities(strategy.row)
    if record.failure is not None:
        return numbers
    numbers |= shown_facts(record)
    for quantity in ("step", "window_step"):
        comparison = (ratio := strategy.ratio(quantity)) and ratio.comparison
        numbers |= {
            f"{quantity}_ratio_to_none": comparison and comparison.ratio,
            f"{quantity}_ratio_interleaving": comparison and comparison.interleaving,
            f"{quantity}_ratio_low": comparison and comparison.low,
            f"{quantity}_ratio_high": comparison and comparison.high,
            f"{quantity}_longer_than_none_s": strategy.longer_s(quantity),
        }
    messages, sent_bytes = (_totals(strategy, what) or (None, None) for what in ("messages", "bytes"))
    for place, side in enumerate(_BOTH):
        numbers |= {f"{side}messages": messages[place], f"{side}sent_bytes": sent_bytes[place]}
    return numbers


def strategies_of(rows: Sequence[Row]) -> list[StrategyRow]:
    """Each row with its baseline: the row of the same file, machine and config, apart from the options of strategies."""
    bases = {_run_of(row): row for row in rows if row.record.config["sync"] == BASELINE and row.record.failure is None}
    bases_of = [(row, bases.get(_run_of(row))) for row in rows]
    return [StrategyRow(row=row, base=None if base is row else base) for row, base in bases_of]


def name_columns(rows: Iterable[Any]) -> list[Column]:
    """The columns that name a strategy; an option is absent for a strategy without it, and has no column if no strategy has it."""
    record_rows = [row_of(row) for row in rows]
    sync = Column("sync", TEXT, lambda row: row_of(row).record.config["sync"], failed=None, names=True)
    columns = [] if any("sync" in row.point for row in record_rows) else [sync]
    for column in point_columns(record_rows):
        if column.title not in USED_BY:
            columns.append(column)
        elif any(column.title not in needless(row.record.config) for row in record_rows):
            columns.append(replace(column, get=_option_of(column.title)))
    return columns


def _option_of(name: str) -> Callable[[Any], Any]:
    """A function of a row for the column of an option."""
    return lambda row: (
        Entry(text=ABSENT) if name in needless(row_of(row).record.config) else row_of(row).point.get(name)
    )


def _run_of(row: Row) -> tuple[Any, ...]:
    config = flat_config(row.record)
    rest = [(name, words(value)) for name, value in config.items() if name not in STRATEGY_FIELDS | _WITHOUT_EFFECT]
    return (row.file, row.record.environment.hostname, *rest)


def _option(name: str, value: Any) -> str:
    """`25 MiB`, `first 1 MiB`, `reduce bf16`, `kept whole`."""
    if value is None or (name in ("reduce_dtype", "compute_dtype") and value == "own"):
        return ""
    if name == "bucket_mib":
        return f"{words(value)} MiB"
    if isinstance(value, bool):
        return "" if value else {"reshard_after_forward": "kept whole"}.get(name, "gradients stay bf16")
    return f"{name.removesuffix('_mib').removesuffix('_bucket').removesuffix('_dtype')} {words(value)}"

"""Tables as people publish them: mean ± std in ms, GiB, percent. The one place where SI becomes a unit people read."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.records.record import Failure
from trainstep.report.quantities import TIMES, quantities, time_of
from trainstep.report.rows import Row, words

FAILURES = {
    "out_of_memory": "OOM",
    "timeout": "time-out",
    "crash": "crash",
    "import_error": "import error",
    "unsupported": "unsupported",
    "divergence": "divergence",
}
ABSENT = "–"
MINUS = "\N{MINUS SIGN}"
_WORKLOADS = {
    "train_step": "Training step",
    "ceiling": "Ceilings",
    "attention": "Attention",
    "attention_tiles": "Attention tiles",
    "profile": "Profiled steps",
}
TITLES = {"grad_sync": "grad sync", "step": "total step"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What stands in one place of a table. `sort`: what a reader sorts by, where that is a number."""

    text: str
    sort: float | None = None
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class Column:
    """`number`: its entries are set right and sort by value. `help`: what it means, shown on the page under the pointer."""

    title: str
    number: bool = False
    help: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a person reads (`entries`) and, for the cells, what a program reads (`raw`: one mapping a row, units in names)."""

    title: str
    columns: tuple[Column, ...]
    entries: tuple[tuple[Entry, ...], ...]
    raw: tuple[Mapping[str, Any], ...] = ()
    note: str = ""
    folded: bool = False
    """Shown on the page only when asked for."""


def in_ms(seconds: float) -> float:
    return seconds * 1e3


def in_gib(byte_count: float) -> float:
    return byte_count / 2**30


def in_percent(share: float) -> float:
    return share * 100


def milliseconds(seconds: float, std_s: float | None = None) -> str:
    """`62.10 ± 0.31`: four digits of the mean, or more where the standard deviation needs them for one of its own."""
    decimals = _decimals(in_ms(seconds))
    if std_s is None or not math.isfinite(std_s):
        return f"{in_ms(seconds):,.{decimals}f}".replace("-", MINUS)
    if 0 < in_ms(std_s) < 0.5 * 10.0**-decimals:
        decimals = min(4, -math.floor(math.log10(in_ms(std_s))))
    return f"{in_ms(seconds):,.{decimals}f} ± {in_ms(std_s):,.{decimals}f}".replace("-", MINUS)


def seconds_words(seconds: float) -> str:
    """`2.31 s`, `62.10 ms` or `18.5 µs`, for a sentence."""
    if abs(seconds) >= 1:
        return f"{seconds:,.2f} s"
    return f"{milliseconds(seconds)} ms" if abs(seconds) >= 1e-4 else f"{three_digits(seconds * 1e6)} µs"


def times_words(ratio: float) -> str:
    """`11.6 times`, for a sentence."""
    return f"{ratio:.2f} times" if ratio < 10 else f"{ratio:,.0f} times"


def gibibytes(byte_count: float) -> str:
    return f"{in_gib(byte_count):,.2f}"


@dataclass(frozen=True, kw_only=True)
class ByteUnit:
    """What bytes are counted in."""

    name: str
    byte_count: int

    def words(self, byte_count: float) -> str:
        """Three digits, the unit being said elsewhere."""
        return three_digits(byte_count / self.byte_count)


_BYTE_UNITS = [ByteUnit(name=name, byte_count=size) for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))]


def byte_unit(byte_counts: Iterable[float | None]) -> ByteUnit:
    """The one unit of a table or a column, chosen by its largest value, which is at least half of it; KiB for the least."""
    largest = max((abs(count) for count in byte_counts if count is not None), default=0)
    return next((unit for unit in _BYTE_UNITS if largest >= unit.byte_count / 2), _BYTE_UNITS[-1])


def byte_words(byte_count: float) -> str:
    """`2.00 GiB`, `15.3 MiB`, `4.0 KiB` or `512 B`, for a sentence."""
    if abs(byte_count) < 1024:
        return f"{byte_count:,.0f} B"
    unit = byte_unit([byte_count])
    return f"{byte_count / unit.byte_count:,.{2 if unit.name == 'GiB' else 1}f} {unit.name}"


def needed_words(byte_count: float) -> str:
    """`68.7 GiB`, `1,024 GiB` or `15.3 MiB`: three digits, for a cell."""
    unit = byte_unit([byte_count])
    return f"{unit.words(byte_count)} {unit.name}"


def three_digits(value: float) -> str:
    """`68.7`, `0.00391`, `1,024`: three digits or all before the point, for columns whose numbers span many powers of ten."""
    decimals = max(0, min(9, 2 - math.floor(math.log10(abs(value))))) if value else 0
    return f"{value:,.{decimals}f}"


def percent(share: float) -> str:
    return f"{in_percent(share):.1f}".replace("-", MINUS)


def ratio_words(ratio: float) -> str:
    return f"{ratio:.3f}"


def rate_words(rate: float, unit: str) -> str:
    """`693 TFLOP/s`, `67.1 GFLOP/s` (of a CPU) or `4,240.0 GB/s`."""
    if not unit.startswith("flop"):
        return f"{rate / 1e9:,.1f} GB/s"
    return f"{rate / 1e12:,.4g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.4g} GFLOP/s"


def failure_word(failure: Failure) -> str:
    return FAILURES[failure.kind]


def failure_sentence(failure: Failure) -> str:
    """`OOM in backward: asked for 2.00 GiB with 137.20 of 139.80 GiB taken`."""
    sentence = f"{failure_word(failure)} in {failure.phase}"
    if failure.asked_bytes is None:
        return f"{sentence}: {failure.message}"
    sentence += f": asked for {byte_words(failure.asked_bytes)}"
    if failure.allocated_bytes is not None:
        sentence += f" with {byte_words(failure.allocated_bytes)} taken"
        if failure.capacity_bytes is not None:
            sentence += f" of {byte_words(failure.capacity_bytes)}"
    return sentence


def cell_tables(rows: Sequence[Row]) -> list[Table]:
    """One table of cells for each workload, in the order of appearance."""
    workloads = dict.fromkeys(row.record.workload for row in rows)
    return [_cell_table(workload, [row for row in rows if row.record.workload == workload]) for workload in workloads]


def point_columns(rows: Sequence[Row], *, without: Sequence[str] = ()) -> list[tuple[Column, Callable[[Row], Entry]]]:
    """The columns that name a row."""
    names = dict.fromkeys(name for row in rows for name in row.point if name not in without)
    return [(Column(title=name, number=_all_numbers(name, rows)), _point_entry(name)) for name in names]


def _cell_table(workload: str, rows: Sequence[Row]) -> Table:
    raw = [quantities(row) for row in rows]
    points = point_columns(rows)
    measured = [(column, make) for column, make in _MEASURED if any(make(numbers) for numbers in raw)]
    measured += _other_samples(raw) if workload != "train_step" else []
    columns = [column for column, _ in points] + [column for column, _ in measured] + [Column(title="doubts")]
    entries = tuple(
        (
            *(make(row) for _, make in points),
            *(_measured_entry(row, make(numbers)) for _, make in measured),
            _doubts_entry(row, numbers),
        )
        for row, numbers in zip(rows, raw, strict=True)
    )
    return Table(title=_WORKLOADS.get(workload, workload), columns=tuple(columns), entries=entries, raw=tuple(raw))


def _measured_entry(row: Row, entry: Entry | None) -> Entry:
    """A failed row shows its failure wherever a number would stand."""
    if row.record.failure is not None:
        return Entry(text=failure_word(row.record.failure), failure=row.record.failure)
    return entry or Entry(text=ABSENT)


def _doubts_entry(row: Row, numbers: Mapping[str, Any]) -> Entry:
    if row.record.failure is not None:
        return Entry(text=failure_sentence(row.record.failure), failure=row.record.failure)
    return Entry(text=numbers["doubts"])


def _point_entry(name: str) -> Callable[[Row], Entry]:
    def entry(row: Row) -> Entry:
        value: Any = row.point.get(name)
        return Entry(text=words(value), sort=float(value) if _is_number(value) else None)

    return entry


def _all_numbers(name: str, rows: Sequence[Row]) -> bool:
    return all(_is_number(row.point.get(name)) for row in rows)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _decimals(value: float) -> int:
    """Decimals that leave four digits."""
    return max(0, min(4, 3 - math.floor(math.log10(abs(value))))) if value else 0


Numbers = Mapping[str, Any]


def _time(name: str) -> Callable[[Numbers], Entry | None]:
    def entry(numbers: Numbers) -> Entry | None:
        found = time_of(numbers, name)
        return found and Entry(text=milliseconds(*found), sort=in_ms(found[0]))

    return entry


def _number(name: str, text: Callable[[float], str]) -> Callable[[Numbers], Entry | None]:
    def entry(numbers: Numbers) -> Entry | None:
        value = numbers.get(name)
        return None if value is None else Entry(text=text(value), sort=value)

    return entry


def _peak(numbers: Numbers) -> Entry | None:
    """Allocated on the device, or resident in the process of a CPU cell."""
    value = numbers.get("peak_allocated_bytes", numbers.get("peak_rss_bytes"))
    return None if value is None else Entry(text=gibibytes(value), sort=in_gib(value))


def _rate(numbers: Numbers) -> Entry | None:
    value = numbers.get("rate")
    unit = "flop/s" if "flops" in numbers else "bytes/s"
    return None if value is None else Entry(text=rate_words(value, unit), sort=value)


def _other_samples(raw: Sequence[Numbers]) -> list[tuple[Column, Callable[[Numbers], Entry | None]]]:
    """Times of a workload of one's own, whatever they are called."""
    names = dict.fromkeys(
        name.removesuffix("_mean_s") for numbers in raw for name in numbers if name.endswith("_mean_s")
    )
    return [(Column(title=f"{name} (ms)", number=True), _time(name)) for name in names if name not in (*TIMES, "time")]


_MEASURED: list[tuple[Column, Callable[[Numbers], Entry | None]]] = [
    *((Column(title=f"{TITLES.get(name, name)} (ms)", number=True), _time(name)) for name in TIMES),
    (Column(title="a call (ms)", number=True), _time("time")),
    (Column(title="rate", number=True), _rate),
    (Column(title="tokens/s", number=True), _number("tokens_per_s", lambda value: f"{value:,.0f}")),
    (Column(title="TFLOP/s", number=True), _number("model_flops_per_s", lambda value: f"{value / 1e12:,.4g}")),
    (Column(title="MFU (%)", number=True), _number("mfu_ratio", percent)),
    (Column(title="compile (s)", number=True), _number("compile_s", lambda value: f"{value:,.1f}")),
    (Column(title="peak (GiB)", number=True), _peak),
]

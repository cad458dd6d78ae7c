"""Turns values into text: ms, GiB, percent, counts, failures. Only this file converts SI units to units for people.

A column of a table declares a `Form` (report/kit/tables.py); sentences and charts call the functions here.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from trainstep.records.record import Failure

FAILURES = {
    "out_of_memory": "OOM",
    "timeout": "time-out",
    "crash": "crash",
    "import_error": "import error",
    "unsupported": "unsupported",
    "divergence": "divergence",
    "node_lost": "node lost",
}
ABSENT = "–"
MINUS = "\N{MINUS SIGN}"


def in_ms(seconds: float) -> float:
    return seconds * 1e3


def in_gib(byte_count: float) -> float:
    return byte_count / 2**30


def in_percent(share: float) -> float:
    return share * 100


def milliseconds(seconds: float, std_s: float | None = None) -> str:
    """`62.10 ± 0.31`: four digits of the time, or as many more as show one digit of its spread."""
    decimals = _decimals(in_ms(seconds), digits=4, most=4)
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


def ms_words(seconds: float) -> str:
    """`62.10 ms`, also over a second, for a sentence beside a table in milliseconds; `18.5 µs` for very short times."""
    return seconds_words(seconds) if abs(seconds) < 1 else f"{milliseconds(seconds)} ms"


def times_words(ratio: float) -> str:
    """`11.6 times`, for a sentence."""
    return f"{ratio:.2f} times" if ratio < 10 else f"{ratio:,.0f} times"


def gibibytes(byte_count: float) -> str:
    return f"{in_gib(byte_count):,.2f}"


@dataclass(frozen=True, kw_only=True)
class ByteUnit:
    """A unit of memory: GiB, MiB or KiB."""

    name: str
    byte_count: int

    def words(self, byte_count: float) -> str:
        """The number in this unit with three digits, without the unit's name."""
        return three_digits(byte_count / self.byte_count)


_BYTE_UNITS = [ByteUnit(name=name, byte_count=size) for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))]


def byte_unit(byte_counts: Iterable[float | None]) -> ByteUnit:
    """The common unit of a table or a column: the largest unit of which its largest value is at least half, else KiB."""
    largest = max((abs(count) for count in byte_counts if count is not None), default=0)
    return next((unit for unit in _BYTE_UNITS if largest >= unit.byte_count / 2), _BYTE_UNITS[-1])


def byte_words(byte_count: float) -> str:
    """`2.00 GiB`, `15.3 MiB`, `4.0 KiB` or `512 B`, for a sentence."""
    if abs(byte_count) < 1024:
        return f"{byte_count:,.0f} B"
    unit = byte_unit([byte_count])
    return f"{byte_count / unit.byte_count:,.{2 if unit.name == 'GiB' else 1}f} {unit.name}"


def needed_words(byte_count: float) -> str:
    """`68.7 GiB`, `1,024 GiB` or `15.3 MiB`: three digits, for a table's cell."""
    unit = byte_unit([byte_count])
    return f"{unit.words(byte_count)} {unit.name}"


def three_digits(value: float) -> str:
    """`68.7`, `0.00391`, `1,024`: three significant digits, or all digits of a larger integer part."""
    return f"{value:,.{_decimals(value, digits=3, most=9)}f}"


def percent(share: float) -> str:
    return f"{in_percent(share):.1f}".replace("-", MINUS)


def ratio_words(ratio: float) -> str:
    return f"{ratio:.3f}"


def rate_words(rate: float, unit: str) -> str:
    """`693 TFLOP/s`, `67.1 GFLOP/s` (typical of a CPU) or `4,240.0 GB/s`."""
    if not unit.startswith("flop"):
        return f"{rate / 1e9:,.1f} GB/s"
    return f"{rate / 1e12:,.4g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.4g} GFLOP/s"


def listed(parts: Iterable[str], *, most: int | None = None) -> str:
    """`a, b and c`, for a sentence; if there are more than `most`, `a, b and 3 more`."""
    every = list(parts)
    if most is not None and len(every) > most:
        every[most:] = [f"{len(every) - most} more"]
    *first, last = every
    return f"{', '.join(first)} and {last}" if first else last


def shortened(text: str, most: int) -> str:
    """The text, cut to `most` characters with an ellipsis at its end."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def failure_word(failure: Failure) -> str:
    return FAILURES[failure.kind]


def failure_sentence(failure: Failure) -> str:
    """`OOM in backward: asked for 2.00 GiB with 137.20 GiB taken of 139.80 GiB`."""
    sentence = f"{failure_word(failure)} in {failure.phase}"
    if failure.asked_bytes is None:
        return f"{sentence}: {failure.message}"
    sentence += f": asked for {byte_words(failure.asked_bytes)}"
    if failure.allocated_bytes is not None:
        sentence += f" with {byte_words(failure.allocated_bytes)} taken"
        if failure.capacity_bytes is not None:
            sentence += f" of {byte_words(failure.capacity_bytes)}"
    return sentence


def _decimals(value: float, *, digits: int, most: int) -> int:
    """The number of decimals, at most `most`, that gives a value so many significant digits."""
    if not value or not math.isfinite(value):
        return 0
    return max(0, min(most, digits - 1 - math.floor(math.log10(abs(value)))))


@dataclass(frozen=True, kw_only=True)
class Form:
    """How the values of a column are written, and which number a reader sorts them by."""

    text: Callable[..., str]
    """The text of a value; called with the value and its `ByteUnit` if `unit` is set."""
    sort: Callable[[Any], float | None] = lambda value: value
    number: bool = True
    """Aligned to the right and sorted by value."""
    absent: str = ABSENT
    unit: str = ""
    """`table` or `column`: values are bytes, and the whole table or column is written in the unit that suits its largest."""
    sizes: Callable[[Any], Iterable[float | None]] = lambda size: (size,)
    """The bytes in a value, from which the unit is chosen."""


def beside(form: Form) -> Form:
    """`18`, or `18 (20)` if the formula says 20: a value is a pair (measured, by formula or None)."""

    def text(pair: tuple[Any, Any], *unit: ByteUnit) -> str:
        measured, formula = pair
        aside = "" if formula is None or formula == measured else f" ({form.text(formula, *unit)})"
        return f"{form.text(measured, *unit)}{aside}"

    return Form(text=text, sort=lambda pair: form.sort(pair[0]), unit=form.unit, sizes=lambda pair: pair)


def _rough_size(size: float, unit: ByteUnit) -> str:
    return "<0.001" if 0 < size < unit.byte_count / 1000 else unit.words(size)


TEXT = Form(text=str, sort=lambda _: None, number=False)
NAME = Form(text=lambda name: name.replace("_", " "), sort=lambda _: None, number=False)
COUNT = Form(text=lambda count: f"{count:,}")
WHOLE = Form(text=lambda value: f"{value:,.0f}")
DIGITS = Form(text=three_digits)
RATIO = Form(text=ratio_words)
ERROR = Form(text=lambda error: f"{error:.1e}" if error else "0")
PERCENT = Form(text=percent)
GIGA = Form(text=lambda number: three_digits(number / 1e9))
MS = Form(text=milliseconds, sort=in_ms)
MS_STD = Form(text=lambda time: milliseconds(*time), sort=lambda time: in_ms(time[0]))
"""A value is a pair: a median and half the interquartile range, or a mean and its standard deviation; the spread may be None."""
RANK_MS = Form(text=lambda pair: f"{milliseconds(pair[1])} (rank {pair[0]})", sort=lambda pair: in_ms(pair[1]))
"""A value is a pair (rank, seconds)."""
GIB = Form(text=gibibytes, sort=in_gib)
BYTES = Form(text=byte_words)
"""Each value has its own unit."""
SIZE = Form(text=lambda size, unit: unit.words(size), unit="table")
ROUGH_SIZE = replace(SIZE, text=_rough_size)
COLUMN_SIZE = replace(SIZE, unit="column")
FLOP_RATE = Form(text=lambda rate: rate_words(rate, "flop/s"))
BYTE_RATE = Form(text=lambda rate: rate_words(rate, "bytes/s"))

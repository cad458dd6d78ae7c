"""Reads the times of one run of a gate's command: what trainstep recorded, pytest-benchmark's JSON, or the run's own duration.

    measure = measure_of("records", command, quantity=None)
    measure.prepare(checkout)                     # before the run
    measure.times(checkout, ran).seconds          # {"train_step small": 0.0123}, after it

A cell is whatever has a time of its own: a record's config, a benchmark, or the whole command. Cells of records are named by their
workload and model and numbered in the order of their records, not by the hash of their config: a version that adds a field to a
config has other hashes.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainstep.measure.gate.checkouts import Checkout
from trainstep.measure.gate.command import Ran
from trainstep.records.benchmark_json import read_benchmarks
from trainstep.records.record import Record
from trainstep.records.store import RUNS, Store

MEASURES = ("records", "wall", "cpu", "benchmark")
"""What `--measure` takes; without it `records` if the command writes any, else `wall`."""
BENCHMARK_OPTION = "--benchmark-json"
_ENVIRONMENT = ("cpu", "cores", "python", "torch", "triton", "cuda", "gpu", "driver")
_BENCHMARK_FILE = ".trainstep-gate.json"


class NoTimes(Exception):
    """A run has no times: what it was to write is missing or wrong, or a cell of it failed. The text is a sentence."""


class NoRecords(NoTimes):
    """The command writes no records at all, so that something else may be measured."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Cell -> seconds, and what the run says about where it ran."""

    seconds: Mapping[str, float]
    environment: Mapping[str, Any] = field(default_factory=dict)


class Measure(Protocol):
    """One way to get the times of a run."""

    name: str
    command: tuple[str, ...]
    """The command as it runs."""

    def prepare(self, checkout: Checkout) -> None:
        """Called before each run."""

    def times(self, checkout: Checkout, ran: Ran) -> Times:
        """Called after each run that ended well. NoTimes in a sentence."""


def measure_of(name: str, command: Sequence[str], quantity: str | None) -> Measure:
    """The measure of this name (one of MEASURES)."""
    if name == "records":
        return RecordFiles(tuple(command), quantity)
    return BenchmarkFile(tuple(command)) if name == "benchmark" else Duration(name, tuple(command))


class Duration:
    """The duration of the command (`wall`), or the processor time of it and the processes it waited for (`cpu`)."""

    def __init__(self, name: str, command: tuple[str, ...]) -> None:
        self.name, self.command = name, command

    def prepare(self, checkout: Checkout) -> None:
        pass

    def times(self, checkout: Checkout, ran: Ran) -> Times:
        cell, seconds = ("wall time", ran.wall_s) if self.name == "wall" else ("processor time", ran.cpu_s)
        if seconds <= 0:
            raise NoTimes("took no processor time that the system can measure")
        return Times(seconds={cell: seconds})


class BenchmarkFile:
    """The medians in pytest-benchmark's JSON: in the file that the command names, else in one that is added to the command."""

    name = "benchmark"

    def __init__(self, command: tuple[str, ...]) -> None:
        named = option_value(command, BENCHMARK_OPTION)
        self.command = command if named else (*command, f"{BENCHMARK_OPTION}={_BENCHMARK_FILE}")
        self._file = named or _BENCHMARK_FILE

    def prepare(self, checkout: Checkout) -> None:
        (checkout.folder / self._file).unlink(missing_ok=True)  # a file that an earlier run left is not this run's

    def times(self, checkout: Checkout, ran: Ran) -> Times:
        path = checkout.folder / self._file
        try:
            benchmarks = read_benchmarks(path)
        except ValueError as error:
            raise NoTimes(f"wrote no times: {error}") from None
        finally:
            if self._file == _BENCHMARK_FILE:
                path.unlink(missing_ok=True)
        host = ("node", "release")  # a container's name differs from run to run
        return Times(
            seconds=benchmarks.seconds,
            environment={key: value for key, value in benchmarks.machine.items() if key not in host},
        )


class RecordFiles:
    """The medians of the records that the command adds to its runs/ folder, or to the file that its --out names."""

    name = "records"

    def __init__(self, command: tuple[str, ...], quantity: str | None) -> None:
        self.command, self._quantity = command, quantity
        self._out = option_value(command, "--out")
        self._before: dict[Path, int] = {}

    def prepare(self, checkout: Checkout) -> None:
        self._before = {path: len(_read(path)) for path in self._files(checkout)}

    def times(self, checkout: Checkout, ran: Ran) -> Times:
        records = [record for path in self._files(checkout) for record in _read(path)[self._before.get(path, 0) :]]
        if not records:
            raise NoRecords(
                f"wrote no records in {self._out or RUNS}; to compare how long the command takes: --measure wall"
            )
        cells: dict[str, list[Record]] = {}
        for record in records:
            if record.failure is not None:
                failure = record.failure
                raise NoTimes(f"{_title(record)} failed: {failure.kind} in {failure.phase}: {failure.message}")
            cells.setdefault(_identity(record), []).append(record)
        seconds: dict[str, float] = {}
        for of_cell in cells.values():
            title = _title(of_cell[0])
            same = sum(name.partition(" #")[0] == title for name in seconds)
            seconds[f"{title} #{same + 1}" if same else title] = self._median(of_cell)
        environment = asdict(records[-1].environment)
        return Times(seconds=seconds, environment={key: environment[key] for key in _ENVIRONMENT})

    def _median(self, records: Sequence[Record]) -> float:
        """The median of the quantity over the records of a cell: by default of `step`, or of the first quantity."""
        last = records[-1]
        quantity = self._quantity or ("step" if "step" in last.samples else next(iter(last.samples), "step"))
        values = [
            value for record in records if quantity in record.samples for value in record.samples[quantity].values
        ]
        if not values:
            known = ", ".join(last.samples) or "no samples"
            raise NoTimes(f"{_title(last)} has no {quantity}; it has {known}")
        unit = next(record.samples[quantity].unit for record in records if quantity in record.samples)
        median = statistics.median(values)
        if unit != "s" or median <= 0:
            raise NoTimes(f"{quantity} of {_title(last)} is no time: {median:g} {unit}")
        return median

    def _files(self, checkout: Checkout) -> list[Path]:
        if self._out:
            path = checkout.folder / self._out
            return [path] if path.is_file() else []
        return sorted((checkout.folder / RUNS).glob("*.jsonl"), key=lambda path: (path.stat().st_mtime_ns, path.name))


def option_value(command: Sequence[str], option: str) -> str | None:
    """The value of an option in a command, as `--out FILE` or `--out=FILE`; the last one counts."""
    value = None
    for word, following in zip(command, [*command[1:], None], strict=True):
        if word == option and following is not None:
            value = following
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value or None


def _read(path: Path) -> list[Record]:
    """The records of a file; an empty list if it holds something else, as the file of a gate does."""
    try:
        return Store(path).finished()
    except ValueError:
        return []


def _identity(record: Record) -> str:
    """What the records of one cell share. A run of a script writes a record every few seconds, each with a config of its own."""
    if record.workload == "run":
        return f"run {record.config.get('script')} {record.config.get('arguments')} {record.config.get('rank')}"
    return record.key


def _title(record: Record) -> str:
    """`train_step small`; `run train.py`."""
    model = record.config.get("model")
    name = model.get("name") if isinstance(model, Mapping) else record.config.get("script")
    return f"{record.workload} {name}" if name else record.workload

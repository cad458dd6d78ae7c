"""The file of a gate: what the gate compares, each run once it has ended, and the verdict. A killed gate continues from its file.

    file = GateFile(Path("runs/main-against-head.gate"))
    with file.locked():
        runs, ending = file.open_for(plan)            # what earlier processes wrote; ValueError for another gate's file
        file.add(run)

Lines of JSON: the plan first, then runs, the ending last. A last line that a kill tore is cut off.

A block is four runs, base head head base, or head base base head in every other block. Only complete blocks count, because runs are
compared only if they followed each other directly. The time of runs in incomplete blocks still counts towards the budget.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trainstep.reading import check_regular
from trainstep.records.amounts import limits_of
from trainstep.records.facts import is_number, value_words
from trainstep.records.locked_file import locked_file
from trainstep.records.sequential import Block

BASE, HEAD = SIDES = ("base", "head")
WARMUP = -1
"""Block number of the first runs, one of each side, which are not compared."""
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a gate compares and how. Two processes with equal plans may share a file."""

    base: str
    """The name that the user gave, with its commit: `main at 1f0c2a9`."""
    head: str
    command: tuple[str, ...]
    setup: str | None = None
    measure: str
    quantity: str | None = None
    threshold: float
    """The slowdown that head may not have, as a share."""
    budget_s: float
    environment: Mapping[str, Any]
    """Where the gate ran: processor, memory, packages."""
    format: int = FORMAT

    def difference(self, other: "Plan") -> str | None:
        """A sentence about the first field in which the other plan differs from this one; None if none differs."""
        for name in (item.name for item in fields(self)):
            value, other_value = getattr(self, name), getattr(other, name)
            if name == "environment":
                changed = [key for key in value.keys() | other_value.keys() if value.get(key) != other_value.get(key)]
                name, value, other_value = (
                    (changed[0], value.get(changed[0]), other_value.get(changed[0])) if changed else (name, 0, 0)
                )
            if value != other_value:
                return f"its {name} is {_words(other_value)} and not {_words(value)}"
        return None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the command. `seconds`: cell -> its time, by the plan's measure."""

    block: int
    side: str
    used_s: float
    """Seconds of the budget that the run took, including the gate's own work around it."""
    seconds: Mapping[str, float]
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a gate ended. `verdict`: one of VERDICTS of records/sequential.py."""

    verdict: str
    reason: str = ""
    """The reason for the verdict if no interval decided: a failed command, a changed set of cells, the time."""
    output: tuple[str, ...] = ()
    """The end of what a failed command printed."""
    notes: tuple[str, ...] = ()
    """What a reader should know, such as packages that differ."""
    is_over: bool = False
    """Whether the last look was the one at the end of the time."""
    exhausted: bool = False
    """Whether a stored baseline ran out of runs."""


class GateFile:
    """The file of one gate. ValueError, in a sentence, for a file that is not a gate's, or is another gate's."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the file for this process. ValueError if another process has locked it, or if it cannot be written."""
        with locked_file(self.path) as made_here:
            try:
                yield
            finally:
                if made_here and self.path.read_bytes().count(b"\n") <= 1:  # refused before anything ran
                    self.path.unlink(missing_ok=True)

    def open_for(self, plan: Plan) -> tuple[list[Run], Ending | None]:
        """The gate's runs so far, and its ending. Writes the plan into a new file. ValueError for another gate's file."""
        content = self.read()
        if content is None:
            self._append({"plan": asdict(plan)})
            return [], None
        old, runs, ending = content
        if difference := plan.difference(old):
            raise ValueError(f"{self.path}: holds another gate: {difference}; name another --out, or remove it")
        return runs, ending

    def read(self) -> tuple[Plan, list[Run], Ending | None] | None:
        """(plan, runs, ending) of the file; None if it is missing or empty. A torn last line is cut off."""
        if not self.path.exists():
            return None
        check_regular(self.path)
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data) and (whole or data.startswith(b'{"plan":'[: len(data)])):
            os.truncate(self.path, len(whole))
        elif len(whole) < len(data):
            raise ValueError(f"{self.path}: is not the file of a gate")
        if not whole:
            return None
        lines = [_parsed(line, f"{self.path}: line {number}") for number, line in enumerate(whole.splitlines(), 1)]
        try:
            plan = _plan(lines[0]["plan"])
            runs = [_run(line["run"], number) for number, line in enumerate(lines[1:], 2) if "run" in line]
            endings = [_ending(line["ending"]) for line in lines[1:] if "ending" in line]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{self.path}: is not the file of a gate: {error}") from None
        if any(run.seconds.keys() != runs[0].seconds.keys() for run in runs):
            raise ValueError(f"{self.path}: is not the file of a gate: its runs have different cells")
        return plan, runs, endings[-1] if endings else None

    def add(self, run: Run) -> None:
        """Write a run; it is on disk when this returns."""
        self._append({"run": asdict(run)})

    def end(self, ending: Ending) -> None:
        """Write the ending."""
        self._append({"ending": asdict(ending)})

    def _append(self, plain: Mapping[str, Any]) -> None:
        try:
            with open(self.path, "ab") as file:
                file.write(json.dumps(plain, separators=(",", ":"), allow_nan=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ValueError(
                f"{self.path}: a run cannot be written: {error.strerror}; every run before it is kept"
            ) from None


def used_seconds(runs: Sequence[Run]) -> float:
    """Seconds of the budget that these runs took."""
    return math.fsum(run.used_s for run in runs)


def blocks_of(runs: Sequence[Run]) -> list[Block]:
    """The complete blocks, each with its cells' log ratios: mean log time of head's runs less that of base's runs."""
    blocks, current, used_s = [], list[Run](), 0.0
    for run in runs:
        used_s += run.used_s
        if run.block == WARMUP or (current and run.block != current[0].block):
            current = []  # a killed gate left this block incomplete
        if run.block == WARMUP:
            continue
        current.append(run)
        if len(current) == len(order_of(run.block)):
            blocks.append(Block(log_ratios=_log_ratios(current), used_s=used_s))
            current = []
    return blocks


def order_of(block: int) -> tuple[str, ...]:
    """The sides of a block's runs in their order."""
    return (BASE, HEAD, HEAD, BASE) if block % 2 == 0 else (HEAD, BASE, BASE, HEAD)


def _log_ratios(runs: Sequence[Run]) -> dict[str, float]:
    logs = {side: [run.seconds for run in runs if run.side == side] for side in SIDES}
    return {name: _mean_log(logs[HEAD], name) - _mean_log(logs[BASE], name) for name in runs[0].seconds}


def _mean_log(seconds: Sequence[Mapping[str, float]], name: str) -> float:
    return math.fsum(math.log(values[name]) for values in seconds) / len(seconds)


def _words(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        plain = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where}: is not the line of a gate's file") from None
    if not isinstance(plain, dict):
        raise ValueError(f"{where}: is not the line of a gate's file")
    return plain


def _plan(plain: Mapping[str, Any]) -> Plan:
    if plain.get("format") != FORMAT:
        raise ValueError(f"format {plain.get('format')!r} is not known here; update trainstep")
    plan = Plan(**{**plain, "command": tuple(plain["command"])})
    if not (is_number(plan.budget_s) and is_number(plan.threshold) and isinstance(plan.environment, dict)):
        raise ValueError("its plan has values of other types")
    return plan


def _run(plain: Mapping[str, Any], line: int) -> Run:
    run = Run(**plain)
    if run.side not in SIDES or type(run.block) is not int:
        raise ValueError(f"line {line}: a run has no side or no block")
    limits = limits_of("s")
    times = {"used_s": run.used_s, "wall_s": run.wall_s, "cpu_s": run.cpu_s}
    for name, value in (times | {f"seconds of {cell}": value for cell, value in run.seconds.items()}).items():
        if not is_number(value) or not limits.allow(value):
            raise ValueError(f"line {line}: {name} cannot be {value_words(value)}: it must be {limits}")
    if not all(run.seconds.values()):
        raise ValueError(f"line {line}: a cell took no time at all")
    return run


def _ending(plain: Mapping[str, Any]) -> Ending:
    return Ending(**{**plain, "output": tuple(plain["output"]), "notes": tuple(plain["notes"])})

"""One cell, alone in its process: run it, observe, and make the record of it, or of how it failed."""

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from trainstep.config.cell import Cell
from trainstep.measure.connection import Answer, CellLost, Connection, Tell
from trainstep.measure.environment import environment
from trainstep.measure.host import memory_bytes
from trainstep.measure.machine_load import load_before
from trainstep.measure.rank_connection import connect
from trainstep.records.facts import facts_of
from trainstep.records.record import FORMAT, Environment, Failure, Record, record_from_plain

_MEMORY_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`timeout_s`: seconds a cell's own process may take. `memory_limit_bytes`: what a CPU cell may allocate; None: 90 %
    of the machine's memory. `visible_devices`: the value of CUDA_VISIBLE_DEVICES. `rounds`: compared variants run in so many
    rounds of whole processes; None: they take turns, alive together, if they fit. `forks`: a process may be forked from one that
    has imported torch. `processes`: fresh ones that each compared variant is run by; None: by what they cost (interleave.py)."""

    timeout_s: float = 600.0
    memory_limit_bytes: int | None = None
    visible_devices: str | None = None
    rounds: int | None = None
    forks: bool = True
    processes: int | None = None

    def memory_for(self, cell: Cell) -> int | None:
        """The limit of a CPU cell; a GPU's process needs address space the host does not have, and gets none."""
        if cell.config.get("device") != "cpu":
            return None
        return self.memory_limit_bytes or int(_MEMORY_SHARE * memory_bytes())


class CellRun:
    """A cell on its way to a record: the time its process may still take, and when it began."""

    def __init__(self, cell: Cell, limits: Limits, connection: Connection) -> None:
        self.cell = cell
        self.connection = connection
        self._limits = limits
        self._left_s = limits.timeout_s
        self._started_at = datetime.now(UTC)
        self._started_s = time.monotonic()
        self._before: dict[str, float | int] = {}

    def ask(self, do: str, **fields: Any) -> Answer:
        """One request of the cell's process; only time spent on its requests counts towards its limit."""
        asked_s = time.monotonic()
        try:
            return self.connection.ask(
                self.cell, {"do": do, **fields}, timeout_s=self._left_s, limit_s=self._limits.timeout_s
            )
        finally:
            self._left_s -= time.monotonic() - asked_s

    def prepare(self) -> Answer:
        self._before = load_before(str(self.cell.config.get("device")), self._limits.visible_devices)
        self.connection.begin()
        return self.ask(
            "prepare",
            workload=self.cell.workload,
            config=dict(self.cell.config),
            memory_limit_bytes=self._limits.memory_for(self.cell),
            compile_cache=self.connection.empty_compile_cache() if self.cell.config.get("cold_compile") else None,
        )

    def record(self, answer: Answer, **facts: Any) -> Record:
        """The record of a `finished` answer."""
        plain = {
            "workload": self.cell.workload,
            "key": self.cell.key,
            "config": self.cell.config,
            "environment": answer["environment"],
            "started_at": self._started_at.isoformat(timespec="seconds"),
            "duration_s": time.monotonic() - self._started_s,
            "format": FORMAT,
            **answer.get("findings", {}),
            "failure": answer.get("failure"),
        }
        try:
            made = record_from_plain(plain)
            before = {name: value for name, value in self._before.items() if name not in made.facts}
            return with_facts(made, **before, **facts)
        except ValueError as error:  # a workload of the user's own may hand over anything
            return self.failed(Failure(kind="crash", phase="afterwards", message=f"what it found is {error}"))

    def failed(self, failure: Failure) -> Record:
        """The record of a process that was lost."""
        return Record(
            workload=self.cell.workload,
            key=self.cell.key,
            config=self.cell.config,
            environment=self._environment(),
            started_at=self._started_at.isoformat(timespec="seconds"),
            duration_s=time.monotonic() - self._started_s,
            failure=failure,
        )

    def _environment(self) -> Environment:
        return environment(visible_devices=self._limits.visible_devices)


def run_alone(run: CellRun, steps: int | None = None, *, looks: bool = True) -> tuple[Record, bool]:
    """Prepare, take every step, finish. Returns the record and whether the process can take another cell.

    Without `looks` the record may hold samples alone.
    """
    try:
        answer = run.prepare()
        if answer["event"] == "ready":
            answer = run.ask("take", steps=steps or steps_of(run.cell))
        if answer["event"] == "taken":
            answer = run.ask("finish", looks=looks)
    except CellLost as lost:
        return run.failed(lost.failure), False
    return run.record(answer, interleaving="none"), bool(answer["again"])


def steps_of(cell: Cell) -> int:
    """Timed steps the cell's config asks for."""
    return int(cell.config.get("steps", 1))


def with_facts(record: Record, **values: Any) -> Record:
    """The record with more facts; None takes one away."""
    kept = {name: fact for name, fact in record.facts.items() if name not in values}
    return replace(record, facts=kept | facts_of(**values))


def open_run(cell: Cell, limits: Limits, tell: Tell) -> CellRun:
    """A cell with a fresh process, or with one for each of its ranks."""
    return CellRun(cell, limits, connect(cell, tell, forks=limits.forks))

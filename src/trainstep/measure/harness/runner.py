"""Runs a cell alone in its process and makes its record; keeps idle processes; searches the largest batch that fits."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from trainstep.config.grid import Cell
from trainstep.config.memory import LARGEST_TRIED, MemoryConfig
from trainstep.config.parsing import from_plain, to_plain
from trainstep.measure.harness.connection import Answer, CellLost, Connection, Tell
from trainstep.measure.harness.nodes import Nodes
from trainstep.measure.harness.rank_connection import connect, nodes_of, ranks_of
from trainstep.measure.machine.environment import environment, load_before, memory_bytes
from trainstep.plan.time.recorded import recorded_prediction
from trainstep.records.facts import facts_of
from trainstep.records.record import FORMAT, Failure, Record, record_from_plain

_MEMORY_SHARE = 0.9
_RESOLUTION = 64
"""`largest_fit` stops at a gap of 1/64 of the value: the result is exact below 128."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How cells may run.

    `timeout_s`: seconds that a cell's own process may take. `memory_limit_bytes`: what a CPU cell may allocate; None:
    90 % of the machine's memory. `visible_devices`: the value of CUDA_VISIBLE_DEVICES. `rounds`: the number of rounds of
    whole processes in which compared variants run; None: they run interleaved, alive together, if they fit. `forks`: a
    process may be forked from a server that has imported torch. `processes`: how many fresh processes run each compared
    variant; None: as many as their cost allows (interleave.py). `nodes`: those of a launch over several (nodes.py).
    """

    timeout_s: float = 600.0
    memory_limit_bytes: int | None = None
    visible_devices: str | None = None
    rounds: int | None = None
    forks: bool = True
    processes: int | None = None
    nodes: Nodes | None = None

    def memory_for(self, cell: Cell) -> int | None:
        """The memory limit of a CPU cell in bytes; None on a GPU."""
        # A process that uses a GPU needs more address space than the host has memory.
        if cell.config.get("device") != "cpu":
            return None
        return self.memory_limit_bytes or int(_MEMORY_SHARE * memory_bytes())


class CellRun:
    """A cell that runs in a process, with the time that is left to it, until it becomes a record."""

    def __init__(
        self, cell: Cell, limits: Limits, connection: Connection, load: Mapping[str, float | int] | None = None
    ) -> None:
        """`load`: what other processes did to this machine before the cell; None: `prepare` looks itself."""
        self.cell = cell
        self.connection = connection
        self._limits = limits
        self._left_s = limits.timeout_s
        self._started_at = datetime.now(UTC)
        self._started_s = time.monotonic()
        self._load_before = load

    def ask(self, do: str, **fields: Any) -> Answer:
        """Send one request to the cell's process; only the time of its requests counts towards its limit."""
        asked_s = time.monotonic()
        try:
            return self.connection.ask(
                self.cell, {"do": do, **fields}, timeout_s=self._left_s, limit_s=self._limits.timeout_s
            )
        finally:
            self._left_s -= time.monotonic() - asked_s

    def prepare(self) -> Answer:
        if self._load_before is None:
            self._load_before = load_before(str(self.cell.config.get("device")), self._limits.visible_devices)
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
            "prediction": self._prediction(answer["environment"].get("gpu")),
            **answer.get("findings", {}),
            "failure": answer.get("failure"),
        }
        try:
            record = record_from_plain(plain)
            load = {name: value for name, value in (self._load_before or {}).items() if name not in record.facts}
            return with_facts(record, **load, **facts)
        except ValueError as error:  # a user's own workload may return anything
            message = f"the workload's findings make no record: {error}"
            return self.failed(Failure(kind="crash", phase="afterwards", message=message))

    def failed(self, failure: Failure) -> Record:
        """The record of a cell that failed without an answer from its process."""
        here = environment(visible_devices=self._limits.visible_devices)
        return Record(
            workload=self.cell.workload,
            key=self.cell.key,
            config=self.cell.config,
            environment=here,
            started_at=self._started_at.isoformat(timespec="seconds"),
            duration_s=time.monotonic() - self._started_s,
            prediction=self._prediction(here.gpu),
            failure=failure,
        )

    def _prediction(self, gpu: str | None) -> dict[str, Any] | None:
        """What plan says of the cell, from its config and the GPU's name alone."""
        return recorded_prediction(self.cell.workload, self.cell.config, gpu=gpu)


def run_alone(run: CellRun, steps: int | None = None, *, inspect: bool = True) -> tuple[Record, bool]:
    """Prepare, take every step, finish. Returns the record and whether the process can measure another cell.

    `inspect`: run also the extra steps that follow the timed steps; without them the record may hold samples alone.
    """
    try:
        answer = run.prepare()
        if answer["event"] == "ready":
            answer = run.ask("take", steps=steps or steps_of(run.cell))
        if answer["event"] == "taken":
            answer = run.ask("finish", inspect=inspect)
    except CellLost as lost:
        return run.failed(lost.failure), False
    return run.record(answer, interleaving="none"), bool(answer["again"])


def steps_of(cell: Cell) -> int:
    """The number of timed steps that the cell's config asks for."""
    return int(cell.config.get("steps", 1))


def with_facts(record: Record, **values: Any) -> Record:
    """The record with these facts added or replaced; a value of None removes the fact."""
    others = {name: fact for name, fact in record.facts.items() if name not in values}
    return replace(record, facts=others | facts_of(**values))


def open_run(cell: Cell, limits: Limits, tell: Tell) -> CellRun:
    """A run of the cell in a fresh process, or in a fresh process for each of its ranks."""
    return CellRun(cell, limits, connect(cell, tell, forks=limits.forks, nodes=limits.nodes))


class IdleProcesses:
    """Processes that can measure another cell of their workload, kept because starting a process takes seconds."""

    def __init__(self, *, forks: bool = True, nodes: Nodes | None = None) -> None:
        """`forks`: fresh processes may be forked. `nodes`: those of this launch."""
        self._forks, self._nodes = forks, nodes
        self._idle: list[tuple[object, Connection]] = []  # the longest idle first

    def take(self, cell: Cell, tell: Tell) -> Connection:
        """An idle process that fits the cell, or a fresh one. Ends idle processes that are dead or do not fit."""
        while self._idle:
            kind, connection = self._idle.pop(0)
            if kind == _kind(cell) and connection.alive:
                return connection
            connection.close()
        return connect(cell, tell, forks=self._forks, nodes=self._nodes)

    def give(self, cell: Cell, connection: Connection) -> None:
        """Keep the process of a cell that is done."""
        self._idle.append((_kind(cell), connection))

    def close(self) -> None:
        """Let every idle process end."""
        while self._idle:
            self._idle.pop()[1].close()

    def kill(self) -> None:
        """End every idle process now."""
        while self._idle:
            self._idle.pop()[1].kill()


def _kind(cell: Cell) -> object:
    """What cells must have in common to share processes; ranks that met over one backend cannot change it."""
    return cell.workload, ranks_of(cell), nodes_of(cell), cell.config.get("backend"), cell.config.get("device")


def largest_fit(cell: Cell, field: str, run: Callable[[Cell], Record]) -> Iterator[Record]:
    """Search the largest batch or context that fits in memory, and yield the record of every trial.

        for record in largest_fit(cell, "batch_size", run): ...

    Each trial has a fresh process. The value doubles, from the cell's own value on, until a trial runs out of memory;
    then the gap is halved. The search measures because no formula knows the allocator's fragmentation or a library's
    workspaces. It ends at a trial that fails in another way (a timeout, a crash), which says nothing about memory, and
    at the field's bound in LARGEST_TRIED, because a small model on a large machine would grow for hours; a cell whose
    own value is larger than this bound has that value as its bound.
    """
    value = int(cell.config[field])
    bound = max(LARGEST_TRIED[field], value)
    fits, fails = 0, bound + 1
    while fails - fits > max(1, fits // _RESOLUTION):
        record = run(at(cell, field, value))
        yield record
        if record.failure is not None and record.failure.kind != "out_of_memory":
            return
        if record.failure is None:
            fits = value
        else:
            fails = value
        value = min(2 * fits, bound) if fails > bound else (fits + fails) // 2
        if value < 1:
            return


def at(cell: Cell, field: str, value: int) -> Cell:
    """The cell with another value of this config field, checked like any config."""
    config = to_plain(from_plain(MemoryConfig, {**cell.config, field: value}))
    return Cell(workload=cell.workload, config=config, point={**cell.point, field: value})

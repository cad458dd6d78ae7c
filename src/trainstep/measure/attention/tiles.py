"""The workload `attention_tiles` finds the fastest tile of one attention kernel on this GPU; `trainstep tune` runs it.

Candidates come from a rule (ops/flash_attention/portable/tiles.py) or from the user; the tile now in use is always among them.
First, each candidate is compiled and checked (lone_kernel.py) in one of several side processes; a candidate that fails becomes a
row with its reason. Then the correct candidates are timed here, interleaved, so that drift falls on all alike. Clearly slower
candidates drop out after the first and the third round.
"""

import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from typing import Any

from trainstep.config.attention import KERNEL_TILE_FIELDS, AttentionTilesConfig
from trainstep.config.grid import Cell
from trainstep.config.parsing import to_plain
from trainstep.costs.attention import attention_kernel_flops
from trainstep.measure.attention.lone_kernel import LoneKernel, operands_of, tile_problem_of
from trainstep.measure.harness.connection import CellConnection, tell_nobody
from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.harness.runner import CellRun, Limits, run_alone
from trainstep.measure.harness.workload import Findings, Stage
from trainstep.measure.machine.environment import cores
from trainstep.measure.step.clock import times_in_a_row_s
from trainstep.ops.flash_attention.portable.tiles import (
    Row,
    TileConfig,
    TileProblem,
    candidates,
    choose_row,
    why_illegal,
)
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Failure, Record, Samples

MOST_PROCESSES = 16
_CHECK_S = 120.0
"""Limit of a check with the start of its process. A kernel that takes longer to compile is not worth shipping."""
_LEAST_ROUNDS = 3
_DROPS = {1: 3.0, _LEAST_ROUNDS: 1.5}
"""After this many rounds, a candidate drops out if it takes over this many times the fastest candidate's time."""
_CHECK_FACTS = ("error", "error_ratio", "registers", "spilled_bytes", "shared_bytes")


@dataclass(kw_only=True)
class Candidate:
    """A tile with its check and its times. `outcome`: right (and so timed), wrong, failed, illegal, not_begun."""

    tile: TileConfig
    outcome: str = "not_begun"
    reason: str = ""
    checked: dict[str, Any] = field(default_factory=dict)
    warmup_s: float = 0.0
    times_s: list[float] = field(default_factory=list)

    @property
    def time_s(self) -> float | None:
        return statistics.median(self.times_s) if self.times_s else None

    def learn(self, record: Record | None, budget_s: float) -> None:
        """Take over the result of the check; no record means that it was not begun."""
        if record is None:
            self.reason = f"not begun within {budget_s:g} s"
        elif record.failure is not None:
            self.outcome = "failed"
            self.reason = f"{record.failure.phase}: {record.failure.message}"
        else:
            self.checked = {name: record.fact(name) for name in _CHECK_FACTS}
            self.reason = record.fact("wrong", "")
            self.outcome = "wrong" if self.reason else "right"


class SideProcesses:
    """Runs cells side by side in up to `count` processes, for work that is not timed.

    A process is started when first needed and kept for later cells. A failure costs its own process, not the other cells.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # A cell's process ends with the thread that started it (harness/cell.py), so the threads are kept too.
        self._threads = ThreadPoolExecutor(max_workers=count, thread_name_prefix="side-process")
        self._thread_local = threading.local()

    def run(self, cells: Sequence[Cell], limits: Limits, *, deadline_s: float) -> Iterator[tuple[int, Record | None]]:
        """Pairs (position, record) as cells finish; None for a cell that had not begun at `deadline_s` (time.monotonic)."""
        futures = {
            self._threads.submit(self._run_one, cell, limits, deadline_s): position
            for position, cell in enumerate(cells)
        }
        for future in as_completed(futures):
            yield futures[future], future.result()

    def close(self) -> None:
        """End the threads and their processes, once they are done."""
        self._threads.shutdown(wait=False)

    def _run_one(self, cell: Cell, limits: Limits, deadline_s: float) -> Record | None:
        if time.monotonic() > deadline_s:
            return None
        connection: CellConnection | None = getattr(self._thread_local, "connection", None)
        if connection is None or not connection.alive:
            connection = CellConnection(tell_nobody)
        record, is_reusable = run_alone(CellRun(cell, limits, connection))
        if not is_reusable:
            connection.close()
        self._thread_local.connection = connection if is_reusable else None
        return record


class AttentionTilesWorkload:
    shares_worker = True  # the next cell also keeps the side processes: starting one takes as long as compiling

    def __init__(self, check: str = "trainstep.measure.attention.lone_kernel:WORKLOAD") -> None:
        self._check = check
        self._side: SideProcesses | None = None

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "AttentionTilesMeasurement":
        """Check every candidate, make the tensors and warm up. CellFailed if no candidate is right."""
        started_s = time.monotonic()
        problem = AttentionTilesConfig(**config)
        tile_problem = tile_problem_of(problem)
        in_use = choose_row(tile_problem)
        tried = [Candidate(tile=tile) for tile in tiles_to_try(problem, in_use, tile_problem)]
        deadline_s = started_s + problem.budget_s
        self._check_all(problem, tile_problem, tried, stage, deadline_s)
        if not any(candidate.outcome == "right" for candidate in tried):
            message = f"none of {len(tried)} tiles can be timed; the first: {tried[0].reason}"
            raise CellFailed(Failure(kind="crash", phase="check", message=message))
        checked_s = time.monotonic() - started_s
        stage("build")
        measurement = AttentionTilesMeasurement(problem, tried, in_use, stage, deadline_s)
        measurement.facts |= facts_of(
            architecture=tile_problem.architecture,
            device_shared_bytes=tile_problem.shared_memory_bytes,
            check_s=checked_s,
        )
        stage("warmup")
        measurement.warm_up()
        return measurement

    def _check_all(
        self,
        problem: AttentionTilesConfig,
        tile_problem: TileProblem,
        tried: Sequence[Candidate],
        stage: Stage,
        deadline_s: float,
    ) -> None:
        """Compile and check all legal candidates, side by side."""
        groups: dict[TileConfig, list[Candidate]] = {}
        for candidate in tried:
            reason = why_illegal(candidate.tile, tile_problem)
            if reason:
                candidate.outcome, candidate.reason = "illegal", reason
            else:  # tiles that differ only in heads_together are one compiled kernel
                groups.setdefault(replace(candidate.tile, heads_together=1), []).append(candidate)
        grouped = list(groups.values())
        most_together = [
            max((candidate.tile for candidate in group), key=lambda tile: tile.heads_together) for group in grouped
        ]
        plain = {"device": problem.device, "problem": to_plain(problem)}
        cells = [
            Cell(workload=self._check, config={**plain, "tile": asdict(tile)}, point={"tile": in_words(tile)})
            for tile in most_together
        ]
        stage(f"compile 0 of {len(cells)}")
        results = self._processes(problem.workers).run(cells, Limits(timeout_s=_CHECK_S), deadline_s=deadline_s)
        for done, (position, record) in enumerate(results, 1):
            for candidate in grouped[position]:
                candidate.learn(record, problem.budget_s)
            stage(f"compile {done} of {len(cells)}")

    def _processes(self, workers: int) -> SideProcesses:
        count = workers or min(cores(), MOST_PROCESSES)
        if self._side is None or self._side.count != count:
            if self._side is not None:
                self._side.close()
            self._side = SideProcesses(count)
        return self._side


def tiles_to_try(config: AttentionTilesConfig, in_use: Row, problem: TileProblem) -> list[TileConfig]:
    """The user's tiles, or else the rule's, and the tile in use, each once."""
    batch, heads, _ = config.sizes
    users = [TileConfig(**dict(zip(KERNEL_TILE_FIELDS, numbers, strict=False))) for numbers in config.own_tiles]
    tiles = users or candidates(problem, heads=batch * heads)
    return list(dict.fromkeys([*tiles, in_use.config]))


def in_words(tile: TileConfig) -> str:
    """The tile as --candidates takes it: `128x64x8x3x1`."""
    return "x".join(map(str, astuple(tile)))


class AttentionTilesMeasurement:
    """Times the right candidates, interleaved, on one set of tensors."""

    def __init__(
        self, config: AttentionTilesConfig, tried: Sequence[Candidate], in_use: Row, stage: Stage, deadline_s: float
    ) -> None:
        self._config = config
        self._tried = tried
        self._in_use = in_use
        self._stage = stage
        self._deadline_s = deadline_s
        self._rounds = 0
        kernel = LoneKernel(config, operands_of(config))
        self._timed = [
            (candidate, partial(kernel.run, kernel.bind(candidate.tile)))
            for candidate in tried
            if candidate.outcome == "right"
        ]
        self.facts: dict[str, Fact] = {}

    def warm_up(self) -> None:
        """Run one round that is kept apart, because it loads the kernels."""
        for _, call in self._timed:
            call()
        times_s = times_in_a_row_s([call for _, call in self._timed], self._config.device)
        for (candidate, _), time_s in zip(self._timed, times_s, strict=True):
            candidate.warmup_s = time_s

    def take(self, steps: int) -> None:
        """Run the config's rounds `steps` times; rounds after the third only within the budget of time."""
        for _ in range(steps * self._config.rounds):
            if self._rounds >= _LEAST_ROUNDS and time.monotonic() > self._deadline_s:
                break
            self._stage(f"round {self._rounds + 1} of {steps * self._config.rounds}")
            first = self._rounds % len(self._timed)  # another candidate begins each round
            order = [*self._timed[first:], *self._timed[:first]]
            times_s = times_in_a_row_s([call for _, call in order], self._config.device)
            for (candidate, _), time_s in zip(order, times_s, strict=True):
                candidate.times_s.append(time_s)
            self._rounds += 1
            if self._rounds in _DROPS:
                self._drop_the_slow(_DROPS[self._rounds])

    def finish(self) -> Findings:
        """Free the tensors and return the ranking."""
        self._timed = []
        config, best = self._config, _fastest(self._tried)
        batch, heads, positions = config.sizes
        flops = attention_kernel_flops(
            config.kernel, batch * heads, positions, config.head_dim, causal=config.mask == "causal"
        )
        used = next(candidate for candidate in self._tried if candidate.tile == self._in_use.config)
        facts = self.facts | facts_of(
            best=in_words(best.tile),
            in_use=in_words(used.tile),
            in_use_record=self._in_use.record,
            in_use_time=used.time_s,
            flops=flops,
            rate=flops / statistics.median(best.times_s),
            timing="host_clock" if config.device == "cpu" else "cuda_events",
            tiles_tried=len(self._tried),
        )
        return Findings(
            samples={"time": Samples(unit="s", values=tuple(best.times_s), warmups=(best.warmup_s,))},
            facts=facts,
            tables={"candidates": _candidate_table(self._tried), "times": _time_table(self._tried)},
        )

    def _drop_the_slow(self, times: float) -> None:
        least_s = _fastest(self._tried).time_s or 0.0
        self._timed = [
            (candidate, call) for candidate, call in self._timed if (candidate.time_s or 0.0) <= times * least_s
        ]


def _fastest(tried: Sequence[Candidate]) -> Candidate:
    timed = [candidate for candidate in tried if candidate.times_s]
    return min(timed, key=lambda candidate: statistics.median(candidate.times_s))


def _candidate_table(tried: Sequence[Candidate]) -> dict[str, list[Any]]:
    """One row per candidate, in the order tried; None for what was not measured."""
    return {
        **{name: [getattr(candidate.tile, name) for candidate in tried] for name in KERNEL_TILE_FIELDS},
        "time_s": [candidate.time_s for candidate in tried],
        "rounds": [len(candidate.times_s) for candidate in tried],
        **{name: [candidate.checked.get(name) for candidate in tried] for name in _CHECK_FACTS},
        "outcome": [candidate.outcome for candidate in tried],
        "reason": [candidate.reason for candidate in tried],
    }


def _time_table(tried: Sequence[Candidate]) -> dict[str, list[Any]]:
    """One row per sample: `candidate` is a row of the table `candidates`, `round` counts from 0."""
    samples = [
        (row, number, time_s) for row, candidate in enumerate(tried) for number, time_s in enumerate(candidate.times_s)
    ]
    return {name: [sample[i] for sample in samples] for i, name in enumerate(("candidate", "round", "time_s"))}


WORKLOAD = AttentionTilesWorkload()

"""The workload `attention_tiles`: which tile makes one attention kernel fastest on this GPU. `trainstep tune` runs it.

Candidates come from a rule (ops/flash_attention/candidates.py) or from the user, with the tile now in use among them. First each is
compiled and checked in a process of its own (tile_check.py), many side by side; one that faults is a row with its reason. Then the
right ones take turns here, so that drift falls on all alike; the clearly slower ones drop out after one round or three.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from trainstep.config.attention_tiles import KERNEL_TILE_FIELDS, AttentionTilesConfig
from trainstep.config.cell import Cell
from trainstep.config.parsing import to_plain
from trainstep.costs.attention import attention_kernel_flops
from trainstep.measure.call_clock import Call, times_in_a_row_s
from trainstep.measure.failures import CellFailed
from trainstep.measure.host import cores
from trainstep.measure.lone_kernel import LoneKernel, operands_of, tile_problem_of
from trainstep.measure.runner import Limits
from trainstep.measure.side_processes import SideProcesses
from trainstep.measure.workload import Findings, Stage
from trainstep.ops.flash_attention.candidates import candidates
from trainstep.ops.flash_attention.tiles import Row, TileConfig, TileProblem, choose_row, why_illegal
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Failure, Record, Samples

MOST_PROCESSES = 16
_CHECK_S = 120.0
"""The start of its process included; a kernel that takes longer to compile is none to ship."""
_ROUNDS_OF_ALL = 3
_DROPS = {1: 3.0, _ROUNDS_OF_ALL: 1.5}
"""After so many rounds, who takes more than so many times the least drops out."""
_SEEN = ("error", "error_ratio", "registers", "spilled_bytes", "shared_bytes")


@dataclass(kw_only=True)
class Candidate:
    """A tile and what became of it. `outcome`: right (and so timed), wrong, failed, illegal, not_begun."""

    tile: TileConfig
    outcome: str = "not_begun"
    reason: str = ""
    seen: dict[str, Any] = field(default_factory=dict)
    warmup_s: float = 0.0
    times_s: list[float] = field(default_factory=list)

    @property
    def time_s(self) -> float | None:
        return statistics.median(self.times_s) if self.times_s else None

    def learn(self, record: Record | None, budget_s: float) -> None:
        """Take over what its check found."""
        if record is None:
            self.reason = f"not begun within {budget_s:g} s"
        elif record.failure is not None:
            self.outcome = "failed"
            self.reason = f"{record.failure.phase}: {record.failure.message}"
        else:
            self.seen = {name: record.fact(name) for name in _SEEN}
            self.reason = record.fact("wrong", "")
            self.outcome = "wrong" if self.reason else "right"


class AttentionTilesWorkload:
    """Cells share a process, and this one the processes that check: starting them takes as long as compiling."""

    shares_worker = True

    def __init__(self, check: str = "trainstep.measure.tile_check:WORKLOAD") -> None:
        self._check = check
        self._side: SideProcesses | None = None

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "AttentionTilesMeasurement":
        """Check every candidate, make the tensors and warm up. CellFailed where no candidate is right."""
        started_s = time.monotonic()
        problem = AttentionTilesConfig(**config)
        where = tile_problem_of(problem)
        in_use = choose_row(where)
        tried = [Candidate(tile=tile) for tile in tiles_to_try(problem, in_use, where)]
        deadline_s = started_s + problem.budget_s
        self._check_all(problem, tried, stage, deadline_s)
        if not any(candidate.outcome == "right" for candidate in tried):
            reasons = next(candidate.reason for candidate in tried)
            message = f"none of {len(tried)} tiles can be timed; the first: {reasons}"
            raise CellFailed(Failure(kind="crash", phase="check", message=message))
        checked_s = time.monotonic() - started_s
        stage("build")
        measurement = AttentionTilesMeasurement(problem, tried, in_use, stage, deadline_s)
        measurement.facts |= facts_of(
            architecture=where.architecture,
            device_shared_bytes=where.shared_memory_bytes,
            check_s=checked_s,
        )
        stage("warmup")
        measurement.warm_up()
        return measurement

    def _check_all(
        self, problem: AttentionTilesConfig, tried: Sequence[Candidate], stage: Stage, deadline_s: float
    ) -> None:
        """Compile and check, side by side, what is legal."""
        where = tile_problem_of(problem)
        waiting: dict[TileConfig, list[Candidate]] = {}
        for candidate in tried:
            reason = why_illegal(candidate.tile, where)
            if reason:
                candidate.outcome, candidate.reason = "illegal", reason
            else:
                waiting.setdefault(replace(candidate.tile, heads_together=1), []).append(candidate)
        alike = list(waiting.values())  # what differs in heads_together alone is one compiled kernel
        most_together = [max((one.tile for one in ones), key=lambda tile: tile.heads_together) for ones in alike]
        cells = [_check_cell(self._check, problem, tile) for tile in most_together]
        stage(f"compile 0 of {len(cells)}")
        results = self._processes(problem.workers).run(cells, Limits(timeout_s=_CHECK_S), deadline_s=deadline_s)
        for done, (position, record) in enumerate(results, 1):
            for candidate in alike[position]:
                candidate.learn(record, problem.budget_s)
            stage(f"compile {done} of {len(cells)}")

    def _processes(self, asked: int) -> SideProcesses:
        count = asked or min(cores(), MOST_PROCESSES)
        if self._side is None or self._side.count != count:
            if self._side is not None:
                self._side.close()
            self._side = SideProcesses(count)
        return self._side


def tiles_to_try(config: AttentionTilesConfig, in_use: Row, where: TileProblem) -> list[TileConfig]:
    """The user's own or the rule's, and the one in use, each once."""
    batch, heads, _ = config.sizes
    own = [TileConfig(**dict(zip(KERNEL_TILE_FIELDS, numbers, strict=False))) for numbers in config.own_tiles]
    found = own or candidates(where, heads=batch * heads)
    return list(dict.fromkeys([*found, in_use.config]))


def in_words(tile: TileConfig) -> str:
    """`128x64x8x3x1`: as --candidates takes it."""
    return "x".join(map(str, astuple(tile)))


def _check_cell(workload: str, problem: AttentionTilesConfig, tile: TileConfig) -> Cell:
    config = {"device": problem.device, "problem": to_plain(problem), "tile": asdict(tile)}
    return Cell(workload=workload, config=config, point={"tile": in_words(tile)})


class AttentionTilesMeasurement:
    """The right candidates, taking turns on one set of tensors."""

    def __init__(
        self,
        config: AttentionTilesConfig,
        tried: Sequence[Candidate],
        in_use: Row,
        stage: Stage,
        deadline_s: float,
    ) -> None:
        self._config = config
        self._tried = tried
        self._in_use = in_use
        self._stage = stage
        self._deadline_s = deadline_s
        self._rounds = 0
        kernel = LoneKernel(config, operands_of(config))
        self._turns = [
            (candidate, _call(kernel, candidate.tile)) for candidate in tried if candidate.outcome == "right"
        ]
        self.facts: dict[str, Fact] = {}

    def warm_up(self) -> None:
        """One round kept apart: the kernels are loaded in it."""
        for _, call in self._turns:
            call()
        times_s = times_in_a_row_s([call for _, call in self._turns], self._config.device)
        for (candidate, _), time_s in zip(self._turns, times_s, strict=True):
            candidate.warmup_s = time_s

    def take(self, steps: int) -> None:
        """All rounds, `steps` times over; beyond the third only while the budget lasts."""
        for _ in range(steps * self._config.rounds):
            if self._rounds >= _ROUNDS_OF_ALL and time.monotonic() > self._deadline_s:
                break
            self._stage(f"round {self._rounds + 1} of {steps * self._config.rounds}")
            first = self._rounds % len(self._turns)  # so that nobody always follows the same neighbour
            order = [*self._turns[first:], *self._turns[:first]]
            times_s = times_in_a_row_s([call for _, call in order], self._config.device)
            for (candidate, _), time_s in zip(order, times_s, strict=True):
                candidate.times_s.append(time_s)
            self._rounds += 1
            if self._rounds in _DROPS:
                self._drop_the_slow(_DROPS[self._rounds])

    def finish(self) -> Findings:
        """Let the tensors go and hand over the ranking."""
        self._turns = []
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
        self._turns = [turn for turn in self._turns if (turn[0].time_s or 0.0) <= times * least_s]


def _call(kernel: LoneKernel, tile: TileConfig) -> Call:
    bound = kernel.bind(tile)
    return lambda: kernel.run(bound)


def _fastest(tried: Sequence[Candidate]) -> Candidate:
    return min((candidate for candidate in tried if candidate.times_s), key=lambda one: statistics.median(one.times_s))


def _candidate_table(tried: Sequence[Candidate]) -> dict[str, list[Any]]:
    """One row a candidate, in the order tried; None where a thing was not seen."""
    return {
        **{name: [getattr(one.tile, name) for one in tried] for name in KERNEL_TILE_FIELDS},
        "time_s": [one.time_s for one in tried],
        "rounds": [len(one.times_s) for one in tried],
        **{name: [one.seen.get(name) for one in tried] for name in _SEEN},
        "outcome": [one.outcome for one in tried],
        "reason": [one.reason for one in tried],
    }


def _time_table(tried: Sequence[Candidate]) -> dict[str, list[Any]]:
    """Every sample: `candidate` is the row of the other table, `round` counts from 0."""
    samples = [(row, turn, time_s) for row, one in enumerate(tried) for turn, time_s in enumerate(one.times_s)]
    return {name: [sample[i] for sample in samples] for i, name in enumerate(("candidate", "round", "time_s"))}


WORKLOAD = AttentionTilesWorkload()

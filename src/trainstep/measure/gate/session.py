"""Runs a gate: both versions alternately, in blocks, until the interval decides or the time is over.

    outcome = run_gate(plan, base, head, GateFile(path), on_block=show)
    outcome.ending.verdict        # "pass", "fail" or "cannot tell"

Each process of a gate begins with a run of each version that does not count: files come into the system's cache, Python writes
bytecode. Every run is on disk when it has ended. The time of all runs counts, those of processes that were killed too.
"""

import math
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainstep.measure.gate.checkouts import Checkout, Source, checked_out
from trainstep.measure.gate.command import Ran, run_command
from trainstep.measure.gate.times import Measure, NoRecords, NoTimes, Times, measure_of
from trainstep.records.benchmark_json import Benchmarks
from trainstep.records.gate_file import (
    BASE,
    HEAD,
    WARMUP,
    Ending,
    GateFile,
    Plan,
    Run,
    blocks_of,
    order_of,
    used_seconds,
)
from trainstep.records.sequential import MINIMUM_BLOCKS, Judgement, judge

_PATIENCE = 10
_LEAST_LIMIT_S = 30
"""A run may take this many times as long as the longest so far, but at least so many seconds."""
_RECENT = 5


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a gate. `judgement` is None if no block was completed."""

    ending: Ending
    judgement: Judgement | None
    runs: tuple[Run, ...]


class _Stopped(Exception):
    """Raised to end the gate without an interval that decides."""

    def __init__(self, ending: Ending) -> None:
        self.ending = ending


def run_gate(
    plan: Plan,
    base: Source | Benchmarks,
    head: Source,
    file: GateFile,
    *,
    allow_mixed: bool = False,
    on_block: Callable[[Judgement, float], None] = lambda judgement, used_s: None,
) -> Outcome:
    """Run the gate, or what is left of it, and return its outcome. If the gate has ended, nothing is run.

    `base`: a version to run, or a stored baseline. `on_block`: called after each block with the judgement so far and the used
    seconds.
    ValueError if a checkout is impossible, or base cannot start the command.
    """
    runs, ending = file.open_for(plan)
    if ending is None:
        gate = _Gate(plan, base, file, runs, allow_mixed=allow_mixed, on_block=on_block)
        ending = gate.run([source for source in (base, head) if isinstance(source, Source)])
        file.end(ending)
    blocks = blocks_of(runs)
    judgement = None
    if blocks:
        judgement = judge(blocks, budget_s=plan.budget_s, threshold=plan.threshold, is_over=ending.is_over)
    return Outcome(ending=ending, judgement=judgement, runs=tuple(runs))


class _Gate:
    """One process of a gate."""

    def __init__(
        self,
        plan: Plan,
        base: Source | Benchmarks,
        file: GateFile,
        runs: list[Run],
        *,
        allow_mixed: bool,
        on_block: Callable[[Judgement, float], None],
    ) -> None:
        self._plan, self._file, self._runs = plan, file, runs
        self._baseline = _stored_times(base) if isinstance(base, Benchmarks) else None
        self._allow_mixed, self._on_block = allow_mixed, on_block
        self._notes: list[str] = []
        self._cells: tuple[str, ...] | None = tuple(runs[-1].seconds) if runs else None
        self._longest_s = 0.0
        self._mark_s = time.perf_counter()

    def run(self, sources: Sequence[Source]) -> Ending:
        try:
            with checked_out(*sources) as checkouts:
                by_side = {checkout.side: checkout for checkout in checkouts}
                if self._plan.setup:
                    self._set_up(checkouts, self._plan.setup)
                    self._mark_s = time.perf_counter()
                measure = self._warm_up(by_side)
                return self._measure(by_side, measure)
        except _Stopped as stopped:
            return stopped.ending

    def _set_up(self, checkouts: Sequence[Checkout], setup: str) -> None:
        for checkout in checkouts:
            ran = run_command(checkout, ("sh", "-c", setup), limit_s=math.inf)
            if ran.trouble:
                raise self._failed(checkout.side, f"its setup {ran.trouble}", ran)

    def _warm_up(self, checkouts: Mapping[str, Checkout]) -> Measure:
        """Run each version once, find out how to measure if the user did not say, and compare the environments of the two."""
        chosen = self._plan.measure
        measure = measure_of("records" if chosen == "auto" else chosen, self._plan.command, self._plan.quantity)
        ran: dict[str, Ran] = {}
        seen: dict[str, Times | NoTimes] = {}
        for side, checkout in checkouts.items():
            measure.prepare(checkout)
            ran[side] = self._run_once(checkout, measure, self._plan.budget_s)
            try:
                seen[side] = measure.times(checkout, ran[side])
            except NoTimes as error:
                seen[side] = error
        if chosen == "auto" and any(isinstance(times, NoRecords) for times in seen.values()):
            measure = measure_of("wall", self._plan.command, None)
            seen = {side: measure.times(checkouts[side], ran[side]) for side in checkouts}
        times_of: dict[str, Times] = {}
        for side, times in seen.items():
            if isinstance(times, NoTimes):
                raise self._failed(side, str(times), ran[side])
            times_of[side] = times
        if self._baseline is not None:
            times_of = {BASE: Times(seconds=self._baseline[0], environment=times_of[HEAD].environment), **times_of}
        self._compare_environments(times_of)
        if self._cells is None:
            self._cells = tuple(times_of[BASE].seconds)
        for side in checkouts:
            self._keep(WARMUP, side, times_of[side].seconds, ran[side])
        return measure

    def _compare_environments(self, found: Mapping[str, Times]) -> None:
        base, head = found[BASE].environment, found[HEAD].environment
        unlike = [
            f"{name} {base.get(name)} against {head.get(name)}" for name in base if base.get(name) != head.get(name)
        ]
        if unlike and not self._allow_mixed:
            raise _Stopped(
                Ending(
                    verdict="cannot tell",
                    reason=f"base and head ran in different environments: {'; '.join(unlike)}; --allow-mixed compares them anyway",
                )
            )
        self._notes += [f"Unlike environments: {'; '.join(unlike)}."] if unlike else []

    def _measure(self, checkouts: Mapping[str, Checkout], measure: Measure) -> Ending:
        """Run blocks until one of them decides."""
        while True:
            blocks, used_s = blocks_of(self._runs), used_seconds(self._runs)
            number = len(blocks)
            exhausted = self._baseline is not None and 2 * number + 2 > len(self._baseline)
            is_over = exhausted or used_s + self._next_block_s(number) > self._plan.budget_s
            if blocks:
                judgement = judge(blocks, budget_s=self._plan.budget_s, threshold=self._plan.threshold, is_over=is_over)
                self._on_block(judgement, used_s)
                if judgement.verdict:
                    return Ending(
                        verdict=judgement.verdict,
                        reason=self._why_open(number, exhausted) if judgement.verdict == "cannot tell" else "",
                        notes=tuple(self._notes),
                        is_over=is_over,
                        exhausted=exhausted,
                    )
            elif is_over:
                return Ending(verdict="cannot tell", reason=self._why_open(0, exhausted), notes=tuple(self._notes))
            self._run_block(number, checkouts, measure)

    def _run_block(self, number: int, checkouts: Mapping[str, Checkout], measure: Measure) -> None:
        stored = 2 * number
        for side in order_of(number):
            if side == BASE and self._baseline is not None:
                self._keep(number, BASE, self._baseline[stored], None)
                stored += 1
                continue
            checkout = checkouts[side]
            measure.prepare(checkout)
            ran = self._run_once(checkout, measure, max(_PATIENCE * self._longest_s, _LEAST_LIMIT_S))
            try:
                times = measure.times(checkout, ran)
            except NoTimes as error:
                raise self._failed(side, str(error), ran) from None
            self._keep(number, side, times.seconds, ran)

    def _run_once(self, checkout: Checkout, measure: Measure, limit_s: float) -> Ran:
        ran = run_command(checkout, measure.command, limit_s=limit_s)
        self._longest_s = max(self._longest_s, ran.wall_s)
        if not ran.started and checkout.side == BASE:  # base runs first, so the command has never run
            raise ValueError(f"command: {shlex.quote(measure.command[0])} {ran.trouble}")
        if ran.trouble:
            raise self._failed(checkout.side, f"the command {ran.trouble}", ran)
        return ran

    def _keep(self, block: int, side: str, seconds: Mapping[str, float], ran: Ran | None) -> None:
        """Write a run, with the time since the last one. Without `ran` it is a run of the stored baseline, which took no time."""
        assert self._cells is not None
        if unlike := set(self._cells) ^ set(seconds):
            name = min(unlike)
            has = "has no" if name in self._cells else "has a new"
            raise self._failed(side, f"it {has} {name}; both versions must have the same cells", ran)
        now_s = time.perf_counter()
        run = Run(
            block=block,
            side=side,
            used_s=0.0 if ran is None else now_s - self._mark_s,
            seconds={name: seconds[name] for name in self._cells},
            wall_s=0.0 if ran is None else ran.wall_s,
            cpu_s=0.0 if ran is None else ran.cpu_s,
        )
        if ran is not None:
            self._mark_s = now_s
        self._file.add(run)
        self._runs.append(run)

    def _next_block_s(self, number: int) -> float:
        """About how long the next block takes: the median of the last blocks; for the first block, the longest run four times."""
        by_block: dict[int, float] = {}
        for run in self._runs:
            by_block[run.block] = by_block.get(run.block, 0.0) + run.used_s
        recent = [by_block[block] for block in range(max(number - _RECENT, 0), number)]
        return statistics.median(recent) if recent else (2 if self._baseline else 4) * self._longest_s

    def _why_open(self, blocks: int, exhausted: bool) -> str:
        if exhausted:
            return f"the baseline has no more runs than the {2 * blocks} that were compared"
        minutes = f"{self._plan.budget_s / 60:g} minute{'s' * (self._plan.budget_s != 60)}"
        if blocks < MINIMUM_BLOCKS:
            need_s = self._next_block_s(blocks) * MINIMUM_BLOCKS + used_seconds(
                [run for run in self._runs if run.block == WARMUP]
            )
            return (
                f"the time of {minutes} holds {blocks} of the {MINIMUM_BLOCKS} blocks of four runs that are needed: "
                f"--budget-minutes {math.ceil(need_s / 60 * 1.1)}"
            )
        return f"the time of {minutes} is over before the interval decides"

    def _failed(self, side: str, what: str, ran: Ran | None) -> _Stopped:
        """Head's failure fails the gate; base's leaves nothing to compare with."""
        name = self._plan.base if side == BASE else self._plan.head
        return _Stopped(
            Ending(
                verdict="fail" if side == HEAD else "cannot tell",
                reason=f"{side} ({name}): {what}",
                output=() if ran is None else ran.output,
                notes=tuple(self._notes),
            )
        )


def _stored_times(baseline: Benchmarks) -> list[dict[str, float]]:
    """The runs of a stored baseline, in their order: cell -> seconds."""
    count = min(len(times) for times in baseline.rounds.values())
    return [{name: times[index] for name, times in baseline.rounds.items()} for index in range(count)]

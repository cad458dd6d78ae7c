"""Compared variants side by side: live processes that take turns, or rounds of whole processes where they do not fit together.

[Note: why turns]
Machines drift by more than the differences looked for: clocks, heat, neighbours. Turn i of one variant runs next to turn i
of the other, so drift falls on both. Processes that wait for their turn block on a pipe and use neither device nor core. Each
turn begins with a step that is not timed, where a workload has one: the other's turn left the caches cold.

[Note: why the order within a set never changes]
Every turn follows a turn of another process. Were the order reversed each turn (a b, b a, a b), every process would take two
turns in a row, the second with warm caches, and b would do so in one more pair than a: the median of the pairs' ratios then
lies between the pairs where b was warm and the others, below 1 for two variants that are the same.

[Note: why several sets]
What a process has from its start to its end (where its memory lies, which core it got) is in all its turns: no number of turns
tells it from a difference of the variants. So the variants are run by several sets of fresh processes, the order reversed from
set to set, and the set is the unit of the comparison (records/compare.py). There are twelve, or as many as a minute holds, but at
least six. A set takes all steps of the config while they take no longer than a second; else its share of them.
Workloads whose processes measure several cells are run by one set: starting a process costs them more than they take.
"""

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from trainstep.config.cell import Cell, group_name
from trainstep.measure.connection import CellLost, Tell
from trainstep.measure.idle_processes import IdleProcesses
from trainstep.measure.rank_findings import joined_ranks
from trainstep.measure.round_parts import RoundParts
from trainstep.measure.runner import CellRun, Limits, open_run, run_alone, steps_of, with_facts
from trainstep.records.compare import MINIMUM_PAIRS
from trainstep.records.record import Record, Samples
from trainstep.records.tables import RANKS

_TURNS = 10
_ROUNDS = 5
"""As many as a comparison needs pairs: a process says nothing of the next one."""
_PROCESSES = 12
_FEWEST_PROCESSES = 6
"""Even, as both orders are to come equally often, and one more than an interval needs at the least."""
_SETS_S = 60.0
_STEPS_S = 1.0


class DoNotFit(Exception):
    """The variants are too large to be alive at the same time."""


def run_interleaved(
    cells: Sequence[Cell],
    limits: Limits,
    tell: Tell,
    idle: IdleProcesses | None = None,
    kept: RoundParts | None = None,
) -> Iterator[list[Record]]:
    """The records of cells that are compared, in the cells' order: taking turns if all fit, else, or if asked for, in rounds.

    Records of turns come one by one, each as soon as its cell and those before it have looked at what they did; those of
    rounds together. Where memory runs out during a look all come again, in rounds: also those that came already.

    `idle`: where processes come from and go to that can measure more than one cell; without it each cell has a fresh one.
    `kept`: where each part of a round is kept as soon as it is measured; those found there are not measured again.
    """
    rounds = min(limits.rounds or _ROUNDS, max(map(steps_of, cells)))
    found = {} if kept is None else kept.found(cells, rounds, limits.visible_devices)
    if limits.rounds is None and not found:  # what is found was measured because they do not fit
        try:
            yield from _run_in_turns(cells, limits, tell, idle)
            return
        except DoNotFit:
            pass
    if idle is not None:
        idle.close()  # they hold memory too
    yield _run_in_rounds(cells, limits, tell, rounds, found, kept)


def _run_in_turns(
    cells: Sequence[Cell], limits: Limits, tell: Tell, idle: IdleProcesses | None = None
) -> Iterator[list[Record]]:
    """Sets of live processes; records come out of the last one, which looks."""
    processes = idle or IdleProcesses(forks=limits.forks)
    parts: dict[str, list[Record]] = {cell.key: [] for cell in cells}
    plan = _Plan(cells, limits.processes)
    try:
        for index in itertools.count():
            whole = [cell for cell in cells if not any(part.failure for part in parts[cell.key])]
            for cell in whole if index else ():
                tell(cell, f"process {index + 1} of {plan.sets}")
            live = _LiveSet(whole if index % 2 == 0 else whole[::-1], limits, tell, processes)
            try:
                live.run(plan)
                # One variant alone is compared with nothing: it takes the steps that its config asks for, and no more.
                last = index + 1 == plan.sets or len(live.alive) < (2 if plan.takes_all else 1)
                for cell in cells:
                    if cell in whole:
                        parts[cell.key].append(live.finish(cell, looks=last))
                    if last:
                        facts = _facts(
                            "live", cells, cell, plan.turn, plan.steps_of(cell), first=_joined(parts[cells[0].key])
                        )
                        # The driver's figure is the whole device's: with several processes alive it is nobody's.
                        yield [with_facts(_joined(parts[cell.key]), **facts, driver_bytes=None, power_w=None)]
            finally:
                live.close()
            if last:
                return
    finally:
        if idle is None:
            processes.close()


class _Plan:
    """What every set of live processes does alike: how many sets, steps a set, and steps a turn. The first set decides."""

    def __init__(self, cells: Sequence[Cell], sets: int | None) -> None:
        self._window = _window(cells)
        self._all_steps = max(map(steps_of, cells))
        self.sets = 1 if self._all_steps // self._window < MINIMUM_PAIRS and sets is None else sets
        self.turn = _whole_windows(self._all_steps // _TURNS, self._window)
        self._steps: int | None = None

    @property
    def takes_all(self) -> bool:
        """Whether a set takes all steps of the config."""
        return self._steps == self._all_steps

    def steps_of(self, cell: Cell) -> int:
        """Steps that a process of the cell takes."""
        return steps_of(cell) if self._steps is None else min(self._steps, steps_of(cell))

    def decide_steps(self, step_s: float, *, shared: bool) -> None:
        """After the first turn: `step_s` is what a step of the slowest variant took in it. `shared`: one set is enough."""
        if self._steps is not None:
            return
        if shared:
            self.sets = 1
        share = -(-self._all_steps // (self.sets or _FEWEST_PROCESSES))
        wanted = max(share, self.turn, int(_STEPS_S / step_s))
        self._steps = self._all_steps if wanted >= self._all_steps else _whole_windows(wanted, self._window)

    def decide_sets(self, set_s: float) -> None:
        """After the first set, which took so long."""
        if self.sets is None:
            pairs_of_sets = int(_SETS_S / set_s / 2)
            self.sets = min(max(2 * pairs_of_sets, _FEWEST_PROCESSES), _PROCESSES)


class _LiveSet:
    """A process for each variant. One that is lost, or can do no more, is closed, which makes room for the others; one that can
    take another cell goes back to where it came from. Memory running out beside live others says that they do not fit."""

    def __init__(self, cells: Sequence[Cell], limits: Limits, tell: Tell, processes: IdleProcesses) -> None:
        self._cells, self._limits, self._tell, self._processes = cells, limits, tell, processes
        self._runs: list[CellRun] = []
        self._ended: dict[str, Record] = {}
        self._shared = False

    @property
    def alive(self) -> list[CellRun]:
        """The variants that have no record yet."""
        return [run for run in self._runs if run.cell.key not in self._ended]

    def run(self, plan: _Plan) -> None:
        """Prepare every variant in order, then take all steps in turns."""
        began_s = time.monotonic()
        for cell in self._cells:
            self._runs.append(CellRun(cell, self._limits, self._processes.take(cell, self._tell)))
            self._advance(self._runs[-1], "prepare")
        step_s = [self._take(run, min(plan.turn, steps_of(run.cell))) / plan.turn for run in self.alive]
        plan.decide_steps(max(step_s, default=1.0), shared=self._shared)
        for done in range(plan.turn, max(map(plan.steps_of, self._cells)), plan.turn):
            for run in self.alive:
                left = plan.steps_of(run.cell) - done
                if left > 0:
                    self._take(run, min(plan.turn, left))
        plan.decide_sets(time.monotonic() - began_s)

    def finish(self, cell: Cell, *, looks: bool) -> Record:
        """The variant's record."""
        [run] = [run for run in self._runs if run.cell is cell]
        if run in self.alive:
            self._advance(run, "finish", looks=looks)
        return self._ended[cell.key]

    def close(self) -> None:
        """End what is still alive."""
        for run in self.alive:
            run.connection.kill()
            run.connection.close()

    def _take(self, run: CellRun, steps: int) -> float:
        """The seconds that a turn took."""
        asked_s = time.monotonic()
        self._advance(run, "take", steps=steps, settle=True)
        return time.monotonic() - asked_s

    def _advance(self, run: CellRun, do: str, **fields: int) -> None:
        others = len(self.alive) - 1
        again = False
        try:
            answer = run.prepare() if do == "prepare" else run.ask(do, **fields)
        except CellLost as lost:
            record = run.failed(lost.failure)
        else:
            if answer["event"] != "finished":
                self._shared |= bool(answer.get("again"))
                return
            record = run.record(answer)
            again = bool(answer["again"]) and do != "take"
        if others and record.failure is not None and record.failure.kind == "out_of_memory":
            raise DoNotFit
        self._ended[run.cell.key] = record
        if again:
            self._processes.give(run.cell, run.connection)
        else:
            run.connection.close()


def _run_in_rounds(
    cells: Sequence[Cell],
    limits: Limits,
    tell: Tell,
    rounds: int,
    found: Mapping[tuple[str, int], Record],
    kept: RoundParts | None,
) -> list[Record]:
    """Rounds of whole processes, the order reversed each time; a variant that failed is not run again. The last looks."""
    parts: dict[str, list[Record]] = {cell.key: [] for cell in cells}
    window = _window(cells)
    share = -(-max(map(steps_of, cells)) // rounds)
    steps = -(-share // window) * window
    for index in range(rounds):
        for cell in cells if index % 2 == 0 else list(reversed(cells)):
            if any(part.failure for part in parts[cell.key]):
                continue
            if (cell.key, index) in found:
                tell(cell, f"round {index + 1} of {rounds} is there already")
                parts[cell.key].append(found[cell.key, index])
                continue
            run = open_run(cell, limits, tell)
            try:
                part, _ = run_alone(run, steps, looks=index == rounds - 1)
                if kept is not None:
                    kept.add(cells, rounds, index, part)
                parts[cell.key].append(part)
            finally:
                run.connection.close()
    first = parts[cells[0].key][0]
    return [
        with_facts(_joined(parts[cell.key]), **_facts("rounds", cells, cell, steps, steps, first=first))
        for cell in cells
    ]


def _joined(parts: Sequence[Record]) -> Record:
    """One record of a variant's processes: samples all have end to end, everything else from the last; a failure stands for
    all."""
    failed = next((part for part in parts if part.failure), None)
    if failed is not None:
        return failed
    samples = {
        name: Samples(
            unit=last.unit,
            values=tuple(value for part in parts for value in part.samples[name].values),
            warmups=tuple(value for part in parts for value in part.samples[name].warmups),
        )
        for name, last in parts[-1].samples.items()
        if all(name in part.samples for part in parts)
    }
    tables = dict(parts[-1].tables)
    if all(RANKS in part.tables for part in parts):
        tables[RANKS] = joined_ranks([part.tables[RANKS] for part in parts])
    duration_s = sum(part.duration_s for part in parts)
    return replace(parts[-1], samples=samples, tables=tables, started_at=parts[0].started_at, duration_s=duration_s)


def _facts(how: str, cells: Sequence[Cell], cell: Cell, turn: int, steps: int, *, first: Record) -> dict[str, object]:
    """How this cell took turns. `turn_steps` and `process_steps` count values of `step`, of which a window has one.

    `first`: when it ran tells this run of the group from another, whose records may lie beside these; rounds that were
    killed and go on keep it.
    """
    group = f"{group_name(cells)} {first.started_at} {first.duration_s}"
    window = _window([cell])
    return {
        "interleaving": how,
        "interleaving_group": group,
        "turn_steps": turn // window,
        "process_steps": steps // window,
    }


def _whole_windows(steps: int, window: int) -> int:
    """The most steps up to that many that are whole windows; one window at the least."""
    return max(steps // window, 1) * window


def _window(cells: Sequence[Cell]) -> int:
    """Steps after which a window of every one of these cells ends."""
    sizes = [cell.config.get("sync") for cell in cells]
    return math.lcm(*(size for size in sizes if isinstance(size, int)))

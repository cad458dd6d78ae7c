"""Compares variants by interleaved steps of live processes, or by rounds of whole processes if memory is short.

    variant   a cell that is compared with the group's other cells
    set       one fresh process for each variant, all alive together; sets run one after the other
    turn      a few consecutive steps of one process of a set
    round     one process for each variant, one after the other, each with its share of the steps
    part      the record of one variant's process in one round, kept on disk until the group is complete

[Note: why interleaved]
Machines drift by more than the differences of interest: clocks, heat, neighbours. Turn i of one variant runs next to turn i
of the other, so drift falls on both. A process that waits for its turn blocks on a pipe and uses neither device nor core.
Each turn begins with a step that is not timed, if the workload has one, because the other variant's turn left the caches cold.

[Note: why the order within a set never changes]
Every turn follows a turn of another process. If the order were reversed after every pair (a b, b a, a b), each process would
have two turns in succession, the second with warm caches, and b would have them in one more pair than a. The median of the
pairs' ratios would then lie between the pairs where b was warm and the others: below 1 for two equal variants.

[Note: why several sets] Some properties of a process last as long as it does, so the set is the unit of the comparison;
sets_plan.py decides how many there are.

[Note: who prepares at the same time]
On a GPU preparing a process (imports, weights, compilation, capture) takes longer than its steps, and most of it is one core's
work. So the processes of a set prepare at the same time, which also makes their starts alike, except in the first set: it fills
the caches of compiled code, chooses between kernels by their times, and shows whether the variants fit beside each other. On a
CPU, whose cores are what is measured, and with several ranks, whose messages would wait for each other, they prepare in turn.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from trainstep.config.grid import Cell, group_name
from trainstep.measure.harness.connection import Answer, CellLost, Connection, Tell
from trainstep.measure.harness.rank_connection import joined_ranks, ranks_of
from trainstep.measure.harness.runner import CellRun, IdleProcesses, Limits, open_run, run_alone, steps_of, with_facts
from trainstep.measure.harness.sets_plan import FEWEST_SETS, SetsPlan, half_width, window_of
from trainstep.measure.harness.sweep import RoundParts
from trainstep.measure.machine.environment import load_before
from trainstep.records.record import Record, Samples
from trainstep.records.tables import RANKS

_ROUNDS = 5
"""A round gives one pair, and a comparison needs five."""


class DoNotFit(Exception):
    """The variants are too large to be alive at the same time."""


def run_interleaved(
    cells: Sequence[Cell],
    limits: Limits,
    tell: Tell,
    idle: IdleProcesses | None = None,
    kept: RoundParts | None = None,
) -> Iterator[list[Record]]:
    """Run the cells of a comparison, interleaved or in rounds, and yield their records in the cells' order.

    Cells run in rounds if `limits` asks for rounds, or if they do not all fit into memory. Records of interleaved cells
    come one by one, each as soon as its cell and those before it have finished; records of rounds come together. If
    memory runs out while a cell finishes, all records come again, from rounds, also those that came already.

    `idle`: takes and gives processes that can measure more than one cell; without it each cell has a fresh process.
    `kept`: keeps each part as soon as it is measured; parts that it holds already are not measured again.
    """
    rounds = min(limits.rounds or _ROUNDS, max(map(steps_of, cells)))
    stored = {} if kept is None else kept.stored(cells, rounds, limits.visible_devices)
    if limits.rounds is None and not stored:  # stored parts show that the variants do not fit
        try:
            yield from _run_live(cells, limits, tell, idle)
            return
        except DoNotFit:
            pass
    if idle is not None:
        idle.close()  # idle processes hold memory too
    yield _run_in_rounds(cells, limits, tell, rounds, stored, kept)


def _run_live(
    cells: Sequence[Cell], limits: Limits, tell: Tell, idle: IdleProcesses | None = None
) -> Iterator[list[Record]]:
    """Run the sets; only the last set runs the extra steps that follow the timed steps."""
    processes = idle or IdleProcesses(forks=limits.forks, nodes=limits.nodes)
    parts: dict[str, list[Record]] = {cell.key: [] for cell in cells}
    plan = SetsPlan(cells, limits.processes)
    try:
        for index in itertools.count():
            working = [cell for cell in cells if not any(part.failure for part in parts[cell.key])]
            if not working:  # all failed when they were to finish the set before
                for cell in cells:
                    yield [_live_record(cell, cells, parts, plan)]
                return
            for cell in working if index else ():
                tell(cell, f"process {index + 1} of {plan.sets or f'{FEWEST_SETS} or more'}")
            live = _LiveSet(working if index % 2 == 0 else working[::-1], limits, tell, processes)
            try:
                live.run(plan, together=index > 0 and all(map(_prepares_beside_others, working)))
                if index + 1 == plan.sets:
                    joined = {key: _joined(records) for key, records in parts.items() if records}
                    plan.extend(half_width(cells, joined, plan))
                # One variant alone is compared with nothing: it takes the steps that its config asks for, and no more.
                last = index + 1 == plan.sets or len(live.alive) < (2 if plan.takes_all else 1)
                for cell in cells:
                    if cell in working:
                        parts[cell.key].append(live.finish(cell, inspect=last))
                    if last:
                        yield [_live_record(cell, cells, parts, plan)]
            finally:
                live.close()
            if last:
                return
    finally:
        if idle is None:
            processes.close()


def _live_record(cell: Cell, cells: Sequence[Cell], parts: Mapping[str, Sequence[Record]], plan: SetsPlan) -> Record:
    """The record of a variant's parts.

    The driver reports memory and power of the whole device; with several live processes neither belongs to one variant.
    """
    facts = _facts("live", cells, cell, plan.turn, plan.steps_of(cell), first=_joined(parts[cells[0].key]))
    return with_facts(_joined(parts[cell.key]), **facts, driver_bytes=None, power_w=None)


class _LiveSet:
    """A set: one live process for each variant.

    A process that is lost, or can measure no more, is closed, which makes room for the others; a process that can measure
    another cell becomes idle again. If memory runs out beside other live processes, the variants do not fit.
    """

    def __init__(self, cells: Sequence[Cell], limits: Limits, tell: Tell, processes: IdleProcesses) -> None:
        self._cells, self._limits, self._tell, self._processes = cells, limits, tell, processes
        self._runs: list[CellRun] = []
        self._ended: dict[str, Record] = {}
        self._leaving: list[Connection] = []
        """Connections of processes that have finished. They end together, as the end of a process that used a GPU takes a while."""
        self._shared = False

    @property
    def alive(self) -> list[CellRun]:
        """The variants that have no record yet."""
        return [run for run in self._runs if run.cell.key not in self._ended]

    def run(self, plan: SetsPlan, *, together: bool) -> None:
        """Prepare every variant, in order or all `together`, then take all steps, interleaved."""
        began_s = time.monotonic()
        # Read before any process starts, because a starting process would count as load to the next.
        load = load_before("cuda", self._limits.visible_devices) if together else None
        for cell in self._cells:
            self._runs.append(CellRun(cell, self._limits, self._processes.take(cell, self._tell), load))
            if not together:
                self._advance(self._runs[-1], "prepare")
        if together:
            self._prepare_together()
        firsts = [(run, min(plan.turn, steps_of(run.cell))) for run in self.alive]
        step_s = [self._take(run, steps) / steps for run, steps in firsts]
        plan.decide_steps(max(step_s, default=1.0), shared=self._shared)
        for done in range(plan.turn, max(map(plan.steps_of, self._cells)), plan.turn):
            for run in self.alive:
                left = plan.steps_of(run.cell) - done
                if left > 0:
                    self._take(run, min(plan.turn, left))
        plan.decide_sets(time.monotonic() - began_s)

    def finish(self, cell: Cell, *, inspect: bool) -> Record:
        """The variant's record."""
        [run] = [run for run in self._runs if run.cell is cell]
        if run in self.alive:
            self._advance(run, "finish", inspect=inspect)
        return self._ended[cell.key]

    def close(self) -> None:
        """End what is still alive, and wait for the end of what has finished: all at once, so that an interrupt leaves none."""
        alive = self.alive
        with ThreadPoolExecutor(len(self._leaving) + len(alive) or 1, thread_name_prefix="close") as threads:
            ends = [threads.submit(connection.close) for connection in self._leaving]
            ends += [threads.submit(_end, run.connection) for run in alive]
        self._leaving.clear()
        for end in ends:
            end.result()

    def _prepare_together(self) -> None:
        """Prepare all variants at the same time. [Note: who prepares at the same time]"""
        threads = ThreadPoolExecutor(len(self._runs), thread_name_prefix="prepare")
        try:
            prepared: list[Future[Answer]] = [threads.submit(run.prepare) for run in self._runs]
            wait(prepared)
        finally:
            threads.shutdown(wait=False)  # after an interrupt each thread ends with its process, which close() ends
        others = len(self._runs) - 1  # all were alive meanwhile, whichever failed
        for run, answer in zip(self._runs, prepared, strict=True):
            self._settle(run, "prepare", answer.result, others=others)

    def _take(self, run: CellRun, steps: int) -> float:
        """Take a turn and return the seconds that it took."""
        asked_s = time.monotonic()
        self._advance(run, "take", steps=steps, settle=True)
        return time.monotonic() - asked_s

    def _advance(self, run: CellRun, do: str, **fields: int) -> None:
        """Ask the run's process for its next action; a final answer or a lost process ends the run.

        DoNotFit if it ran out of memory beside other live processes.
        """
        ask = run.prepare if do == "prepare" else lambda: run.ask(do, **fields)
        self._settle(run, do, ask, others=len(self.alive) - 1)

    def _settle(self, run: CellRun, do: str, answered: Callable[[], Answer], *, others: int) -> None:
        """Take the answer to the action `do`: `answered` returns it or raises CellLost; the rest is as in `_advance`. `others`:
        processes that were alive beside this one."""
        again = False
        try:
            answer = answered()
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
        elif do == "finish":
            self._leaving.append(run.connection)
        else:
            run.connection.close()


def _end(connection: Connection) -> None:
    connection.kill()
    connection.close()


def _run_in_rounds(
    cells: Sequence[Cell],
    limits: Limits,
    tell: Tell,
    rounds: int,
    stored: Mapping[tuple[str, int], Record],
    kept: RoundParts | None,
) -> list[Record]:
    """Run the rounds, with the order reversed each round.

    A variant that failed is not run again. Only the last round runs the extra steps that follow the timed steps.
    """
    parts: dict[str, list[Record]] = {cell.key: [] for cell in cells}
    window = window_of(cells)
    share = -(-max(map(steps_of, cells)) // rounds)
    steps = -(-share // window) * window
    for index in range(rounds):
        for cell in cells if index % 2 == 0 else list(reversed(cells)):
            if any(part.failure for part in parts[cell.key]):
                continue
            if (cell.key, index) in stored:
                tell(cell, f"round {index + 1} of {rounds} is stored already")
                parts[cell.key].append(stored[cell.key, index])
                continue
            run = open_run(cell, limits, tell)
            try:
                part, _ = run_alone(run, steps, inspect=index == rounds - 1)
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
    """Join the records of a variant's processes: the first failure if there is one; else the samples end to end, and
    everything else from the last record."""
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
    """The facts that say how this cell was interleaved.

    `turn_steps` and `process_steps` count values of the sample `step`, which has one value for each window. The start of
    the record `first` tells this run of the group from another, whose records may lie beside these; rounds that go on
    after a kill keep it.
    """
    window = window_of([cell])
    return {
        "interleaving": how,
        "interleaving_group": f"{group_name(cells)} {first.started_at} {first.duration_s}",
        "turn_steps": turn // window,
        "process_steps": steps // window,
    }


def _prepares_beside_others(cell: Cell) -> bool:
    """Whether the cell's process may prepare while the others do. [Note: who prepares at the same time]"""
    return cell.config.get("device") == "cuda" and ranks_of(cell) == 1

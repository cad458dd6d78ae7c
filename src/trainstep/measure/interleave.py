"""Compared variants side by side: live processes taking turns, or rounds of whole processes where they do not fit together.

[Note: why turns]
Machines drift by more than the differences looked for: clocks, heat, neighbours. Turn i of one variant runs next to turn i
of the other, the order reversed each turn, so drift falls on both and pairs cancel it. Processes that wait for their turn
block on a pipe and use neither device nor core. Each turn begins with a step that is not timed, where a workload has one:
the other's turn left the caches cold.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from trainstep.config.cell import Cell, group_name
from trainstep.measure.connection import CellLost, Tell
from trainstep.measure.idle_processes import IdleProcesses
from trainstep.measure.rank_findings import joined_ranks
from trainstep.measure.round_parts import RoundParts
from trainstep.measure.runner import CellRun, Limits, open_run, run_alone, steps_of, with_facts
from trainstep.records.record import Record, Samples
from trainstep.records.tables import RANKS

_TURNS = 10
_ROUNDS = 5
"""As many as a comparison needs pairs: a process says nothing of the next one."""


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
    processes = idle or IdleProcesses(forks=limits.forks)
    runs: list[CellRun] = []
    ended: dict[str, Record] = {}
    try:
        for cell in cells:
            runs.append(CellRun(cell, limits, processes.take(cell, tell)))
            if _advance(runs[-1], "prepare", runs, ended):
                processes.give(cell, runs[-1].connection)
        turn = _turn_steps(cells)
        _take_turns(runs, ended, turn)
        for run in runs:
            if run.cell.key not in ended and _advance(run, "finish", runs, ended):
                processes.give(run.cell, run.connection)
            # The driver's figure is the whole device's: with several processes alive it is nobody's.
            facts = _facts("live", cells, run.cell, turn, first=ended[cells[0].key])
            yield [with_facts(ended[run.cell.key], **facts, driver_bytes=None, power_w=None)]
    finally:
        for run in _alive(runs, ended):
            run.connection.kill()
            run.connection.close()
        if idle is None:
            processes.close()


def _take_turns(runs: Sequence[CellRun], ended: dict[str, Record], turn: int) -> None:
    """All steps of all variants, `turn` at a time, the order reversed each turn."""
    left = {run.cell.key: steps_of(run.cell) for run in runs}
    order = list(runs)
    while any(left[run.cell.key] for run in _alive(order, ended)):
        for run in _alive(order, ended):
            steps = min(turn, left[run.cell.key])
            left[run.cell.key] -= steps
            if steps:
                _advance(run, "take", runs, ended, steps=steps, settle=True)
        order.reverse()


def _alive(runs: Sequence[CellRun], ended: Mapping[str, Record]) -> list[CellRun]:
    return [run for run in runs if run.cell.key not in ended]


def _advance(run: CellRun, do: str, runs: Sequence[CellRun], ended: dict[str, Record], **fields: int) -> bool:
    """Ask; a final answer or a lost process ends the run and its process, which makes room for the others.

    True if the run ended and its process can take another cell: then it is left alive.

    Memory running out beside live others says that they do not fit.
    """
    others = len(_alive(runs, ended)) - 1
    again = False
    try:
        answer = run.prepare() if do == "prepare" else run.ask(do, **fields)
    except CellLost as lost:
        record = run.failed(lost.failure)
    else:
        if answer["event"] != "finished":
            return False
        record = run.record(answer)
        again = bool(answer["again"]) and do != "take"
    if others and record.failure is not None and record.failure.kind == "out_of_memory":
        raise DoNotFit
    ended[run.cell.key] = record
    if not again:
        run.connection.close()
    return again


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
    return [with_facts(_joined(parts[cell.key]), **_facts("rounds", cells, cell, steps, first=first)) for cell in cells]


def _joined(parts: Sequence[Record]) -> Record:
    """One record of several rounds: samples all have end to end, everything else from the last; a failure stands for all."""
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


def _facts(how: str, cells: Sequence[Cell], cell: Cell, turn: int, *, first: Record) -> dict[str, object]:
    """How this cell took turns. `turn_steps` counts values of `step`, of which a window has one.

    `first`: when it ran tells this run of the group from another, whose records may lie beside these; rounds that were
    killed and go on keep it.
    """
    group = f"{group_name(cells)} {first.started_at} {first.duration_s}"
    return {"interleaving": how, "interleaving_group": group, "turn_steps": turn // _window([cell])}


def _turn_steps(cells: Sequence[Cell]) -> int:
    """Steps a turn: a tenth of the steps, in whole windows."""
    window = _window(cells)
    share = max(map(steps_of, cells)) // _TURNS
    return max(share // window, 1) * window


def _window(cells: Sequence[Cell]) -> int:
    """Steps after which a window of every one of these cells ends."""
    sizes = [cell.config.get("sync") for cell in cells]
    return math.lcm(*(size for size in sizes if isinstance(size, int)))

"""Compared variants side by side: live processes taking turns, or rounds of whole processes where they do not fit together.

[Note: why turns]
Machines drift by more than the differences looked for: clocks, heat, neighbours. Turn i of one variant runs next to turn i
of the other, the order reversed each turn, so drift falls on both and pairs cancel it. Processes that wait for their turn
block on a pipe and use neither device nor core.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from trainstep.config.cell import Cell
from trainstep.measure.connection import CellLost, Tell
from trainstep.measure.runner import CellRun, Limits, open_run, run_alone, steps_of, with_facts
from trainstep.records.record import Record, Samples

_TURNS = 10
_ROUNDS = 3


class DoNotFit(Exception):
    """The variants are too large to be alive at the same time."""


def run_interleaved(cells: Sequence[Cell], limits: Limits, tell: Tell) -> list[Record]:
    """The records of cells that are compared, in the cells' order: taking turns if all fit, else in rounds."""
    try:
        return _run_in_turns(cells, limits, tell)
    except DoNotFit:
        return _run_in_rounds(cells, limits, tell)


def _run_in_turns(cells: Sequence[Cell], limits: Limits, tell: Tell) -> list[Record]:
    runs = []
    ended: dict[str, Record] = {}
    try:
        for cell in cells:
            run = open_run(cell, limits, tell)
            runs.append(run)
            _advance(run, "prepare", ended, alone=len(runs) - len(ended) == 1)
        alive = [run for run in runs if run.cell.key not in ended]
        turn = _turn_steps(cells)
        left = {run.cell.key: steps_of(run.cell) for run in alive}
        while any(left[run.cell.key] for run in alive):
            for run in alive:
                steps = min(turn, left[run.cell.key])
                left[run.cell.key] -= steps
                if steps:
                    _advance(run, "take", ended, steps=steps)
            alive = [run for run in reversed(alive) if run.cell.key not in ended]
        facts = {"interleaving": "live", "interleaving_group": _group_name(cells), "turn_steps": turn}
        for run in alive:
            _advance(run, "finish", ended)
    finally:
        for run in runs:
            run.connection.close()
    # The driver's figure is the whole device's: with several processes alive it is nobody's.
    return [_of_group(ended[cell.key], facts) for cell in cells]


def _advance(run: CellRun, do: str, ended: dict[str, Record], *, alone: bool = False, **fields: int) -> None:
    """Ask; a final answer or a lost process ends the run. Memory running out beside live others says they do not fit."""
    try:
        answer = run.prepare() if do == "prepare" else run.ask(do, **fields)
    except CellLost as lost:
        ended[run.cell.key] = run.failed(lost.failure)
    else:
        if answer["event"] != "finished":
            return
        ended[run.cell.key] = run.record(answer)
    failure = ended[run.cell.key].failure
    if failure is not None and failure.kind == "out_of_memory" and not alone:
        raise DoNotFit


def _of_group(record: Record, facts: dict[str, object]) -> Record:
    return with_facts(record, **facts, driver_bytes=None)


def _run_in_rounds(cells: Sequence[Cell], limits: Limits, tell: Tell) -> list[Record]:
    """At least three rounds of whole processes, the order reversed each time; a variant that failed is not run again."""
    parts: dict[str, list[Record]] = {cell.key: [] for cell in cells}
    window = _window(cells)
    share = -(-max(map(steps_of, cells)) // _ROUNDS)
    steps = -(-share // window) * window
    for round_index in range(_ROUNDS):
        for cell in cells if round_index % 2 == 0 else list(reversed(cells)):
            if any(part.failure for part in parts[cell.key]):
                continue
            run = open_run(cell, limits, tell)
            try:
                parts[cell.key].append(run_alone(run, steps)[0])
            finally:
                run.connection.close()
    facts = {"interleaving": "rounds", "interleaving_group": _group_name(cells), "turn_steps": steps}
    return [with_facts(_joined(parts[cell.key]), **facts) for cell in cells]


def _joined(parts: Sequence[Record]) -> Record:
    """One record of several rounds: samples end to end, everything else from the last; a failure stands for all."""
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
    }
    duration_s = sum(part.duration_s for part in parts)
    return replace(parts[-1], samples=samples, started_at=parts[0].started_at, duration_s=duration_s)


def _turn_steps(cells: Sequence[Cell]) -> int:
    """Steps a turn: a tenth of the steps, in whole windows."""
    window = _window(cells)
    share = max(map(steps_of, cells)) // _TURNS
    return max(share // window, 1) * window


def _window(cells: Sequence[Cell]) -> int:
    sizes = [cell.config.get("sync") for cell in cells]
    return max((size for size in sizes if isinstance(size, int)), default=1)


def _group_name(cells: Sequence[Cell]) -> str:
    return hashlib.sha256(" ".join(sorted(cell.key for cell in cells)).encode()).hexdigest()[:16]

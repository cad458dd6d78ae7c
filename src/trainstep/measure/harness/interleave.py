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

[Note: why several sets]
Some properties of a process last from its start to its end (where its memory lies, which core it got) and are in all its
turns: no number of turns separates them from a difference of the variants. So several sets run, in an order that is
reversed from set to set, and the set is the unit of the comparison (records/compare.py). There are twelve sets, or as many
as fit into a minute, but at least six. The second set says how long a set takes, because the first may also wait until
torch is imported. Where the machine is so noisy that 5 % would not show, up to twice as many sets run. The width alone
decides on more sets, never the ratio, so the interval stays near 99 %: of 200,000 simulated comparisons of equal variants
it excluded 1 in 1.0 to 1.6 %. (Stein's two-stage test of 1945 would be exact.) Each process takes all steps of the config
while they take no longer than a second; else its share of them. Workloads whose processes measure several cells get one
set, because starting a process takes longer than the steps.
"""

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from trainstep.config.grid import Cell, group_name
from trainstep.measure.harness.connection import CellLost, Tell
from trainstep.measure.harness.rank_connection import joined_ranks
from trainstep.measure.harness.runner import CellRun, IdleProcesses, Limits, open_run, run_alone, steps_of, with_facts
from trainstep.measure.harness.sweep import RoundParts
from trainstep.records.compare import MINIMUM_PAIRS, compare_samples
from trainstep.records.record import Record, Samples
from trainstep.records.tables import RANKS

_TURNS = 10
_ROUNDS = 5
"""A round gives one pair, and a comparison needs five."""
_MOST_SETS = 12
_FEWEST_SETS = 6
"""An even number, so that both orders are equally frequent, and one more than an interval needs."""
_SETS_S = 60.0
"""About how many seconds all sets may take together."""
_MOST_SETS_IF_NOISY, _SETS_S_IF_NOISY = 24, 120.0
"""The same limits for all sets, those before included, where the machine is noisy."""
_HALF_WIDTH = 0.025
"""Half of the 99 % interval, as a log ratio, that further sets aim at: a true 5 % is then found in over 95 % of comparisons."""
_STEPS_S = 1.0
"""The least seconds of steps that a process of a set takes."""


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
    plan = _Plan(cells, limits.processes)
    try:
        for index in itertools.count():
            working = [cell for cell in cells if not any(part.failure for part in parts[cell.key])]
            for cell in working if index else ():
                tell(cell, f"process {index + 1} of {plan.sets or f'{_FEWEST_SETS} or more'}")
            live = _LiveSet(working if index % 2 == 0 else working[::-1], limits, tell, processes)
            try:
                live.run(plan)
                if index + 1 == plan.sets:
                    plan.extend(_half_width(cells, parts, plan))
                # One variant alone is compared with nothing: it takes the steps that its config asks for, and no more.
                last = index + 1 == plan.sets or len(live.alive) < (2 if plan.takes_all else 1)
                for cell in cells:
                    if cell in working:
                        parts[cell.key].append(live.finish(cell, inspect=last))
                    if last:
                        facts = _facts(
                            "live", cells, cell, plan.turn, plan.steps_of(cell), first=_joined(parts[cells[0].key])
                        )
                        # The driver reports memory and power of the whole device; with several live processes neither
                        # belongs to one variant.
                        yield [with_facts(_joined(parts[cell.key]), **facts, driver_bytes=None, power_w=None)]
            finally:
                live.close()
            if last:
                return
    finally:
        if idle is None:
            processes.close()


class _Plan:
    """The number of sets, and the steps of a process and of a turn. The first two sets decide them for all sets."""

    def __init__(self, cells: Sequence[Cell], sets: int | None) -> None:
        self._window = _window(cells)
        self._all_steps = max(map(steps_of, cells))
        self.sets = 1 if self._all_steps // self._window < MINIMUM_PAIRS and sets is None else sets
        self.turn = _whole_windows(self._all_steps // _TURNS, self._window)
        self._steps: int | None = None
        self._sets_taken = 0
        self._set_s: float | None = None
        """How long a set takes, if further sets may follow those that were decided first."""

    @property
    def takes_all(self) -> bool:
        """Whether each process takes all steps of the config."""
        return self._steps == self._all_steps

    def steps_of(self, cell: Cell) -> int:
        """The number of steps that a process of the cell takes."""
        return steps_of(cell) if self._steps is None else min(self._steps, steps_of(cell))

    def decide_steps(self, step_s: float, *, shared: bool) -> None:
        """Decide, after the first turn, how many steps a process takes.

        `step_s`: what a step of the slowest variant took in this turn. `shared`: the processes can measure several
        cells, so one set is enough.
        """
        if self._steps is not None:
            return
        if shared:
            self.sets = 1
        share = -(-self._all_steps // (self.sets or _FEWEST_SETS))
        wanted = max(share, self.turn, int(_STEPS_S / step_s))
        self._steps = self._all_steps if wanted >= self._all_steps else _whole_windows(wanted, self._window)

    def decide_sets(self, set_s: float) -> None:
        """Decide the number of sets after the second set, which took `set_s`; do nothing after the others."""
        if self._sets_taken == 1 and self.sets is None:
            self._set_s = set_s
            self.sets = max(min(_even_number_of_sets(_SETS_S, set_s), _MOST_SETS), _FEWEST_SETS)
        self._sets_taken += 1

    def extend(self, half_width: float) -> None:
        """Decide on further sets, once, before the last set ends. `half_width`: of the widest interval so far, as a log ratio."""
        if self._set_s is not None and self.sets is not None:
            wanted = math.ceil(self.sets * (half_width / _HALF_WIDTH) ** 2 / 2) * 2
            fitting = _even_number_of_sets(_SETS_S_IF_NOISY, self._set_s)
            self.sets = max(min(wanted, _MOST_SETS_IF_NOISY, fitting), self.sets)
        self._set_s = None


def _even_number_of_sets(seconds: float, set_s: float) -> int:
    """The number of sets that fit, rounded down to an even number, so that both orders are equally frequent."""
    return 2 * int(seconds / set_s / 2)


def _half_width(cells: Sequence[Cell], parts: Mapping[str, Sequence[Record]], plan: _Plan) -> float:
    """Half of the widest 99 % interval of the variants' times against the first one's, as a log ratio; 0 without intervals."""
    timed = [
        (record.samples["step"], plan.turn // _window([cell]), plan.steps_of(cell) // _window([cell]))
        for cell in cells
        if parts[cell.key] and "step" in (record := _joined(parts[cell.key])).samples
    ]
    widths = [0.0]
    for other, turn, steps in timed[1:]:
        first, first_turn, first_steps = timed[0]
        ratio = compare_samples(first, other, turn_steps=(first_turn, turn), process_steps=(first_steps, steps))
        if ratio.low and ratio.high:
            widths.append(math.log(ratio.high / ratio.low))
    return max(widths) / 2


class _LiveSet:
    """A set.

    A process that is lost, or can measure no more, is closed, which makes room for the others; a process that can measure
    another cell becomes idle again. If memory runs out beside other live processes, the variants do not fit.
    """

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
        """Prepare every variant in order, then take all steps, interleaved."""
        began_s = time.monotonic()
        for cell in self._cells:
            self._runs.append(CellRun(cell, self._limits, self._processes.take(cell, self._tell)))
            self._advance(self._runs[-1], "prepare")
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
        """End what is still alive."""
        for run in self.alive:
            run.connection.kill()
            run.connection.close()

    def _take(self, run: CellRun, steps: int) -> float:
        """Take a turn and return the seconds that it took."""
        asked_s = time.monotonic()
        self._advance(run, "take", steps=steps, settle=True)
        return time.monotonic() - asked_s

    def _advance(self, run: CellRun, do: str, **fields: int) -> None:
        """Ask the run's process for its next action; a final answer or a lost process ends the run.

        DoNotFit if it ran out of memory beside other live processes.
        """
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
    stored: Mapping[tuple[str, int], Record],
    kept: RoundParts | None,
) -> list[Record]:
    """Run the rounds, with the order reversed each round.

    A variant that failed is not run again. Only the last round runs the extra steps that follow the timed steps.
    """
    parts: dict[str, list[Record]] = {cell.key: [] for cell in cells}
    window = _window(cells)
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
    window = _window([cell])
    return {
        "interleaving": how,
        "interleaving_group": f"{group_name(cells)} {first.started_at} {first.duration_s}",
        "turn_steps": turn // window,
        "process_steps": steps // window,
    }


def _whole_windows(steps: int, window: int) -> int:
    """The largest number of steps up to `steps` that is whole windows; at least one window."""
    return max(steps // window, 1) * window


def _window(cells: Sequence[Cell]) -> int:
    """The number of steps after which a window of every cell ends."""
    sizes = [cell.config.get("sync") for cell in cells]
    return math.lcm(*(size for size in sizes if isinstance(size, int)))

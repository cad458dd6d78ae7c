"""How many processes a comparison of live variants takes, how many steps each, and how many steps a turn.

The words variant, set and turn are those of interleave.py.

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

import math
from collections.abc import Mapping, Sequence

from trainstep.config.grid import Cell
from trainstep.measure.harness.runner import steps_of
from trainstep.records.compare import MINIMUM_PAIRS, compare_samples
from trainstep.records.record import Record

_TURNS = 10
_MOST_SETS = 12
FEWEST_SETS = 6
"""An even number, so that both orders are equally frequent, and one more than an interval needs."""
_SETS_S = 60.0
"""About how many seconds all sets may take together."""
_MOST_SETS_IF_NOISY, _SETS_S_IF_NOISY = 24, 120.0
"""The same two limits where the machine is noisy; the sets before count too."""
_HALF_WIDTH = 0.025
"""Half of the 99 % interval, as a log ratio, that further sets aim at: a true 5 % is then found in over 95 % of comparisons."""
_STEPS_S = 1.0
"""The least seconds of steps that a process of a set takes."""


class SetsPlan:
    """The number of sets, and the steps of a process and of a turn. The first two sets decide them for all sets."""

    def __init__(self, cells: Sequence[Cell], sets: int | None) -> None:
        self._window = window_of(cells)
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
        share = -(-self._all_steps // (self.sets or FEWEST_SETS))
        wanted = max(share, self.turn, int(_STEPS_S / step_s))
        self._steps = self._all_steps if wanted >= self._all_steps else _whole_windows(wanted, self._window)

    def decide_sets(self, set_s: float) -> None:
        """Decide the number of sets after the second set, which took `set_s`; do nothing after the others."""
        if self._sets_taken == 1 and self.sets is None:
            self._set_s = set_s
            self.sets = max(min(_even_number_of_sets(_SETS_S, set_s), _MOST_SETS), FEWEST_SETS)
        self._sets_taken += 1

    def extend(self, half_width: float) -> None:
        """Decide on further sets, once, before the last set ends. `half_width`: of the widest interval so far, as a log ratio."""
        if self._set_s is not None and self.sets is not None:
            wanted = math.ceil(self.sets * (half_width / _HALF_WIDTH) ** 2 / 2) * 2
            fitting = _even_number_of_sets(_SETS_S_IF_NOISY, self._set_s)
            self.sets = max(min(wanted, _MOST_SETS_IF_NOISY, fitting), self.sets)
        self._set_s = None


def half_width(cells: Sequence[Cell], joined: Mapping[str, Record], plan: SetsPlan) -> float:
    """Half of the widest 99 % interval of the variants' times against the first one's, as a log ratio; 0 without intervals.

    `joined`: the record so far of each cell that has run, by the cell's key.
    """
    timed = [
        (record.samples["step"], plan.turn // window_of([cell]), plan.steps_of(cell) // window_of([cell]))
        for cell in cells
        if (record := joined.get(cell.key)) is not None and "step" in record.samples
    ]
    widths = [0.0]
    for other, turn, steps in timed[1:]:
        first, first_turn, first_steps = timed[0]
        ratio = compare_samples(first, other, turn_steps=(first_turn, turn), process_steps=(first_steps, steps))
        if ratio.low and ratio.high:
            widths.append(math.log(ratio.high / ratio.low))
    return max(widths) / 2


def window_of(cells: Sequence[Cell]) -> int:
    """The number of steps after which a window of every cell ends."""
    sizes = [cell.config.get("sync") for cell in cells]
    return math.lcm(*(size for size in sizes if isinstance(size, int)))


def _whole_windows(steps: int, window: int) -> int:
    """The largest number of steps up to `steps` that is whole windows; at least one window."""
    return max(steps // window, 1) * window


def _even_number_of_sets(seconds: float, set_s: float) -> int:
    """The number of sets that fit, rounded down to an even number, so that both orders are equally frequent."""
    return 2 * int(seconds / set_s / 2)

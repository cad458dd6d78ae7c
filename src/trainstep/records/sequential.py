"""Decide between two versions while they are still being measured: pass, fail or cannot tell, without more false alarms.

    judge(blocks, budget_s=180, threshold=0.02).verdict     # "pass", "fail", "cannot tell", or "" as long as it is open

The unit is a block: four runs of whole processes in the order base head head base, or head base base head in every other block. Its
value is the mean log time of the two runs of head less that of base. So a steady drift within a block cancels, and the cost of a
place in the order falls on both sides. A run is a process (decision 2): an effect that lasts as long as a process, such as where
its memory lies, is noise here, not bias.

The interval is that of `compare` for pairs of processes: Student's interval of the mean of log ratios, at 99 %. But each further
look at an interval, with a stop as soon as it decides, adds a chance of error. So the 1 % is divided over the looks: after a share
f of the time, at most f times 1 % has been spent (the linear spending function of Lan and DeMets 1983, "Discrete sequential
boundaries for clinical trials", Biometrika 70), and the look that takes the share from f to g has the interval at level 1 - 1 % (g
- f). By Bonferroni's inequality all intervals of a gate then hold together with 99 %, however they depend on each other. Looks come
after 1/1024, 1/512 ... 1/4, 1/2 and all of the time, each when the next block ends. So half of the 1 % is left for the last look,
whose interval is 9 % wider than one without earlier looks. An early look spends little and still decides obvious cases. The times
of the looks never depend on the ratio.

With several cells (benchmarks, sizes) each gets an equal part of the 1 %, so that the 99 % hold for the whole gate.

The rules, with the ratio of head to base and the threshold t:

    fail        the interval lies above 1, and the ratio is at least 1 + t, in one cell
    pass        the interval lies below 1 + t, in every cell
    cannot tell the time is over before either

The rule for `fail` is that of `compare` for `slower`, with t as its minimum effect. A head that is as fast as base fails at most
once in 200 gates, and one that is slower by t or more passes at most once in 200.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainstep.records.compare import MINIMUM_PAIRS, student_point
from trainstep.records.summary import Floats

VERDICTS = ("pass", "fail", "cannot tell")
ALPHA = 0.01
"""The chance that any interval of a gate, at any look, misses the true ratio."""
FIRST_SHARE = 1 / 1024
"""The share of the time after which the first look comes; the others come after 1/512, 1/256 ... 1/4, 1/2 and all of it."""
MINIMUM_BLOCKS = MINIMUM_PAIRS


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block. `log_ratios`: cell -> log of head's time over base's. `used_s`: seconds of the budget used when the block ends."""

    log_ratios: Mapping[str, float]
    used_s: float


@dataclass(frozen=True, kw_only=True)
class CellState:
    """What is known of one cell. `ratio`: head's time over base's so far; `low` to `high`: its interval at the last look."""

    name: str
    verdict: str = ""
    """One of VERDICTS; empty while the cell is open. A decided cell keeps its verdict, its ratio and its interval."""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    blocks: int = 0
    """Number of blocks behind the ratio."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The state of a gate. `verdict`: one of VERDICTS; empty while the gate is open."""

    verdict: str
    cells: tuple[CellState, ...]
    looks: int
    """Number of looks so far, each of which spent a part of the 1 %."""
    just_looked: bool
    """Whether there was a look after the last block."""

    @property
    def decisive(self) -> CellState:
        """The cell that a sentence is about: the first that fails, else the first that is open, else the slowest."""
        for verdict in ("fail", "", "cannot tell"):
            if first := next((cell for cell in self.cells if cell.verdict == verdict), None):
                return first
        return max(self.cells, key=lambda cell: cell.ratio or 0.0)


def judge(blocks: Sequence[Block], *, budget_s: float, threshold: float, is_over: bool = False) -> Judgement:
    """Judge the blocks of a gate in their order, with a look wherever one was due, and a last one if the time `is_over`.

    The same blocks always give the same judgement, so a killed gate continues as if it had not been killed. `threshold`: the
    slowdown that head may not have, as a share. ValueError for a threshold below 0, for no block, and for blocks of unlike cells.
    """
    if not threshold >= 0:
        raise ValueError(f"threshold: must be a share of at least 0, not {threshold}")
    if not blocks:
        raise ValueError("blocks: there must be at least one")
    names = tuple(blocks[0].log_ratios)
    if any(block.log_ratios.keys() != set(names) for block in blocks):
        raise ValueError("blocks: all must have the same cells")
    logs = np.array([[block.log_ratios[name] for name in names] for block in blocks], dtype=np.float64)
    cells = [CellState(name=name) for name in names]
    verdict, looks, just_looked = "", 0, False
    for count, alpha in _looks([block.used_s for block in blocks], budget_s, is_over=is_over):
        looks, just_looked = looks + 1, count == len(blocks)
        cells = [
            cell if cell.verdict else _look(cell.name, logs[:count, index], alpha / len(names), threshold)
            for index, cell in enumerate(cells)
        ]
        verdict = _whole([cell.verdict for cell in cells])
        if verdict:
            break
    if is_over and not verdict:
        verdict = "cannot tell"
    return Judgement(
        verdict=verdict,
        cells=tuple(_brought_up_to_date(cell, logs[:, index], verdict) for index, cell in enumerate(cells)),
        looks=looks,
        just_looked=just_looked,
    )


def _looks(used_s: Sequence[float], budget_s: float, *, is_over: bool) -> Iterator[tuple[int, float]]:
    """For each look: the number of blocks, and the part of ALPHA that the look spends."""
    last, due = 0.0, FIRST_SHARE
    for count, used in enumerate(used_s, 1):
        final = is_over and count == len(used_s)
        share = 1.0 if final else min(used / budget_s, 1.0)
        if count >= MINIMUM_BLOCKS and (share >= due or final) and share > last:
            yield count, ALPHA * (share - last)
            last = share
            while due <= share:
                due *= 2


def _look(name: str, logs: Floats, alpha: float, threshold: float) -> CellState:
    """The cell with its interval at level 1 - alpha, and a verdict if the interval decides."""
    n, middle = len(logs), float(np.mean(logs))
    reach = student_point(n - 1, alpha) * float(np.std(logs, ddof=1)) / n**0.5
    ratio, low, high = (float(np.exp(value)) for value in (middle, middle - reach, middle + reach))
    verdict = "fail" if low > 1 and ratio >= 1 + threshold else "pass" if high < 1 + threshold else ""
    return CellState(name=name, verdict=verdict, ratio=ratio, low=low, high=high, blocks=n)


def _whole(verdicts: Sequence[str]) -> str:
    """The verdict of all cells together; empty while it is open."""
    if "fail" in verdicts:
        return "fail"
    return "pass" if all(verdict == "pass" for verdict in verdicts) else ""


def _brought_up_to_date(cell: CellState, logs: Floats, verdict: str) -> CellState:
    """The cell; an open cell gets the ratio of all blocks, and the verdict `cannot tell` once the gate has ended."""
    if cell.verdict:
        return cell
    return CellState(
        name=cell.name,
        verdict="cannot tell" if verdict else "",
        ratio=float(np.exp(np.mean(logs))),
        low=cell.low,
        high=cell.high,
        blocks=len(logs),
    )

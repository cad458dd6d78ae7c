"""Searches the fastest options of a training step: one change at a time against the best so far, then all together once more.

    search(start, changes, refusal=..., probe=..., compare=...)   # the callbacks measure; tests give them numbers

A new value to try is one row of `CHANGES`. A change is kept only if the comparison calls it faster and the loss stays within the
spread of losses that other seeds give (docs/decisions/0019-presets-by-greedy-search.md).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainstep.records.compare import Comparison

Options = Mapping[str, Any]
"""Flat config fields, as the command line gives them."""
ALWAYS, IF_TOO_LARGE = "always", "if the start runs out of memory"


@dataclass(frozen=True, kw_only=True)
class Change:
    """Options to try together."""

    options: Options
    when: str = ALWAYS
    built_in: bool = False
    """Has an effect on the built-in model only."""

    @property
    def name(self) -> str:
        """`compile block, update in_backward`"""
        return ", ".join(f"{name} {value}" for name, value in self.options.items())


def _row(when: str = ALWAYS, *, built_in: bool = False, **options: Any) -> Change:
    return Change(options=options, when=when, built_in=built_in)


CHANGES = (
    _row(IF_TOO_LARGE, recompute="selective"),
    _row(IF_TOO_LARGE, recompute="narrow"),
    _row(IF_TOO_LARGE, recompute="block"),
    _row(capture="auto"),
    _row(compile="block"),
    _row(compile="model"),
    _row(adamw="trainstep"),
    _row(update="in_backward"),
    _row(built_in=True, attention="trainstep"),
    _row(built_in=True, attention="sdpa"),
    _row(built_in=True, attention="sdpa_flash"),
    _row(built_in=True, attention="sdpa_cudnn"),
    _row(built_in=True, attention="flex"),
    _row(built_in=True, ops="fused"),
)
"""What is tried, the largest expected gain first. Allowed precisions come before, because they decide which attentions can run."""


def changes_within(precisions: Sequence[str], *, built_in: bool) -> list[Change]:
    """The rows for a model, after one for each allowed precision."""
    allowed = [_row(precision=name) for name in precisions]
    return [change for change in (*allowed, *CHANGES) if built_in or not change.built_in]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The start, run alone with several seeds. `spread`: largest minus smallest loss."""

    failure_kind: str = ""
    message: str = ""
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A comparison of a set of options with the best before it, and both losses after equally many steps (None: not finite)."""

    comparison: Comparison
    losses: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What became of a change. Without `comparison` it did not run, and `reason` says why."""

    change: str
    kept: bool = False
    reason: str = ""
    comparison: Comparison | None = None

    @property
    def word(self) -> str:
        """The verdict as a table shows it."""
        return self.comparison.word if self.comparison else "not run"


@dataclass(kw_only=True)
class Result:
    """The search so far: `best` is the start with all kept changes."""

    start: Options
    best: Options
    steps: list[Step] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    """What the budget left."""
    trouble: str = ""
    """Why the start cannot run; nothing is then tried."""
    whole: Step | None = None
    """`best` against the start, measured once more; None without kept changes or before it ran."""

    @property
    def kept(self) -> list[Step]:
        return [step for step in self.steps if step.kept]

    @property
    def chosen(self) -> Options:
        """The options to recommend: `best`, unless its last comparison with the start did not confirm it."""
        return self.best if self.whole is None or self.whole.kept else self.fitting

    fitting: Options = field(default_factory=dict)
    """The start, with recomputation if it does not fit without."""


Refusal = Callable[[Options], str | None]
"""Why a config refuses these options, or None."""
ProbeFunction = Callable[[Options], Probe | None]
"""Runs options alone; None: the budget is spent."""
CompareFunction = Callable[[Options, Options, int], Measured | None]
"""Compares the second options with the first; 1 as the last argument asks for another measurement than 0. None: as above."""


def search(
    start: Options, changes: Sequence[Change], *, refusal: Refusal, probe: ProbeFunction, compare: CompareFunction
) -> Result:
    """Try every change in order, and compare what was kept with the start."""
    result = Result(start=start, best=start, fitting=start)
    rows = [change for change in changes if change.when == ALWAYS]
    first = _fitting(result, [change for change in changes if change.when == IF_TOO_LARGE], refusal, probe)
    if first is None:
        result.untried += [change.name for change in rows] if not result.trouble else []
        return result
    compared: list[tuple[Options, Options]] = []
    for index, change in enumerate(rows):
        options = {**result.best, **change.options}
        if why := _needless(result.best, change) or refusal(options):
            result.steps.append(Step(change=change.name, reason=why))
            continue
        measured = compare(result.best, options, 0)
        if measured is None:
            result.untried += [change.name for change in rows[index:]]
            break
        compared.append((result.best, options))
        step = _judged(change.name, measured, first.spread)
        result.steps.append(step)
        if step.kept:
            result.best = options
    if result.best == result.fitting:
        return result
    repeat = int((result.fitting, result.best) in compared)
    measured = compare(result.fitting, result.best, repeat)
    if measured is None:
        result.untried.append("all kept changes against the start")
    else:
        result.whole = _judged("all kept changes", measured, first.spread)
    return result


def _fitting(result: Result, rows: Sequence[Change], refusal: Refusal, probe: ProbeFunction) -> Probe | None:
    """Run the start, and as long as memory runs out the start with each row, and note the first that runs. None if none runs."""
    tried = probe(result.start)
    for change in rows:
        if tried is None or tried.failure_kind != "out_of_memory":
            break
        options = {**result.start, **change.options}
        if why := _needless(result.start, change) or refusal(options):
            result.steps.append(Step(change=change.name, reason=why))
            continue
        again = probe(options)
        if again is not None:
            fits = not again.failure_kind
            words = "the step fits with it, and without it runs out of memory" if fits else again.message
            result.steps.append(Step(change=change.name, kept=fits, reason=words))
            if fits:
                result.best = result.fitting = options
        else:
            result.untried.append(change.name)
        tried = again
    if tried is not None and tried.failure_kind:
        result.trouble = tried.message
        return None
    return tried


def _needless(options: Options, change: Change) -> str:
    same = all(options.get(name) == value for name, value in change.options.items())
    return "is so already" if same else ""


def _judged(name: str, measured: Measured, spread: float) -> Step:
    """The step of a change that ran: kept if it is faster and its loss is as near as losses of other seeds."""
    comparison = measured.comparison
    if comparison.verdict != "faster":
        return Step(change=name, comparison=comparison, reason=comparison.reason)
    before, after = measured.losses
    if before is None or after is None or not math.isfinite(before - after):
        return Step(change=name, comparison=comparison, reason=f"not kept: the loss is {after} and was {before}")
    difference = abs(after - before)
    words = f"the loss differs by {difference:.2g}; seeds differ by {spread:.2g}"
    if difference > spread:
        return Step(change=name, comparison=comparison, reason=f"not kept: {words}")
    return Step(change=name, comparison=comparison, kept=True, reason=words)

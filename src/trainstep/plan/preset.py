"""Searches the fastest options of a training step: one change at a time against the best so far, then all together once more.

    search(start, CHANGES, key_of=..., trial=..., compare=...)   # the callbacks measure; tests give them numbers

A new value to try is one row of `CHANGES`. A row costs a trial first: one process, which shows that the options run, that their
losses are right, and that they are not far slower. Only then are several processes interleaved with the best so far, and the change
is kept if the comparison calls it faster (docs/decisions/0021-presets-by-greedy-search.md).

[Note: values of one option] Rows that follow each other and set the same option all have their trials first. The fastest value is
compared first, and a value that took clearly longer alone is not compared: at most one of six attentions is taken, and a comparison
takes as long as six trials.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainstep.config.attention import PACKAGES
from trainstep.config.run import RECOMPUTES
from trainstep.plan.trials import (
    BudgetSpent,
    CompareFunction,
    KeyFunction,
    Options,
    Step,
    Trial,
    TrialFunction,
    Trials,
    name_of,
    precision_of,
)

ALWAYS, IF_TOO_LARGE, IF_LESS = "always", "if the start runs out of memory", "if the best recomputes more"
IF_PRECISION = "if a precision was kept, and the option was not"


@dataclass(frozen=True, kw_only=True)
class Change:
    """Options to try together. `otherwise`: more options, with which they are tried if the config refuses them alone."""

    options: Options
    otherwise: Options = field(default_factory=dict)
    when: str = ALWAYS
    built_in: bool = False
    """Whether it has an effect on the built-in model only."""
    package: str = ""
    """The package that must be installed; empty: none."""


def _row(
    when: str = ALWAYS, *, otherwise: Options | None = None, built_in: bool = False, package: str = "", **options: Any
) -> Change:
    return Change(options=options, otherwise=otherwise or {}, when=when, built_in=built_in, package=package)


_UNCAPTURED, _EVERY = {"capture": "none"}, {"recompute_every": 1, "narrow_blocks": 0}
_KEPT_ATTENTION = {"attention": "trainstep"}
"""The attention whose result recomputation can keep, in place of flex and flash_attn_4."""
CHANGES = (
    _row(IF_TOO_LARGE, recompute="selective"),
    _row(IF_TOO_LARGE, recompute="narrow"),
    _row(IF_TOO_LARGE, recompute="block"),
    _row(capture="auto"),
    _row(IF_PRECISION, capture="auto"),
    _row(compile="block", otherwise=_UNCAPTURED),
    _row(built_in=True, ops="fused"),
    _row(adamw="trainstep"),
    _row(update="in_backward", otherwise={"adamw": "trainstep"}),
    _row(built_in=True, attention="trainstep"),
    _row(built_in=True, attention="flash_attn_4", package=PACKAGES["flash_attn_4"]),
    _row(built_in=True, attention="sdpa"),
    _row(built_in=True, attention="sdpa_flash"),
    _row(built_in=True, attention="sdpa_cudnn"),
    _row(built_in=True, attention="flex"),
    _row(compile="model", otherwise=_UNCAPTURED),
    _row(IF_LESS, recompute="none", otherwise=_EVERY),
    _row(IF_LESS, recompute="selective", otherwise=_KEPT_ATTENTION),
    _row(IF_LESS, recompute="narrow", otherwise=_KEPT_ATTENTION),
)
"""The changes to try, the largest expected gain first. The whole model is compiled after all that stays in its blocks, because its
compilation, a minute of large models, would be part of every later trial. Less recomputation comes last, when other changes may
have made room."""
_BEFORE_PRECISIONS = "capture"
"""Allowed precisions are tried right after this option: without it a step may wait for the host, which is noisy, so that a
comparison takes minutes, and hides what kernels gain. They come before the rest, since they decide which attentions can run.
Behind them it is tried once more: a step that is faster on the device may wait for the host where the one before did not."""


_CLEARLY = 1.03
"""The ratio of the fastest steps of two trials above which noise does not explain it. [Note: values of one option]"""


def changes_within(
    precisions: Sequence[str], *, built_in: bool, is_installed: Callable[[str], bool] = lambda package: True
) -> list[Change]:
    """The rows for a model, with one for each allowed precision, without those whose package is not installed."""
    allowed = [_row(precision=name) for name in precisions]
    place = 1 + next((place for place, change in enumerate(CHANGES) if _BEFORE_PRECISIONS in change.options), -1)
    rows = [change for change in (*CHANGES[:place], *allowed, *CHANGES[place:]) if built_in or not change.built_in]
    return [change for change in rows if not change.package or is_installed(change.package)]


@dataclass(kw_only=True)
class Result:
    """The search so far. `fitting`: the start, with recomputation if it needs that; `best`: with all kept changes too."""

    start: Options
    fitting: Options
    best: Options
    start_s: float | None = None
    """The step's time in the trial of `fitting`; None until two runs of it have shown that changes can be tried from it."""
    steps: list[Step] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    """Changes for which the budget was too small, or which a dry run would measure next."""
    trouble: str = ""
    """Why nothing can be tried from this start."""
    whole: Step | None = None
    """`best` against `fitting`, measured once more; None without kept changes or before it ran."""

    @property
    def kept(self) -> list[Step]:
        return [step for step in self.steps if step.kept]

    @property
    def chosen(self) -> Options:
        """The options to recommend: `best`, unless its last comparison with the start did not confirm it."""
        return self.best if self.whole is None or self.whole.kept else self.fitting


def search(
    start: Options, changes: Sequence[Change], *, key_of: KeyFunction, trial: TrialFunction, compare: CompareFunction
) -> Result:
    """Try every change in order, and compare what was kept with the start."""
    return _Search(start, key_of, trial, compare).run(changes)


class _Search(Trials):
    def __init__(self, start: Options, key_of: KeyFunction, trial: TrialFunction, compare: CompareFunction) -> None:
        super().__init__(key_of, trial, compare)
        self.result = Result(start=start, fitting=start, best=start)
        self._best_s: float | None = None
        self._keys: dict[str, str] = {}
        """Key -> the change that led to it."""
        self._trials: dict[tuple[str, int], Trial] = {}
        self._compared_of: tuple[frozenset[str], str, float] | None = None
        """The last option with a comparison, the first of its values that was compared, and the time of that value alone."""

    def run(self, changes: Sequence[Change]) -> Result:
        result = self.result
        rows = [change for change in changes if change.when != IF_TOO_LARGE]
        try:
            self._begin([change for change in changes if change.when == IF_TOO_LARGE])
            if result.trouble:
                return result
            while rows:
                self._fastest_first(rows)
                if (step := self._step(rows[0])) is not None:
                    result.steps.append(replace(step, change=self._told(step.change)))
                rows.pop(0)
            if result.best != result.fitting:
                together = "all kept changes"
                result.whole = self.judged(together, result.fitting, result.best, None)
        except BudgetSpent:
            result.untried += [self._told(name) for change in rows if (name := self._untried_name(change))]
            if not rows:
                result.untried.append("all kept changes against the start")
        return result

    def _begin(self, rows: Sequence[Change]) -> None:
        """Run the start, with more and more recomputation as long as memory runs out, and see that its losses can be repeated."""
        result = self.result
        tried = self.measured(result.start)
        for change in rows:
            if tried.failure_kind != "out_of_memory" or tried.phase == "build":  # weights alone that do not fit
                break
            options = {**result.start, **change.options}
            name = name_of(change.options)
            if why := self.refusal(options):
                result.steps.append(Step(change=name, reason=why))
                continue
            tried = self.measured(options)
            fits = not tried.failure_kind
            why = "the step fits with it, and without it runs out of memory" if fits else tried.message
            word = "fits" if fits else tried.failure_kind.replace("_", " ")
            result.steps.append(Step(change=name, kept=fits, reason=why, word=word, alone_s=tried.step_s))
            if fits:
                result.fitting = result.best = options
        if tried.failure_kind:
            result.trouble = tried.message
            return
        self._keys[self.key_of(result.best)] = "the start"
        result.trouble = self.repeats(result.best, tried)
        if not result.trouble:
            result.start_s = self._best_s = tried.step_s

    def measured(self, options: Options, repeat: int = 0) -> Trial:
        """The trial, once."""
        key = self.key_of(options), repeat
        if key not in self._trials:
            self._trials[key] = super().measured(options, repeat)
        return self._trials[key]

    def _fastest_first(self, rows: list[Change]) -> None:
        """Run the trials of the first rows, if they are values of one option, and order them. [Note: values of one option]"""
        option = frozenset(rows[0].options)
        alike = [*itertools.takewhile(lambda row: frozenset(row.options) == option and row.when == rows[0].when, rows)]
        if len(alike) < 2 or (self._compared_of and self._compared_of[0] == option):
            return
        rows[: len(alike)] = sorted(alike, key=self._alone_s)

    def _told(self, name: str) -> str:
        """The change's name in what is told of it, where one of that name has been tried already."""
        return f"{name}, once more" if name in [step.change for step in self.result.steps] else name

    def _alone_s(self, change: Change) -> float:
        """The fastest step of its trial; 0 where it is not tried or fails, infinite where the budget has no room for it."""
        if not self._applies(change):
            return 0.0
        options, _, why = self._options_of(change)
        if why or self.key_of(options) in (self.key_of(self.result.best), *self._keys):
            return 0.0
        try:
            return self.measured(options).step_s or 0.0
        except BudgetSpent:
            return math.inf

    def _why_slower(self, change: Change, options: Options) -> str:
        """Why a value need not be compared: another value of its option was clearly faster alone. Empty if it must be."""
        if self._compared_of is None or self._compared_of[0] != frozenset(change.options):
            return ""
        _, name, fastest_s = self._compared_of
        alone_s = self.measured(options).step_s
        if alone_s is None or alone_s <= _CLEARLY * fastest_s:
            return ""
        return f"alone it takes {alone_s / fastest_s:.3g} times as long as {name}, which was compared"

    def _step(self, change: Change) -> Step | None:
        """Try one change; None if its condition does not hold, so that there is nothing to say about it."""
        if not self._applies(change):
            return None
        options, name, why = self._options_of(change)
        if why:
            return Step(change=name, reason=why)
        key = self.key_of(options)
        if key == self.key_of(self.result.best):
            return Step(change=name, reason="is already set")
        if key in self._keys:
            return Step(change=name, reason=f"these are the options of {self._keys[key]}, which was tried")
        if why := self._why_slower(change, options):
            self._keys[key] = name
            return Step(change=name, word="slower", reason=why, alone_s=self.measured(options).step_s)
        step, tried = self.attempt(name, self.result.best, options, fastest_s=self._best_s)
        self._keys[key] = name
        option = frozenset(change.options)
        if step.comparison is not None and tried.step_s and (not self._compared_of or self._compared_of[0] != option):
            self._compared_of = option, name, tried.step_s
        if step.kept:
            self.result.best, self._best_s = options, tried.step_s
            if precision_of(options) != self.reference.precision:
                self.reference = self.reference_like(options, tried)
        return step

    def _applies(self, change: Change) -> bool:
        if change.when == IF_PRECISION:
            fitting, best = self.result.fitting, self.result.best
            options = {**best, **change.options}
            is_new = not self.refusal(options) and self.key_of(options) != self.key_of(best)
            return is_new and precision_of(best) != precision_of(fitting)
        if change.when != IF_LESS:
            return True
        mode, less = (options.get("recompute") or "none" for options in (self.result.best, change.options))
        return mode in RECOMPUTES and RECOMPUTES.index(less) < RECOMPUTES.index(mode)

    def _options_of(self, change: Change) -> tuple[Options, str, str]:
        """The options with the change, its name, and why a config refuses it; with what it may bring along, if refused alone.

        The reason is then the one that holds with that too: a reader who follows the advice of the first meets the second.
        """
        given = change.options
        if self.refusal({**self.result.best, **given}):
            given = {**given, **change.otherwise}
        options = {**self.result.best, **given}
        return options, name_of(given), self.refusal(options)

    def _untried_name(self, change: Change) -> str:
        """The name of a change that would be measured with the best so far; empty for one that would not."""
        if not self._applies(change):
            return ""
        options, name, why = self._options_of(change)
        return "" if why or self.key_of(options) == self.key_of(self.result.best) else name

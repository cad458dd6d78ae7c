"""Searches the fastest options of a training step: one change at a time against the best so far, then all together once more.

    search(start, CHANGES, key_of=..., trial=..., compare=...)   # the callbacks measure; tests give them numbers

A new value to try is one row of `CHANGES`. A row costs a trial first: one process, which shows that the options run, that their
losses are right, and that they are not far slower. Only then are several processes interleaved with the best so far, and the change
is kept if the comparison calls it faster (docs/decisions/0021-presets-by-greedy-search.md).

[Note: which difference of the losses is rounding]
A trial and the start have the same seed, weights and batches. If both are right, their losses differ by rounding alone. The spread
of several seeds would tell nothing: without a causal mask, or without any update, the losses of ten steps lie within it. Let d be
the norm of the difference of both sequences of losses over the norm of the start's. Measured on a CPU (tiny, mini, and small in
fp32, ten steps) with right variants and with four wrong attentions (no mask, another scale, shifted keys, no gradient for q):

                  right             wrong, random tokens   wrong, text
    fp32          at most 2e-7      at least 5e-6          at least 1.4e-4
    fp16_autocast at most 4e-6      not measured           at least 1.3e-4
    bf16          at most 2.6e-5    at least 1.2e-5        at least 1.3e-4

So losses are compared on text where the model can read it. A 64th of the unit roundoff (2^-8 for bf16) is allowed, but at least
2^-20: fp32's loss itself has steps of 2^-24. Another precision moves the loss lawfully: against fp32, fp16_autocast by 6e-6,
bf16_autocast by 6e-5, bf16_master by 1.3e-3 and bf16 by 2.9e-3. A whole unit roundoff is allowed there, which a missing mask
exceeds (1.0e-2). Later changes are held to the losses of the new precision.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainstep.config.run import RECOMPUTES
from trainstep.records.compare import Comparison

Options = Mapping[str, Any]
"""Flat config fields, as the command line gives them."""
ALWAYS, IF_TOO_LARGE, IF_LESS = "always", "if the start runs out of memory", "if the best recomputes more"
HOPELESS = 1.5
"""A trial that takes this many times the best's time is not compared further. Two processes of the same step differ by less."""
_ROUNDOFF = {"fp32": 2**-24, "tf32": 2**-11, "fp16_autocast": 2**-11}
_BF16_ROUNDOFF = 2**-8
_SHARE, _LEAST = 2**-6, 2**-20
"""[Note: which difference of the losses is rounding]"""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Options to try together. `otherwise`: more options, with which they are tried if the config refuses them alone."""

    options: Options
    otherwise: Options = field(default_factory=dict)
    when: str = ALWAYS
    built_in: bool = False
    """Has an effect on the built-in model only."""


def name_of(options: Options) -> str:
    """`compile block with capture none`"""
    return " with ".join(f"{name} {'none' if value is None else value}" for name, value in options.items())


def _row(when: str = ALWAYS, *, otherwise: Options | None = None, built_in: bool = False, **options: Any) -> Change:
    return Change(options=options, otherwise=otherwise or {}, when=when, built_in=built_in)


_UNCAPTURED, _EVERY = {"capture": "none"}, {"recompute_every": 1}
CHANGES = (
    _row(IF_TOO_LARGE, recompute="selective"),
    _row(IF_TOO_LARGE, recompute="narrow"),
    _row(IF_TOO_LARGE, recompute="block"),
    _row(capture="auto"),
    _row(compile="block", otherwise=_UNCAPTURED),
    _row(compile="model", otherwise=_UNCAPTURED),
    _row(adamw="trainstep"),
    _row(update="in_backward", otherwise={"adamw": "trainstep"}),
    _row(built_in=True, attention="trainstep"),
    _row(built_in=True, attention="sdpa"),
    _row(built_in=True, attention="sdpa_flash"),
    _row(built_in=True, attention="sdpa_cudnn"),
    _row(built_in=True, attention="flex"),
    _row(built_in=True, ops="fused"),
    _row(IF_LESS, recompute="none", otherwise=_EVERY),
    _row(IF_LESS, recompute="selective"),
    _row(IF_LESS, recompute="narrow"),
)
"""What is tried, the largest expected gain first. Allowed precisions come before, because they decide which attentions can run.
Less recomputation comes last, when other changes may have made room."""


def changes_within(precisions: Sequence[str], *, built_in: bool) -> list[Change]:
    """The rows for a model, after one for each allowed precision."""
    allowed = [_row(precision=name) for name in precisions]
    return [change for change in (*allowed, *CHANGES) if built_in or not change.built_in]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A set of options, run alone in one process. `losses` of its first steps, on the first batches (None: not finite)."""

    failure_kind: str = ""
    """Empty if it ran."""
    phase: str = ""
    """Where it failed."""
    message: str = ""
    losses: tuple[float | None, ...] = ()
    step_s: float | None = None
    """The fastest step, because disturbances of a lone process only add."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What became of a change. Without `comparison` it was not compared, and `reason` says why."""

    change: str
    kept: bool = False
    reason: str = ""
    comparison: Comparison | None = None
    word: str = "not run"
    """The verdict as a table shows it."""
    alone_s: float | None = None
    """The step's time in the trial."""


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
    """What the budget left, or what a dry run would measure next."""
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


KeyFunction = Callable[[Options], str]
"""Identifies the cell that options describe, whether or not they are defaults. ValueError says why a config refuses them."""
TrialFunction = Callable[[Options, int], Trial | None]
"""Runs options alone; 1 as the last argument asks for another run than 0. None: the budget is spent."""
CompareFunction = Callable[[Options, Options, int], Comparison | None]
"""Compares the second options with the first; the last argument and None as above."""


def search(
    start: Options, changes: Sequence[Change], *, key_of: KeyFunction, trial: TrialFunction, compare: CompareFunction
) -> Result:
    """Try every change in order, and compare what was kept with the start."""
    return _Search(start, key_of, trial, compare).run(changes)


def allowed_difference(precision: str, reference_precision: str) -> float:
    """The largest relative difference of losses that is rounding. [Note: which difference of the losses is rounding]"""
    roundoff, other = (_ROUNDOFF.get(name, _BF16_ROUNDOFF) for name in (precision, reference_precision))
    return max(roundoff, other) if precision != reference_precision else max(_SHARE * roundoff, _LEAST)


def difference_of(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Norm of the difference over the norm of the reference, over the steps that both have."""
    pairs = list(zip(losses, reference, strict=False))
    apart = math.sqrt(math.fsum((a - b) ** 2 for a, b in pairs))
    size = math.sqrt(math.fsum(b * b for _, b in pairs))
    return apart / size if size else math.inf if apart else 0.0


class _BudgetSpent(Exception):
    """A measurement did not run."""


class _Search:
    def __init__(self, start: Options, key_of: KeyFunction, trial: TrialFunction, compare: CompareFunction) -> None:
        self._key_of, self._trial, self._compare = key_of, trial, compare
        self.result = Result(start=start, fitting=start, best=start)
        self._reference: tuple[str, list[float]] = ("", [])
        """Precision and losses to which changes are held."""
        self._best_s: float | None = None
        self._compared: set[tuple[str, str]] = set()
        self._keys: dict[str, str] = {}
        """Key -> the change that led to it."""

    def run(self, changes: Sequence[Change]) -> Result:
        result = self.result
        rows = [change for change in changes if change.when != IF_TOO_LARGE]
        try:
            self._begin([change for change in changes if change.when == IF_TOO_LARGE])
            if result.trouble:
                return result
            while rows:
                if (step := self._step(rows[0])) is not None:
                    result.steps.append(step)
                rows.pop(0)
            if result.best != result.fitting:
                together = "all kept changes"
                result.whole = self._judged(together, result.fitting, result.best, None)
        except _BudgetSpent:
            result.untried += [name for change in rows if (name := self._untried_name(change))]
            if not rows:
                result.untried.append("all kept changes against the start")
        return result

    def _begin(self, rows: Sequence[Change]) -> None:
        """Run the start, with more and more recomputation as long as memory runs out, and see that its losses can be repeated."""
        result = self.result
        tried = self._measured(result.start)
        for change in rows:
            if tried.failure_kind != "out_of_memory" or tried.phase == "build":  # weights alone that do not fit
                break
            options = {**result.start, **change.options}
            name = name_of(change.options)
            if why := self._refusal(options):
                result.steps.append(Step(change=name, reason=why))
                continue
            tried = self._measured(options)
            fits = not tried.failure_kind
            why = "the step fits with it, and without it runs out of memory" if fits else tried.message
            word = "fits" if fits else tried.failure_kind.replace("_", " ")
            result.steps.append(Step(change=name, kept=fits, reason=why, word=word, alone_s=tried.step_s))
            if fits:
                result.fitting = result.best = options
        if tried.failure_kind:
            result.trouble = tried.message
            return
        self._keys[self._key_of(result.best)] = "the start"
        precision, losses = self._precision(result.best), tried.losses
        if not losses or None in losses:
            result.trouble = f"its loss is not finite: {_shown(losses)}" if losses else "its record has no losses"
            return
        self._reference = (precision, [loss for loss in losses if loss is not None])
        again = self._measured(result.best, 1)
        if why := again.message or self._wrong_losses(again, precision):
            result.trouble = (
                f"a second run of the start with the same seed is not alike ({why}), so no change's loss can be checked; draw "
                "weights and batches from run.seed"
            )
            return
        result.start_s = self._best_s = tried.step_s

    def _step(self, change: Change) -> Step | None:
        """Try one change; None if its condition does not hold, so that there is nothing to say about it."""
        if not self._applies(change):
            return None
        options, name, why = self._options_of(change)
        if why:
            return Step(change=name, reason=why)
        key = self._key_of(options)
        if key == self._key_of(self.result.best):
            return Step(change=name, reason="is so already")
        if key in self._keys:
            return Step(change=name, reason=f"these are the options of {self._keys[key]}, which was tried")
        tried = self._measured(options)
        self._keys[key] = name
        if tried.failure_kind:
            return Step(change=name, word=tried.failure_kind.replace("_", " "), reason=tried.message)
        precision = self._precision(options)
        if why := self._wrong_losses(tried, precision):
            return Step(change=name, word="another loss", reason=f"not kept: {why}", alone_s=tried.step_s)
        if self._best_s and tried.step_s and tried.step_s > HOPELESS * self._best_s:
            ratio = tried.step_s / self._best_s
            why = f"its fastest step took {ratio:.3g} times the best's, each alone, so it was not compared further"
            return Step(change=name, word="slower", reason=why, alone_s=tried.step_s)
        step = self._judged(name, self.result.best, options, tried)
        if step.kept:
            self.result.best, self._best_s = options, tried.step_s
            if precision != self._reference[0]:
                self._reference = (precision, [loss for loss in tried.losses if loss is not None])
        return step

    def _judged(self, name: str, before: Options, after: Options, tried: Trial | None) -> Step:
        """Compare, and keep what is faster."""
        pair = (self._key_of(before), self._key_of(after))
        known = self._compare(before, after, int(pair in self._compared))
        if known is None:
            raise _BudgetSpent
        self._compared.add(pair)
        kept, reason = known.verdict == "faster", known.reason
        alone_s = tried.step_s if tried else None
        return Step(change=name, kept=kept, reason=reason, comparison=known, word=known.word, alone_s=alone_s)

    def _measured(self, options: Options, repeat: int = 0) -> Trial:
        tried = self._trial(options, repeat)
        if tried is None:
            raise _BudgetSpent
        return tried

    def _applies(self, change: Change) -> bool:
        if change.when != IF_LESS:
            return True
        mode, less = (options.get("recompute") or "none" for options in (self.result.best, change.options))
        return mode in RECOMPUTES and RECOMPUTES.index(less) < RECOMPUTES.index(mode)

    def _options_of(self, change: Change) -> tuple[Options, str, str]:
        """The options with the change, its name, and why a config refuses it, with and without what it may bring along."""
        best = self.result.best
        options = {**best, **change.options}
        why = self._refusal(options)
        if why and change.otherwise and not self._refusal({**options, **change.otherwise}):
            return {**options, **change.otherwise}, name_of({**change.options, **change.otherwise}), ""
        return options, name_of(change.options), why

    def _untried_name(self, change: Change) -> str:
        """The name of a change that would be measured with the best so far; empty for one that would not."""
        if not self._applies(change):
            return ""
        options, name, why = self._options_of(change)
        return "" if why or self._key_of(options) == self._key_of(self.result.best) else name

    def _refusal(self, options: Options) -> str:
        try:
            self._key_of(options)
        except ValueError as error:
            return str(error)
        return ""

    def _precision(self, options: Options) -> str:
        return str(options.get("precision", "fp32"))

    def _wrong_losses(self, tried: Trial, precision: str) -> str:
        """Why losses are not those of the same mathematics; empty if they are."""
        reference_precision, reference = self._reference
        losses = [loss for loss in tried.losses if loss is not None]
        if len(losses) < len(tried.losses):
            return f"its loss is not finite: {_shown(tried.losses)}"
        if not losses:
            return "its record has no losses"
        apart, allowed = difference_of(losses, reference), allowed_difference(precision, reference_precision)
        if apart <= allowed:
            return ""
        steps = min(len(losses), len(reference))
        return (
            f"the losses of {steps} steps differ from the start's by {apart:.2g}, and rounding explains {allowed:.2g}"
        )


def _shown(losses: Sequence[float | None]) -> str:
    """The losses up to the first that is not finite."""
    shown = losses[: losses.index(None) + 1] if None in losses else losses
    return ", ".join("nan or inf" if loss is None else f"{loss:.4g}" for loss in shown)

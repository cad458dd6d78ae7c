"""Tries options of a training step: one process alone, whose losses are checked, then a comparison with other options.

    trials = Trials(key_of, trial, compare)      # the callbacks measure; tests give them numbers
    trials.repeats(start, trials.measured(start))            # "" if a second run has the same losses: changes can be checked
    step, tried = trials.attempt("capture auto", start, {**start, "capture": "auto"}, fastest_s=0.1)

A search of the fastest options (plan/preset.py) and a proof of predicted gains (explain/prove.py) are made of these.

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
2^-20: fp32's loss itself has steps of 2^-24. Another precision legitimately moves the loss: against fp32, fp16_autocast by 6e-6,
bf16_autocast by 6e-5, bf16_master by 1.3e-3 and bf16 by 2.9e-3. A whole unit roundoff is allowed there, which a missing mask
exceeds (1.0e-2). Later changes are held to the losses of the new precision.

[Note: the nearest run] Runs of a step that is not deterministic (atomic additions, kernels chosen by time) differ by rounding.
Eleven of a compiled GPT-2 in bf16 autocast were 2.9e-5 apart in the median and 1.0e-4 at most (results/h200/
script_hugging_face_proof.ndjson), which is more than what is allowed. So where the start has run several times, losses are held to
those of the run that is nearest: the changes there were 3.5e-5 away at most.

[Note: calm steps] Where training is unstable, that rounding grows from step to step: runs of one GPT-2 were 2e-6 apart over six
steps, 3e-5 over eight and 3e-4 over ten (results/h200/script_hugging_face_plain_proof.ndjson), and ten steps tell nothing there. So
losses are compared over as many steps as all runs of the start agree within a quarter of what is allowed, and over four at least: a
wrong forward pass shows in the first, a wrong gradient or update from the second on, if the learning rate does not begin at zero.

[Note: unstable steps] Where all runs of a start are bitwise equal, they do not show whether training amplifies rounding. A
change of precision does: medium's losses rose from 6.9 to 10.9 in the third step, and bf16 autocast was 1.9e-4 from fp32 in the
first step and 2.3e-3 over ten; there torch.compile was 6e-6 and 4.7e-4 from eager bf16, other attentions 4e-5 to 1.0e-4
(results/h200/preset_medium_flash_attn_4.jsonl). So what is allowed grows as the difference from another precision grows from the
first step on, but at most to half of that difference. The losses of the first step, of the first two, and so on each keep to
it, since one blown-up step would hide much. Where the start is in 16 bits, a trial in fp32 shows it, once losses differ.
Only where weights are in fp32: bf16 weights lose updates, and so move tiny's calm losses from 1e-5 to 2.4e-3: more than rounding.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trainstep.records.compare import Comparison

Options = Mapping[str, Any]
"""Flat config fields, as the command line gives them."""
ANOTHER_LOSS = "another loss"
"""The word of a change whose losses are not those of the same mathematics."""
HOPELESS = 1.5
"""A change is not compared further if two of its trials take this many times the best's time."""
_ROUNDOFF = {"fp32": 2**-24, "tf32": 2**-11, "fp16_autocast": 2**-11}
_BF16_ROUNDOFF = 2**-8
_SHARE, _LEAST = 2**-6, 2**-20
"""[Note: which difference of the losses is rounding]"""
_CALM, _FEWEST_STEPS = 1 / 4, 4
"""[Note: calm steps]"""
_FP32_WEIGHTS = ("tf32", "fp16_autocast", "bf16_autocast")
_MOST_OF_PRECISION = 1 / 2
"""[Note: unstable steps]"""


def name_of(options: Options) -> str:
    """The options in words, as `compile block with capture none`."""
    return " with ".join(f"{name} {'none' if value is None else value}" for name, value in options.items())


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A set of options, run alone in one process. `losses` of its first steps, on the first batches (None: not finite)."""

    failure_kind: str = ""
    """Empty if it ran."""
    phase: str = ""
    """The phase in which it failed."""
    message: str = ""
    losses: tuple[float | None, ...] = ()
    others: tuple[tuple[float, ...], ...] = ()
    """Finite losses of other runs of the same options, where there are. [Note: the nearest run]"""
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
    apart: float | None = None
    """Relative difference of its losses; None where losses were not compared."""
    allowed: float | None = None
    """The largest difference that rounding explains."""


KeyFunction = Callable[[Options], str]
"""Identifies the cell that options describe, whether or not they are defaults. ValueError says why a config refuses them."""
TrialFunction = Callable[[Options, int], Trial | None]
"""Runs options alone; 1 as the last argument asks for another run than 0. None: the budget is spent."""
CompareFunction = Callable[[Options, Options, int], Comparison | None]
"""Compares the second options with the first; the last argument and None as above."""


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


def calm_steps(runs: Sequence[Sequence[float]], allowed: float) -> int:
    """Over how many of the first steps losses can be compared, by those of several runs of one step. [Note: calm steps]"""
    most = min((len(run) for run in runs if run), default=0)
    for steps in range(most, _FEWEST_STEPS, -1):
        pairs = itertools.combinations([run[:steps] for run in runs], 2)
        if all(difference_of(a, b) <= _CALM * allowed for a, b in pairs):
            return steps
    return min(most, _FEWEST_STEPS)


class BudgetSpent(Exception):
    """The budget was too small for a measurement, which did not run."""


class Reference(NamedTuple):
    """Losses to which changes are held, and the precision that gave them."""

    precision: str
    losses: Sequence[float]
    others: Sequence[Sequence[float]] = ()
    """Losses of further runs. [Note: the nearest run]"""
    steps: int | None = None
    """How many of the first steps count; None: the calm ones. [Note: calm steps]"""
    other_precision: Sequence[float] = ()
    """Losses of the same steps in another precision, where they are known. [Note: unstable steps]"""

    def allowed(self, precision: str, steps: int) -> float:
        """The largest relative difference from these losses, over so many steps, that rounding in a precision explains."""
        allowed = allowed_difference(precision, self.precision)
        if precision != self.precision or precision not in _FP32_WEIGHTS or not self.other_precision:
            return allowed
        apart = [difference_of(self.losses[:some], self.other_precision[:some]) for some in range(1, steps + 1)]
        first = next(
            (each for each in apart if each), math.inf
        )  # a head of zeros has the same first loss in any precision
        return max(allowed, min(allowed * apart[-1] / first, _MOST_OF_PRECISION * apart[-1]))


class LossCheck(NamedTuple):
    """`why` the losses are not those of the same mathematics; empty if they are. Differences as in `Step`."""

    why: str
    apart: float | None = None
    allowed: float | None = None


class Trials:
    """Measures options by its callbacks, and judges what they return. BudgetSpent where a callback did not measure."""

    def __init__(self, key_of: KeyFunction, trial: TrialFunction, compare: CompareFunction) -> None:
        self.key_of, self._trial, self._compare = key_of, trial, compare
        self.reference = Reference("", ())
        self.spread: float | None = None
        """Relative difference of the losses of two runs of the start."""
        self.has_precisions = True
        """Whether the start may be tried in fp32, as options have a precision. [Note: unstable steps]"""
        self._asked_fp32 = False
        self._start: Options = {}
        self._compared: set[tuple[str, str]] = set()

    def refusal(self, options: Options) -> str:
        """Why a config refuses the options; empty if it takes them."""
        try:
            self.key_of(options)
        except ValueError as error:
            return str(error)
        return ""

    def measured(self, options: Options, repeat: int = 0) -> Trial:
        """The options alone in one process."""
        tried = self._trial(options, repeat)
        if tried is None:
            raise BudgetSpent
        return tried

    def repeats(self, options: Options, tried: Trial) -> str:
        """Take the losses of `tried` as the reference, if a second run repeats them; else say why no change can be checked."""
        precision, losses = precision_of(options), tried.losses
        if not losses or None in losses:
            return f"its loss is not finite: {_shown(losses)}" if losses else "its record has no losses"
        self._start, self.reference = options, reference_of(options, tried)
        again = self.measured(options, 1)
        first, second = _finite(tried), _finite(again)
        others = tried.others or (second,)
        steps = calm_steps([first, second, *others], allowed_difference(precision, precision))
        check = self.check_losses(again, precision, Reference(precision, first, again.others, steps))
        if not check.why and tried.others:  # the first one, too, must be near to one of the others
            check = self.check_losses(tried, precision, Reference(precision, second, tried.others, steps))
        if check.apart is not None:
            self.spread = difference_of(second[:steps], first[:steps])
        self.reference = Reference(precision, first, others, steps)
        if why := again.message or check.why:
            return (
                f"a second run of the start with the same seed has other losses ({why}), so no change's loss can be checked; draw "
                "weights and batches from run.seed"
            )
        return ""

    def reference_like(self, options: Options, tried: Trial) -> Reference:
        """The losses of other options as a reference, over the steps in which the start's runs agree."""
        known = self.reference
        other = known.losses if precision_of(options) != known.precision else ()
        return reference_of(options, tried)._replace(steps=known.steps, other_precision=other)

    def attempt(
        self,
        name: str,
        before: Options,
        after: Options,
        *,
        fastest_s: float | None,
        reference: Reference | None = None,
        work: float = 1.0,
    ) -> tuple[Step, Trial]:
        """Run `after` alone, check its losses, and compare it with `before` unless it failed or is far slower.

        `fastest_s`: the fastest step of `before`. `reference`: whose losses it must have, by default the start's; one without
        losses asks for finite ones alone. `work`: tokens of a step of `after` over those of `before`.
        """
        tried = self.measured(after)
        if tried.failure_kind:
            return Step(change=name, word=tried.failure_kind.replace("_", " "), reason=tried.message), tried
        check = self.check_losses(tried, precision_of(after), self.reference if reference is None else reference)
        if check.why and check.apart is not None and reference is None and self._measured_in_fp32():
            check = self.check_losses(tried, precision_of(after), self.reference)
        alone_s = tried.step_s
        if check.why:
            step = Step(
                change=name,
                word=ANOTHER_LOSS,
                reason=f"not kept: {check.why}",
                alone_s=alone_s,
                apart=check.apart,
                allowed=check.allowed,
            )
            return step, tried
        if fastest_s and alone_s and alone_s > HOPELESS * fastest_s * work:
            # A neighbour may have slowed the whole process: a second one must be as slow before the change is given up.
            with suppress(BudgetSpent):  # else the comparison decides, part of which may be on disk
                alone_s = min(alone_s, self.measured(after, 1).step_s or alone_s)
                tried = replace(tried, step_s=alone_s)
                if alone_s > HOPELESS * fastest_s * work:
                    ratio = alone_s / fastest_s / work
                    why = f"its fastest step took {ratio:.3g} times the best's, each alone and twice: it was not compared further"
                    return Step(change=name, word="slower", reason=why, alone_s=alone_s), tried
        step = self.judged(name, before, after, tried)
        return replace(step, apart=check.apart, allowed=check.allowed), tried

    def _measured_in_fp32(self) -> bool:
        """Run the start in fp32, once and where that tells something. Whether the reference has its losses now."""
        known = self.reference
        is_known = known.other_precision or not known.losses or known.precision not in _FP32_WEIGHTS
        if is_known or not self.has_precisions or self._asked_fp32:
            return False
        in_fp32 = {**self._start, "precision": "fp32"}
        tried = None if self.refusal(in_fp32) else self.measured(in_fp32)
        self._asked_fp32 = True
        if tried is not None and None not in tried.losses:
            self.reference = known._replace(other_precision=_finite(tried))
        return bool(self.reference.other_precision)

    def judged(self, name: str, before: Options, after: Options, tried: Trial | None) -> Step:
        """Compare, and keep what is faster."""
        pair = (self.key_of(before), self.key_of(after))
        known = self._compare(before, after, int(pair in self._compared))
        if known is None:
            raise BudgetSpent
        self._compared.add(pair)
        kept, reason = known.verdict == "faster", known.reason
        alone_s = tried.step_s if tried else None
        return Step(change=name, kept=kept, reason=reason, comparison=known, word=known.word, alone_s=alone_s)

    def check_losses(self, tried: Trial, precision: str, reference: Reference) -> LossCheck:
        """Whether losses are those of the same mathematics as the reference's."""
        losses = [loss for loss in tried.losses if loss is not None]
        if len(losses) < len(tried.losses):
            return LossCheck(f"its loss is not finite: {_shown(tried.losses)}")
        if not losses:
            return LossCheck("its record has no losses")
        if not reference.losses:
            return LossCheck("")
        runs = (reference.losses, *reference.others)
        steps = reference.steps or calm_steps(runs, allowed_difference(reference.precision, reference.precision))
        if len(losses) < min(steps, len(reference.losses)):
            return LossCheck(f"it has the losses of {len(losses)} steps, of {steps} that are compared")
        steps = min(steps, len(losses), len(reference.losses))
        apart, allowed = _nearest(losses, runs, steps), reference.allowed(precision, steps)
        if allowed_difference(precision, reference.precision) < apart <= allowed:  # [Note: unstable steps]
            each = (
                (_nearest(losses, runs, some), reference.allowed(precision, some), some) for some in range(1, steps)
            )
            apart, allowed, steps = next((one for one in each if one[0] > one[1]), (apart, allowed, steps))
        if apart <= allowed:
            return LossCheck("", apart, allowed)
        whose = "the start's" if len(runs) == 1 else f"those of the nearest of the start's {len(runs)} runs"
        why = f"the losses of {steps} steps differ from {whose} by {apart:.2g}, and rounding explains {allowed:.2g}"
        return LossCheck(why, apart, allowed)


def _nearest(losses: Sequence[float], runs: Sequence[Sequence[float]], steps: int) -> float:
    """The difference from the nearest of these runs, over so many steps."""
    return min(difference_of(losses[:steps], each[:steps]) for each in runs)


def _finite(tried: Trial) -> list[float]:
    return [loss for loss in tried.losses if loss is not None]


def reference_of(options: Options, tried: Trial) -> Reference:
    """The trial's losses as what later changes are held to."""
    return Reference(precision_of(options), _finite(tried), tried.others)


def precision_of(options: Options) -> str:
    """The precision that the options ask for."""
    return str(options.get("precision", "fp32"))


def _shown(losses: Sequence[float | None]) -> str:
    """The losses up to the first that is not finite."""
    shown = losses[: losses.index(None) + 1] if None in losses else losses
    return ", ".join("nan or inf" if loss is None else f"{loss:.4g}" for loss in shown)

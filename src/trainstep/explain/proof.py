"""A proof of predicted gains: the changes tried, their results, and the options to take.

    proof.singles[0].measured(proof.measured_s), proof.helped, proof.together, proof.chosen

explain/prove.py makes a proof, report/explain/proof.py shows it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainstep.config.script import text_of_changes
from trainstep.plan.time.interval import Interval
from trainstep.plan.trials import Options, Step

TOGETHER, AGAIN = "all changes that helped, together", "a second time"
BATCH = "batch_size"
BATCH_CAUSE = "matmul_shapes"
"""The cause whose page advises more tokens in a batch."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A change to try. `gain`: the predicted gain, None without a prediction. `refusal`: why it is not tried; empty if it is."""

    fields: Mapping[str, Any]
    cause: str = ""
    gain: Interval | None = None
    refusal: str = ""

    @property
    def name(self) -> str:
        """As `--apply` takes it: `compile=module,adamw=fused`."""
        return text_of_changes(self.fields)


def precision_refusal(fields: Mapping[str, Any], allowed: Sequence[str]) -> str:
    """Why a change of the precision is not tried: the user has not allowed it. Empty for one that is, and for other changes."""
    precision = fields.get("precision")
    if precision is None or precision in allowed:
        return ""
    return f"it changes the losses: --allow-precision {precision} allows it"


def in_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    """By falling predicted gain; then batch sizes, which the user asked for; then others without a gain; refused ones last.

    A budget without room for all leaves out the last.
    """

    def order(candidate: Candidate) -> tuple[bool, bool, float]:
        gain = candidate.gain
        is_asked_for = gain is not None or BATCH in candidate.fields
        return bool(candidate.refusal), not is_asked_for, -gain.time_s if gain else 0.0

    return sorted(candidates, key=order)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A change that was tried, with its result."""

    candidate: Candidate
    step: Step

    @property
    def has_interval(self) -> bool:
        """Whether the change was compared in enough pairs for an interval."""
        comparison = self.step.comparison
        return comparison is not None and comparison.low is not None and comparison.high is not None

    @property
    def highest(self) -> float | None:
        """The highest likely ratio: the interval's high end, or the slowest pair of a comparison that the budget ended."""
        comparison = self.step.comparison
        if comparison is None:
            return None
        return max(comparison.each) if comparison.is_cut_off and comparison.n > 1 else comparison.high

    def measured(self, measured_s: float) -> Interval | None:
        """The measured gain on a step of `measured_s`, with the comparison's 99 % interval; without one, of no width."""
        comparison = self.step.comparison
        if comparison is None or comparison.ratio is None:
            return None
        low, high = (comparison.ratio if end is None else end for end in (comparison.low, comparison.high))
        return Interval(
            time_s=measured_s * (1 - comparison.ratio), low_s=measured_s * (1 - high), high_s=measured_s * (1 - low)
        )

    def held(self, measured_s: float) -> str:
        """Whether the predicted interval holds the measured gain.

        `yes` if the gain is inside, `no` if its whole interval is outside, else `cannot tell`, as for a gain without an interval;
        empty if either is unknown.
        """
        predicted, gain = self.candidate.gain, self.measured(measured_s)
        if predicted is None or gain is None:
            return ""
        if not self.has_interval:
            return "cannot tell"
        if predicted.low_s <= gain.time_s <= predicted.high_s:
            return "yes"
        return "no" if gain.high_s < predicted.low_s or gain.low_s > predicted.high_s else "cannot tell"


@dataclass(kw_only=True)
class Proof:
    """The proof so far. `measured_s`: the explained step's time, to which gains are relative."""

    start: Options
    measured_s: float
    start_s: float | None = None
    """The fastest step in the original's trial; None until two runs of the original have shown that changes can be checked."""
    spread: float | None = None
    """Relative difference between the losses of two runs of the original."""
    trouble: str = ""
    """Why nothing can be tried from this start."""
    unchecked: str = ""
    """Why losses cannot be compared, if changes are tried nevertheless."""
    singles: list[Tried] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    """Changes for which the budget left no time, or which a dry run would measure."""
    unfinished: list[str] = field(default_factory=list)
    """Changes of which the budget ended the comparison, and that no other comparison has decided."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Changes that helped or may help but are not in `together`, with the reason."""
    together: Tried | None = None
    again: list[Tried] = field(default_factory=list)
    """Second comparisons of single changes, made if `together` is not to be taken, until one confirms its change."""

    @property
    def helped(self) -> list[Tried]:
        """The changes that are faster than the original, the fastest first."""
        kept = [tried for tried in self.singles if tried.step.kept]
        return sorted(kept, key=lambda tried: ratio_of(tried.step))

    @property
    def promising(self) -> list[Tried]:
        """The changes that may help but lack the verdict `faster`, the fastest first.

        These are changes that were faster in every round (at least two) before the budget ended their comparison, and changes that
        are surely faster but by less than the minimum effect. They join the comparison of all together, which has all its pairs.
        """
        uncertain = [
            tried for tried in self.singles if not tried.step.kept and tried.highest is not None and tried.highest < 1
        ]
        return sorted(uncertain, key=lambda tried: ratio_of(tried.step))

    @property
    def may_join(self) -> list[Tried]:
        """The changes that helped or may help, the fastest first."""
        return sorted([*self.helped, *self.promising], key=lambda tried: ratio_of(tried.step))

    @property
    def best(self) -> Tried | None:
        """The change to take: all together, unless a single one is clearly faster; None if nothing surely helped.

        The fastest of several comparisons may be so by chance, so a second comparison must confirm a single change.
        """
        if self.together is None:  # not measured yet: take the change that seems best
            return next(iter(self.helped), None)
        if self.takes_all:
            return self.together
        confirmed = next((tried for tried in self.again if tried.step.kept), None)
        seems = next((tried for tried in self.unconfirmed if tried.step.kept), None)
        return confirmed or (seems if self.untried else None) or (self.together if self.together.step.kept else None)

    @property
    def takes_all(self) -> bool:
        """Whether all changes together are faster than the original, and no single change is clearly faster than all together."""
        first, whole = next(iter(self.may_join), None), self.together
        if whole is None or not whole.step.kept or first is None:
            return False
        low = None if whole.step.comparison is None else whole.step.comparison.low
        beats = first.highest is not None and low is not None and first.highest < low
        return not beats or whole.candidate.fields == first.candidate.fields

    @property
    def unconfirmed(self) -> list[Tried]:
        """The changes that helped or may help and were compared only once, the fastest first.

        If `together` has a single change, that is its second comparison.
        """
        twice = [tried.candidate.fields for tried in (*self.again, *([self.together] if self.together else []))]
        return [tried for tried in self.may_join if tried.candidate.fields not in twice]

    @property
    def chosen(self) -> Options:
        """The options to recommend; the start's if nothing helped."""
        return self.start if self.best is None else {**self.start, **self.best.candidate.fields}


def ratio_of(step: Step) -> float:
    """The step's time over the original's; 1 if it was not compared."""
    comparison = step.comparison
    return comparison.ratio if comparison is not None and comparison.ratio is not None else 1.0

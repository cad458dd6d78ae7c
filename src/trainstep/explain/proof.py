"""A proof of predicted gains: what is tried, what became of it, and what to take.

    proof.singles[0].measured(proof.measured_s), proof.helped, proof.together, proof.chosen

explain/prove.py makes it, report/explain/proof.py shows it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainstep.plan.time.interval import Interval
from trainstep.plan.trials import Options, Step, name_of

TOGETHER, AGAIN = "all changes that helped, together", "a second time"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A change to try. `gain`: as predicted, None if it is not. `refusal`: why it is not tried; empty if it is."""

    fields: Mapping[str, Any]
    cause: str = ""
    gain: Interval | None = None
    refusal: str = ""

    @property
    def name(self) -> str:
        return name_of(self.fields)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A change and what became of it."""

    candidate: Candidate
    step: Step

    @property
    def has_interval(self) -> bool:
        """Whether it was compared in enough pairs."""
        known = self.step.comparison
        return known is not None and known.low is not None and known.high is not None

    @property
    def highest(self) -> float | None:
        """The highest ratio that is likely: the interval's end, or the slowest pair of a comparison that the budget ended."""
        known = self.step.comparison
        if known is None:
            return None
        return max(known.each) if known.is_cut_off and known.n > 1 else known.high

    def measured(self, measured_s: float) -> Interval | None:
        """The measured gain of a step that takes `measured_s`, with the comparison's 99 % interval; of no width without one."""
        known = self.step.comparison
        if known is None or known.ratio is None:
            return None
        low, high = (known.ratio if end is None else end for end in (known.low, known.high))
        return Interval(
            time_s=measured_s * (1 - known.ratio), low_s=measured_s * (1 - high), high_s=measured_s * (1 - low)
        )

    def held(self, measured_s: float) -> str:
        """Whether the predicted interval holds the measured gain.

        `yes` if the gain is inside, `no` if even its whole interval is outside, else `cannot tell`, also where the gain has no
        interval; empty if either is unknown.
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
    """The proof so far. `measured_s`: the explained step's time, of which gains are parts."""

    start: Options
    measured_s: float
    start_s: float | None = None
    """The fastest step of the original's trial; None until two runs of it have shown that changes can be checked."""
    spread: float | None = None
    """Relative difference of the losses of two runs of the original."""
    trouble: str = ""
    """Why nothing can be tried from this start."""
    unchecked: str = ""
    """Why losses tell nothing, where changes are tried all the same."""
    singles: list[Tried] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    """What the budget left, or what a dry run would measure."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Changes that helped or may and are not in `together`, with the reason."""
    together: Tried | None = None
    again: list[Tried] = field(default_factory=list)
    """Second comparisons of changes alone, where `together` is not what to take, until one confirms its change."""

    @property
    def helped(self) -> list[Tried]:
        """The changes that are faster than the original, the fastest first."""
        kept = [tried for tried in self.singles if tried.step.kept]
        return sorted(kept, key=lambda tried: ratio_of(tried.step))

    @property
    def promising(self) -> list[Tried]:
        """The changes that may help, without the verdict `faster`, the fastest first.

        Those that were faster in all of their rounds, at least two, before the budget ended them; and those that are faster for
        sure, by less than the least effect. They are measured with those that helped: the comparison of all together has all of
        its pairs.
        """
        found = [
            tried for tried in self.singles if not tried.step.kept and tried.highest is not None and tried.highest < 1
        ]
        return sorted(found, key=lambda tried: ratio_of(tried.step))

    @property
    def may_join(self) -> list[Tried]:
        """What helped and what may, the fastest first."""
        return sorted([*self.helped, *self.promising], key=lambda tried: ratio_of(tried.step))

    @property
    def best(self) -> Tried | None:
        """What to take: all together, unless one alone is clearly faster; None if nothing helped for sure.

        One alone was the fastest of several comparisons, which chance may choose, so a second one must confirm it.
        """
        if self.together is None:  # not yet: what seems best
            return next(iter(self.helped), None)
        if self.takes_all:
            return self.together
        confirmed = next((tried for tried in self.again if tried.step.kept), None)
        seems = next((tried for tried in self.unconfirmed if tried.step.kept), None)
        return confirmed or (seems if self.untried else None) or (self.together if self.together.step.kept else None)

    @property
    def takes_all(self) -> bool:
        """Whether all together are faster, and none alone is clearly faster than they."""
        first, whole = next(iter(self.may_join), None), self.together
        if whole is None or not whole.step.kept or first is None:
            return False
        low = None if whole.step.comparison is None else whole.step.comparison.low
        beats = first.highest is not None and low is not None and first.highest < low
        return not beats or whole.candidate.fields == first.candidate.fields

    @property
    def unconfirmed(self) -> list[Tried]:
        """What helped or may and was compared once, the fastest first; `together` of one change is its second time."""
        twice = [tried.candidate.fields for tried in (*self.again, *([self.together] if self.together else []))]
        return [tried for tried in self.may_join if tried.candidate.fields not in twice]

    @property
    def chosen(self) -> Options:
        """The options to recommend; the start's if nothing helped."""
        return self.start if self.best is None else {**self.start, **self.best.candidate.fields}


def ratio_of(step: Step) -> float:
    """The step's ratio to the original's; 1 where it was not compared."""
    known = step.comparison
    return known.ratio if known is not None and known.ratio is not None else 1.0

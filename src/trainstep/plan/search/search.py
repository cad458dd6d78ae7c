"""Searches the options of a step by prediction: the fastest that fits, the one that needs least memory, and those in between.

    result = search(space, calibration, gpu_memory_bytes=..., minimize="time")
    result.best, result.runner_up, result.frontier, result.alternatives

Every allowed combination of a rank's options and a strategy is a candidate. To find the fastest, candidates are predicted in the
order of a lower bound of their times (bounds.py), until the next bound is above the time of one that fits. Candidates whose bounds
show that they do not fit are left out. The first candidate of a strategy and a division of the batch bounds the others from below:
a rank that computes longer hides more of its messages, but never ends earlier. The candidates that need least memory, and those in
between, are found by likely bytes: the bound, and how much more than their bounds others of the kind need. All candidates that are
shown were predicted in full. Then each single change of the best is predicted too. A better one becomes the best, so no single
change improves the result (docs/decisions/0030-plan-searches-by-bounds.md).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from trainstep.config.parallel import RanksConfig
from trainstep.plan.prediction import Prediction, predict
from trainstep.plan.search.bounds import Bounds
from trainstep.plan.search.space import Space
from trainstep.plan.time.calibration import Calibration
from trainstep.plan.time.step_time import StepTime, step_time

OnBounds = Callable[[int, int, float], None]
"""Called with ranks, combinations and the seconds that bounds took, before predictions begin."""
TIME, MEMORY, RANKS = "time", "memory", "ranks"
OBJECTIVES = (TIME, MEMORY, RANKS)
_SAME = 1e-3
"""Predictions whose relative difference is smaller count as equal."""
_STEP = 0.03
"""A point of the frontier needs at least this share less memory than the point before it."""
_MOST_TRIES = 24
"""Most predictions in the search for the candidate that needs least memory."""
_MOST_POINTS = 12
"""Most points of the frontier that are predicted, at about equal steps."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A step that was predicted in full."""

    time: StepTime
    prediction: Prediction

    @property
    def config(self) -> RanksConfig:
        return self.prediction.config

    @property
    def time_s(self) -> float:
        return self.time.step.time_s

    @property
    def needed_bytes(self) -> int:
        return self.prediction.needed_bytes

    @property
    def fits_surely(self) -> bool:
        return self.prediction.fits is True and not self.prediction.is_tight


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The best with one field changed. `least_bytes`: the bound of its memory; `prediction`: its memory, where it was predicted."""

    field: str
    value: Any
    time: StepTime
    least_bytes: int
    prediction: Prediction | None = None


@dataclass(kw_only=True)
class Effort:
    """What a search looked at. `candidates`: allowed combinations; by their bounds, those that were not predicted are slower, need
    more memory, or do not fit."""

    candidates: int = 0
    timed: int = 0
    replayed: int = 0
    too_large: int = 0
    """Left out because their memory cannot fit."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Why there is no prediction -> number of candidates."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result. `best` is None if nothing fits; then `leanest` says how much memory is needed at least."""

    minimize: str
    space: Space
    best: Candidate | None
    leanest: Candidate
    """The candidate that needs least memory of those predicted; of all, if nothing fits or memory is minimized."""
    frontier: tuple[Candidate, ...] = ()
    """The fastest first; each next candidate is slower and needs less memory."""
    alternatives: tuple[Alternative, ...] = ()
    """Every single change of the best, the fastest first."""
    runner_up: Candidate | None = None
    """The next best whose time differs."""
    effort: Effort
    fewer_ranks: tuple[tuple[int, int], ...] = ()
    """Numbers of ranks on which nothing fits, with the least memory there."""


def search(
    space: Space, calibration: Calibration, *, gpu_memory_bytes: int, minimize: str, on_bounds: OnBounds | None = None
) -> Found:
    """The best options of the space. ValueError if none of them has a prediction."""
    results: list[Found] = []
    for ranks in sorted(space.ranks):
        goal = MEMORY if minimize == MEMORY else TIME
        results.append(_Search(space, ranks, calibration, gpu_memory_bytes).run(goal, on_bounds))
        if minimize == RANKS and results[-1].best is not None:
            break
    fewer = tuple((item.leanest.config.ranks, item.leanest.needed_bytes) for item in results if item.best is None)
    fitting = [(_order(best, minimize), item) for item in results if (best := item.best) is not None]
    if not fitting:
        return replace(min(results, key=lambda item: item.leanest.needed_bytes), minimize=minimize, fewer_ranks=fewer)
    return replace(min(fitting, key=lambda pair: pair[0])[1], minimize=minimize, fewer_ranks=fewer)


def _order(candidate: Candidate, minimize: str) -> tuple[float, ...]:
    """A key by which the best sorts first: the least memory, or else what fits most surely and then the least time."""
    doubt = 0 if candidate.fits_surely else 1 if candidate.prediction.spare_bytes >= 0 else 2
    if minimize == MEMORY:
        return candidate.needed_bytes, candidate.time_s
    return doubt, candidate.time_s, candidate.needed_bytes


def frontier_of(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The fastest candidate, then each that needs clearly less memory than all that are faster."""
    frontier: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda candidate: (candidate.time_s, candidate.needed_bytes)):
        if not frontier or candidate.needed_bytes < (1 - _STEP) * frontier[-1].needed_bytes:
            frontier.append(candidate)
    return frontier


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A combination with its bounds. Messages are alike within a `group`; bounds are about equally close within a `kind`."""

    config: RanksConfig
    time_s: float
    nbytes: int
    sure_bytes: int
    group: tuple[Any, ...]
    kind: tuple[Any, ...]


class _Search:
    """The search on one number of ranks."""

    def __init__(self, space: Space, ranks: int, calibration: Calibration, gpu_memory_bytes: int) -> None:
        self._space, self._ranks, self._calibration, self._memory = space, ranks, calibration, gpu_memory_bytes
        self._bounds = Bounds(calibration)
        self.effort = Effort()
        self._times: dict[RanksConfig, StepTime | None] = {}
        self._known: dict[RanksConfig, Candidate | None] = {}
        self._points: list[Candidate] = []
        """Candidates that fit."""
        self._floor: dict[tuple[Any, ...], float] = {}
        self._more: dict[tuple[Any, ...], int] = {}
        """How much more memory than their bounds similar steps need."""

    def run(self, minimize: str, on_bounds: OnBounds | None = None) -> Found:
        began_s, pairs = monotonic(), self._pairs()
        if on_bounds is not None:
            on_bounds(self._ranks, self.effort.candidates, monotonic() - began_s)
        by_time = sorted(pairs, key=lambda pair: (pair.time_s, pair.nbytes))
        for surely in (True, False):
            able = [pair for pair in by_time if (pair.sure_bytes if surely else pair.nbytes) <= self._memory]
            self.effort.too_large = len(pairs) - len(able)
            self._find_fastest(able, surely)
            if self._points:
                self._find_frontier(able)
                break
        if minimize == MEMORY or not self._points:
            self._find_leanest(pairs)
        leanest = min(filter(None, self._known.values()), key=lambda candidate: _order(candidate, MEMORY), default=None)
        if leanest is None:
            reasons = [*self.effort.unknown, *self._space.refused]
            raise ValueError(reasons[0] if reasons else "minimize: no combination is allowed; name fewer options")
        if not self._points:
            return Found(minimize=minimize, space=self._space, best=None, leanest=leanest, effort=self.effort)
        best, alternatives = self._polished(minimize)
        return Found(
            minimize=minimize,
            space=self._space,
            best=best,
            leanest=leanest,
            alternatives=tuple(alternatives),
            runner_up=self._runner_up(best, alternatives, minimize),
            frontier=tuple(frontier_of(self._points)),
            effort=self.effort,
        )

    def _pairs(self) -> list[_Pair]:
        """The allowed combinations with their bounds, without those that differ only in a slower attention or AdamW."""
        fastest: dict[tuple[Any, ...], _Pair] = {}
        strategies = self._space.strategies(self._ranks)
        for run in self._space.runs(self._ranks):
            for sync in strategies:
                config = self._space.allowed(self._ranks, sync, run)
                if config is None:
                    continue
                self.effort.candidates += 1
                try:
                    time_s, nbytes = self._bounds.time_s(config), self._bounds.bytes(config)
                except ValueError as error:
                    self.effort.unknown[str(error)] += 1
                    continue
                group = sync, run.batch_size, run.accumulation, run.precision, run.update
                kind = run.ops, run.compile, run.capture
                alike = (*group, *kind, run.recompute, run.recompute_every, run.narrow_blocks, nbytes)
                before = fastest.get(alike)
                if before is None or time_s < before.time_s:
                    sure = self._bounds.sure_bytes(config)
                    fastest[alike] = _Pair(
                        config=config, time_s=time_s, nbytes=nbytes, sure_bytes=sure, group=group, kind=kind
                    )
        return list(fastest.values())

    def _find_fastest(self, by_time: Iterable[_Pair], surely: bool) -> None:
        """Predict pairs in the order of their least times until no other can be faster than one that fits."""
        fastest_s = math.inf
        too_large: dict[tuple[Any, ...], int] = {}
        for pair in by_time:
            kind = (*pair.group, *pair.kind)
            if pair.time_s >= fastest_s:
                return
            if self._floor.get(pair.group, 0.0) >= fastest_s or pair.nbytes >= too_large.get(kind, self._memory + 1):
                continue
            time = self._time(pair.config)
            if time is None:
                continue
            self._floor.setdefault(pair.group, time.step.time_s)
            if time.step.time_s >= fastest_s:
                continue
            candidate = self._predicted(time)
            if candidate is None:
                continue
            self._learn(pair, candidate)
            if candidate.fits_surely or (candidate.prediction.fits and not surely):
                self._points.append(candidate)
                fastest_s = candidate.time_s
            else:
                too_large[kind] = pair.nbytes

    def _find_frontier(self, by_time: Sequence[_Pair]) -> None:
        """Again and again predict the fastest pair that is likely to need a step less memory than all candidates before.

        Likely time: the pair's bound, and what messages add to the first pair of its group. Likely memory: the pair's bound, and
        how much more than their bounds others of its kind need.
        """
        added_s: dict[tuple[Any, ...], float] = {}
        for pair in by_time:
            if pair.group not in added_s:
                time = self._time(pair.config)
                added_s[pair.group] = math.inf if time is None else time.step.time_s - pair.time_s
        left = sorted(
            (pair for pair in by_time if added_s[pair.group] < math.inf),
            key=lambda pair: pair.time_s + added_s[pair.group],
        )
        least_bytes = min(point.needed_bytes for point in self._points)
        end_bytes = min((pair.nbytes + self._likely_more(pair) for pair in left), default=least_bytes)
        step = min(1 - _STEP, (end_bytes / least_bytes) ** (1 / _MOST_POINTS))
        for _ in range(_MOST_POINTS):
            leaner = next((pair for pair in left if pair.nbytes + self._likely_more(pair) <= step * least_bytes), None)
            if leaner is None:
                return
            left.remove(leaner)
            time = self._time(leaner.config)
            candidate = None if time is None else self._predicted(time)
            if candidate is not None:
                self._learn(leaner, candidate)
                self._add(candidate)
                least_bytes = min(least_bytes, candidate.needed_bytes)

    def _learn(self, pair: _Pair, candidate: Candidate) -> None:
        run = pair.config.run
        alike = run.batch_size, run.precision, *pair.kind
        for key in ((pair.config.sync, *alike), alike):
            self._more[key] = max(0, candidate.needed_bytes - pair.nbytes)

    def _likely_more(self, pair: _Pair) -> int:
        """How much more than its bound a pair is likely to need: as much as the last of its kind that was predicted."""
        run = pair.config.run
        alike = run.batch_size, run.precision, *pair.kind
        return self._more.get((pair.config.sync, *alike), self._more.get(alike, 0))

    def _find_leanest(self, pairs: Sequence[_Pair]) -> None:
        """Predict what is likely to need least until nothing is likely to need less than one that was predicted."""
        left = sorted(pairs, key=lambda pair: (pair.nbytes, pair.time_s))
        least_bytes = math.inf
        for _ in range(_MOST_TRIES):
            if not left:
                return
            pair = min(left, key=lambda pair: pair.nbytes + self._likely_more(pair))
            if pair.nbytes + self._likely_more(pair) >= least_bytes:
                return
            left.remove(pair)
            time = self._time(pair.config)
            candidate = None if time is None else self._predicted(time)
            if candidate is not None:
                self._learn(pair, candidate)
                self._add(candidate)
                least_bytes = min(least_bytes, candidate.needed_bytes)

    def _add(self, candidate: Candidate) -> None:
        """Add the candidate to those that fit, if it fits as surely as they do."""
        surely = any(point.fits_surely for point in self._points)
        fits = candidate.fits_surely or (candidate.prediction.fits and not surely)
        if fits and all(candidate is not point for point in self._points):
            self._points.append(candidate)

    def _polished(self, minimize: str) -> tuple[Candidate, list[Alternative]]:
        """The best of all, and its single changes, none of which is better."""
        while True:
            best, alternatives = min(self._points, key=lambda point: _order(point, minimize)), list[Alternative]()
            for name, value, config in self._space.neighbours(best.config):
                try:
                    least_bytes, candidate = self._bounds.bytes(config), None
                except ValueError:  # counted already
                    continue
                time = self._time(config)
                if time is None:
                    continue
                is_better = time.step.time_s < best.time_s and least_bytes <= self._memory
                if minimize == MEMORY:
                    is_better = least_bytes < best.needed_bytes
                if config in self._known or is_better:
                    candidate = self._predicted(time)
                if candidate is not None:
                    self._add(candidate)
                prediction = None if candidate is None else candidate.prediction
                alternatives.append(
                    Alternative(field=name, value=value, time=time, least_bytes=least_bytes, prediction=prediction)
                )
            if min(self._points, key=lambda point: _order(point, minimize)) is best:
                return best, sorted(alternatives, key=lambda alternative: alternative.time.step.time_s)

    def _runner_up(self, best: Candidate, alternatives: Iterable[Alternative], minimize: str) -> Candidate | None:
        """The next best candidate whose objective differs, of the points and the single changes."""
        for alternative in alternatives if minimize != MEMORY else ():
            if differs(best.time_s, alternative.time.step.time_s) and alternative.least_bytes <= self._memory:
                candidate = self._predicted(alternative.time)
                if candidate is not None:
                    self._add(candidate)
                if any(candidate is point for point in self._points):
                    break
        others = [
            point
            for point in self._points
            if (
                differs(best.needed_bytes, point.needed_bytes)
                if minimize == MEMORY
                else differs(best.time_s, point.time_s)
            )
        ]
        return min(others, key=lambda point: _order(point, minimize), default=None)

    def _time(self, config: RanksConfig) -> StepTime | None:
        """The predicted time; None, with a note of the reason, if there is none."""
        if config in self._times:
            return self._times[config]
        try:
            self._times[config] = step_time(config, self._calibration)
            self.effort.timed += 1
        except ValueError as error:
            self.effort.unknown[str(error)] += 1
            self._times[config] = None
        return self._times[config]

    def _predicted(self, time: StepTime) -> Candidate | None:
        """The prediction in full; None, with a note of the reason, if there is none."""
        config = time.config
        if config not in self._known:
            self.effort.replayed += 1
            try:
                prediction = predict(config, gpu_memory_bytes=self._memory)
                self._known[config] = Candidate(time=time, prediction=prediction)
            except ValueError as error:
                self.effort.unknown[str(error)] += 1
                self._known[config] = None
        return self._known[config]


def differs(a: float, b: float) -> bool:
    """Whether two values differ by more than a thousandth."""
    return abs(a - b) > _SAME * max(a, b)

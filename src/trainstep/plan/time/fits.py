"""Fits sums of non-negative terms to measured times, and reads curves of measured points: in plain Python, to start fast."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

_LEAST_SPREAD = 0.03


@dataclass(frozen=True, kw_only=True)
class Fit:
    """time = sum of factors[i] x column[i]. `spread`: root mean square of the relative errors, 3 % at least."""

    factors: tuple[float, ...]
    spread: float


def nonnegative_fit(rows: Sequence[Sequence[float]], times_s: Sequence[float]) -> Fit:
    """The factors with the least sum of squared relative errors. ValueError without points."""
    if not rows:
        raise ValueError("nothing was measured to fit")
    columns = len(rows[0])
    scaled = [[value / time_s for value in row] for row, time_s in zip(rows, times_s, strict=True)]
    best: tuple[float, tuple[float, ...]] | None = None
    for size in range(min(columns, len(rows)), 0, -1):
        for chosen in combinations(range(columns), size):
            solution = _least_squares([[row[index] for index in chosen] for row in scaled])
            if solution is None or min(solution) < 0:
                continue
            factors = [0.0] * columns
            for index, value in zip(chosen, solution, strict=True):
                factors[index] = value
            error = sum((sum(f * x for f, x in zip(factors, row, strict=True)) - 1) ** 2 for row in scaled)
            if best is None or error < best[0]:
                best = error, tuple(factors)
    assert best is not None  # one column alone always fits with a positive factor
    return Fit(factors=best[1], spread=max(_LEAST_SPREAD, (best[0] / len(rows)) ** 0.5))


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """x with the least |rows x - 1|^2, by the normal equations; None if they have no single solution."""
    size = len(rows[0])
    table = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)] + [sum(row[i] for row in rows)] for i in range(size)
    ]
    # Columns differ by many orders of magnitude, so each is divided by its length.
    scale = [table[i][i] ** 0.5 for i in range(size)]
    if min(scale) == 0:
        return None
    table = [
        [value / scale[i] / (scale[j] if j < size else 1) for j, value in enumerate(row)] for i, row in enumerate(table)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(table[row][i]))
        table[i], table[pivot] = table[pivot], table[i]
        if abs(table[i][i]) < 1e-9:
            return None
        for row in range(size):
            if row != i:
                factor = table[row][i] / table[i][i]
                table[row] = [a - factor * b for a, b in zip(table[row], table[i], strict=True)]
    return [table[i][size] / table[i][i] / scale[i] for i in range(size)]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Seconds by bytes: straight lines between measured points, the first point's time below it, the last one's rate above."""

    points: tuple[tuple[float, float], ...]

    def seconds(self, nbytes: float) -> float:
        first, last = self.points[0], self.points[-1]
        if nbytes <= first[0]:
            return first[1]
        if nbytes >= last[0]:
            return last[1] * nbytes / last[0]
        for (low, low_s), (high, high_s) in pairwise(self.points):
            if nbytes <= high:
                return low_s + (high_s - low_s) * (nbytes - low) / (high - low)
        raise AssertionError("the points are in order")


def curve_of(points: Sequence[tuple[float, float]]) -> tuple[Curve, float]:
    """The curve and its spread. Neighbours within 10 % of bytes are averaged; the spread is that of the averaged points."""
    groups: list[list[tuple[float, float]]] = []
    for nbytes, time_s in sorted(points):
        if groups and nbytes <= 1.1 * groups[-1][0][0]:
            groups[-1].append((nbytes, time_s))
        else:
            groups.append([(nbytes, time_s)])
    means = [
        (sum(nbytes for nbytes, _ in group) / len(group), sum(time_s for _, time_s in group) / len(group))
        for group in groups
    ]
    errors = [
        time_s / mean_s - 1
        for group, (_, mean_s) in zip(groups, means, strict=True)
        for _, time_s in group
        if len(group) > 1
    ]
    spread = (sum(error**2 for error in errors) / len(errors)) ** 0.5 if errors else 0.0
    return Curve(points=tuple(means)), max(_LEAST_SPREAD, spread)

"""Decides which optimizer's update ends a step, where a script has several optimizers: `closing.closes(id(optimizer))`.

[Note: the rule] The step ends with the optimizer that updates most rarely; of several that update about as rarely, with the one
that appeared last. So two optimizers that follow each other (matrices by one, the rest by another) make one step. A GAN's step is
an update of each of its networks; with five updates of the critic for each update of the generator, the step ends with the
generator's. The rule is applied to the updates so far, so it needs a cycle to settle.
"""

_ALIKE = 1.5
"""Optimizers that update up to this many times as often as the rarest count as equally rare."""
_MEMORY = 64
"""Counts are halved when there are more updates than this per optimizer, so that a new rhythm is learnt."""
_LOST = 8
"""An optimizer without an update for this many times its usual distance is forgotten: it was replaced, or its network frozen."""


class Closing:
    """The updates so far, by optimizer."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        """Optimizer -> its updates so far, in the order of appearance."""
        self._latest: dict[int, int] = {}
        """Optimizer -> the number of its latest update among all updates."""
        self._updates = 0
        self.seen = 0
        """The most optimizers that were in use at the same time."""

    def closes(self, optimizer: int) -> bool:
        """Count an update of this optimizer; whether the step ends with it."""
        counts = self._counts
        counts[optimizer] = counts.get(optimizer, 0) + 1
        self._updates += 1
        self._latest[optimizer] = self._updates
        if len(counts) == 1:
            self.seen = self.seen or 1
            return True
        total = sum(counts.values())
        for key in [key for key in counts if self._updates - self._latest[key] > _LOST * total / counts[key]]:
            del counts[key], self._latest[key]
        self.seen = max(self.seen, len(counts))
        if total > _MEMORY * len(counts):
            self._counts = counts = {key: max(1, count // 2) for key, count in counts.items()}
        least = min(counts.values())
        return optimizer == next(key for key in reversed(counts) if counts[key] <= _ALIKE * least)

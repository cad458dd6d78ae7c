"""Divides the time of a thread into parts of its steps: `enter(part)`, `leave(part)` as hooks see them, `take()` at a step's end.

Parts nest (a backward inside an optimizer's closure), and a moment belongs to the innermost. Time outside of all parts is a gap.
It belongs to a part if both its neighbours say so: between forward and backward the loss is computed, between backward and
optimizer gradients are clipped. Any other gap is the part `other`.
"""

import time
from collections.abc import Callable, Mapping

from trainstep.config.script import Part

_GAPS: Mapping[tuple[Part, Part], Part] = {
    (Part.FORWARD, Part.BACKWARD): Part.FORWARD,
    (Part.FORWARD, Part.FORWARD): Part.FORWARD,
    (Part.BACKWARD, Part.OPTIMIZER): Part.OPTIMIZER,
    (Part.OPTIMIZER, Part.OPTIMIZER): Part.OPTIMIZER,
    (Part.EVALUATION, Part.EVALUATION): Part.EVALUATION,
    (Part.EVALUATION, Part.DATA): Part.EVALUATION,
    (Part.DATA, Part.EVALUATION): Part.EVALUATION,
}
"""(part before, part after) -> part of the gap between them."""


_NOTHING = dict.fromkeys(Part, 0)


class PhaseClock:
    """The time of each part since the last `take()`, in ns. `on_change`: called with the part that begins, None outside."""

    def __init__(
        self, now_ns: Callable[[], int] = time.perf_counter_ns, on_change: Callable[[Part | None], None] | None = None
    ) -> None:
        self._now_ns = now_ns
        self._on_change = on_change
        self._open: list[Part] = []
        self._since_ns = self._began_ns = now_ns()
        self._last: Part | None = None
        """The part that ended before the present gap."""
        self._last_ns = 0
        """How long the last stretch of `_last` took: an evaluation that follows a batch is given the time of that batch."""
        self._spent_ns = _NOTHING.copy()
        self._optimizer_ns = self._before_updates_ns = 0
        """The optimizer's part since `take_update_share()`, and how much of it was before an update: clipping, unscaling."""

    @property
    def now(self) -> Part | None:
        """The innermost open part."""
        return self._open[-1] if self._open else None

    def is_open(self, part: Part) -> bool:
        """Whether this part is open, at any depth."""
        return part in self._open

    def enter(self, part: Part) -> None:
        """Begin a part."""
        now_ns = self._now_ns()
        passed_ns = now_ns - self._since_ns
        if self._open:
            self._spent_ns[self._open[-1]] += passed_ns
        else:
            gap = _GAPS.get((self._last, part), Part.OTHER) if self._last is not None else Part.OTHER
            self._spent_ns[gap] += passed_ns
            if gap is Part.OPTIMIZER:
                self._before_updates_ns += passed_ns
            if part is Part.EVALUATION and self._last is Part.DATA:
                moved_ns = min(self._last_ns, self._spent_ns[Part.DATA])
                self._spent_ns[Part.DATA] -= moved_ns
                self._spent_ns[Part.EVALUATION] += moved_ns
        self._open.append(part)
        self._since_ns = now_ns
        if self._on_change is not None:
            self._on_change(part)

    def leave(self, part: Part) -> None:
        """End a part, and all parts inside it, which an exception may have left open. Nothing happens if the part is not open."""
        if part not in self._open:
            return
        now_ns = self._now_ns()
        while True:
            ended = self._open.pop()
            self._last_ns = now_ns - self._since_ns
            self._spent_ns[ended] += self._last_ns
            self._since_ns = now_ns
            if ended is part:
                break
        if not self._open:
            self._last = part
        if self._on_change is not None:
            self._on_change(self.now)

    def take(self) -> tuple[int, dict[Part, int]]:
        """End a step: (its time, the time of each part), which sum up to it. The next step begins now."""
        now_ns = self._now_ns()
        self._spent_ns[self.now or Part.OTHER] += now_ns - self._since_ns
        step_ns, spent_ns = now_ns - self._began_ns, self._spent_ns
        self._optimizer_ns += spent_ns[Part.OPTIMIZER]
        self._restart(now_ns)
        return step_ns, spent_ns

    def take_update_share(self) -> float | None:
        """The share of the optimizer's part inside updates, over all steps since the last call; None without an update."""
        whole_ns, before_ns = self._optimizer_ns, self._before_updates_ns
        self._optimizer_ns = self._before_updates_ns = 0
        return 1 - min(before_ns, whole_ns) / whole_ns if whole_ns else None

    def restart(self) -> None:
        """Begin the next step now, and forget the time since `take()`: the time that watching itself took between two steps."""
        self._restart(self._now_ns())

    def _restart(self, now_ns: int) -> None:
        self._since_ns = self._began_ns = now_ns
        self._spent_ns = _NOTHING.copy()

"""When a message may go: once all its gradients are there, and not before the ones in front of it. [Note: the same messages on
every rank]"""

from collections.abc import Sequence


class LaunchOrder:
    """Groups of gradients, by number, that go out in their order as their members become ready."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._sizes = [len(members) for members in groups]
        self._group_of = {member: group for group, members in enumerate(groups) for member in members}
        self._begin()

    def ready(self, member: int) -> Sequence[int] | None:
        """Groups that may go now that this one is there; None if it was there already."""
        group = self._waiting.pop(member, None)
        if group is None:
            return None
        self._missing[group] -= 1
        if self._missing[group]:
            return ()
        first = self._next
        while self._next < len(self._sizes) and not self._missing[self._next]:
            self._next += 1
        return range(first, self._next)

    def rest(self) -> Sequence[int]:
        """Groups that have not gone; from here on a new step begins."""
        left = range(self._next, len(self._sizes))
        self._begin()
        return left

    def _begin(self) -> None:
        self._missing = list(self._sizes)
        self._waiting = dict(self._group_of)
        """Groups of the members that are not there."""
        self._next = 0

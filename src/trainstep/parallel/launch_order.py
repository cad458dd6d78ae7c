"""Decides when a message may go: once all its gradients are ready and all messages before it have gone.

It also keeps the flags that say which rank used which parameter. [Note: the same messages on every rank]
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from trainstep.parallel.collectives import DONE, Collectives, Pending


class LaunchOrder:
    """Groups of gradients, numbered, that go out in their order as their members become ready."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._sizes = [len(members) for members in groups]
        self._group_of = {member: group for group, members in enumerate(groups) for member in members}
        self._begin()

    def ready(self, member: int) -> Sequence[int] | None:
        """The groups that may go now that this member is ready; None if it was ready before."""
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
        """The groups that have not gone; after this call a new step begins."""
        unsent = range(self._next, len(self._sizes))
        self._begin()
        return unsent

    def _begin(self) -> None:
        self._missing = list(self._sizes)
        self._waiting = dict(self._group_of)
        """The group of each member that is not ready."""
        self._next = 0


# Flags that say which parameters were used: one per parameter, reduced over ranks. The host reads them only where this
# rank lacks a gradient.


class FlagReader:
    """Reads flags; while a step is captured, when they cannot be read, it takes their values from the step before.

    All ranks capture the same step and launch it together, so the values of that step stay true of the captured step.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._missing: list[int] = []
        self._unused: list[int] = []

    def unused_everywhere(self, flags: Tensor, missing: Sequence[int]) -> list[int]:
        """The indices in `missing` whose flag is 0. ValueError if `missing` differs from the step before while captured."""
        if self._collectives.recorded:
            if list(missing) != self._missing:
                raise ValueError(
                    "other parameters go unused than in the step before; a captured step must use the same parameters every time"
                )
        elif missing:
            with _unwatched(flags):
                values = flags.tolist()  # waits for the device
            self._unused = [index for index in missing if values[index] == 0]
            self._missing = list(missing)
        else:
            self._missing = self._unused = []
        return self._unused


class Usage:
    """One byte per parameter and their maximum over ranks, for strategies whose gradients are not sent in buckets."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.flags = torch.empty(0)
        self._reader = FlagReader(collectives)
        self._all_used = False
        """Whether the flags are all 1. Their maximum over ranks is 1 too, so the next step may send the same tensor again."""
        self._pending: Pending = DONE

    def send(self, used: Sequence[bool]) -> None:
        """Start reducing the flags; every rank calls this once per step."""
        if not (self._all_used and all(used)) and not self._collectives.recorded:
            self.flags = torch.tensor(used, dtype=torch.uint8).to(self._collectives.ranks.device, non_blocking=True)
            self._all_used = all(used)
        self._pending = self._collectives.all_reduce(self.flags, reduction="maximum", label="usage")

    def unused_everywhere(self, used: Sequence[bool]) -> list[int]:
        """The indices of the parameters that no rank used."""
        self._pending.wait()
        missing = [index for index, flag in enumerate(used) if not flag]
        return self._reader.unused_everywhere(self.flags, missing)


@contextmanager
def _unwatched(tensor: Tensor) -> Iterator[None]:
    """Inside, the search for waits that precedes a capture does not see this wait: a captured step has none."""
    mode = torch.cuda.get_sync_debug_mode() if tensor.is_cuda else 0
    try:
        if tensor.is_cuda:
            torch.cuda.set_sync_debug_mode(0)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            yield
    finally:
        if tensor.is_cuda:
            torch.cuda.set_sync_debug_mode(mode)

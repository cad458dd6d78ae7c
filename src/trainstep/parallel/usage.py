"""Who used which parameter, where gradients travel one by one: a byte for each, and the maximum over ranks."""

from collections.abc import Sequence

import torch

from trainstep.parallel.collectives import DONE, Collectives, Pending


class Usage:
    """Flags of parameters. They are read only where this rank lacks a gradient: that read waits for the device."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.flags = torch.empty(0)
        self._all_used = False
        """Whether the flags say so. Their maximum with others' leaves them as they are, so the next step sends them again."""
        self._pending: Pending = DONE

    def send(self, used: Sequence[bool]) -> None:
        """Tell the others; every rank calls this once a step."""
        if not (self._all_used and all(used)):
            self.flags = torch.tensor(used, dtype=torch.uint8).to(self._collectives.ranks.device, non_blocking=True)
            self._all_used = all(used)
        self._pending = self._collectives.all_reduce(self.flags, reduction="maximum", label="usage")

    def unused_everywhere(self, used: Sequence[bool]) -> list[int]:
        """Parameters that no rank used."""
        self._pending.wait()
        if all(used):
            return []
        return [index for index, flag in enumerate(self.flags.tolist()) if not flag]

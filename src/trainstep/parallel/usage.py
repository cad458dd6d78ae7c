"""Who used which parameter: a flag for each, put together over ranks, and read where this rank lacks a gradient."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from trainstep.parallel.collectives import DONE, Collectives, Pending


class FlagReader:
    """Reads flags; where they cannot be read, in a step that is captured, it knows what they said in the step before.

    All ranks capture the same step, and launch it together, so what was true of that step stays true of the captured one.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._missing: list[int] = []
        self._unused: list[int] = []

    def unused_everywhere(self, flags: Tensor, missing: Sequence[int]) -> list[int]:
        """Those of the indices `missing` whose flag is 0. ValueError if they differ from the step before's while captured."""
        if self._collectives.recorded:
            if list(missing) != self._missing:
                raise ValueError(
                    "another parameter goes unused than in the step before; a captured step uses the same ones"
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
    """A byte for each parameter, and the maximum over ranks: for strategies whose gradients travel one by one."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.flags = torch.empty(0)
        self._reader = FlagReader(collectives)
        self._all_used = False
        """Whether the flags say so. Their maximum with others' leaves them as they are, so the next step sends them again."""
        self._pending: Pending = DONE

    def send(self, used: Sequence[bool]) -> None:
        """Tell the others; every rank calls this once a step."""
        if not (self._all_used and all(used)) and not self._collectives.recorded:
            self.flags = torch.tensor(used, dtype=torch.uint8).to(self._collectives.ranks.device, non_blocking=True)
            self._all_used = all(used)
        self._pending = self._collectives.all_reduce(self.flags, reduction="maximum", label="usage")

    def unused_everywhere(self, used: Sequence[bool]) -> list[int]:
        """Parameters that no rank used."""
        self._pending.wait()
        missing = [index for index, flag in enumerate(used) if not flag]
        return self._reader.unused_everywhere(self.flags, missing)


@contextmanager
def _unwatched(tensor: Tensor) -> Iterator[None]:
    """Who watches the step for waits, to capture it, does not hear of the wait inside: in a captured step there is none."""
    mode = torch.cuda.get_sync_debug_mode() if tensor.is_cuda else 0
    try:
        if tensor.is_cuda:
            torch.cuda.set_sync_debug_mode(0)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            yield
    finally:
        if tensor.is_cuda:
            torch.cuda.set_sync_debug_mode(mode)

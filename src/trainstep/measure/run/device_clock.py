"""Times the parts of a step on the GPU, by CUDA events between them, without waiting for the GPU.

    clock.mark(part)          # a part begins on the host
    clock.end_step()          # an index: the steps so far
    clock.finished()          # the times of steps that the GPU has finished since, in order

A part lasts on the device until the next of forward, backward and optimizer begins, so that it holds the idle time of the device
too.
"""

from collections import deque
from itertools import pairwise
from typing import NamedTuple

import torch

from trainstep.config.script import Part

MARKED = (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER)


def matmul_precision() -> str:
    """torch's precision of fp32 matmuls on a GPU: highest, high or medium.

    `torch.get_float32_matmul_precision` raises in programs that use the newer setting, as transformers does for `tf32`.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        setting = torch.backends.cuda.matmul.fp32_precision
        setting = torch.backends.fp32_precision if setting == "none" else setting  # type: ignore[attr-defined]
        return "high" if setting == "tf32" else "highest"


def is_capturing() -> bool:
    """Whether the current stream captures a graph, which must hold no events of ours and nothing that waits."""
    return bool(torch.cuda.is_current_stream_capturing())


class _Mark(NamedTuple):
    part: Part | None
    event: torch.cuda.Event


class DeviceClock:
    """The device times of steps on the current GPU. Events are reused, because making one costs as much as recording it."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []
        self._marks: list[_Mark] = []
        self._waiting: deque[list[_Mark]] = deque()

    def mark(self, part: Part | None) -> None:
        """Note that a part begins. Parts that are not timed on the device are ignored, and so is a part that merely goes on."""
        if part in MARKED and (not self._marks or self._marks[-1].part is not part) and not is_capturing():
            self._record(part)

    def end_step(self) -> None:
        """Note that the step has ended on the host."""
        self._record(None)
        self._waiting.append(self._marks)
        self._marks = []

    def finished(self) -> list[dict[Part, float]]:
        """Part -> seconds on the device, of each step that has ended there; a step is given once."""
        steps = []
        while self._waiting and self._waiting[0][-1].event.query():
            marks = self._waiting.popleft()
            times = dict.fromkeys(MARKED, 0.0)
            for mark, following in pairwise(marks):
                if mark.part is not None:
                    times[mark.part] += mark.event.elapsed_time(following.event) / 1e3
            self._free += [mark.event for mark in marks]
            steps.append(times)
        return steps

    def drop_step(self) -> None:
        """Forget the marks since the last step's end."""
        self._free += [mark.event for mark in self._marks]
        self._marks = []

    def wait(self) -> None:
        """Wait until the device has ended all steps."""
        if self._waiting:
            self._waiting[-1][-1].event.synchronize()

    def _record(self, part: Part | None) -> None:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(_Mark(part, event))

"""A built step run again and again and timed: in windows on the batches that come next, or on the last ones once more."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from trainstep.measure.built_step import BuiltStep
from trainstep.measure.clock import Window, clock_for
from trainstep.parallel.collectives import Collectives
from trainstep.spans import nvtx_spans
from trainstep.training.batches import Batch
from trainstep.training.captured import EventMark, unmarked

_MOST_BEFORE_CAPTURE = 16
"""Steps: a few warm-ups, and as many more as torch.compile may take."""


class ReadWindow(NamedTuple):
    """A window with what was read behind it: the SM clock, and calls of cudaMalloc inside."""

    times: Window
    sm_clock_hz: float | None
    device_allocations: int


class StepTimer:
    """`batches`: the last step's, none before the first. `loss`: the last timed step's; before the first, not a number."""

    def __init__(self, built: BuiltStep) -> None:
        self.batches: list[Batch] = []
        self.loss = torch.tensor(math.nan)
        self._built = built
        self._assembly = built.assembly
        self._run = built.assembly.run
        self._clock = clock_for(built.opened.device, self._run.sync)
        self._collectives = Collectives(built.assembly.ranks)
        self._next_step = 0

    def window(self, steps: int) -> ReadWindow:
        """Time so many steps on the next batches."""
        opened = self._built.opened
        batches = self._next_batches(steps)
        allocations_before = opened.memory.device_allocations()
        times = self._timed(batches)
        allocations = opened.memory.device_allocations() - allocations_before
        return ReadWindow(times, None if opened.gpu is None else opened.gpu.sm_clock_hz(), allocations)

    def capture(self) -> None:
        """Untimed steps on the next batches until all that follow are alike: a graph's, or never one.

        Peaks of memory count from the last of them. Of a graph that is the step in which it was captured: the allocator counts
        its memory then and never again.
        """
        captured = self._assembly.captured
        for _ in range(_MOST_BEFORE_CAPTURE):
            batches = self._next_batches(1)
            self._built.opened.memory.start()
            self._assembly.take(batches[-1])
            self._drop_gradients()
            if captured is None or captured.is_settled(batches[-1]):
                return

    def window_again(self) -> Window:
        """Time the last step once more."""
        return self._timed([self.batches])

    def step_again(self) -> None:
        """The last step once more, untimed: of a user's batches there may be no more."""
        self._assembly.take(self.batches)
        self._drop_gradients()

    def eager_step_again(self) -> None:
        """The same, but never as a graph."""
        self._assembly.complete()
        self._assembly.step(self.batches)
        self._drop_gradients()

    def _next_batches(self, steps: int) -> list[list[Batch]]:
        self.batches = []  # frees them before the next are made
        batches = [self._assembly.micro_batches(self._next_step + index) for index in range(steps)]
        self._next_step += steps
        self.batches = batches[-1]
        return batches

    def _timed(self, batches: Sequence[list[Batch]]) -> Window:
        self._collectives.barrier()  # ranks begin together
        self._clock.start_window()
        # A graph's events are those of its last launch: they tell the phases of a window of one step alone
        mark = unmarked if self._assembly.captured is not None and len(batches) > 1 else self._clock.mark
        for micro_batches in batches:
            self._clock.start_step()
            self.loss = self._marked_step(micro_batches, mark)
        return self._clock.stop_window()

    def _marked_step(self, micro_batches: list[Batch], mark: EventMark) -> torch.Tensor:
        with nvtx_spans() if self._run.nvtx else nullcontext():
            loss = self._assembly.take(micro_batches, mark)
        self._drop_gradients()
        return loss

    def _drop_gradients(self) -> None:
        if self._run.mode == "forward_backward":
            self._assembly.step.clear_gradients()

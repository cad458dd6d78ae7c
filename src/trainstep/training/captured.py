"""A training step captured: which part of it a graph takes, and what is left to the host."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from trainstep.capture.baked import why_not_captured
from trainstep.capture.captured_step import CapturedStep
from trainstep.config.phases import Phase
from trainstep.training.step import TrainStep


class EventMark(Protocol):
    """Called at the end of each phase. `event`: what a graph recorded there; None: the phase ends now."""

    def __call__(self, phase: Phase, event: torch.cuda.Event | None = None, /) -> None: ...


def unmarked(_phase: Phase, _event: torch.cuda.Event | None = None, /) -> None:
    """For who wants to know no phase."""


class CapturedTrainStep:
    """`step(micro_batches, mark)` as TrainStep has it, its work in one graph; the optimizer's apart where no graph can hold it.

    With `strict` whatever is left out is an error: ValueError for the optimizer, NotCapturable for the rest, by the step that finds
    it. Phases of a step on a GPU are marked by the graph's own events, the same ones at every step.
    """

    def __init__(self, step: TrainStep, device: torch.device, *, strict: bool) -> None:
        reason = why_not_captured(step.optimizer) if step.optimizer is not None else None
        if reason and strict:
            raise ValueError(f"capture: {reason}; or take capture auto, which captures the rest")
        self._step = step
        self._optimizer_left_out = reason
        self._captured = CapturedStep(
            self._graphed,
            optimizer=None if reason else step.optimizer,
            module=step.module,
            device=device,
            strict=strict,
        )

    def __call__(self, micro_batches: Sequence[Mapping[str, Any]], mark: EventMark = unmarked) -> Tensor:
        """One step. Returns the last micro-batch's loss, detached."""
        loss: Tensor = self._captured([dict(batch) for batch in micro_batches], mark)
        if self._optimizer_left_out:
            self._step.update(mark)
        return loss

    def is_settled(self, micro_batches: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the next step of such batches is what all further ones will be: a graph's, or never one."""
        return self._captured.why_not is not None or self._captured.is_captured([dict(one) for one in micro_batches])

    @property
    def what(self) -> str:
        """What a graph takes: step, forward and backward, or nothing."""
        if self._captured.why_not is not None:
            return "nothing"
        return "forward and backward" if self._optimizer_left_out else "step"

    @property
    def left_out(self) -> str | None:
        """Why something runs as it is; None where nothing does."""
        return self._captured.why_not or self._optimizer_left_out

    @property
    def capture_s(self) -> float:
        """Seconds that the capture itself took."""
        return self._captured.capture_s

    def pool_bytes(self) -> int:
        """The device's memory that belongs to the graph."""
        return self._captured.pool_bytes()

    def _graphed(self, micro_batches: Sequence[Mapping[str, Any]]) -> Tensor:
        part = self._step.compute if self._optimizer_left_out else self._step
        return part(micro_batches, self._mark)

    def _mark(self, phase: Phase, _event: torch.cuda.Event | None = None, /) -> None:
        self._captured.mark(phase)

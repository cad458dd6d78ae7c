"""A training step captured: which part of it a graph takes, and what is left to the host.

[Note: where the step is cut] A graph ends with everything that it began. FlatShardedOptimizer sends updated parameters while the
next forward runs, beyond the step's end. So of its steps the update comes first in the graph of the next step:

    step           forward k   backward k   reduce k   update k   gather k ...
    graph          update k-1   gather k-1   forward k   backward k   reduce k

and between two graphs there is nothing on its way, only each rank's shard of the gradients, in memory of its own. An update that
was left to the next step uses the options (learning rates, weight decay) of its own step, and is made up (`complete`) before anyone
reads parameters or the optimizer's state, or runs the module.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from trainstep.capture.baked import why_not_captured
from trainstep.capture.captured_step import CapturedStep
from trainstep.config.phases import Phase
from trainstep.parallel.flat_optimizer import FlatShardedOptimizer
from trainstep.parallel.host_agreement import HostAgreement
from trainstep.parallel.ranks import Ranks
from trainstep.training.step import TrainStep


class EventMark(Protocol):
    """Called at the end of each phase. `event`: what a graph recorded there; None: the phase ends now."""

    def __call__(self, phase: Phase, event: torch.cuda.Event | None = None, /) -> None: ...


def unmarked(_phase: Phase, _event: torch.cuda.Event | None = None, /) -> None:
    """For who wants to know no phase."""


class CapturedTrainStep:
    """`step(micro_batches, mark)` as TrainStep has it, its work in one graph; the optimizer's apart where no graph can hold it.

    With `strict` whatever is left out is an error: ValueError for the optimizer, NotCapturable for the rest, by the step that finds
    it. Phases of a step on a GPU are marked by the graph's own events, the same ones at every step. Several ranks whose step sends
    messages capture together, and every rank must make one of these.
    """

    def __init__(self, step: TrainStep, ranks: Ranks, *, strict: bool) -> None:
        reason = why_not_captured(step.optimizer) if step.optimizer is not None else None
        if reason and strict:
            raise ValueError(f"capture: {reason}; or take capture auto, which captures the rest")
        self._step = step
        self._optimizer_left_out = reason
        self._postponing = (
            _Postponing(step) if isinstance(step.optimizer, FlatShardedOptimizer) and not reason else None
        )
        sends = step.gradient_sync is not None and ranks.world_size > 1
        self._captured = CapturedStep(
            self._graphed,
            optimizer=None if reason else step.optimizer,
            module=step.module,
            device=ranks.device,
            strict=strict,
            agree=HostAgreement(ranks) if sends else None,
        )

    def __call__(self, micro_batches: Sequence[Mapping[str, Any]], mark: EventMark = unmarked) -> Tensor:
        """One step. Returns the last micro-batch's loss, detached."""
        with self._postponing.step() if self._postponing else nullcontext():
            loss: Tensor = self._captured(self._given(micro_batches), mark)
        if self._optimizer_left_out:
            self._step.update(mark)
        return loss

    def complete(self) -> None:
        """Do what was left to the next step. Where messages are sent, every rank must ask."""
        if self._postponing:
            self._postponing.complete()

    def is_settled(self, micro_batches: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the next step of such batches is what all further ones will be: a graph's, or never one."""
        return self._captured.why_not is not None or self._captured.is_captured(self._given(micro_batches))

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

    def _given(self, micro_batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What a graph is captured for: with an update to come first, and without, they are two."""
        update_first = self._postponing is not None and self._postponing.is_pending
        return {"micro_batches": [dict(batch) for batch in micro_batches], "update_first": update_first}

    def _graphed(self, given: Mapping[str, Any]) -> Tensor:
        with self._recording():
            if given["update_first"]:
                self._step.update(self._mark)
            whole = self._postponing is None and not self._optimizer_left_out
            part = self._step if whole else self._step.compute
            loss = part(given["micro_batches"], self._mark)
            if self._postponing is not None:
                self._postponing.join()
            return loss

    def _recording(self) -> AbstractContextManager[None]:
        """Around a step that is captured: a strategy asks no other rank in it."""
        recorded: Callable[[], AbstractContextManager[None]] = nullcontext
        if self._captured.is_recording:  # torch's own strategies have no such thing
            recorded = getattr(self._step.gradient_sync, "recorded", nullcontext)
        return recorded()

    def _mark(self, phase: Phase, _event: torch.cuda.Event | None = None, /) -> None:
        self._captured.mark(phase)


class _Postponing:
    """The update of a step's gradients, left to the next step. [Note: where the step is cut]"""

    def __init__(self, step: TrainStep) -> None:
        optimizer = step.optimizer
        assert isinstance(optimizer, FlatShardedOptimizer)
        self.is_pending = False
        self._step = step
        self._groups = optimizer.param_groups
        self._options: list[dict[str, Any]] = []
        """Each group's when the step ran whose update is pending."""
        self._in_step = False
        self._sync = optimizer.gradient_sync
        self._sync.keep_shards()
        self._sync.postponed = self.complete
        complete = torch.compiler.disable(lambda *_: self.complete())
        step.module.register_forward_pre_hook(complete, prepend=True)  # before those that wait for parameters

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, which begins with the update that is pending and leaves its own."""
        now = _options_of(self._groups)
        if not self.is_pending:
            self._sync.wait_for_parameters()  # a step as it is may have sent some, for which a graph does not wait
        self._in_step = True
        try:
            with self._with_options(self._options if self.is_pending else now):
                yield
        finally:
            self._in_step = False
        self._options, self.is_pending = now, True

    def join(self) -> None:
        """At a step's end: nothing is on its way, not even to a block that the step did not use."""
        self._sync.wait_for_parameters()

    def complete(self) -> None:
        if self.is_pending and not self._in_step:
            self.is_pending, self._in_step = False, True
            try:
                with self._with_options(self._options):
                    self._step.update()
            finally:
                self._in_step = False

    @contextmanager
    def _with_options(self, options: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        now = _options_of(self._groups)
        _set_options(self._groups, options)
        try:
            yield
        finally:
            _set_options(self._groups, now)


def _options_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def _set_options(groups: Sequence[dict[str, Any]], options: Sequence[Mapping[str, Any]]) -> None:
    for group, its in zip(groups, options, strict=True):
        group.update(its)

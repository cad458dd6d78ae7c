"""Captures a training step in a CUDA graph, whole or without its optimizer, and says what it leaves out.

[Note: where the step is cut] Everything that a graph begins must end in the same graph. FlatShardedOptimizer sends updated
parameters while the next forward runs, beyond the end of the step. So the graph of the next step begins with the update:

    step           forward k   backward k   reduce k   update k   gather k ...
    graph          update k-1   gather k-1   forward k   backward k   reduce k

Between two graphs no message is on its way; only each rank's shard of the gradients remains, in memory of its own. A
postponed update uses the options (learning rates, weight decay) of its own step. `complete` does it before anything reads
parameters or the optimizer's state, or runs the module.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from trainstep.capture.captured_step import CapturedStep
from trainstep.capture.inputs import why_not_captured
from trainstep.config.run import Phase
from trainstep.parallel.agreement import HostAgreement
from trainstep.parallel.flat_optimizer import FlatShardedOptimizer
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.torch_peers import TorchDDP
from trainstep.training.step import TrainStep


class EventMark(Protocol):
    """Called at the end of each phase. `event`: the event that a graph recorded there; None: the phase ends now.

    A captured step calls it once more with None for the phase, where its work begins on the device.
    """

    def __call__(self, phase: Phase | None, event: torch.cuda.Event | None = None, /) -> None: ...


_DDP_WARMUPS = 12
"""Steps of torch's DDP before a capture: it measures and arranges its messages in the first eleven (torch's notes, CUDA graphs)."""


def unmarked(_phase: Phase | None, _event: torch.cuda.Event | None = None, /) -> None:
    """An EventMark that ignores every phase."""


class CapturedTrainStep:
    """Runs `step(micro_batches, mark)` like TrainStep, but as one graph; the optimizer runs apart if no graph can hold it.

    With `strict` it is an error to leave anything out: ValueError for the optimizer, NotCapturable for the rest, raised by
    the step that finds it. On a GPU the phases are marked by the graph's own events, which are the same at every step.
    Ranks whose step sends messages capture together, and every rank must construct this class.
    """

    def __init__(self, step: TrainStep, ranks: Ranks, *, strict: bool) -> None:
        self.on_phase: Callable[[Phase], None] = unmarked
        """Called at the end of each phase while Python runs it: in eager steps and in the captured step, never in a launch."""
        reason = why_not_captured(step.optimizer) if step.optimizer is not None else None
        if reason and strict:
            raise ValueError(f"capture: {reason}; or use capture auto, which captures the rest")
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
            warmups=_DDP_WARMUPS if isinstance(step.gradient_sync, TorchDDP) else 3,
            strict=strict,
            agree=HostAgreement(ranks) if sends else None,
        )

    def __call__(self, micro_batches: Sequence[Mapping[str, Any]], mark: EventMark = unmarked) -> Tensor:
        """Run one step. Returns the last micro-batch's loss, detached."""
        with self._postponing.step() if self._postponing else nullcontext():
            loss: Tensor = self._captured(self._inputs(micro_batches), mark)
        if self._optimizer_left_out:
            self._step.update(partial(self._mark_update, mark))
        return loss

    def complete(self) -> None:
        """Do the update that was postponed to the next step. If the step sends messages, every rank must call this."""
        if self._postponing:
            self._postponing.complete()

    def is_settled(self, micro_batches: Sequence[Mapping[str, Any]]) -> bool:
        """Whether all further steps of such batches run like the next step: as a graph launch, or never as a graph."""
        return self._captured.why_not is not None or self._captured.is_captured(self._inputs(micro_batches))

    def captures_next(self, micro_batches: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the next step of such batches will be captured, if nothing changes before it."""
        return self._captured.captures_next(self._inputs(micro_batches))

    @property
    def what(self) -> str:
        """The part of the step that the graph holds: `step`, `forward and backward`, or `nothing`."""
        if self._captured.why_not is not None:
            return "nothing"
        return "forward and backward" if self._optimizer_left_out else "step"

    @property
    def left_out(self) -> str | None:
        """Why a part of the step runs outside the graph; None if no part does."""
        return self._captured.why_not or self._optimizer_left_out

    @property
    def capture_s(self) -> float:
        """Seconds that the capture itself took."""
        return self._captured.capture_s

    def on_stream(self) -> AbstractContextManager[None]:
        """Enqueue inside on the stream of the captures, which has a workspace of cuBLAS and cached memory of its own."""
        return self._captured.on_stream()

    def pool_bytes(self) -> int:
        """Bytes of the device's memory that belong to the graph."""
        return self._captured.pool_bytes()

    def pool_unused_bytes(self) -> int:
        """Bytes of the pool that no tensor has between launches."""
        return self._captured.pool_unused_bytes()

    def _inputs(self, micro_batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The inputs of the graph. Steps with and without a postponed update differ here, and so have a graph each."""
        update_first = self._postponing is not None and self._postponing.is_pending
        return {"micro_batches": [dict(batch) for batch in micro_batches], "update_first": update_first}

    def _graphed(self, inputs: Mapping[str, Any]) -> Tensor:
        with self._recording():
            self._captured.mark(None)
            if inputs["update_first"]:
                self._step.update(self._mark)
            whole = self._postponing is None and not self._optimizer_left_out
            part = self._step if whole else self._step.compute
            loss = part(inputs["micro_batches"], self._mark)
            if self._postponing is not None:
                self._postponing.join()
            return loss

    def _recording(self) -> AbstractContextManager[None]:
        """The context of a step that is captured, in which a parallel strategy sends no questions to other ranks."""
        recorded: Callable[[], AbstractContextManager[None]] = nullcontext
        if self._captured.is_recording:
            # torch's own strategies have no method `recorded`.
            recorded = getattr(self._step.gradient_sync, "recorded", nullcontext)
        return recorded()

    def _mark_update(self, mark: EventMark, phase: Phase) -> None:
        self.on_phase(phase)
        mark(phase)

    def _mark(self, phase: Phase, _event: torch.cuda.Event | None = None, /) -> None:
        self.on_phase(phase)
        self._captured.mark(phase)


class _Postponing:
    """Postpones the optimizer's update to the next step. [Note: where the step is cut]"""

    def __init__(self, step: TrainStep) -> None:
        optimizer = step.optimizer
        assert isinstance(optimizer, FlatShardedOptimizer)
        self.is_pending = False
        self._step = step
        self._groups = optimizer.param_groups
        self._options: list[dict[str, Any]] = []
        """The options of each group at the step whose update is pending."""
        self._in_step = False
        self._sync = optimizer.gradient_sync
        self._sync.keep_shards()
        self._sync.postponed = self.complete
        complete = torch.compiler.disable(lambda *_: self.complete())
        step.module.register_forward_pre_hook(complete, prepend=True)  # before the hooks that wait for parameters

    @contextmanager
    def step(self) -> Iterator[None]:
        """The context of a step, which begins with the pending update and leaves its own update pending."""
        now = _options_of(self._groups)
        if not self.is_pending:
            # A step outside a graph may have sent parameters, and a graph does not wait for these.
            self._sync.wait_for_parameters()
        self._in_step = True
        try:
            with self._with_options(self._options if self.is_pending else now):
                yield
        finally:
            self._in_step = False
        self._options, self.is_pending = now, True

    def join(self) -> None:
        """Wait, at a step's end, for every message, even to a block that the step did not use."""
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
    for group, group_options in zip(groups, options, strict=True):
        group.update(group_options)

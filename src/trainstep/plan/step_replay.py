"""Replays a training step of one rank: its phases in order, with what a parallel strategy holds. A subclass has the model's passes.

step_memory.py replays the ops of the built-in model, traced_memory.py those of a traced model. Three steps are replayed: the
optimizer's state is made in the first, and the allocator settles in the second. A captured step runs once more with a pool of its
own, after the cache was emptied.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from trainstep.plan.live_tensors import BATCH, WORKSPACE, Moment, Tensor
from trainstep.plan.rank_tensors import rank_tensors
from trainstep.plan.replicated_tensors import Setup

_WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS's workspace on Hopper, once for the thread of forward and once for autograd's (results/h200/memory.jsonl, workspaces)."""
STEPS = 3
_MOST_MICRO_BATCHES = 3
"""Micro-batches after the third repeat it."""
_MOST_BATCHES = 64
"""Batches that are tensors of their own; the rest are one, so that a large accumulation takes no time."""


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The moments of the last step in order, and the fullest moment of each phase and of all.

    `reserved_bytes` of `peak` and of the phases is the most of the whole run.
    """

    moments: tuple[Moment, ...]
    phases: tuple[Moment, ...]
    peak: Moment


class StepReplay(ABC):
    """One rank's steps. A subclass runs the model on `live`, all live tensors, and `ranks`, the tensors of the strategy."""

    def __init__(self, setup: Setup) -> None:
        self.run_config, self.live, self.ranks = setup.config.run, setup.live, rank_tensors(setup)
        self._workspaces: dict[str, Tensor] = {}

    @property
    @abstractmethod
    def batch_bytes(self) -> tuple[int, ...]:
        """The bytes of each tensor of a micro-batch."""

    @property
    @abstractmethod
    def buffers_bytes(self) -> tuple[int, ...]:
        """The bytes of each buffer of the model."""

    @abstractmethod
    def forward(self, *, keeps: bool) -> None:
        """A micro-batch's forward. `keeps`: autograd keeps what backward needs."""

    @abstractmethod
    def backward(self) -> None:
        """The backward of the last forward."""

    @abstractmethod
    def drop_kept(self) -> None:
        """Free what the last forward keeps, which has no backward."""

    def run(self, steps: int) -> StepMemory:
        """Replay the steps; of a captured step three at least, or its warm-ups would reserve too little: up to 14 % of a flat
        sharded step (results/h100/predicted_ranks.jsonl). ValueError for what has no formulas."""
        run, live = self.run_config, self.live
        steps = steps if run.capture == "none" else max(STEPS, steps)
        self.ranks.build()
        batches = min(run.accumulation, _MOST_BATCHES)
        rest = sum(self.batch_bytes) * (run.accumulation - batches)
        for nbytes in (*self.batch_bytes * batches, *((rest,) if rest else ()), *self.buffers_bytes):
            live.new(nbytes, BATCH)
        moments = [live.moment("after init")]
        if run.capture != "none":  # warm-ups run on the capture's stream, which cannot use what was freed on another
            live.allocator.pool = "stream of the capture"
        for number in range(steps):
            if number == steps - 1:
                live.forget_peaks()
                if run.capture != "none":
                    live.drop(self._workspaces.values())
                    self._workspaces.clear()
                    live.allocator.empty_cache()
                    live.allocator.pool = "graph"
            moments = [moments[0], *self._step()]
        live.note_peak()
        most = live.allocator.most_reserved_bytes
        phases = [replace(peak, reserved_bytes=most) for peak in live.peaks.values()]
        peak = max(phases, key=lambda phase: phase.allocated_bytes)
        return StepMemory(moments=tuple(moments), phases=tuple(phases), peak=peak)

    def _step(self) -> list[Moment]:
        live, run, moments = self.live, self.run_config, list[Moment]()
        trains = run.mode in ("forward_backward", "step")
        micro_batches = min(run.accumulation, _MOST_MICRO_BATCHES)
        for number in range(micro_batches):
            live.phase = "forward"
            self.ranks.begin_micro_batch(is_last=number == micro_batches - 1)
            self.forward(keeps=run.mode != "forward_no_grad")
            moments = [live.moment("after forward")]
            if trains:
                live.phase = "backward"
                self.backward()
                moments.append(live.moment("after backward"))
            else:
                self.drop_kept()
        if trains:
            live.phase = "grad_sync"
            self.ranks.finish()
            moments.append(live.moment("after grad_sync"))
        if run.mode == "step":
            live.phase = "optimizer"
            with self._updating():
                self.ranks.update()
            moments.append(live.moment("after optimizer"))
        self.ranks.clear()
        return [*moments, live.moment("after step")]

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """The context of an update: AdamW's loop and foreach run outside a captured step's graph, and so outside its pool."""
        allocator = self.live.allocator
        pool = allocator.pool
        if self.run_config.adamw in ("loop", "foreach"):
            allocator.pool = "default"
        yield
        allocator.pool = pool

    def workspace(self, thread: str) -> None:
        """cuBLAS's workspace of a thread, forward or backward, which stays."""
        if thread not in self._workspaces:
            self._workspaces[thread] = self.live.new(_WORKSPACE_BYTES, WORKSPACE)

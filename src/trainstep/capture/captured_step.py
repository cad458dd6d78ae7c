"""CapturedStep: the first calls of a training step run eagerly, the later calls launch a graph.

[Note: the warm-ups are real steps] Before a capture, a few steps must run in which kernels are compiled and tuned,
optimizers make their state, and libraries make their workspaces. These steps are the first calls themselves, on the
caller's batches. So no state has to be restored afterwards, and a captured run takes the same steps as an eager run. The
last warm-up is watched for operations that make the host wait; libraries that ask whether a graph is captured are told
that it is (`as_if_capturing`), so that what they do then is what is watched.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainstep.capture.inputs import Baked, State, StaticInputs, copies, detached, on_device, shape_of
from trainstep.capture.tape import CudaGraphs, OnMark, Tapes
from trainstep.capture.waits import NotCapturable, Wait, as_if_capturing, compiles_nothing, graphs_compiled, place_of

_MOST_COMPILING = 8
"""The number of steps after the warm-ups in which torch.compile may still compile."""
_MOST_DROPS = 8
"""The number of times that graphs may be dropped without a launch in between."""
_OTHER_PROCESS = NotCapturable("the step cannot be captured: another process says why")
_RUNNING = ContextVar("_RUNNING", default=False)
"""Whether a captured step's function is running; another captured step that it calls becomes a part of its graph."""


class _Action(IntEnum):
    """What a call does with its step; several processes all do what the process with the largest number has to do."""

    LAUNCH = 0
    CAPTURE = 1
    EAGER = 2
    """Run eagerly: a warm-up, or a shape beyond the most graphs."""
    NEVER = 3
    """Run eagerly from here on: the step cannot be captured."""


def _ignore(_label: Any, _event: torch.cuda.Event | None) -> None:
    pass


def _ignore_launch(_on_mark: OnMark) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class _Graph:
    inputs: StaticInputs
    launch: Callable[[OnMark], None]
    outputs: Any
    gradients_before: Sequence[tuple[Tensor, Tensor | None]]
    """Each parameter with its gradient before the step: the graph writes to this tensor's memory at every launch."""
    gradients_after: Sequence[tuple[Tensor, Tensor | None]]
    """Each parameter that has another gradient after the step: the same tensor after every launch."""


class CapturedStep:
    """Runs `function(batch)` as one graph: `step(batch)`.

    The batch is copied in, the graph is launched, and copies of the function's outputs are returned, without waiting for
    the device.

    function      runs forward and backward of a batch and everything else that belongs to the step (clipping,
                  optimizer.step(), zero_grad()). A batch is tensors and plain values in dicts, lists and tuples;
                  micro-batches are a list of batches. The function gets the tensors on the device. A tensor in pinned
                  host memory must not be overwritten before the GPU has copied it.
    optimizer     the optimizer that the function steps. Its learning rates are read at each call, so schedules work as
                  usual (outside the function). Any other change of its groups (betas, weight decay, parameters), and
                  load_state_dict, make a new graph. Raises ValueError if a graph cannot hold its step: then leave it out
                  of the function, give `module` alone, and call its step and zero_grad() after each call.
    module        the module that is trained: train() and eval() of any part, frozen parameters and replaced buffers make
                  a new graph. Without it only changes of the optimizer's parameters are noticed.
    warmups       the number of calls of each shape that run eagerly before a call is captured; at least 2.
    most_graphs   the most graphs, one for each shape of the batch; further shapes run eagerly.
    strict        raise NotCapturable, with the lines, for a step that cannot be captured; without it such a step runs
                  eagerly, and `why_not` says why.
    generators    the device's generators from which the function draws random numbers, other than the default generator.
    agree         returns the largest of the numbers that all processes give to it at the same call; needed by a function
                  that sends messages to other processes (parallel/agreement.py). The processes capture in the same call
                  and run eagerly in the same call, because a capture sends nothing and NCCL sets up captured messages
                  together. A step is launched when every process has a graph for it; if one process cannot capture a
                  step, no process does.

    If another captured step's function calls it, it becomes part of that step's graph. Use it from one thread at a time.

    Random numbers are new at each launch. Everything else that Python computes keeps its value from the capture. On a CPU
    a tape replaces the graph (tape.py): it is not faster, but behaves the same.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        module: nn.Module | None = None,
        device: torch.device | str | None = None,
        warmups: int = 3,
        most_graphs: int = 8,
        strict: bool = True,
        generators: Sequence[torch.Generator] = (),
        agree: Callable[[int], int] | None = None,
    ) -> None:
        if warmups < 2:
            raise ValueError(f"warmups: a step runs at least twice before it is captured, not {warmups} times")
        if most_graphs < 1:
            raise ValueError(f"most_graphs: must be at least 1, not {most_graphs}")
        self.device = _device_of(optimizer, module, device)
        self.why_not: str | None = None
        """Why the step runs eagerly, in a sentence; None while it is captured or may still be."""
        self.capture_s = 0.0
        """Seconds that captures have taken so far."""
        self._function = function
        self._warmups = warmups
        self._most_graphs = most_graphs
        self._strict = strict
        self._agree = agree or (lambda number: number)
        self._baked = Baked(optimizer, module, self.device)
        self._recorder = CudaGraphs(self.device, generators) if self.device.type == "cuda" else Tapes()
        self._graphs: dict[Hashable, _Graph] = {}
        self._warmups_done: dict[Hashable, int] = {}
        """Shape -> the number of its warm-ups so far."""
        self._compiling = self._drops_since_launch = 0
        self._on_mark: OnMark = _ignore
        self._recording = False
        self._not_finite = torch.zeros((), dtype=torch.int64, device=self.device)

    def __call__(self, batch: Any, on_mark: OnMark = _ignore) -> Any:
        """Run one step. `on_mark`: called for each `mark` of the function. Raises NotCapturable: see `strict`."""
        if _RUNNING.get():
            return copies(self._run(batch))
        self._on_mark = on_mark
        change = None if self.why_not else self._baked.change()
        if change:
            self._begin_again(change)
        shape, graph, proposal = self._propose(batch)
        agreed = self._agree(proposal)
        if agreed == _Action.LAUNCH and graph is not None:
            return self._launch(graph, batch)
        if agreed == _Action.NEVER and proposal != _Action.NEVER:
            self._give_up(_OTHER_PROCESS)
        if agreed == _Action.CAPTURE:
            return self._capture(shape, batch)
        if proposal == _Action.EAGER and self._still_warming(shape):
            return self._warm_up(shape, batch)
        return self._run_eagerly(batch)

    def _propose(self, batch: Any) -> tuple[Hashable, _Graph | None, _Action]:
        """The batch's shape, its graph if there is one, and what this process would do with the step."""
        try:
            shape = self._shape_of(batch)
        except NotCapturable as error:
            self._give_up(error)
            return None, None, _Action.NEVER
        graph = self._graphs.get(shape)
        if graph is not None and self._has_its_gradients(graph):
            return shape, graph, _Action.LAUNCH
        if self.why_not is not None:
            return shape, None, _Action.NEVER
        if len(self._graphs) >= self._most_graphs:
            return shape, None, _Action.EAGER
        self._warmups_done.setdefault(shape, 0)
        return shape, None, _Action.CAPTURE if self._is_warm(shape) else _Action.EAGER

    def _is_warm(self, shape: Hashable) -> bool:
        return self._warmups_done.get(shape, 0) >= self._warmups

    def _still_warming(self, shape: Hashable) -> bool:
        """Whether the next eager step of this shape is one of its warm-ups."""
        # A shape that came after the most graphs has no entry: it is never captured, so it needs no warm-up.
        return self._warmups_done.get(shape, self._warmups) < self._warmups

    @property
    def is_recording(self) -> bool:
        """Whether the function is running in order to be recorded."""
        return self._recording

    def is_captured(self, batch: Any) -> bool:
        """Whether there is a graph for batches of this shape."""
        return self._shape_of(batch) in self._graphs

    def captures_next(self, batch: Any) -> bool:
        """Whether the next call with a batch of this shape will be captured, if nothing changes before it."""
        if self.why_not is not None or len(self._graphs) >= self._most_graphs:
            return False
        try:
            shape = self._shape_of(batch)
        except NotCapturable:
            return False
        return shape not in self._graphs and self._is_warm(shape)

    def mark(self, label: Any) -> None:
        """Mark this point of the step: the function calls it, and `on_mark(label, event)` is called at every step.

        For a graph on a GPU `event` is the torch.cuda.Event that the graph records at this point, the same at each
        launch. Otherwise it is None, and `on_mark` is called at this point while the step runs.
        """
        if self._recording:
            self._recorder.mark(label, self._on_mark)
        else:
            self._on_mark(label, None)

    def reset(self) -> None:
        """Drop the graphs: the next calls of each shape run eagerly again and are then captured.

        Call this after a change that a graph cannot notice: of the function's own Python state, or of a tensor that was
        replaced.
        """
        if self._graphs:
            self._recorder.forget()
        self._graphs.clear()
        self._warmups_done.clear()

    def losses_not_finite(self) -> int:
        """The number of scalar outputs so far that were NaN or infinite. Waits for the device: call it every k steps."""
        return int(self._not_finite.item())

    def pool_bytes(self) -> int:
        """Bytes of the device's memory that belong to the graphs: for intermediate tensors and for gradients they leave."""
        return self._recorder.pool_bytes()

    def pool_unused_bytes(self) -> int:
        """Bytes of the pool that no tensor has now: only the next launch may use them."""
        return self._recorder.pool_bytes(unused=True)

    def on_stream(self) -> AbstractContextManager[None]:
        """Enqueue inside as an eager step does: on the stream of the captures, in order with the current one."""
        return self._recorder.eager()

    def _shape_of(self, batch: Any) -> Hashable:
        """The shape of the batch, with the modes of torch that change what runs: autograd and autocast around the call."""
        kind = self.device.type
        in_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return shape_of(batch), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), in_dtype

    def _run_eagerly(self, batch: Any) -> Any:
        with self._recorder.eager():
            return copies(self._run(on_device(batch, self.device)))

    def _run(self, batch: Any) -> Any:
        token = _RUNNING.set(True)
        # With autocast around the call, the cache may hold casts of the weights from another call.
        torch.clear_autocast_cache()
        try:
            outputs = self._function(batch)
        finally:
            _RUNNING.reset(token)
            torch.clear_autocast_cache()
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.numel() == 1 and leaf.is_floating_point():
                self._not_finite += leaf.detach().isfinite().logical_not().reshape(())
        return outputs

    def _warm_up(self, shape: Hashable, batch: Any) -> Any:
        """Run a step eagerly. The last warm-up is watched; a step in which torch.compile compiled does not count as last."""
        done = self._warmups_done.get(shape, 0) + 1
        with self._baked.rates_in_tensors():
            if done < self._warmups:
                self._warmups_done[shape] = done
                return self._run_eagerly(batch)
            compiled, state = graphs_compiled(), self._baked.state()
            with self._recorder.watched() as waits, as_if_capturing() as pretence:
                try:
                    outputs = self._run_eagerly(batch)
                except Exception as error:
                    if pretence.asked and not isinstance(error, torch.OutOfMemoryError):
                        # It may be what refuses a capture, and would be raised at every call.
                        self._give_up(_refusal(None, [place_of(error)]), error)
                    raise
        if graphs_compiled() == compiled:
            self._warmups_done[shape] = done
            reason = self._baked.not_again(state)
            if waits or reason:
                self._give_up(_refusal(reason, waits))
        elif self._compiling < _MOST_COMPILING:
            self._compiling += 1
        else:
            self._give_up(NotCapturable("torch.compile compiles again in every step (TORCH_LOGS=recompiles says why)"))
        return outputs

    def _capture(self, shape: Hashable, batch: Any) -> Any:
        before = [(parameter, parameter.grad) for parameter in self._baked.parameters]
        inputs = StaticInputs(batch, self.device)
        began_s = time.perf_counter()
        launch, outputs, refusal = self._record(inputs, before)
        self.capture_s += time.perf_counter() - began_s
        inputs.note_written()
        if refusal is not None:
            if not self._recorder.takes_step:
                del launch, outputs  # free their memory for the eager step
                self._give_up(refusal)
                return self._run_eagerly(batch)
            inputs.write_back(batch)
            self._give_up(refusal)
            return outputs
        after = [(parameter, parameter.grad) for parameter, gradient in before if parameter.grad is not gradient]
        self._graphs[shape] = _Graph(
            inputs=inputs, launch=launch, outputs=outputs, gradients_before=before, gradients_after=after
        )
        if not self._recorder.takes_step:
            launch(self._on_mark)
        inputs.write_back(batch)
        return copies(outputs)

    def _record(
        self, inputs: StaticInputs, gradients_before: Sequence[tuple[Tensor, Tensor | None]]
    ) -> tuple[Callable[[OnMark], None], Any, NotCapturable | None]:
        """The graph's launch, the outputs, and why the graph cannot be used, if so: then its effects have been undone.

        A tape takes the step while it records, and so has no effects to undo.
        """
        state, refusal = self._baked.state(), None
        launch: Callable[[OnMark], None] = _ignore_launch
        outputs: Any = None
        self._recording = True
        try:
            with compiles_nothing(), as_if_capturing(), self._baked.rates_in_tensors():
                launch, outputs = self._recorder.record(lambda: detached(self._run(inputs.batch)), self._on_mark)
        except BaseException as error:
            if self._recorder.takes_step:
                raise
            made = self._baked.not_again(state, captured=True)
            self._undo(gradients_before, state)
            if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, Exception):
                raise
            # Keep the error's place but not the error, which holds the capture's tensors.
            refusal = _refusal(made, [place_of(error)])
        finally:
            self._recording = False
        reason = self._baked.not_again(state, captured=True)
        if refusal is None and (reason or self._recorder.refused):
            refusal = _refusal(reason, self._recorder.refused)
        if self._agree(_Action.LAUNCH if refusal is None else _Action.NEVER) == _Action.NEVER and refusal is None:
            refusal = _OTHER_PROCESS
        if refusal is not None and not self._recorder.takes_step:
            self._undo(gradients_before, state)
        return launch, outputs, refusal

    def _undo(self, gradients_before: Sequence[tuple[Tensor, Tensor | None]], state: State) -> None:
        """Remove the gradients and the state that a capture made, because a capture computes nothing."""
        for parameter, gradient in gradients_before:
            parameter.grad = gradient
        self._baked.drop_state_since(state)

    def _launch(self, graph: _Graph, batch: Any) -> Any:
        self._drops_since_launch = 0
        graph.inputs.fill(batch)
        graph.launch(self._on_mark)
        for parameter, gradient in graph.gradients_after:
            parameter.grad = gradient
        graph.inputs.write_back(batch)
        return copies(graph.outputs)

    def _has_its_gradients(self, graph: _Graph) -> bool:
        """Whether the gradients are the tensors with which the graph was captured; if not, the graphs are dropped."""
        if all(parameter.grad is gradient for parameter, gradient in graph.gradients_before):
            return True
        self._begin_again(
            "its parameters have other gradients than at the capture; clear gradients in the same way before every call "
            "(zero_grad(set_to_none=False) where calls add up), or give micro-batches as one list"
        )
        return False

    def _begin_again(self, reason: str) -> None:
        """Drop the graphs; a step that changes too often is never captured."""
        self.reset()
        self._drops_since_launch += 1
        if self._drops_since_launch > _MOST_DROPS:
            self._give_up(NotCapturable(f"the step is not the same for {self._warmups} consecutive calls: {reason}"))

    def _give_up(self, error: NotCapturable, cause: Exception | None = None) -> None:
        self.reset()
        self.why_not = str(error)
        if self._strict:
            raise error from cause


def _refusal(reason: str | None, waits: Sequence[Wait]) -> NotCapturable:
    return NotCapturable("; ".join(filter(None, ["the step cannot be captured", reason])), waits)


def _device_of(
    optimizer: torch.optim.Optimizer | None, module: nn.Module | None, device: torch.device | str | None
) -> torch.device:
    if device is not None:
        return torch.device(device)
    of_optimizer = [parameter for group in optimizer.param_groups for parameter in group["params"]] if optimizer else []
    for parameter in of_optimizer or (module.parameters() if module is not None else ()):
        return torch.device(parameter.device)
    raise ValueError("device: give the optimizer or the module that the step trains, or the device that it runs on")

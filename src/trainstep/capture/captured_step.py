"""Anyone's training step, captured: its first calls run as they are, then a graph takes their place.

[Note: no step is lost, none is made up] A capture needs a few steps before it, in which kernels are compiled and tuned, optimizers
make their state, libraries their workspaces. They are the first calls themselves, on the caller's batches, so there is no state to
be put back afterwards, and a captured training run takes the same steps as one that is not. The last of them is watched for what
makes the host wait.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainstep.capture.baked import Baked, State
from trainstep.capture.cuda_graph import CudaGraphs, OnMark
from trainstep.capture.inputs import StaticInputs, copies, detached, on_device, shape_of
from trainstep.capture.tape import Tapes
from trainstep.capture.waits import NotCapturable, Wait, compiles_nothing, graphs_compiled, place_of

_MOST_COMPILING = 8
"""Steps beyond the warm-ups in which torch.compile may still compile."""
_MOST_BEGINNINGS = 8
"""Times in a row that what a graph bakes in may change before the graph was used twice."""
_LAUNCH, _CAPTURE, _AS_IT_IS, _NEVER = range(4)
"""What a call does with its step; of several processes each does what the one with the largest number has to."""
_ANOTHERS = NotCapturable("the step cannot be captured: another process says why")
_RUNNING = ContextVar("_RUNNING", default=False)
"""Whether the function of a captured step is running: another one's calls in it are a part of its graph."""


def _ignore(_label: Any, _event: torch.cuda.Event | None) -> None:
    pass


def _ignore_launch(_on_mark: OnMark) -> None:
    pass


def _alone(number: int) -> int:
    return number


@dataclass(frozen=True, kw_only=True)
class _Graph:
    inputs: StaticInputs
    launch: Callable[[OnMark], None]
    outputs: Any
    found: Sequence[tuple[Tensor, Tensor | None]]
    """Each parameter with the gradient that it had before the step: the graph overwrites it, or adds to it, wherever it is now."""
    left: Sequence[tuple[Tensor, Tensor | None]]
    """Each parameter that has another gradient after the step: the same tensor at every launch."""


class CapturedStep:
    """`step(batch)` is `function(batch)` as one graph: the batch is copied in, the graph launched, and copies of what the function
    returned come back, of which the host has not waited for any.

    function      forward and backward, and whatever else belongs to the step (clipping, optimizer.step(), zero_grad()), of a batch:
                  tensors and plain values in dicts, lists and tuples. Micro-batches are a list of batches. Tensors come to it on
                  the device; one in pinned memory of the host must not be written anew before the GPU has copied it.
    optimizer     the one that the function steps. Its learning rates are read at each call, so schedules work as ever (outside of
                  the function); another change of its groups (betas, weight decay, parameters), and load_state_dict, make a new
                  graph. ValueError where a graph cannot hold its step: then leave it out of the function, give `module` alone,
                  and call its step and zero_grad() after each call.
    module        the one that is trained: train() and eval() of any part of it, frozen parameters and replaced buffers make a new
                  graph. Without it only the optimizer's parameters are looked after.
    warmups       calls of each shape that run as they are before the next is captured, 2 at least.
    most_graphs   one a shape of the batch; further shapes run as they are.
    strict        NotCapturable, with the lines, for a step that cannot be captured; else it runs as it is, and `why_not` says why.
    generators    of the device, other than its default one, from which the function draws random numbers.
    agree         the largest of the numbers that all processes give it at the same call, for a function that sends messages to the
                  others (parallel/host_agreement.py): they capture in the same call, or run as they are in the same call, since a
                  capture sends nothing and NCCL sets up captured messages together. A step is launched when every process has a
                  graph for it; what one cannot capture none does.

    Called by the function of another captured step, it is a part of that one's graph. Not for several threads at once.

    Random numbers are new at each launch. Everything else that Python works out is as it was when the step was captured. On a CPU a
    tape takes the graph's place (tape.py): nothing is faster, but the same holds.
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
        """Why the step runs as it is, in a sentence; None while it is, or may yet be, captured."""
        self.capture_s = 0.0
        """Seconds that captures have taken so far."""
        self._function = function
        self._warmups = warmups
        self._most_graphs = most_graphs
        self._strict = strict
        self._agree = agree or _alone
        self._baked = Baked(optimizer, module, self.device)
        self._recorder = CudaGraphs(self.device, generators) if self.device.type == "cuda" else Tapes()
        self._graphs: dict[Hashable, _Graph] = {}
        self._warm: dict[Hashable, int] = {}
        """Calls of each shape so far that ran as they are and count."""
        self._compiling = self._begun_again = 0
        self._on_mark: OnMark = _ignore
        self._recording = False
        self._not_finite = torch.zeros((), dtype=torch.int64, device=self.device)

    def __call__(self, batch: Any, on_mark: OnMark = _ignore) -> Any:
        """One step. `on_mark`: told of each `mark` of the function, see there. NotCapturable: see `strict`."""
        if _RUNNING.get():
            return copies(self._run(batch))
        self._on_mark = on_mark
        if change := self.why_not is None and self._baked.change():
            self._begin_again(change)
        shape, graph, wish = self._wish(batch)
        agreed = self._agree(wish)
        if agreed == _LAUNCH and graph is not None:
            return self._launch(graph, batch)
        if agreed == _NEVER and wish != _NEVER:
            self._give_up(_ANOTHERS)
        if agreed == _CAPTURE:
            return self._capture(shape, batch)
        if wish == _AS_IT_IS and self._warm.get(shape, self._warmups) < self._warmups:
            return self._warm_up(shape, batch)
        return self._as_it_is(batch)

    def _wish(self, batch: Any) -> tuple[Hashable, _Graph | None, int]:
        """The batch's shape, its graph if there is one, and what this process would do."""
        try:
            shape = self._shape_of(batch)
        except NotCapturable as error:
            self._give_up(error)
            return None, None, _NEVER
        graph = self._graphs.get(shape)
        if graph is not None and self._finds_its_gradients(graph):
            return shape, graph, _LAUNCH
        if self.why_not is not None:
            return shape, None, _NEVER
        if len(self._graphs) >= self._most_graphs:
            return shape, None, _AS_IT_IS
        done = self._warm.setdefault(shape, 0)
        return shape, None, _CAPTURE if done >= self._warmups else _AS_IT_IS

    @property
    def is_recording(self) -> bool:
        """Whether the function runs to be written down, not for its step's sake."""
        return self._recording

    def is_captured(self, batch: Any) -> bool:
        """Whether a graph takes the next step of such a batch."""
        return self._shape_of(batch) in self._graphs

    def mark(self, label: Any) -> None:
        """Called by the function: `on_mark(label, event)` is told of this point of every step.

        Of a captured step on a GPU `event` is a torch.cuda.Event that the graph records here, the same one at each launch; it is
        None where `on_mark` is called at this very point, while the step runs.
        """
        if self._recording:
            self._recorder.mark(label, self._on_mark)
        else:
            self._on_mark(label, None)

    def reset(self) -> None:
        """Forget the graphs: the next calls of each shape run as they are again, and are captured anew.

        To be called where something changed that a graph holds on to: the function's own Python state, a tensor that was replaced.
        """
        if self._graphs:
            self._recorder.forget()
        self._graphs.clear()
        self._warm.clear()

    def losses_not_finite(self) -> int:
        """How many outputs of one number were NaN or infinite so far. Waits for the device: ask every k steps."""
        return int(self._not_finite.item())

    def pool_bytes(self) -> int:
        """The device's memory that belongs to the graphs: what steps need between inputs and outputs, and gradients they leave."""
        return self._recorder.pool_bytes()

    def _shape_of(self, batch: Any) -> Hashable:
        """The batch's, and what else torch runs otherwise: with autograd or without, in autocast's dtype or in none."""
        kind = self.device.type
        in_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return shape_of(batch), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), in_dtype

    def _as_it_is(self, batch: Any) -> Any:
        with self._recorder.eager():
            return copies(self._run(on_device(batch, self.device)))

    def _run(self, batch: Any) -> Any:
        inside = _RUNNING.set(True)
        torch.clear_autocast_cache()  # under autocast around the call: casts of the weights as they were at another call
        try:
            outputs = self._function(batch)
        finally:
            _RUNNING.reset(inside)
            torch.clear_autocast_cache()
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.numel() == 1 and leaf.is_floating_point():
                self._not_finite += leaf.detach().isfinite().logical_not().reshape(())
        return outputs

    def _warm_up(self, shape: Hashable, batch: Any) -> Any:
        """A step as it is. The last one is watched; it is taken again where torch.compile still compiled in it."""
        done = self._warm.get(shape, 0) + 1
        with self._baked.rates_in_tensors():
            if done < self._warmups:
                self._warm[shape] = done
                return self._as_it_is(batch)
            compiled, state = graphs_compiled(), self._baked.state()
            with self._recorder.watched() as waits:
                outputs = self._as_it_is(batch)
        if graphs_compiled() == compiled:
            self._warm[shape] = done
            reason = self._baked.not_again(state)
            if waits or reason:
                self._give_up(_refusal(reason, waits))
        elif self._compiling < _MOST_COMPILING:
            self._compiling += 1
        else:
            self._give_up(NotCapturable("torch.compile compiles again in every step (TORCH_LOGS=recompiles says why)"))
        return outputs

    def _capture(self, shape: Hashable, batch: Any) -> Any:
        """Write the step down, and take it once."""
        found = [(parameter, parameter.grad) for parameter in self._baked.parameters]
        inputs = StaticInputs(batch, self.device)
        began_s = time.perf_counter()
        launch, outputs, refusal = self._record(inputs, found)
        self.capture_s += time.perf_counter() - began_s
        inputs.note_written()
        if refusal is not None:
            if not self._recorder.takes_step:
                del launch, outputs  # their memory is for the step as it is
                self._give_up(refusal)
                return self._as_it_is(batch)
            inputs.write_back(batch)
            self._give_up(refusal)
            return outputs
        left = [(parameter, parameter.grad) for parameter, gradient in found if parameter.grad is not gradient]
        self._graphs[shape] = _Graph(inputs=inputs, launch=launch, outputs=outputs, found=found, left=left)
        if not self._recorder.takes_step:
            launch(self._on_mark)
        inputs.write_back(batch)
        return copies(outputs)

    def _record(
        self, inputs: StaticInputs, found: Sequence[tuple[Tensor, Tensor | None]]
    ) -> tuple[Callable[[OnMark], None], Any, NotCapturable | None]:
        """The graph's launch, the outputs, and why it is no good after all: then all is as it was, but for a tape's step."""
        state, refusal = self._baked.state(), None
        launch: Callable[[OnMark], None] = _ignore_launch
        outputs: Any = None
        self._recording = True
        try:
            with compiles_nothing(), self._baked.rates_in_tensors():
                launch, outputs = self._recorder.record(lambda: detached(self._run(inputs.batch)), self._on_mark)
        except BaseException as error:
            if self._recorder.takes_step:
                raise
            self._undo(found, state)
            if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, Exception):
                raise
            # Of the error itself nothing is kept: it holds the capture's tensors
            refusal = _refusal(None, [place_of(error)])
        finally:
            self._recording = False
        reason = self._baked.not_again(state, captured=True)
        if refusal is None and (reason or self._recorder.refused):
            refusal = _refusal(reason, self._recorder.refused)
        if self._agree(_LAUNCH if refusal is None else _NEVER) == _NEVER and refusal is None:
            refusal = _ANOTHERS
        if refusal is not None and not self._recorder.takes_step:
            self._undo(found, state)
        return launch, outputs, refusal

    def _undo(self, found: Sequence[tuple[Tensor, Tensor | None]], state: State) -> None:
        """Take away what a capture left where steps leave their results: it was never computed."""
        for parameter, gradient in found:
            parameter.grad = gradient
        self._baked.drop_state_since(state)

    def _launch(self, graph: _Graph, batch: Any) -> Any:
        self._begun_again = 0
        graph.inputs.fill(batch)
        graph.launch(self._on_mark)
        for parameter, gradient in graph.left:
            parameter.grad = gradient
        graph.inputs.write_back(batch)
        return copies(graph.outputs)

    def _finds_its_gradients(self, graph: _Graph) -> bool:
        """Whether gradients are those that the graph was captured with; where not, the graphs are forgotten."""
        if all(parameter.grad is gradient for parameter, gradient in graph.found):
            return True
        self._begin_again(
            "it finds other gradients than when it was captured; clear them alike before every call "
            "(zero_grad(set_to_none=False) where calls add up), or give micro-batches as one list"
        )
        return False

    def _begin_again(self, reason: str) -> None:
        """Forget the graphs, but not for ever: steps that are never the same twice run as they are."""
        self.reset()
        self._begun_again += 1
        if self._begun_again > _MOST_BEGINNINGS:
            self._give_up(NotCapturable(f"the step is not the same for {self._warmups} calls in a row: {reason}"))

    def _give_up(self, error: NotCapturable) -> None:
        self.reset()
        self.why_not = str(error)
        if self._strict:
            raise error


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

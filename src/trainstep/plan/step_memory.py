"""Replays a training step of one rank, tensor by tensor, to know its memory at each moment: by category, allocated and reserved.

    memory = replay(run)                            # of the built-in model, without a parallel strategy
    memory.peak.categories["activations"], memory.peak.allocated_bytes, memory.peak.reserved_bytes

The ops are those of model_ops.py. Forward allocates an op's temporary tensors and what it keeps, and frees the temporary tensors of
the op before. Backward allocates an op's gradients, then frees the incoming gradient, what the op kept, and its temporary tensors.
Three steps are replayed: the optimizer's state is made in the first, and the allocator settles in the second.

The graph of a captured step has a pool of its own, which is not replayed: such a step reserves 6 to 10 % more
(results/h200/captured.jsonl). Parallel strategies are not replayed either; peak_memory.py has their terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainstep.config.model import ModelConfig
from trainstep.config.run import RunConfig
from trainstep.costs.exchange import ParameterSize
from trainstep.plan.activations import block_inputs
from trainstep.plan.allocator import Allocator, Block
from trainstep.plan.memory_terms import transformer_parameters
from trainstep.plan.model_ops import ACTIVATION, COPY, LOGITS, Kept, Op, model_ops, symbols_of, widths_of

PARAMETERS, GRADIENTS, STATE, TEMPORARY = "parameters", "gradients", "optimizer state", "temporaries"
WORKSPACE, BATCH, ROUNDING = "workspaces", "batch and buffers", "rounding"
CATEGORIES = (PARAMETERS, GRADIENTS, STATE, ACTIVATION, COPY, LOGITS, TEMPORARY, WORKSPACE, BATCH, ROUNDING)
_WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS's workspace on Hopper, once for the thread of forward and once for autograd's (results/h200/memory.jsonl, workspaces)."""
_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What is held at a moment, with the allocator's rounding as a category."""

    name: str
    categories: dict[str, int]
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The moments of the last step in order, and the fullest; `peak.reserved_bytes` is the most of the whole run."""

    moments: tuple[Moment, ...]
    peak: Moment


class _Tensor(NamedTuple):
    block: Block
    category: str
    nbytes: int


@dataclass
class _Held:
    """The tensors held now."""

    allocator: Allocator = field(default_factory=Allocator)
    requested: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    phase: str = "init"
    peak: Moment | None = None

    def new(self, nbytes: int, category: str) -> _Tensor:
        block = self.allocator.take(nbytes)
        self.requested[category] += nbytes
        if self.peak is None or self.allocator.allocated_bytes > self.peak.allocated_bytes:
            self.peak = self.moment(self.phase)
        return _Tensor(block, category, nbytes)

    def drop(self, tensors: Sequence[_Tensor]) -> None:
        for tensor in tensors:
            self.allocator.give_back(tensor.block)
            self.requested[tensor.category] -= tensor.nbytes

    def moment(self, name: str) -> Moment:
        rounding = self.allocator.allocated_bytes - sum(self.requested.values())
        return Moment(
            name=name,
            categories={**self.requested, ROUNDING: rounding},
            allocated_bytes=self.allocator.allocated_bytes,
            reserved_bytes=self.allocator.reserved_bytes,
        )


def replay(run: RunConfig, *, state_share: float = 1.0) -> StepMemory:
    """The memory of this run's step on a GPU. ValueError for a model of the user's own.

    `state_share`: the share of parameters whose optimizer state this rank has.
    """
    return _Step(run, state_share).run_steps()


class _Step:
    def __init__(self, run: RunConfig, state_share: float) -> None:
        assert isinstance(run.model, ModelConfig)
        self._run, self._symbols, self._widths = run, symbols_of(run), widths_of(run)
        self._layers, self._ops = run.model.layers, model_ops(run)
        self._parameters: Sequence[ParameterSize] = transformer_parameters(run.model, run.precision, run.ops)
        self._held = _Held()
        self._state_share = state_share
        self._kept: list[tuple[Op, list[_Tensor]]] = []
        self._inputs: list[list[_Tensor]] = []
        """Inputs of recomputed blocks."""
        self._gradients: list[_Tensor] = []
        self._state: list[_Tensor] = []
        self._passing: list[_Tensor] = []
        """Temporary tensors of the op before."""
        self._stream: _Tensor | None = None
        self._incoming: _Tensor | None = None
        self._workspaces: set[str] = set()

    def run_steps(self) -> StepMemory:
        run, held = self._run, self._held
        for parameter in self._parameters:
            held.new(parameter.numel * parameter.element_bytes, PARAMETERS)
        tokens_bytes = 8 * run.batch_size * run.context
        for _ in range(2 * run.accumulation):
            held.new(tokens_bytes, BATCH)
        table = Kept(name="cos", element_bytes=4, shape="S d").nbytes(self._symbols) // self._symbols["H"] // 2
        held.new(table, BATCH), held.new(table, BATCH)
        moments = [held.moment("after init")]
        for _ in range(_STEPS):
            moments = [moments[0], *self._step()]
        assert held.peak is not None
        peak = Moment(
            name=held.peak.name,
            categories=held.peak.categories,
            allocated_bytes=held.peak.allocated_bytes,
            reserved_bytes=held.allocator.reserved_bytes,
        )
        return StepMemory(moments=tuple(moments), peak=peak)

    def _step(self) -> list[Moment]:
        held, run, moments = self._held, self._run, list[Moment]()
        trains = run.mode in ("forward_backward", "step")
        for number in range(run.accumulation):
            held.phase = "forward"
            self._forward(keeps=run.mode != "forward_no_grad")
            moments = [held.moment("after forward")]
            if trains:
                held.phase = "backward"
                self._backward(first=number == 0)
                moments.append(held.moment("after backward"))
            elif run.mode == "forward":
                for _, tensors in self._kept:
                    held.drop(tensors)
                self._kept.clear()
        if run.mode == "step":
            held.phase = "optimizer"
            self._update()
            moments.append(held.moment("in the optimizer"))
        held.drop(self._gradients)
        self._gradients.clear()
        return [*moments, held.moment("after step")]

    def _workspace(self, thread: str) -> None:
        if thread not in self._workspaces:
            self._workspaces.add(thread)
            self._held.new(_WORKSPACE_BYTES, WORKSPACE)

    def _new(self, tensor: Kept, category: str | None = None) -> _Tensor:
        return self._held.new(tensor.nbytes(self._symbols), category or tensor.category)

    def _temporary(self, tensor: Kept) -> _Tensor:
        return self._new(tensor, LOGITS if tensor.category == LOGITS else TEMPORARY)

    def _forward(self, *, keeps: bool) -> None:
        copies: list[_Tensor] = []  # without gradients, autocast keeps its copies of weights until forward ends
        ops, recomputes = self._ops, self._run.recompute == "block" and keeps

        def run_ops(sequence: Sequence[Op]) -> None:
            for op in sequence:
                self._forward_op(op)
                if not keeps:
                    [(_, tensors)] = self._kept
                    self._kept.clear()
                    copies.extend(tensor for tensor in tensors if tensor.category == COPY)
                    self._passing += [tensor for tensor in tensors if tensor.category != COPY]

        run_ops(ops.before)
        for _ in range(self._layers):
            if recomputes:
                self._inputs.append([self._new(tensor) for tensor in block_inputs(self._run)])
                begin = len(self._kept)
                run_ops(ops.block)
                for _, tensors in self._kept[begin:]:
                    copies += [tensor for tensor in tensors if tensor.category == COPY]
                    self._held.drop([tensor for tensor in tensors if tensor.category != COPY])
                del self._kept[begin:]
            else:
                run_ops(ops.block)
        run_ops(ops.after)
        self._held.drop([*self._passing, *copies])
        self._passing.clear()

    def _forward_op(self, op: Op) -> None:
        temporaries = [self._temporary(tensor) for tensor in op.forward]
        if op.weights and op.name != "embedding":
            self._workspace("forward")
        kept = [self._new(tensor) for tensor in op.kept]
        self._held.drop(self._passing)
        self._passing = temporaries
        self._kept.append((op, kept))

    def _backward(self, *, first: bool) -> None:
        self._workspace("backward")
        self._stream = self._incoming = None
        after = [self._kept.pop() for _ in self._ops.after]
        for op, kept in after:
            self._backward_op(op, kept, first=first)
        for _ in range(self._layers):
            inputs: list[_Tensor] = []
            if self._run.recompute == "block":
                inputs = self._inputs.pop()
                for op in self._ops.block:
                    self._forward_op(op)
                self._held.drop(self._passing)
                self._passing = []
            for _ in self._ops.block:
                self._backward_op(*self._kept.pop(), first=first)
            self._held.drop(inputs)
        for _ in self._ops.before:
            self._backward_op(*self._kept.pop(), first=first)
        self._held.drop([tensor for tensor in {self._stream, self._incoming} if tensor is not None])
        self._stream = self._incoming = None

    def _backward_op(self, op: Op, kept: list[_Tensor], *, first: bool) -> None:
        made = [self._temporary(tensor) for tensor in op.backward]
        for shape in op.weights:
            self._gradient(shape, op, first=first)
        if made or op.name == "embedding":
            if self._incoming is not None and self._incoming is not self._stream:
                self._held.drop([self._incoming])
            self._held.drop(made[1:])
            self._incoming = made[0] if made else self._stream
        self._held.drop(kept)
        if op.joins:
            if self._stream is None:
                self._stream = self._incoming
            elif self._incoming is not None and self._incoming is not self._stream:
                self._held.drop([self._incoming])
            self._incoming = self._stream

    def _gradient(self, shape: str, op: Op, *, first: bool) -> None:
        weight = Kept(name="dW", element_bytes=self._widths.weight, shape=shape)
        is_matrix = len(shape.split()) > 1 and op.name != "embedding"
        narrow = (
            [self._held.new(weight.nbytes(self._symbols) // 2, TEMPORARY)]
            if self._widths.autocast and is_matrix
            else []
        )
        gradient = self._held.new(weight.nbytes(self._symbols), GRADIENTS)
        self._held.drop(narrow)
        if first:
            self._gradients.append(gradient)
        else:
            self._held.drop([gradient])  # added to the gradient of the micro-batch before

    def _update(self) -> None:
        if not self._state:
            element_bytes = 4 if self._run.precision == "bf16_master" else self._widths.weight
            tensors = 3 if self._run.precision == "bf16_master" else 2
            for parameter in self._parameters:
                nbytes = round(parameter.numel * self._state_share) * element_bytes
                self._state += [self._held.new(nbytes, STATE) for _ in range(tensors)]
                self._state.append(self._held.new(4, STATE))
        if self._run.adamw == "foreach":
            roots = [
                self._held.new(parameter.numel * parameter.element_bytes, TEMPORARY) for parameter in self._parameters
            ]
            self._held.drop(roots)
        elif self._run.adamw == "loop":
            largest = max(parameter.numel * parameter.element_bytes for parameter in self._parameters)
            self._held.drop([self._held.new(largest, TEMPORARY) for _ in range(2)])

"""Replays a training step of one rank, tensor by tensor, to know its memory at each moment: by category, allocated and reserved.

    memory = replay(alone(run))                     # or replay(RanksConfig(ranks=2, sync=..., run=run))
    memory.peak.categories["activations"], memory.peak.allocated_bytes, memory.peak.reserved_bytes

The ops are those of block_ops.py. Forward allocates an op's temporary tensors and what it keeps, and frees the temporary tensors of
the op before. Backward allocates an op's gradients, then frees the incoming gradient, what the op kept, and its temporary tensors.
A recomputed block runs its forward once more in front of its backward. rank_tensors.py has what each parallel strategy does with
parameters and gradients. A model of the user's own is replayed from its trace (traced_memory.py).
"""

from collections.abc import Sequence

from trainstep.config.parallel import RanksConfig, SyncConfig
from trainstep.config.run import RunConfig
from trainstep.costs.exchange import ROOT, ParameterSize
from trainstep.costs.strategies import BASELINE
from trainstep.costs.traced_step import TracedStep
from trainstep.plan.block_ops import model_ops
from trainstep.plan.live_tensors import COPY, LOGITS, TEMPORARY, LiveTensors, Tensor
from trainstep.plan.memory_terms import transformer_parameters
from trainstep.plan.model_ops import Block, Kept, Op, model_of, symbols_of, widths_of
from trainstep.plan.peak_memory import computed_run, exchange_of
from trainstep.plan.replicated_tensors import Setup
from trainstep.plan.step_replay import STEPS, StepMemory, StepReplay
from trainstep.plan.traced_memory import TracedReplay, stored_parameters


def alone(run: RunConfig) -> RanksConfig:
    """The config of a single process."""
    return RanksConfig(ranks=1, sync=SyncConfig(name=BASELINE), run=run)


def replay(config: RanksConfig, *, rank: int = 0, steps: int = STEPS, traced: TracedStep | None = None) -> StepMemory:
    """The memory of a rank's step on a GPU. ValueError for torch's strategies, and for a user's model without `traced`.

    `steps`: how many are replayed, at least 2; with 2 what is reserved is less exact, so a captured step has 3. `traced`: the trace
    of this config's model, which is replayed in the place of formulas.
    """
    exchange = exchange_of(config)
    if exchange is None:
        strategy = config.sync.strategy
        raise ValueError(
            f"sync: what {strategy.name} of torch holds is not known; take {strategy.counterpart}, ours of its kind"
        )
    run, live = config.run, LiveTensors()
    if traced is not None:
        parameters = stored_parameters(traced, run.precision)
        setup = Setup(config=config, exchange=exchange, parameters=parameters, rank=rank, live=live)
        return TracedReplay(setup, traced).run(steps)
    parameters = transformer_parameters(model_of(run), run.precision, run.ops)
    setup = Setup(config=config, exchange=exchange, parameters=parameters, rank=rank, live=live)
    return _Replay(setup).run(steps)


class _Replay(StepReplay):
    """One rank's steps. `_compute`: the run in the dtype that the model computes in, which fsdp may choose."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._run, self._live, self._ranks = self.run_config, self.live, self.ranks
        self._compute = computed_run(setup.config)
        self._symbols, self._widths = symbols_of(self._compute), widths_of(self._compute)
        self._ops = model_ops(self._compute)
        self._gradient_bytes = {p.name: p.numel * setup.exchange.compute_bytes(p) for p in setup.parameters}
        self._parameters = _by_unit(setup.parameters)
        self._kept: list[tuple[Op, list[Tensor]]] = []
        self._held: list[dict[Kept, list[Tensor]]] = []
        """What recomputed blocks keep, last block last."""
        self._passing: list[Tensor] = []
        """Temporary tensors of the op before."""
        self._stream: Tensor | None = None
        self._incoming: dict[str, Tensor] = {}
        """Gradients that the next op in backward uses up, beside that of the stream."""
        self._complete: list[tuple[ParameterSize, Tensor]] = []
        """Gradients that a compiled graph has made and not returned yet."""

    @property
    def batch_bytes(self) -> tuple[int, ...]:
        return (8 * self._run.batch_size * self._run.context,) * 2  # tokens and targets

    @property
    def buffers_bytes(self) -> tuple[int, ...]:
        return (Kept(name="cos", element_bytes=2, shape="S d").nbytes(self._symbols) // self._symbols["H"],) * 2

    def drop_kept(self) -> None:
        for _, tensors in self._kept:
            self._live.drop(tensors)
        for results in self._held:
            self._live.drop(tensor for tensors in results.values() for tensor in tensors)
        self._kept.clear()
        self._held.clear()

    # Forward.

    def forward(self, *, keeps: bool) -> None:
        # Autograd keeps copies of weights only in blocks that keep all. Autocast's cache has them until forward ends, but a
        # compiled block rounds its weights inside its graph, where there is no cache.
        copies: list[Tensor] = []
        ranks = self._ranks
        ranks.before_forward(ROOT)
        if not keeps:
            stream = Kept(name="stream", element_bytes=self._widths.stream, shape="N d")
            copies.append(self._new(stream, "residual stream"))
        self._forward_ops(self._ops.before, copies, keeps=keeps)
        for layer, block in enumerate(self._ops.blocks):
            unit = f"blocks.{layer}"
            ranks.before_forward(unit)
            if keeps and block.mode != "none":
                self._forward_recomputed(block, copies)
            else:
                self._forward_ops(block.ops, copies, keeps=keeps)
            ranks.after_forward(unit)
        self._forward_ops(self._ops.after, copies, keeps=keeps)
        ranks.forward_over(trains=self._run.mode in ("forward_backward", "step"))
        self._live.drop([*self._passing, *copies])
        self._passing = []

    def _forward_ops(self, ops: Sequence[Op], copies: list[Tensor], *, keeps: bool) -> None:
        frame, variables = "", list[Tensor]()
        for op in ops:
            self._forward_op(op)
            if keeps:
                continue
            _, tensors = self._kept.pop()
            copies += [tensor for tensor in tensors if tensor.category == COPY]
            self._passing += [tensor for tensor in tensors if tensor.category != COPY]
            if op.frame != frame:
                self._live.drop(variables)
                frame, variables = op.frame, []
            if frame:
                variables += self._passing
                self._passing = []
        self._live.drop(variables)

    def _forward_recomputed(self, block: Block, copies: list[Tensor]) -> None:
        """Run a block's forward and keep only what its mode keeps."""
        results: dict[Kept, list[Tensor]] = {}
        passing: list[Tensor] = []
        for op in block.ops:
            made = [(tensor, False) for tensor in op.forward] + [(tensor, True) for tensor in op.kept]
            self._workspace_for(op, "forward")
            temporary: list[Tensor] = []
            for tensor, of_kept in made:
                new = self._new(tensor, op.name) if of_kept else self._temporary(tensor)
                if block.keeps(tensor, of_kept=of_kept):
                    results.setdefault(tensor, []).append(new)
                elif tensor.category == COPY and self._run.compile == "none":
                    copies.append(new)
                else:
                    temporary.append(new)
            self._live.drop([*self._passing, *passing])
            self._passing, passing = [], temporary
        self._passing = passing
        self._held.append(results)

    def _forward_op(self, op: Op, given: dict[Kept, list[Tensor]] | None = None, *, is_last: bool = False) -> None:
        """`given`: tensors that are there already. `is_last`: recomputation stops when the op has its inputs."""
        temporaries = []
        for tensor in () if is_last else op.forward:
            temporaries.append(given[tensor].pop() if given and given.get(tensor) else self._temporary(tensor))
        self._workspace_for(op, "forward")
        kept = [
            given[tensor].pop() if given and given.get(tensor) else self._new(tensor, op.name) for tensor in op.kept
        ]
        self._live.drop(self._passing)
        self._passing = temporaries
        self._kept.append((op, kept))

    # Backward.

    def backward(self) -> None:
        self.workspace("backward")
        self._stream, self._incoming = None, {}
        self._ranks.before_backward(ROOT)
        after = [self._kept.pop() for _ in self._ops.after]
        self._backward_ops(after, self._parameters["after"])
        compiled = self._run.compile
        for layer, block in reversed([*enumerate(self._ops.blocks)]):
            unit = f"blocks.{layer}"
            self._ranks.before_backward(unit)
            if block.mode != "none":
                self._recompute(block)
            kept = [self._kept.pop() for _ in block.ops]
            self._backward_ops(kept, self._parameters[unit])
            if compiled == "block":
                self._hand_over()
        self._backward_ops([self._kept.pop() for _ in self._ops.before], self._parameters["before"])
        self._hand_over()
        self._live.drop([*self._incoming.values(), *([self._stream] if self._stream is not None else [])])

    def _recompute(self, block: Block) -> None:
        given = self._held.pop()
        for op in block.ops:
            self._forward_op(op, given, is_last=op is block.ops[-1])
        self._live.drop([*self._passing, *(tensor for tensors in given.values() for tensor in tensors)])
        self._passing = []

    def _backward_ops(self, kept: Sequence[tuple[Op, list[Tensor]]], parameters: Sequence[ParameterSize]) -> None:
        """`kept`: the ops in backward's order. `parameters`: theirs, in the module's order."""
        left = list(parameters)
        for op, tensors in kept:
            own = left[len(left) - len(op.weights) :]
            del left[len(left) - len(own) :]
            self._backward_op(op, tensors, own)

    def _backward_op(self, op: Op, kept: list[Tensor], parameters: Sequence[ParameterSize]) -> None:
        live = self._live
        made = [self._temporary(tensor) for tensor in op.backward]
        for parameter in parameters:
            self._gradient(parameter, op)
        if made:
            live.drop([self._incoming.pop(name) for name in op.takes or tuple(self._incoming)])
            live.drop(made[op.gives :])
            for number, tensor in enumerate(made[: op.gives]):
                # Two gradients with one name belong to two uses of one tensor.
                name = op.backward[number].name
                self._incoming[name if name not in self._incoming else f"{name} again"] = tensor
        live.drop(kept)
        if op.joins:
            gradients = [*self._incoming.values()]
            self._incoming.clear()
            if self._stream is None and gradients:
                self._stream, *gradients = gradients
            live.drop(gradients)

    def _gradient(self, parameter: ParameterSize, op: Op) -> None:
        live, nbytes = self._live, self._gradient_bytes[parameter.name]
        is_cast = self._widths.autocast and op.name != "embedding" and not op.joins  # a matmul's, made in 16 bits
        narrow = [live.new(nbytes // 2, TEMPORARY)] if is_cast else []
        gradient = live.new(nbytes, "gradients")
        live.drop(narrow)
        if self._run.compile == "none":
            self._ranks.gradient(parameter, gradient)
        else:
            self._complete.append((parameter, gradient))

    def _hand_over(self) -> None:
        """A compiled graph returns all its gradients at its end."""
        for parameter, gradient in self._complete:
            self._ranks.gradient(parameter, gradient)
        self._complete.clear()

    # Tensors.

    def _workspace_for(self, op: Op, thread: str) -> None:
        if op.weights and op.name != "embedding":
            self.workspace(thread)

    def _new(self, tensor: Kept, op: str) -> Tensor:
        return self._live.new(tensor.nbytes(self._symbols), tensor.category, op)

    def _temporary(self, tensor: Kept) -> Tensor:
        category = LOGITS if tensor.category == LOGITS else TEMPORARY
        return self._live.new(tensor.nbytes(self._symbols), category)


def _by_unit(parameters: Sequence[ParameterSize]) -> dict[str, list[ParameterSize]]:
    """Parameters of each block, and those `before` and `after` the blocks, in the module's order."""
    units: dict[str, list[ParameterSize]] = {"before": [], "after": []}
    place = "before"
    for parameter in parameters:
        if parameter.unit != ROOT:
            place = "after"
        units.setdefault(place if parameter.unit == ROOT else parameter.unit, []).append(parameter)
    return units

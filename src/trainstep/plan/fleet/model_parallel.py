"""The time of a step with tensor and pipeline parallelism, for published tables alone: trainstep itself has neither.

    predicted = model_parallel_time(step, topology, calibration)
    predicted.step_s, predicted.parts_s          # parts: compute, tensor-parallel messages, bubble, ...

t, p, d: degrees of tensor, pipeline and data parallelism, n = t p d GPUs; v: virtual stages of a rank; m: micro-batches of a
pipeline; L: layers. A rank's kernels are those of L / p blocks, of which tensor parallelism divides matrices, heads and vocabulary
by t; norms and residuals stay whole (M. Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3). Then

    micro-batch = forward + backward of the slowest stage, which has the head
                  + L / p x 2 passes x 2 all-reduces of N d 2 bytes among t ranks of a node (3 passes if blocks are recomputed)
                  + 2 v sends of N d 2 / t bytes to the next stage and back, over the network
    step        = micro-batch (m + (p - 1) / v) + all-reduce of the rank's gradients among d ranks, in fp32 + update

(D. Narayanan et al., arXiv:2104.04473, sections 2.2, 2.3 and 4.1, of which (p - 1) / (v m) is the bubble.)

`overlaps` is a run as Megatron-LM's --tp-comm-overlap, --overlap-grad-reduce and --overlap-param-gather have it: tensor-parallel
messages and sends are hidden; gradients are reduced to shards, in fp32, and 16-bit parameters gathered, a virtual stage at a time,
while the others compute: with several virtual stages each works on p micro-batches before the next has its turn, so that the last p
micro-batches' backward has all stages' reductions, and the first p ones' forward their gathers. Each rank updates 1 / d.

What is left out: unequal stages but for the head, and the sum of gradients of tied embeddings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainstep.config.model import ModelConfig
from trainstep.config.parallel import RanksConfig, SyncConfig
from trainstep.config.run import Phase, RunConfig
from trainstep.costs.strategies import BASELINE
from trainstep.plan.fleet.collective_time import collective_s
from trainstep.plan.fleet.stragglers import waiting_share
from trainstep.plan.fleet.streams import Task, simulate
from trainstep.plan.fleet.topology import Group, Topology
from trainstep.plan.time.calibration import Calibration
from trainstep.plan.time.kernels import ATTENTION_KINDS, Kernel, Kind
from trainstep.plan.time.step_kernels import StepKernels, step_kernels
from trainstep.plan.time.step_time import step_time

_WIDE = ("rotary", "attention projections", "attention values")
"""Ops whose traffic covers only the heads that a rank has."""


@dataclass(frozen=True, kw_only=True)
class ModelParallelStep:
    """`run`: of the whole model, with a micro-batch's sequences. `global_batch`: sequences of a step."""

    run: RunConfig
    gpus: int
    tensor: int
    pipeline: int
    virtual_stages: int
    global_batch: int
    overlaps: bool = False

    @property
    def model(self) -> ModelConfig:
        assert isinstance(self.run.model, ModelConfig)
        return self.run.model

    @property
    def data(self) -> int:
        """Degree of data parallelism."""
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.data * self.run.batch_size)


@dataclass(frozen=True, kw_only=True)
class ModelParallelTime:
    """Seconds of a step by part."""

    parts_s: Mapping[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.parts_s.values())


def model_parallel_time(step: ModelParallelStep, topology: Topology, calibration: Calibration) -> ModelParallelTime:
    """The step's time. ValueError where degrees do not divide the GPUs, layers, heads or batch."""
    _check(step)
    stage = _slowest_stage(step, calibration)
    compute_s, update_s = stage.forward_s + stage.backward_s, stage.update_s
    passes = 3 if step.run.recompute == "block" else 2
    within = Group(ranks=step.tensor, per_node=step.tensor)
    activation_bytes = 2 * step.run.batch_size * step.run.context * step.model.d_model
    layers = step.model.layers // step.pipeline
    tensor_s = layers * passes * 2 * collective_s(topology, "all_reduce", activation_bytes, within)
    sends_s = 0.0
    if step.pipeline > 1:
        rail = topology.network.bytes_per_s / topology.gpus_per_node
        sends_s = 2 * step.virtual_stages * (topology.network.latency_s + activation_bytes / step.tensor / rail)
    gradients_s = _gradients_s(step, topology)
    if step.overlaps:
        tensor_s = sends_s = 0.0
        gradients_s = _overlapped_s(step, topology, stage)
        update_s /= step.data
    micro_batch_s = compute_s + tensor_s + sends_s
    bubble_s = micro_batch_s * (step.pipeline - 1) / step.virtual_stages
    many = step.micro_batches
    parts = {
        "compute": many * compute_s,
        "tensor-parallel messages": many * tensor_s,
        "sends between stages": many * sends_s,
        "bubble": bubble_s,
        "gradients": gradients_s,
        "update": update_s,
    }
    parts["waiting for the slowest rank"] = waiting_share(step.gpus, topology.spread) * parts["compute"]
    return ModelParallelTime(parts_s=parts)


def _check(step: ModelParallelStep) -> None:
    wholes = {
        "gpus": (step.gpus, step.tensor * step.pipeline),
        "layers": (step.model.layers, step.pipeline),
        "heads": (step.model.heads, step.tensor),
        "global_batch": (step.global_batch, step.data * step.run.batch_size),
    }
    for name, (whole, parts) in wholes.items():
        if parts == 0 or whole % parts:
            raise ValueError(f"{name}: {whole} cannot be divided by {parts}, as degrees of parallelism would")


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """Seconds of a micro-batch's passes and of the update."""

    forward_s: float
    backward_s: float
    update_s: float


def _slowest_stage(step: ModelParallelStep, calibration: Calibration) -> _Stage:
    """The stage with the head."""
    model = replace(step.model, layers=step.model.layers // step.pipeline)
    run = replace(step.run, model=model, accumulation=1)
    config = RanksConfig(ranks=1, sync=SyncConfig(name=BASELINE), run=run)

    def kernels_of(run: RunConfig, **options: Any) -> StepKernels:
        return _divided(step_kernels(run, **options), step.tensor)

    time = step_time(config, calibration, kernels_of=kernels_of)

    def seconds(phase: Phase) -> float:
        embedding_s = sum(line.time_s for line in time.lines if line.op == "embedding" and line.phase == phase)
        return time.device[phase].time_s - (embedding_s if step.pipeline > 1 else 0.0)

    return _Stage(
        forward_s=seconds(Phase.FORWARD),
        backward_s=seconds(Phase.BACKWARD),
        update_s=time.device[Phase.OPTIMIZER].time_s,
    )


def _divided(kernels: StepKernels, tensor: int) -> StepKernels:
    """A rank's kernels: matrices and heads divided among `tensor` ranks."""
    symbols = dict(kernels.symbols)
    for name in ("f", "H", "V", "P", "W"):
        if name in symbols:
            symbols[name] = -(-symbols[name] // tensor)
    symbols["k"] = symbols["d"] // tensor

    def divided(kernel: Kernel) -> Kernel:
        if kernel.kind in ATTENTION_KINDS or "d" not in kernel.shape.split():
            return kernel
        if kernel.kind == Kind.MATMUL and kernel.op == "attention projections":
            return replace(kernel, shape=_one_side_divided(kernel.shape))
        if kernel.op in _WIDE:
            return replace(kernel, shape=kernel.shape.replace("N d", "N k"))
        return kernel

    return replace(
        kernels,
        forward=tuple(divided(kernel) for kernel in kernels.forward),
        backward=tuple(divided(kernel) for kernel in kernels.backward),
        symbols=symbols,
    )


def _one_side_divided(shape: str) -> str:
    """`N / 3 d / d` as `N / 3 k / d`: the queries', keys' and values' side, or any if both are the stream's width."""
    sides = shape.split(" / ")
    wide = next((side for side in sides if side == "3 d"), None) or next(side for side in sides if side == "d")
    sides[sides.index(wide)] = wide.replace("d", "k")
    return " / ".join(sides)


def _replicas(step: ModelParallelStep, topology: Topology) -> Group:
    """The ranks that have the same parameters. They are t p ranks apart, so a node has one or several of them."""
    per_node = min(step.data, max(1, topology.gpus_per_node // (step.tensor * step.pipeline)))
    return Group(ranks=step.data, per_node=per_node, at_once=topology.gpus_per_node // per_node)


def _own_parameters(step: ModelParallelStep) -> float:
    return step.model.parameters / (step.tensor * step.pipeline)


def _gradients_s(step: ModelParallelStep, topology: Topology) -> float:
    """The all-reduce of a rank's gradients in fp32."""
    return collective_s(topology, "all_reduce", 4 * _own_parameters(step), _replicas(step, topology))


def _overlapped_s(step: ModelParallelStep, topology: Topology, stage: _Stage) -> float:
    """What reductions and gathers add, a virtual stage at a time; without virtual stages a layer at a time of one micro-batch."""
    parts = step.virtual_stages if step.virtual_stages > 1 else step.model.layers // step.pipeline
    batches = step.pipeline if step.virtual_stages > 1 else 1
    group, numel = _replicas(step, topology), _own_parameters(step) / parts
    backward_s, forward_s = batches * stage.backward_s, batches * stage.forward_s
    reducing: list[Task] = []
    gathering: list[Task] = []
    for _ in range(parts):
        reducing.append(Task(stream="compute", work_s=backward_s / parts))
        reduction_s = collective_s(topology, "reduce_scatter", 4 * numel, group)
        reducing.append(Task(stream="messages", work_s=reduction_s, link="network", after=(len(reducing) - 1,)))
        gathering.append(
            Task(stream="messages", work_s=collective_s(topology, "all_gather", 2 * numel, group), link="network")
        )
        gathering.append(Task(stream="compute", work_s=forward_s / parts, after=(len(gathering) - 1,)))
    reduced_s = max(ran.end_s for ran in simulate(reducing)) - backward_s
    gathered_s = max(ran.end_s for ran in simulate(gathering)) - forward_s
    return reduced_s + gathered_s

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

(D. Narayanan et al., arXiv:2104.04473, sections 2.2, 2.3 and 4.1, of which (p - 1) / (v m) is the bubble.) `overlaps` is a run that
hides tensor-parallel messages, sends, and all of the gradients' all-reduce but what is longer than a micro-batch. What is left out:
unequal stages but for the head, and the sum of gradients of tied embeddings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainstep.config.model import ModelConfig
from trainstep.config.parallel import RanksConfig, SyncConfig
from trainstep.config.run import Phase, RunConfig
from trainstep.costs.strategies import YARDSTICK
from trainstep.plan.fleet.collective_time import collective_s
from trainstep.plan.fleet.stragglers import waiting_share
from trainstep.plan.fleet.topology import Group, Topology
from trainstep.plan.time.calibration import Calibration
from trainstep.plan.time.kernels import ATTENTION_KINDS, Kernel, Kind
from trainstep.plan.time.step_kernels import StepKernels, step_kernels
from trainstep.plan.time.step_time import StepTime, step_time

_WIDE = ("rotary", "attention projections", "attention values")
"""Ops whose traffic is of the heads that a rank has."""


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
    """The step's time. ValueError where degrees do not divide what they divide."""
    _check(step)
    compute_s, update_s = _slowest_stage(step, calibration)
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
        gradients_s = max(0.0, gradients_s - compute_s)
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


def _slowest_stage(step: ModelParallelStep, calibration: Calibration) -> tuple[float, float]:
    """Seconds of forward and backward of a micro-batch, and of the update, on the stage with the head."""
    model = replace(step.model, layers=step.model.layers // step.pipeline)
    run = replace(step.run, model=model, accumulation=1)
    config = RanksConfig(ranks=1, sync=SyncConfig(name=YARDSTICK), run=run)

    def kernels_of(run: RunConfig, **options: object) -> StepKernels:
        return _divided(step_kernels(run, **options), step.tensor)  # type: ignore[arg-type]

    time = step_time(config, calibration, kernels_of=kernels_of)
    compute_s = sum(time.device[phase].time_s for phase in (Phase.FORWARD, Phase.BACKWARD))
    if step.pipeline > 1:
        compute_s -= _time_of(time, ("embedding",))
    return compute_s, time.device[Phase.OPTIMIZER].time_s


def _time_of(time: StepTime, ops: Sequence[str]) -> float:
    return sum(line.time_s for line in time.lines if line.op in ops)


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


def _gradients_s(step: ModelParallelStep, topology: Topology) -> float:
    """The all-reduce of a rank's gradients among its replicas, which are t ranks apart on a node, or on other nodes."""
    parameters = step.model.parameters / (step.tensor * step.pipeline)
    per_node = max(1, topology.gpus_per_node // (step.tensor * step.pipeline)) if step.data > 1 else 1
    per_node = min(per_node, step.data)
    group = Group(ranks=step.data, per_node=per_node, at_once=topology.gpus_per_node // per_node)
    return collective_s(topology, "all_reduce", 4 * parameters, group)

"""The kernels of a traced step of any model, eager, from its operators: products, attention, and what each other one moves.

The kind of an operator that only moves bytes follows from its name, or else from whether it reads and writes in order. A
kernel that does not is not vectorised, so that it takes as long for 16 bits as for 32. Log-softmax and the loss are one kind, timed
together.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

from trainstep.config.machine import matmul_dtype
from trainstep.config.parallel import RanksConfig
from trainstep.config.run import Phase, RunConfig
from trainstep.costs.attention import attention_backward_flops, attention_flops
from trainstep.costs.traced_step import TracedStep, Work
from trainstep.plan.time.calibration import Calibration
from trainstep.plan.time.kernels import Kernel, Kind, matmul, traffic
from trainstep.plan.time.step_kernels import StepKernels, parameter_kernels
from trainstep.plan.time.step_time import StepTime, step_time

_KINDS = {
    "mean": Kind.ROWS,
    "var_mean": Kind.ROWS,
    "native_layer_norm": Kind.ROWS,
    "_fused_rms_norm": Kind.ROWS,
    "native_layer_norm_backward": Kind.COLUMNS,
    "_fused_rms_norm_backward": Kind.COLUMNS,
    "_softmax": Kind.SOFTMAX,
    "_log_softmax": Kind.LOSS,
    "_log_softmax_backward_data": Kind.LOSS_BACKWARD,
    "embedding_dense_backward": Kind.EMBEDDING_BACKWARD,
    "rms_norm": Kind.FUSED,
    "rms_norm_backward": Kind.FUSED_COLUMNS,
    "add_rms_norm": Kind.FUSED,
    "rotary": Kind.FUSED,
    "rotary_split": Kind.FUSED,
    "rotary_join": Kind.FUSED,
    "swiglu": Kind.FUSED,
    "swiglu_backward": Kind.FUSED,
}
_ACCESS = {"strided": Kind.STRIDED, "broadcast": Kind.BROADCAST}
_UNVECTORISED_BYTES = 8
"""Least bytes per element that a kernel is counted with which does not read and write in order."""
_IN_THE_LOSS = ("nll_loss_forward", "nll_loss_backward")
"""Operators that are timed with log-softmax."""
_LOSS_BACKWARD_BYTES = 16 / 12
"""Bytes that the loss moves in backward, with its gradient's zeros, over those of log-softmax's backward alone."""
_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


def traced_time(
    config: RanksConfig, calibration: Calibration, traced: TracedStep, *, has_nodes: bool = False
) -> StepTime:
    """The time of a traced step on one GPU. ValueError for several, and for a compiled one: what is fused is not in the trace."""
    if has_nodes or (config.ranks > 1 and config.sync.strategy.communicates):
        raise ValueError(
            "ranks: the time of your own model is planned for one GPU alone, its memory for several too; take --ranks 1"
        )
    if config.run.compile != "none":
        raise ValueError(
            "compile: which ops of your own model are fused is not known; take --compile none, or measure it: trainstep bench"
        )
    return step_time(config, calibration, kernels_of=partial(traced_kernels, traced))


def traced_kernels(
    traced: TracedStep, run: RunConfig, *, compute: RunConfig | None = None, **options: Any
) -> StepKernels:
    """The kernels of a traced micro-batch, and of the update of its parameters. `options`: as of step_kernels.

    `compute` is the run that was traced, so it says nothing more.
    """
    numel = sum(parameter.numel for parameter in traced.parameters if parameter.trained)
    tensors = sum(parameter.trained for parameter in traced.parameters)
    symbols = _attention_symbols(traced)
    unit_flops = _causal_flops(symbols)
    own = parameter_kernels(run, numel, tensors, **options)
    passes = {
        phase: tuple(
            kernel for work in traced.work if work.phase == phase for kernel in _kernels(work, run, unit_flops)
        )
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    flops = sum(work.times * _model_flops(work) for work in traced.work if work.phase == Phase.FORWARD)
    trains = run.mode in ("forward_backward", "step")
    return StepKernels(
        forward=passes[Phase.FORWARD],
        backward=(*passes[Phase.BACKWARD], *own.backward),
        added=own.added,
        optimizer=own.optimizer,
        symbols={**own.symbols, **symbols},
        tensors=tensors,
        model_flops=run.accumulation * (3 if trains else 1) * flops,
    )


def _kernels(work: Work, run: RunConfig, unit_flops: Mapping[Kind, int]) -> Iterator[Kernel]:
    if work.kind == "matmul":
        batch, m, n, k = work.shape
        shape = f"{m} / {n} / {k}" if batch == 1 else f"{m} / {n} / {k} x {batch}"
        yield matmul(work.module, shape, _DTYPES.get(work.dtype, matmul_dtype(run.precision)), work.times)
    elif work.kind == "attention":
        kind = _attention_kind(work)
        count = max(1, round(work.times * work.flops / unit_flops[kind]))
        bytes_ = 2 if work.dtype in _DTYPES else 4
        yield Kernel(op=_implementation(work.op), kind=kind, shape="B H S S D", element_bytes=bytes_, count=count)
    elif work.op not in _IN_THE_LOSS:
        kind, nbytes = _kind(work), work.read_bytes + work.written_bytes
        if kind == Kind.LOSS_BACKWARD:
            nbytes = round(nbytes * _LOSS_BACKWARD_BYTES)
        elif kind in _ACCESS.values():
            nbytes = max(nbytes, _UNVECTORISED_BYTES * prod(work.shape))
        yield traffic(work.module, kind, nbytes, "1", work.times)


def _kind(work: Work) -> Kind:
    if work.op in _KINDS:
        return _KINDS[work.op]
    if work.op == "sum":
        return Kind.ROWS if work.shape and work.shape[-1] == 1 else Kind.COLUMNS
    if work.op == "_to_copy" and work.written_bytes > work.read_bytes:
        return Kind.WIDENED
    return _ACCESS.get(work.access, Kind.CONTIGUOUS)


def _model_flops(work: Work) -> int:
    """FLOPs of forward alone: the fused head computes its gradients in forward, too."""
    return work.flops // 3 if work.op == "linear_cross_entropy" else work.flops


def _attention_kind(work: Work) -> Kind:
    """The kind by the operator's name, since a recomputed block runs attention's forward in backward."""
    return Kind.ATTENTION_BACKWARD if work.op.endswith("_backward") else Kind.ATTENTION_FORWARD


def _implementation(op: str) -> str:
    """RunConfig.attention's name for an operator."""
    return "sdpa" if op.startswith("_scaled_dot_product") else "trainstep"


def _attention_symbols(traced: TracedStep) -> dict[str, int]:
    """The shape of the first attention; nothing without attention."""
    first = next((work for work in traced.work if work.kind == "attention"), None)
    if first is None:
        return {}
    batch, heads, _, queries, keys, width = first.shape
    return {"B": batch, "H": heads, "S": round((queries * keys) ** 0.5), "D": width}


def _causal_flops(symbols: Mapping[str, int]) -> dict[Kind, int]:
    """The FLOPs of one causal attention of that shape: other masks and shapes count as parts or multiples of it."""
    if not symbols:
        return {}
    shape = symbols["B"] * symbols["H"], symbols["S"], symbols["S"], symbols["D"]
    return {
        Kind.ATTENTION_FORWARD: attention_flops(*shape, causal=True),
        Kind.ATTENTION_BACKWARD: attention_backward_flops(*shape, causal=True),
    }

"""The kernels of a whole step by phase: embedding, blocks, head and loss, recomputation, gradients that add up, the update."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainstep.config.machine import matmul_dtype
from trainstep.config.run import RunConfig
from trainstep.costs.element_wise import chunk_tokens
from trainstep.plan.memory_terms import transformer_parameters
from trainstep.plan.model_ops import check_known, model_of, modes_of, symbols_of, widths_of
from trainstep.plan.time.block_kernels import block_passes, linear, plain_norm
from trainstep.plan.time.kernels import ATTENTION_KINDS, Kernel, Kind, matmul, traffic

_PASSES_OF_FOREACH = 80
"""Bytes of a parameter and moments in fp32 that AdamW's foreach and loop read and write in their eight passes."""


@dataclass(frozen=True, kw_only=True)
class StepKernels:
    """The kernels of a micro-batch's passes and of the update. A block's are listed once with `layers` as their count."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    added: tuple[Kernel, ...]
    """Kernels that add the gradients of a micro-batch after the first to those before."""
    optimizer: tuple[Kernel, ...]
    symbols: dict[str, int]
    tensors: int
    """Number of parameters."""
    model_flops: int | None = None
    """FLOPs of the step's matmuls and attention; None for the built-in model, which has a formula."""


def step_kernels(
    run: RunConfig,
    *,
    updated_share: float = 1.0,
    copies_gradients: bool = False,
    summing_ranks: int = 0,
    compute: RunConfig | None = None,
) -> StepKernels:
    """The kernels of this run. ValueError for what has no formulas.

    `updated_share`: share of the parameters that this rank updates. `copies_gradients`: gradients are copied into flat buffers,
    from which they are sent. `summing_ranks`: number of ranks that average gradients by copies, so that each adds up its part
    itself. `compute`: the run in the precision that the model computes in, where that is not the parameters'.
    """
    check_known(run)
    model = model_of(run)
    compute = run if compute is None else compute
    block = block_passes(compute)
    again = [
        replace(kernel, count=blocks * kernel.count)
        for mode, blocks in Counter(modes_of(run)).items()
        for kernel in _again(block.forward, mode)
    ]
    forward, backward = _around(compute)
    layers = model.layers
    parameters = transformer_parameters(model, run.precision, run.ops)
    numel = sum(parameter.numel for parameter in parameters)
    own = parameter_kernels(
        run,
        numel,
        len(parameters),
        updated_share=updated_share,
        copies_gradients=copies_gradients,
        summing_ranks=summing_ranks,
    )
    return StepKernels(
        forward=(*(replace(kernel, count=layers * kernel.count) for kernel in block.forward), *forward),
        backward=(
            *(replace(kernel, count=layers * kernel.count) for kernel in block.backward),
            *again,
            *backward,
            *own.backward,
        ),
        added=own.added,
        optimizer=own.optimizer,
        symbols={**symbols_of(run), "D": model.head_dim, **own.symbols},
        tensors=len(parameters),
    )


@dataclass(frozen=True, kw_only=True)
class ParameterKernels:
    """What depends on a model's parameters alone. `backward`: copies and sums of gradients; the rest as in StepKernels."""

    backward: tuple[Kernel, ...]
    added: tuple[Kernel, ...]
    optimizer: tuple[Kernel, ...]
    symbols: dict[str, int]


def parameter_kernels(
    run: RunConfig,
    numel: int,
    tensors: int,
    *,
    updated_share: float = 1.0,
    copies_gradients: bool = False,
    summing_ranks: int = 0,
) -> ParameterKernels:
    """The kernels over `numel` parameters in so many tensors. The options are those of step_kernels."""
    weight, backward = widths_of(run).weight, list[Kernel]()
    symbols = {"P": round(numel * updated_share), "W": numel}
    if copies_gradients:
        backward += _in_pieces([traffic("gradients", Kind.CONTIGUOUS, 2 * weight, "W")], tensors)
    if summing_ranks:
        symbols["M"] = numel // summing_ranks
        backward += [traffic("sums of messages", Kind.CONTIGUOUS, (summing_ranks + 1) * weight, "M")]
    return ParameterKernels(
        backward=tuple(backward),
        added=tuple(_in_pieces([traffic("gradients", Kind.CONTIGUOUS, 3 * weight, "W")], tensors)),
        optimizer=tuple(_update(run, weight, tensors)) if run.mode == "step" else (),
        symbols=symbols,
    )


def _again(forward: Sequence[Kernel], mode: str) -> Iterator[Kernel]:
    """The kernels of forward that a block's backward runs once more. Block: all; selective: neither matmuls nor attention; narrow:
    also matmuls that widen."""
    for kernel in forward:
        if mode == "none" or (mode == "selective" and _is_result(kernel)):
            continue
        if mode == "narrow" and _is_result(kernel) and not _widens(kernel):
            continue
        yield kernel


def _is_result(kernel: Kernel) -> bool:
    return kernel.kind == Kind.MATMUL or kernel.kind in ATTENTION_KINDS


def _widens(kernel: Kernel) -> bool:
    return kernel.kind == Kind.MATMUL and kernel.shape in ("N / 3 d / d", "N / f / d", "N / 2 f / d")


def _around(run: RunConfig) -> tuple[list[Kernel], list[Kernel]]:
    """The kernels before and after the blocks, in forward and in backward."""
    widths, dtype = widths_of(run), matmul_dtype(run.precision)
    e, s = widths.matmul, widths.stream
    forward = [traffic("embedding", Kind.CONTIGUOUS, 2 * s, "N d")]
    backward = [traffic("embedding", Kind.EMBEDDING_BACKWARD, 2 * s, "N d")]
    if run.ops == "fused":
        tokens = min(chunk_tokens(model_of(run).vocab_size, e), run.batch_size * run.context)
        chunks = -(-run.batch_size * run.context // tokens)
        casts = [traffic("loss", Kind.CONTIGUOUS, 6, "V d")] if widths.autocast else []
        forward += [
            traffic("norm", Kind.FUSED, 2 * s + 2 * e, "N d"),
            *casts,
            matmul("head", f"{tokens} / V / d", dtype, chunks),
            matmul("head", f"{tokens} / d / V", dtype, chunks),
            matmul("head", f"V / d / {tokens}", dtype, chunks),
            traffic("loss", Kind.FUSED, 3 * e, f"{tokens} V", chunks),
            traffic("loss", Kind.CONTIGUOUS, 2 * e if e < 4 and run.loss_sum_dtype == "own" else 8 + e, "V d", chunks),
        ]
        backward += [
            traffic("norm", Kind.FUSED_COLUMNS, 3 * s + 2 * e, "N d"),
            traffic("loss", Kind.CONTIGUOUS, s + e, "N d"),
            traffic("loss", Kind.CONTIGUOUS, 4 + e, "V d"),
        ]
        return forward, backward
    whole = run.compile == "model"
    head, head_back = linear("head", "N", "V", "d", run, widths, kind=Kind.COMPILED if whole else Kind.CONTIGUOUS)
    if whole:
        return (
            [
                *forward,
                traffic("norm", Kind.COMPILED, s + e, "N d"),
                *head,
                traffic("loss", Kind.COMPILED, 2 * e, "N V"),
            ],
            [
                *backward,
                traffic("norm", Kind.COMPILED_COLUMNS, 3 * s + e, "N d"),
                *head_back,
                traffic("loss", Kind.COMPILED, 2 * e, "N V"),
            ],
        )
    norm, norm_back = plain_norm(widths)
    rounded = [traffic("head", Kind.CONTIGUOUS, 6, "N d")] if widths.autocast else []
    widened = [traffic("loss", Kind.WIDENED, 6, "N V")] if e < 4 else []
    narrowed = [traffic("loss", Kind.CONTIGUOUS, 6, "N V")] if e < 4 else []
    return (
        [*forward, *norm, *rounded, *head, *widened, traffic("loss", Kind.LOSS, 8, "N V")],
        [*backward, *norm_back, *head_back, *rounded, *narrowed, traffic("loss", Kind.LOSS_BACKWARD, 16, "N V")],
    )


def _update(run: RunConfig, weight: int, tensors: int) -> Iterator[Kernel]:
    """Unscaling, clipping and AdamW. P: parameters that this rank updates. In one pass AdamW reads parameter, gradient and moments,
    and writes all but the gradient; bf16_master has its own fp32 copy, and writes the weight beside it."""
    if run.precision == "fp16_autocast":
        yield traffic("unscale", Kind.CONTIGUOUS, 2 * weight, "P")
    if run.clip_grad_norm is not None:
        yield traffic("clipping", Kind.ROWS, weight, "P")
        yield traffic("clipping", Kind.CONTIGUOUS, 2 * weight, "P")
    moments = 4 if run.precision == "bf16_master" else weight
    element_bytes = 7 * weight if run.precision != "bf16_master" else 6 * moments + 2 * weight
    if run.adamw in ("foreach", "loop"):
        passes = [traffic("adamw", Kind.CONTIGUOUS, _PASSES_OF_FOREACH * moments / 4 / 8, "P", 8)]
        yield from _in_pieces(passes, tensors) if run.adamw == "loop" else passes
        return
    yield Kernel(op=run.adamw, kind=Kind.OPTIMIZER, shape="P", element_bytes=element_bytes)


def _in_pieces(kernels: Sequence[Kernel], tensors: int) -> Iterator[Kernel]:
    """The kernels run for each tensor by itself: one launch for each, the same bytes in all."""
    for kernel in kernels:
        yield replace(kernel, element_bytes=kernel.element_bytes / max(tensors, 1), count=kernel.count * tensors)

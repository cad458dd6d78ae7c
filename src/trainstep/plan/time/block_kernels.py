"""The kernels of a block's forward and backward: as plain PyTorch, fused, or compiled by Inductor.

Plain ops were read from training/transformer.py, ops/reference.py and autograd's formulas; their numbers and sizes are those of
results/h200/profile.jsonl (fp32, table kernels). Compiled blocks are those of results/h200/profile_captured.jsonl. What only
autocast or 16-bit weights add, which no profile has, follows from the dtypes of the same ops.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.config.machine import matmul_dtype
from trainstep.config.run import RunConfig
from trainstep.plan.model_ops import TILED, Widths, widths_of
from trainstep.plan.time.kernels import Kernel, Kind, matmul, times, traffic

Pass = list[Kernel]
_ATTENTION_WEIGHTS = (("attention projections", "3 d", "d"), ("attention projections", "d", "d"))
"""The op, n and k of matmuls with attention's weights."""
_SMALL = 4.0
_UNVECTORISED = 8
"""Bytes per element that an unvectorised kernel is counted with: it takes as long for 16 bits as for 32."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The kernels of a part of the model."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]


def block_passes(run: RunConfig) -> Passes:
    """The kernels of a block."""
    widths, dtype = widths_of(run), matmul_dtype(run.precision)
    if run.ops == "fused":
        forward, backward = _fused(run, widths, dtype)
    elif run.compile != "none":
        forward, backward = _compiled(run, widths, dtype)
    else:
        forward, backward = _eager(run, widths, dtype)
    return Passes(forward=tuple(forward), backward=tuple(backward))


def linear(op: str, m: str, n: str, k: str, run: RunConfig, widths: Widths, *, kind: Kind) -> tuple[Pass, Pass]:
    """y = x W^T with x (m, k) and W (n, k): forward, and both products of backward. Autocast rounds the weight, and widens its
    gradient."""
    dtype = matmul_dtype(run.precision)
    rounded = [traffic(op, kind, 6, f"{n} {k}")] if widths.autocast else []
    widened = [traffic(op, _widening(kind), 6, f"{n} {k}")] if widths.autocast else []
    forward = [*rounded, matmul(op, f"{m} / {n} / {k}", dtype)]
    return forward, [matmul(op, f"{m} / {k} / {n}", dtype), matmul(op, f"{n} / {k} / {m}", dtype), *widened]


def _widening(kind: Kind) -> Kind:
    return Kind.WIDENED if kind == Kind.CONTIGUOUS else kind


def plain_norm(widths: Widths, op: str = "norm") -> tuple[Pass, Pass]:
    """ops/reference.py rms_norm: in fp32, 6 kernels forward and 16 backward; from and to 16 bits a cast more each."""
    casts = [traffic(op, kind, 6, "N d") for kind in (Kind.WIDENED, Kind.CONTIGUOUS)] if widths.stream < 4 else []
    forward = [
        *casts,
        traffic(op, Kind.CONTIGUOUS, 8, "N d"),  # x^2
        traffic(op, Kind.ROWS, 4, "N d"),  # its mean
        traffic(op, Kind.CONTIGUOUS, _SMALL, "N", 2),  # + eps, 1 / sqrt
        traffic(op, Kind.BROADCAST, 8, "N d", 2),  # x / rms, times the weight
    ]
    backward = [
        *casts,
        traffic(op, Kind.BROADCAST, 8, "N d", 2),  # dy w, and its product with 1 / rms
        traffic(op, Kind.CONTIGUOUS, 12, "N d", 2),  # dy x / rms, and that with x
        traffic(op, Kind.COLUMNS, 4, "N d"),
        traffic(op, Kind.ROWS, 4, "N d"),
        traffic(op, Kind.CONTIGUOUS, _SMALL, "N", 5),
        traffic(op, Kind.BROADCAST, 4, "N d"),  # the mean's gradient, repeated
        traffic(op, Kind.CONTIGUOUS, 8, "N d"),  # 2 x
        traffic(op, Kind.CONTIGUOUS, 12, "N d"),
        traffic(op, Kind.CONTIGUOUS, 12, "N d", 2),  # both parts of dx, and the residual stream's
    ]
    return forward, backward


def _eager(run: RunConfig, widths: Widths, dtype: str) -> tuple[Pass, Pass]:
    e, wide = widths.matmul, widths.autocast
    norm, norm_back = plain_norm(widths)
    parts = [
        _linear(run, widths, "attention projections", "3 d", "d", casts=1),
        _plain_rotary(widths),
        plain_attention(run, widths, dtype) if run.attention not in TILED else tiled_attention(run, widths),
        _linear(run, widths, "attention projections", "d", "d"),
        ([traffic("residual stream", Kind.CONTIGUOUS, widths.stream * 2 + e, "N d")], _narrowed(wide)),
        (norm, norm_back),
        _linear(run, widths, "mlp", "f", "d", casts=1),
        _linear(run, widths, "mlp", "f", "d", casts=1),
        (
            [traffic("mlp", Kind.CONTIGUOUS, 2 * e, "N f"), traffic("mlp", Kind.CONTIGUOUS, 3 * e, "N f")],
            [traffic("mlp", Kind.CONTIGUOUS, 3 * e, "N f", 3), traffic("mlp", Kind.CONTIGUOUS, 12 if wide else 3 * e, "N d")],
        ),
        _linear(run, widths, "mlp", "d", "f"),
        ([traffic("residual stream", Kind.CONTIGUOUS, widths.stream * 2 + e, "N d")], _narrowed(wide)),
    ]  # fmt: skip
    copies = [  # of attention's output, and of the gradients of q, k and v
        [traffic("attention projections", Kind.STRIDED, _UNVECTORISED, "N d", count)] for count in (1, 3)
    ]
    return _joined((norm, norm_back), *parts, (copies[0], copies[1]))


def _joined(*parts: tuple[Pass, Pass]) -> tuple[Pass, Pass]:
    """The kernels of all parts' passes."""
    return [kernel for ahead, _ in parts for kernel in ahead], [kernel for _, back in parts for kernel in back]


def _linears(
    run: RunConfig, widths: Widths, kind: Kind, shapes: Sequence[tuple[str, str, str]]
) -> list[tuple[Pass, Pass]]:
    """The matmuls of a block's weights, of which `shapes` has the op, n and k."""
    return [linear(op, "N", n, k, run, widths, kind=kind) for op, n, k in shapes]


def _linear(run: RunConfig, widths: Widths, op: str, n: str, k: str, *, casts: int = 0) -> tuple[Pass, Pass]:
    """`linear` in eager mode. `casts`: how often autocast rounds the input and widens its gradient."""
    forward, backward = linear(op, "N", n, k, run, widths, kind=Kind.CONTIGUOUS)
    if not (widths.autocast and casts):
        return forward, backward
    rounded, widened = (traffic(op, kind, 6, f"N {k}", casts) for kind in (Kind.CONTIGUOUS, Kind.WIDENED))
    return [rounded, *forward], [*backward, widened]


def _narrowed(autocast: bool) -> Pass:
    """The stream's gradient as the matmul's dtype."""
    return [traffic("residual stream", Kind.CONTIGUOUS, 6, "N d")] if autocast else []


def _plain_rotary(widths: Widths) -> tuple[Pass, Pass]:
    """ops/reference.py rotary on q and k, in fp32: products of half the elements, which lie in pairs."""
    casts = [traffic("rotary", Kind.STRIDED, _UNVECTORISED, "N d", 2)] if widths.matmul < 4 else []
    back = [traffic("rotary", Kind.CONTIGUOUS, 6, "N d", 2)] if widths.matmul < 4 else []
    forward = [
        traffic("rotary", Kind.STRIDED, 4, "N d", 8),
        traffic("rotary", Kind.CONTIGUOUS, 6, "N d", 4),
        traffic("rotary", Kind.STRIDED, 4, "N d", 4),
    ]
    backward = [*forward, traffic("rotary", Kind.CONTIGUOUS, 4, "N d", 2)]
    return [*casts, *forward, *back], [*back, *backward, *casts]


def plain_attention(run: RunConfig, widths: Widths, dtype: str) -> tuple[Pass, Pass]:
    """Attention with its matrix of scores, of which the half that is masked is computed too. Autocast's softmax is in fp32."""
    e = widths.matmul
    soft = 4 if widths.autocast else e
    scores, values = (
        matmul("attention scores", "S / S / D x B H", dtype),
        matmul("attention values", "S / D / S x B H", dtype),
    )
    casts = (
        [traffic("attention softmax", kind, 6, "B H S S") for kind in (Kind.WIDENED, Kind.CONTIGUOUS)]
        if widths.autocast
        else []
    )
    masked = [
        traffic("attention scores", Kind.CONTIGUOUS, 2 * e, "B H S S", 2),  # scale; a copy, which the mask then fills
        traffic("attention scores", Kind.BROADCAST, _UNVECTORISED, "B H S S"),
    ]
    forward = [
        scores,
        *masked,
        traffic("attention scores", Kind.CONTIGUOUS, 2, "S S", 3),  # the mask
        *casts,
        traffic("attention softmax", Kind.SOFTMAX, 2 * soft, "B H S S"),
        traffic("attention values", Kind.STRIDED, _UNVECTORISED, "N d"),
        values,
    ]
    backward = [
        *times(2, values),
        *times(2, scores),
        *casts,
        traffic("attention softmax", Kind.CONTIGUOUS, 3 * soft, "B H S S", 2),
        *masked,
        traffic("attention values", Kind.STRIDED, _UNVECTORISED, "N d"),
    ]
    return forward, backward


def tiled_attention(run: RunConfig, widths: Widths) -> tuple[Pass, Pass]:
    """One kernel forward; backward has three, of which a calibration measures the sum."""
    name = run.attention
    return (
        [Kernel(op=name, kind=Kind.ATTENTION_FORWARD, shape="B H S S D", element_bytes=widths.matmul)],
        [Kernel(op=name, kind=Kind.ATTENTION_BACKWARD, shape="B H S S D", element_bytes=widths.matmul)],
    )


def _compiled(run: RunConfig, widths: Widths, dtype: str) -> tuple[Pass, Pass]:
    e, s = widths.matmul, widths.stream
    shapes = [*_ATTENTION_WEIGHTS, ("mlp", "f", "d"), ("mlp", "f", "d"), ("mlp", "d", "f")]
    if run.attention in TILED:
        attention = tiled_attention(run, widths)
    else:
        # Inductor joins scale, mask and softmax, forward and backward, into one kernel each.
        scores, values = (
            matmul("attention scores", "S / S / D x B H", dtype),
            matmul("attention values", "S / D / S x B H", dtype),
        )
        attention = (
            [scores, traffic("attention softmax", Kind.COMPILED, 3 * e, "B H S S"), values],
            [*times(2, scores, values), traffic("attention softmax", Kind.COMPILED, 4 * e, "B H S S")],
        )
    forward = [
        traffic("norm", Kind.COMPILED, s + e, "N d"),
        traffic("rotary", Kind.COMPILED_PERMUTED, 2 * e, "2 N d"),
        traffic("attention projections", Kind.COMPILED, 2 * e, "N d"),
        traffic("norm", Kind.COMPILED, s + 2 * e, "N d"),
        traffic("mlp", Kind.COMPILED, 3 * e, "N f"),
        traffic("residual stream", Kind.COMPILED, 2 * s + 2 * e, "N d"),
    ]
    backward = [
        traffic("residual stream", Kind.COMPILED, s + e, "N d"),
        traffic("mlp", Kind.COMPILED, 6 * e, "N f"),
        traffic("norm", Kind.COMPILED_COLUMNS, 3 * s + 3 * e, "N d"),
        traffic("norm", Kind.COMPILED_COLUMNS, 3 * s + e, "N d"),
        traffic("norm", Kind.COLUMNS, s + 2 * e, "N d"),
        traffic("norm", Kind.COMPILED_COLUMNS, _SMALL, "128 d", 2),
        traffic("rotary", Kind.COMPILED_PAIRS, 2 * e, "2 N d"),
        traffic("attention projections", Kind.COMPILED_PERMUTED, 2 * e, "3 N d"),
    ]
    return _joined((forward, backward), *_linears(run, widths, Kind.COMPILED, shapes), attention)


def _fused(run: RunConfig, widths: Widths, dtype: str) -> tuple[Pass, Pass]:
    """The ops of ops/: gate and up in one matmul, the residual added in the norm, rotation and split in one kernel."""
    e, s = widths.matmul, widths.stream
    kind = Kind.CONTIGUOUS if run.compile == "none" else Kind.COMPILED
    shapes = [*_ATTENTION_WEIGHTS, ("mlp", "2 f", "d"), ("mlp", "d", "f")]
    tiled = run.attention in TILED
    attention = tiled_attention(run, widths) if tiled else plain_attention(run, widths, dtype)
    forward = [
        traffic("norm", Kind.FUSED, 2 * s + 2 * e, "N d", 2),
        traffic("rotary", Kind.FUSED, 2 * e, "3 N d"),
        traffic("mlp", Kind.FUSED, 3 * e, "N f"),
    ]
    backward = [
        traffic("norm", Kind.FUSED_COLUMNS, 3 * s + 2 * e, "N d", 2),
        traffic("norm", Kind.FUSED_COLUMNS, _SMALL, "128 d", 2),
        traffic("rotary", Kind.FUSED, 2 * e, "3 N d"),
        traffic("mlp", Kind.FUSED, 6 * e, "N f"),
    ]
    return _joined((forward, backward), *_linears(run, widths, kind, shapes), attention)

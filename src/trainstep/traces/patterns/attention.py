"""Attention that writes its scores to memory, is given a mask where `is_causal=True` would do, or is in fp32.

written out  The scores are a batched matmul, followed by a softmax over its last dimension. All other ops on tensors of that shape
             go through memory, and so do copies of the factors into the order that a batched matmul takes; a fused attention needs
             neither. Least time: the batched matmuls. A fused attention does 7 of them in place of 6 (it computes the scores again
             in backward), skips masked blocks, and also does the softmax. On a CPU it took 0.84 to 1.12 times these matmuls' time
             on one machine and up to twice on another (docs/log.md, 2026-11-25 and 2026-11-27), so there it is timed. On a GPU the
             batched matmuls also write the scores: one model on an H100 (64 wide, 1,024 positions) took 15.6 ms where a fused
             attention took 4.5 ms, at 0.31 of the plain matmuls' rate (results/h100/planted.md). So in 16 bits the least time is
             the smaller of two: that of the batched matmuls, and that of the fused FLOPs at 0.3 of the plain rate. With short
             sequences a fused attention does not reach this rate, and gains less.
with a mask  A fused attention on a GPU is given a mask of T x T. If the mask is causal, `is_causal` skips half of the work. Least
             time: half; a GPT-2 without Hugging Face's mask took 0.42 of the time with it (docs/log.md, 2026-11-27). Only the ops
             below are known: flash takes no mask, and on a CPU the fused op takes as long with a mask as without.
of fp32      A fused attention on a GPU has fp32 tensors. Its time in 16 bits depends on torch's precision
             (explain/script_evidence.py). Attention written out as matmuls is left to the pattern of fp32 matmuls.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from trainstep.costs.attention import attention_backward_flops, attention_flops
from trainstep.traces.kineto import Range
from trainstep.traces.patterns.matmuls import BATCHED, SIXTEEN_BITS, sixteen_bit_work
from trainstep.traces.patterns.pattern import (
    ATTENTION,
    FP32_ATTENTION,
    FUSED_ATTENTION,
    FUSED_CAUSAL_ATTENTION,
    FUSED_MASKED_ATTENTION,
    MASK,
    Instead,
    Pattern,
)
from trainstep.traces.patterns.step_ops import NOTHING, Cost, Shape, StepOps, first, tensors

_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")
_SOFTMAX_BACKWARD = "aten::_softmax_backward_data"
_FUSED, _BY_MATMULS = "aten::_scaled_dot_product_", "aten::_scaled_dot_product_attention_math"
_FUSED_RATE_OF_PLAIN = 0.3
"""A fused attention's FLOP/s, as a share of the FLOP/s of the step's plain matmuls."""
_MASK_AT = {
    "cudnn_attention": 3,
    "cudnn_attention_backward": 8,
    "efficient_attention": 3,
    "efficient_attention_backward": 4,
    "fused_attention_overrideable": 3,
    "fused_attention_overrideable_backward": 4,
}
"""Op, without the prefix -> index of the argument that is the mask (torch's native_functions.yaml: `attn_bias`)."""


def written_out(ops: StepOps) -> Iterator[Pattern]:
    """The pattern of attention that writes its scores to memory, all layers together."""
    products = {product: opened for opened in ops.all if opened.name in BATCHED and (product := _product(opened))}
    soft = [opened for opened in ops.all if opened.name in _SOFTMAX and _flattened(first(opened)) in products]
    shapes = {scores for opened in soft if (scores := _flattened(first(opened)))}
    if not shapes:
        return
    touching = [opened for opened in ops.all if any(_flattened(shape) in shapes for shape in tensors(opened))]
    others = [opened for opened in touching if opened.name not in BATCHED]
    matmuls = [opened for opened in ops.all if opened.name in BATCHED and _meets(opened, shapes)]
    factors = {_flattened(shape) for opened in matmuls for shape in tensors(opened)} - shapes
    copies = [opened for opened in ops.all if _reorders_heads(opened) and _flattened(first(opened)) in factors]
    instead = tuple(_fused(soft, [*touching, *matmuls], products))
    least_ns = float(sum(cost.time_ns for cost in ops.costs(matmuls).values()))
    words = ", ".join(" x ".join(map(str, shape[-2:])) for shape in sorted(shapes))
    costs = ops.costs([*others, *copies, *matmuls])
    for phase, cost in ops.around([*others, *copies, *matmuls]).items():
        costs[phase] = costs.get(phase, NOTHING) + cost
    yield Pattern(
        name=ATTENTION,
        calls=len(soft),
        costs=costs,
        least_ns=min(least_ns, _fused_ns(instead, ops)),
        what=f"scores of {words} are written to memory by {len(others) / ops.steps:,.0f} ops",
        instead=instead,
    )


def _reorders_heads(opened: Range) -> bool:
    """Whether it copies (batch, heads, rows, columns) without a cast. Casts and shared keys' copies a fused attention needs too."""
    return opened.name == "aten::copy_" and len(first(opened)) == 4 and len(set(opened.dtypes[:2])) == 1


def _fused_ns(instead: Sequence[Instead], ops: StepOps) -> float:
    """Time of fused attention in 16 bits on a GPU, from the rate of the step's plain matmuls; infinity if that is unknown."""
    plain = sixteen_bit_work(ops, batched=False)
    if not plain.flops or any(fused.dtype not in SIXTEEN_BITS for fused in instead):
        return math.inf
    flops = 0
    for fused in instead:
        (batch, heads, queries, head_dim), (_, _, keys, _), _ = fused.shapes
        shape, causal = (batch * heads, queries, keys, head_dim), fused.op == FUSED_CAUSAL_ATTENTION
        flops += fused.forwards * attention_flops(*shape, causal=causal)
        flops += fused.backwards * attention_backward_flops(*shape, causal=causal)
    return 1e9 * flops / (_FUSED_RATE_OF_PLAIN * plain.flops / plain.time_s)


def _fused(
    soft: Sequence[Range], involved: Sequence[Range], products: dict[tuple[int, int, int], Range]
) -> Iterator[Instead]:
    """A fused attention for each shape of scores. Recomputed forwards count, because a fused attention would be recomputed too."""
    masks = {_flattened(scores): is_bool for opened in involved for scores, is_bool in _masked(opened)}
    backward = [_flattened(first(opened)) for opened in involved if opened.name == _SOFTMAX_BACKWARD]
    for shape, forwards in Counter(first(opened) for opened in soft).items():
        *lead, queries, keys = shape
        scores = _flattened(shape)
        assert scores is not None
        product = products[scores]
        head_dim = [factor for factor in tensors(product) if len(factor) == 3][-2][2]
        query, key = ((math.prod(lead[:-1]), lead[-1], rows, head_dim) for rows in (queries, keys))
        op = FUSED_MASKED_ATTENTION if scores in masks else FUSED_ATTENTION
        if masks.get(scores) and queries == keys:
            op = FUSED_CAUSAL_ATTENTION
        backwards = min(forwards, backward.count(scores))
        yield Instead(op, (query, key, key), next(iter(product.dtypes), ""), forwards, backwards)


def _masked(opened: Range) -> Iterator[tuple[Shape, bool]]:
    """Scores that an op combines with a mask of their last two dimensions, shared by several of them; and whether it has bools.

    A square mask of bools is taken to be causal. A mask of numbers may be anything, such as a bias of positions, and must be kept.
    """
    shapes = tensors(opened)
    if opened.name == "aten::baddbmm" and (product := _product(opened)):  # the scores are its result
        yield product, False
    for scores in shapes:
        if any(mask[-2:] == scores[-2:] and math.prod(mask) < math.prod(scores) for mask in shapes):
            yield scores, "bool" in opened.dtypes


def with_mask(ops: StepOps) -> Iterator[Pattern]:
    """The pattern of fused attention that is given a square mask."""
    masked = [opened for opened in ops.all if ops.on_device and mask_of(opened)]
    if not masked:
        return
    costs = ops.costs(masked, whole=True)
    words = ", ".join(sorted({" x ".join(map(str, mask_of(opened)[-2:])) for opened in masked}))
    yield Pattern(
        name=MASK,
        calls=len(masked),
        costs=costs,
        least_ns=sum(cost.time_ns for cost in costs.values()) / 2,
        what=f"attention is given a mask of {words}; if it is causal, half of its work is wasted",
    )


def fused_in_fp32(ops: StepOps) -> Iterator[Pattern]:
    """The pattern of fused attention of fp32 tensors. With a mask only half of its time counts: `with_mask` has the other half."""
    fused = [opened for opened in ops.all if ops.on_device and opened.name.startswith(_FUSED)]
    fused = [opened for opened in fused if opened.dtypes[:1] == ("float",) and opened.name != _BY_MATMULS]
    if not fused:
        return
    costs = ops.costs([opened for opened in fused if not mask_of(opened)], whole=True)
    for phase, cost in ops.costs([opened for opened in fused if mask_of(opened)], whole=True).items():
        costs[phase] = costs.get(phase, NOTHING) + Cost(time_ns=cost.time_ns // 2)
    yield Pattern(name=FP32_ATTENTION, calls=len(fused), costs=costs, least_ns=0.0, what="attention of fp32 tensors")


def mask_of(opened: Range) -> tuple[Any, ...]:
    """The shape of a fused op's mask of T x T, T > 1; () for an op without one, or without recorded shapes."""
    at = _MASK_AT.get(opened.name.removeprefix(_FUSED), len(opened.shapes))
    mask = opened.shapes[at] if at < len(opened.shapes) else ()
    is_square = isinstance(mask, tuple) and len(mask) >= 2 and mask[-1] == mask[-2] and mask[-1] != 1
    return mask if is_square else ()


def _meets(opened: Range, shapes: set[tuple[int, int, int]]) -> bool:
    return _product(opened) in shapes or any(_flattened(shape) in shapes for shape in tensors(opened))


def _flattened(shape: Shape) -> tuple[int, int, int] | None:
    """(product of the leading sizes, rows, columns): equal for (batch, heads, T, S) and (batch x heads, T, S); else None."""
    return (math.prod(shape[:-2]), shape[-2], shape[-1]) if len(shape) >= 3 and math.prod(shape) > 0 else None


def _product(opened: Range) -> tuple[int, int, int] | None:
    """The shape of a batched matmul's result; None if its factors' shapes are unknown."""
    factors = [shape for shape in tensors(opened) if len(shape) == 3][-2:]
    return _flattened((factors[0][0], factors[0][1], factors[1][2])) if len(factors) == 2 else None

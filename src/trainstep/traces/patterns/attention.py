"""Attention that writes its scores to memory, is given a mask where `is_causal=True` would do, or is in fp32.

written out  scores = a batched matmul, then a softmax over its last dimension: all other ops on tensors of that shape go through
             memory, which a fused attention does not do, as do copies of its factors into the order that a batched matmul takes. At
             least: the batched matmuls. A fused attention does 7 of them where these are 6 (it computes the scores again in
             backward), skips masked blocks, and also does the softmax; on a CPU it took 0.84 to 1.12 times these matmuls' time on
             one machine and up to twice on another (docs/log.md, 2026-11-25 and 2026-11-27), so there it is timed. On a GPU the
             batched matmuls also write the scores: one model on an H100 (64 wide, 1,024 positions) took 15.6 ms where a fused
             attention took 4.5, at 0.31 of the plain matmuls' rate (results/h100/planted.md). So in 16 bits the least is the
             smaller of two times: the batched matmuls', and the fused FLOPs at 0.3 of that rate. Short sequences do not reach
             it, and gain less.
with a mask  on a GPU, a fused attention that is given a mask of T x T. If it is causal, to say so skips half of the work. At least:
             half of the time; a GPT-2 without the mask of Hugging Face's took 0.42 of it (docs/log.md, 2026-11-27). Only the ops
             below are known: flash takes no mask, and on a CPU the fused op takes as long with a mask as without.
of fp32      on a GPU, a fused attention of fp32 tensors. What it takes in 16 bits depends on torch's precision
             (explain/script_evidence.py). An attention by matmuls is left to the pattern of these.
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
"""A fused attention's FLOP/s, as a share of the step's plain matmuls'."""
_MASK_AT = {
    "cudnn_attention": 3,
    "cudnn_attention_backward": 8,
    "efficient_attention": 3,
    "efficient_attention_backward": 4,
    "fused_attention_overrideable": 3,
    "fused_attention_overrideable_backward": 4,
}
"""Op, without the prefix -> which of its arguments is the mask (torch's native_functions.yaml: `attn_bias`)."""


def written_out(ops: StepOps) -> Iterator[Pattern]:
    """The attention whose scores are in memory, all layers together."""
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
    yield Pattern(
        name=ATTENTION,
        calls=len(soft),
        costs=ops.costs([*others, *copies, *matmuls]),
        least_ns=min(least_ns, _fused_ns(instead, ops)),
        what=f"scores of {words} are written to memory by {len(others) / ops.steps:,.0f} ops",
        instead=instead,
    )


def _reorders_heads(opened: Range) -> bool:
    """A copy of (batch, heads, rows, columns) in one dtype. A cast, or keys that heads share, a fused attention needs too."""
    return opened.name == "aten::copy_" and len(first(opened)) == 4 and len(set(opened.dtypes[:2])) == 1


def _fused_ns(instead: Sequence[Instead], ops: StepOps) -> float:
    """What fused attention in 16 bits takes on a GPU whose plain matmuls show their rate; infinity otherwise."""
    plain = sixteen_bit_work(ops, batched=False)
    if not plain.flops or any(one.dtype not in SIXTEEN_BITS for one in instead):
        return math.inf
    flops = 0
    for one in instead:
        (batch, heads, queries, head_dim), (_, _, keys, _), _ = one.shapes
        shape, causal = (batch * heads, queries, keys, head_dim), one.op == FUSED_CAUSAL_ATTENTION
        flops += one.forwards * attention_flops(*shape, causal=causal)
        flops += one.backwards * attention_backward_flops(*shape, causal=causal)
    return 1e9 * flops / (_FUSED_RATE_OF_PLAIN * plain.flops / plain.time_s)


def _fused(
    soft: Sequence[Range], involved: Sequence[Range], products: dict[tuple[int, int, int], Range]
) -> Iterator[Instead]:
    """A fused attention for each shape of scores. Recomputed scores would be computed again by a fused one, too."""
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
    """Scores that an op combines with a mask of their last two dimensions, the same for several of them; whether it is of bools.

    A mask of bools that is square is taken to be causal. One of numbers may be anything: a bias of positions cannot be left out.
    """
    shapes = tensors(opened)
    if opened.name == "aten::baddbmm" and (product := _product(opened)):  # its scores are the result
        yield product, False
    for scores in shapes:
        if any(mask[-2:] == scores[-2:] and math.prod(mask) < math.prod(scores) for mask in shapes):
            yield scores, "bool" in opened.dtypes


def with_mask(ops: StepOps) -> Iterator[Pattern]:
    """Fused attention that is given a square mask."""
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
    """Fused attention of fp32 tensors: of one with a mask the half that is left without it, which no other pattern saves."""
    fused = [opened for opened in ops.all if ops.on_device and opened.name.startswith(_FUSED)]
    fused = [opened for opened in fused if opened.dtypes[:1] == ("float",) and opened.name != _BY_MATMULS]
    if not fused:
        return
    costs = ops.costs([opened for opened in fused if not mask_of(opened)], whole=True)
    for phase, cost in ops.costs([opened for opened in fused if mask_of(opened)], whole=True).items():
        costs[phase] = costs.get(phase, NOTHING) + Cost(time_ns=cost.time_ns // 2)
    yield Pattern(name=FP32_ATTENTION, calls=len(fused), costs=costs, least_ns=0.0, what="attention of fp32 tensors")


def mask_of(opened: Range) -> tuple[Any, ...]:
    """The shape of a fused op's mask of T x T, T > 1; () of an op without one, and where no shapes were recorded."""
    at = _MASK_AT.get(opened.name.removeprefix(_FUSED), len(opened.shapes))
    mask = opened.shapes[at] if at < len(opened.shapes) else ()
    is_square = isinstance(mask, tuple) and len(mask) >= 2 and mask[-1] == mask[-2] and mask[-1] != 1
    return mask if is_square else ()


def _meets(opened: Range, shapes: set[tuple[int, int, int]]) -> bool:
    return _product(opened) in shapes or any(_flattened(shape) in shapes for shape in tensors(opened))


def _flattened(shape: Shape) -> tuple[int, int, int] | None:
    """(all but the last two, rows, columns), the same of (batch, heads, T, S) and (batch x heads, T, S); None of other shapes."""
    return (math.prod(shape[:-2]), shape[-2], shape[-1]) if len(shape) >= 3 and math.prod(shape) > 0 else None


def _product(opened: Range) -> tuple[int, int, int] | None:
    """The shape of a batched product."""
    factors = [shape for shape in tensors(opened) if len(shape) == 3][-2:]
    return _flattened((factors[0][0], factors[0][1], factors[1][2])) if len(factors) == 2 else None

"""Says what a call of an operator computes and moves: FLOPs, and the least bytes read and written, from the shapes alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainstep.costs.attention import attention_backward_flops, attention_flops
from trainstep.costs.traced_step import Work

_aten = torch.ops.aten
_PRODUCTS = {  # operator -> the place of its first factor
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
}
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "flash_attention",
)
"""Forward operators that never write out the scores; a backward has `_backward` behind its name, and dO before q, k, v."""
_BACKWARD = "_backward"
_FUSED_HEADS = ("linear_cross_entropy", "linear_cross_entropy_backward")


def work_of(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor], *, phase: str, module: str
) -> Work | None:
    """The work of one call; None if it moves nothing, as a view."""
    inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    inputs += [x for group in args if isinstance(group, (list, tuple)) for x in group if isinstance(x, Tensor)]
    written = _written(func, inputs, results)
    if not written:
        return None
    name = func._schema.name.partition("::")[2]
    kind, shape, flops, causal = _arithmetic(func, name, args, kwargs, results)
    of_result = args[0] if name == _FUSED_HEADS[0] else written[0]
    return Work(
        phase=phase,
        module=module,
        op=name,
        kind=kind,
        shape=shape,
        dtype=str(of_result.dtype).removeprefix("torch."),
        flops=flops,
        read_bytes=sum(_bytes(x) for x in inputs),
        written_bytes=sum(_bytes(x) for x in written),
        causal=causal,
        access=_access(inputs, written),
    )


def has_own_kernel(name: str) -> bool:
    """Whether a compiler calls a library or a kernel of ours for this operator, and fuses it with nothing before it."""
    products = {func._schema.name.partition("::")[2] for func in _PRODUCTS}
    return (
        name in products or name.removesuffix(_BACKWARD) in (*_ATTENTION, "convolution") or name.startswith("inside ")
    )


def inner_bytes(func: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Bytes of each tensor that a call makes and frees inside itself, for operators of which that is known; else empty.

    Backward of attention adds up dq in fp32. The fused head has the logits of a chunk of tokens and, if there are several chunks
    whose dW is summed in another dtype than the weight's, that sum.
    """
    name = func._schema.name.partition("::")[2]
    if name.endswith(_BACKWARD) and name.removesuffix(_BACKWARD) in _ATTENTION:
        return (4 * args[1].numel(),)
    if name in _FUSED_HEADS:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        hidden, weight = given["hidden"], given["weight"]
        tokens = hidden.shape[:-1].numel()
        logits = min(tokens, given["chunk"]) * weight.shape[0] * hidden.element_size()
        has_sum = tokens > given["chunk"] and given["sum_dtype"] != weight.dtype
        return (logits, given["sum_dtype"].itemsize * weight.numel()) if has_sum else (logits,)
    return ()


def _arithmetic(
    func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> tuple[str, tuple[int, ...], int, bool]:
    if func in _PRODUCTS:
        a, b = args[_PRODUCTS[func] :][:2]
        batch, (m, k), n = (a.shape[0] if a.dim() == 3 else 1), a.shape[-2:], b.shape[-1]
        return "matmul", (batch, m, n, k), 2 * batch * m * n * k, False
    if name == _FUSED_HEADS[0]:
        # Forward has the logits, and the products of their gradient with the weight and with the input.
        hidden, weight = args[:2]
        tokens, (vocabulary, width) = hidden.shape[:-1].numel(), weight.shape
        return "matmul", (3, tokens, vocabulary, width), 6 * tokens * vocabulary * width, False
    is_backward = name.endswith(_BACKWARD)
    if name.removesuffix(_BACKWARD) in _ATTENTION:
        query, key = args[1:3] if is_backward else args[:2]
        batch, heads, queries, width = query.shape
        keys = key.shape[-2]
        causal = _is_causal(func, args, kwargs)
        count = attention_backward_flops if is_backward else attention_flops
        flops = count(batch * heads, queries, keys, width, causal=causal)
        return "attention", (batch, heads, key.shape[1], queries, keys, width), flops, causal
    return "element-wise", tuple(results[0].shape) if results else (), 0, False


def _is_causal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    for name in ("is_causal", "causal"):
        if name in kwargs:
            return bool(kwargs[name])
        if name in names and names.index(name) < len(args):
            return bool(args[names.index(name)])
    return False


def _written(func: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
    """The results that the call has written: new ones, and those that it changed in place."""
    if func._schema.is_mutable:
        return list(results)
    given = {id(x.untyped_storage()) for x in inputs}
    return [x for x in results if id(x.untyped_storage()) not in given]


def _access(inputs: Sequence[Tensor], written: Sequence[Tensor]) -> str:
    """The value of Work.access. Numbers, and tensors of one element, are left out."""
    sizes = [x for x in (*inputs, *written) if x.numel() > 1]
    if any(not x.is_contiguous() for x in sizes):
        return "strided"
    largest = max((x.numel() for x in written), default=0)
    return "broadcast" if any(x.numel() < largest for x in inputs if x.numel() > 1) else "contiguous"


def _bytes(x: Tensor) -> int:
    """Bytes of a tensor's elements; an expanded element counts once."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())

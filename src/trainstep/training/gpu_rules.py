"""Makes torch choose for CPU tensors what it would choose for CUDA tensors, so that a step is traced on a machine without a GPU.

    with FakeTensorMode(), gpu_rules(): ...

Inside, of this process's CPU tensors:
- autocast widens the ops that it widens on a GPU and leaves alone on a CPU (aten/src/ATen/autocast_mode.h of torch 2.11);
- scaled_dot_product_attention runs flash attention in 16 bits without a mask, memory-efficient attention otherwise, and written-out
  attention where neither can (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; cuDNN's is not preferred by default);
- dropout keeps a byte an element, and rms_norm is one op that keeps 1 / rms;
- our own ops (trainstep.ops) take their kernels.

The kernels themselves are a GPU's, so only tensors without memory can run.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import _scoped_library

from trainstep.ops.operators import KERNEL_DTYPES

_aten = torch.ops.aten
_WITH_KERNELS = ("linear_cross_entropy", "rms_norm", "rotary", "swiglu")
"""Modules of trainstep.ops, whose functions have the same names."""
_WIDENED = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "group_norm"),
    *("rms_norm", "cosine_similarity", "dist", "pdist", "renorm", "logsumexp", "norm.Scalar", "norm.ScalarOpt_dim"),
)  # fmt: skip
"""Ops that autocast runs in fp32 on a GPU only. The losses are missing: a CPU widens them too."""
_WIDENED_BY_DTYPE = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList"),
    *("linalg_vector_norm", "linalg_matrix_norm"),
)
"""Ops that autocast gives dtype fp32 where the call names none."""
_NARROW = (torch.float16, torch.bfloat16)
_MOST_FLASH_WIDTH = 256
_FLASH_WIDTH_MULTIPLE = 8


@contextmanager
def gpu_rules() -> Iterator[None]:
    """Inside, CPU tensors follow the rules of CUDA tensors."""
    _forget_kernels()
    try:
        with _scoped_library("aten", "IMPL") as library, _own_kernels():
            for name in _WIDENED:
                _register(library, name, "AutocastCPU", _widened)
            for name in _WIDENED_BY_DTYPE:
                _register(library, name, "AutocastCPU", _widened_by_dtype)
            for name, kernel in _RULES.items():
                library.impl(name, kernel, "AutogradCPU")
            yield
    finally:
        _forget_kernels()


def _forget_kernels() -> None:
    """Let torch look for the kernels of these ops anew.

    An op keeps the kernel that it found for a key when a compiler traced it, and a library that is added or removed does not
    change that. A model that is compiled later would get no gradients through its attention, with no more than a warning.
    """
    for name in (*_WIDENED, *_WIDENED_BY_DTYPE, *_RULES):
        _overload(name)._dispatch_cache.clear()


@contextmanager
def _own_kernels() -> Iterator[None]:
    """Inside, our ops take their kernels for any tensor."""
    modules = [importlib.import_module(f"trainstep.ops.{name}") for name in _WITH_KERNELS]
    before = [module.has_kernel for module in modules]
    for module in modules:
        module.has_kernel = lambda *tensors: all(x.dtype in KERNEL_DTYPES for x in tensors)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, has_kernel in zip(modules, before, strict=True):
            module.has_kernel = has_kernel  # type: ignore[attr-defined]


def _register(library: Any, name: str, key: str, kind: Callable[[Any], Callable[..., Any]]) -> None:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
        library.impl(name, kind(_overload(name)), key)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload or "default")


def _without_autocast(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        return op(*args, **kwargs)


def _widened(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        wide = tuple(x.float() if _is_narrow(x) else x for x in args)
        return _without_autocast(op, wide, {key: x.float() if _is_narrow(x) else x for key, x in kwargs.items()})

    return run


def _widened_by_dtype(op: Any) -> Callable[..., Any]:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_named = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
        if not is_named and _is_narrow(x):
            kwargs["dtype"] = torch.float32
        return _without_autocast(op, (x, *args), kwargs)

    return run


def _is_narrow(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in _NARROW


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention by the kernel that a GPU would take."""
    width = query.shape[-1]
    is_usual = query.dim() == 4 and value.shape[-1] == width and width <= _MOST_FLASH_WIDTH
    if is_usual and attn_mask is None and query.dtype in _NARROW:
        inputs = [_padded(x) for x in (query, key, value)]
        scale = width**-0.5 if scale is None else scale
        output = _aten._scaled_dot_product_flash_attention(*inputs, dropout_p, is_causal, scale=scale)[0]
        return output if output.shape[-1] == width else output[..., :width]  # type: ignore[no-any-return]
    if query.dim() == 4 and key.shape[1] == query.shape[1] and query.dtype in (*_NARROW, torch.float32):
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        keeps_lse = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        return _aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
            query, key, value, bias, keeps_lse, dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _padded(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % _FLASH_WIDTH_MULTIPLE
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as numbers to add, for every head; a boolean mask becomes a tensor of its own."""
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or x.numel() == 0:
        return x
    return _aten.native_dropout(x, p, True)[0]  # type: ignore[no-any-return]


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is not None and weight.dtype == x.dtype:
        return _FusedRmsNorm.apply(x, weight, len(normalized_shape))  # type: ignore[no-any-return, no-untyped-call]
    return _aten._fused_rms_norm(x, normalized_shape, weight, eps)[0]  # type: ignore[no-any-return]


class _FusedRmsNorm(torch.autograd.Function):
    """Keeps x, the weight and 1 / rms in fp32, as aten::_fused_rms_norm does on a GPU. Only shapes are right, not values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dims: int) -> Tensor:
        rstd = x.new_empty((*x.shape[:-dims], *[1] * dims), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


_RULES = {"scaled_dot_product_attention": attention, "dropout": _dropout, "rms_norm": _rms_norm}
"""Op of aten -> its kernel inside `gpu_rules`."""

"""`rms_norm`: RMSNorm (Zhang 2019), alone or with the residual addition before it, each in one pass over memory.

    h = x + residual                      without a residual h = x
    y = h / sqrt(mean(h^2) + eps) weight  over the last dimension, in fp32, rounded once

Forward reads x and the residual and writes y and h; it keeps h, which the residual stream has anyway, and 1 / rms, 4 bytes a row.
Backward reads dy, h and dh and writes the gradient of h. Least bytes: costs/element_wise.py.
"""

from typing import Any

import torch
from torch import Tensor, nn

from trainstep.ops import reference
from trainstep.ops.operators import define, gradients_by, has_kernel, makes_a_graph
from trainstep.spans import span

try:
    from trainstep.ops.kernels.rms_norm import WIDEST, launch_rms_norm, launch_rms_norm_backward
except ImportError:  # there is no triton for this platform; has_kernel then says so
    WIDEST = 0


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-5, *, residual: Tensor | None = None, dtype: torch.dtype | None = None
) -> Any:
    """y, or with a residual (y, x + residual).

    x (..., C) and the residual, of the same shape, in fp32, bf16 or fp16, weight (C,) in any of these. x + residual has the
    wider of their dtypes; y has its dtype, or `dtype`: a matmul that would cast y anyway can have it cast here. On a CPU, in fp64
    and for C > 16,384 ops/reference.py runs. ValueError for other shapes.
    """
    if x.dim() == 0:
        raise ValueError("x: must be (..., C), but is a single number")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight: must have the shape {tuple(x.shape[-1:])} of x's rows, but has {tuple(weight.shape)}"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual: must have x's shape {tuple(x.shape)}, but has {tuple(residual.shape)}")
    with span("norm"):
        operands = (x, weight) if residual is None else (x, weight, residual)
        if not has_kernel(*operands) or not 0 < x.shape[-1] <= WIDEST:
            h = x if residual is None else x + residual
            y = reference.rms_norm(h, weight, eps).to(dtype or h.dtype)
            return y if residual is None else (y, h)
        if residual is None:
            return _rms_norm(x, weight, eps, dtype or x.dtype)[0]
        wide = torch.promote_types(x.dtype, residual.dtype)
        return _add_rms_norm(x, residual, weight, eps, dtype or wide)[:2]


class RMSNorm(nn.Module):
    """`rms_norm` with its weight; `norm(x)` gives y, `norm(x, residual)` gives (y, x + residual).

    Takes the state_dict of torch.nn.RMSNorm with elementwise_affine.
    """

    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Any:
        return rms_norm(x, self.weight, self.eps, residual=residual, dtype=dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def _run(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    y, _, inverse_rms = launch_rms_norm(x.contiguous(), None, weight.contiguous(), eps, dtype)
    return y, inverse_rms


def _run_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return launch_rms_norm(x.contiguous(), residual.contiguous(), weight.contiguous(), eps, dtype)


def _run_backward(
    dy: Tensor, dsum: Tensor | None, h: Tensor, weight: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    return launch_rms_norm_backward(
        dy.contiguous(), None if dsum is None else dsum.contiguous(), h.contiguous(), weight.contiguous(), inverse_rms
    )


def _fake(x: Tensor, _weight: Tensor, _eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


def _fake_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    y, inverse_rms = _fake(x, weight, eps, dtype)
    return y, x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype)), inverse_rms


def _fake_backward(
    _dy: Tensor, _dsum: Tensor | None, h: Tensor, weight: Tensor, _inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # autograd would fill zeros for 1 / rms


def _save_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, ctx.eps, _ = inputs
    _, h, inverse_rms = output
    ctx.save_for_backward(h, weight, inverse_rms)
    ctx.dtypes = x.dtype, residual.dtype
    ctx.mark_non_differentiable(inverse_rms)
    ctx.set_materialize_grads(False)


def _gradients_with_graph(h: Tensor, weight: Tensor, eps: float, dy: Tensor) -> tuple[Any, Any]:
    dh, dweight = gradients_by(lambda h, weight: reference.rms_norm(h, weight, eps).to(dy.dtype), (h, weight), (dy,))
    return dh, dweight


def _backward(ctx: Any, dy: Tensor, _dinverse_rms: None) -> tuple[Tensor | None, ...]:
    x, weight, inverse_rms = ctx.saved_tensors
    if makes_a_graph():
        return *_gradients_with_graph(x, weight, ctx.eps, dy), None, None
    dx, dweight = _rms_norm_backward(dy, None, x, weight, inverse_rms)
    return dx, dweight, None, None


def _backward_add(ctx: Any, dy: Tensor | None, dsum: Tensor | None, _dinverse_rms: None) -> tuple[Tensor | None, ...]:
    h, weight, inverse_rms = ctx.saved_tensors
    x_dtype, residual_dtype = ctx.dtypes
    if dy is None:  # nobody uses y
        assert dsum is not None
        return dsum.to(x_dtype), dsum.to(residual_dtype), None, None, None
    if makes_a_graph():
        dh, dweight = _gradients_with_graph(h, weight, ctx.eps, dy)
        dh = dh if dsum is None else dh + dsum
    else:
        dh, dweight = _rms_norm_backward(dy, dsum, h, weight, inverse_rms)
    return dh.to(x_dtype), dh.to(residual_dtype), dweight, None, None


_rms_norm = define(
    "rms_norm(Tensor x, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)",
    _run,
    _fake,
    save=_save,
    backward=_backward,
)
_add_rms_norm = define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _run_add,
    _fake_add,
    save=_save_add,
    backward=_backward_add,
)
_rms_norm_backward = define(
    "rms_norm_backward(Tensor dy, Tensor? dsum, Tensor h, Tensor weight, Tensor inverse_rms) -> (Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)

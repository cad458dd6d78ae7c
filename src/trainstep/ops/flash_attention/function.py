"""`flash_attention` and its backward pass as operators of torch: with autograd, torch.compile and FLOP counts.

They are registered with torch.library's Library, one implementation per dispatch key, because that costs the host less than
custom_op does. On CUDA devices the Triton kernels run that choice.py and hopper/host.py decide on, on other devices
algorithm.py. Memory kept for backward is linear in S: q, k, v, the output and the log-sum-exp. There is no second derivative.

    flash_attention -> _forward_autograd -> _FlashAttention -> _attend -> _forward_below_autograd -> _forward_cuda, which launches
    flash_attention -> _forward_op, while torch.compile traces; the dispatcher then calls what the end of the file registers:
        Autograd: _forward_autograd; CUDA: _forward_cuda; other devices: _forward_anywhere (algorithm.py); Meta: _forward_fake

_forward_below_autograd calls _forward_op too where the dispatcher has more to do: for a mode, a profiler, a subclass, a CPU.
The backward functions have the same names and call each other in the same way.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from trainstep.costs.attention import attention_backward_flops, attention_flops
from trainstep.ops.flash_attention import algorithm
from trainstep.ops.flash_attention.choice import (
    SDPA,
    check_results,
    check_scale,
    check_settings,
    check_tensors,
    why_never_hopper,
)
from trainstep.ops.flash_attention.portable.tiles import Arithmetic, Tiles
from trainstep.ops.flash_attention.problem import Problem
from trainstep.spans import span

try:
    from trainstep.ops.flash_attention.portable.backward import launch_backward
    from trainstep.ops.flash_attention.portable.forward import launch_forward
    from trainstep.ops.flash_attention.split.backward import launch_split_backward
    from trainstep.ops.flash_attention.split.forward import launch_split_forward
except ImportError:  # there is no triton for this platform, and no GPU that it could use
    launch_backward = launch_forward = launch_split_backward = launch_split_forward = None  # type: ignore[assignment]
try:
    from trainstep.ops.flash_attention.hopper.host import launch_hopper_backward, launch_hopper_forward
except ImportError:  # why_never_hopper then says so
    launch_hopper_backward = launch_hopper_forward = None  # type: ignore[assignment]

_SETTINGS = "float scale, bool causal, bool bottom_right, str? fp32_precision, int[]? tiles"
_library = torch.library.Library("trainstep", "FRAGMENT")
_library.define(f"flash_attention(Tensor q, Tensor k, Tensor v, {_SETTINGS}) -> (Tensor, Tensor)")
_library.define(
    "flash_attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_SETTINGS}) -> (Tensor, Tensor, Tensor)"
)
_forward_op = torch.ops.trainstep.flash_attention.default
_backward_op = torch.ops.trainstep.flash_attention_backward.default


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_alignment: str = "top_left",
    layout: str = "BHSD",
    fp32_precision: str | None = None,
    return_lse: bool = False,
    tiles: Tiles | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v without the S x S matrix; called like torch's scaled_dot_product_attention.

    q (B, H, S, D), k and v (B, G, S', D); with layout="BSHD" (B, S, H, D); or all (B, S, D). fp32, fp16, bf16; autocast applies.
    D is 8 to 256. S and S' are any; H is a multiple of G with enable_gqa. A tensor whose last stride is not 1 is copied once;
    all others are read in place. The output has q's layout.

    is_causal: query i sees keys 0..i, as in torch; with causal_alignment="bottom_right" the last query sees all keys, and a query
    that sees no key gives 0. return_lse: also returns log(sum(exp(scores))), (B, H, S) or (B, S), in fp32, without gradient. CPU
    tensors are computed by algorithm.py, the same algorithm in PyTorch, in their dtype's own arithmetic.

    fp32_precision, for fp32 tensors on a GPU; by default that of torch's matmuls:
        "ieee", "tf32"
        "tf32x3": three products of TF32 parts; errors up to 4 times those of fp32
        "fp16x3": three products of fp16 parts, split beforehand and scaled by head (split/parts.py); the same errors, faster, and
                  meanwhile as much memory again as q, k, v, and in backward do, take

    Kept for the backward pass: q, k, v, o and the log-sum-exp; `o.grad_fn.saved_tensors` shows them (behind a view for BSHD).
    """
    check_settings(attn_mask, dropout_p, causal_alignment, layout, fp32_precision)
    tensors = [_heads_first(x, layout) for x in _autocast(q, k, v)]
    q_BHSD, k_BGSD, v_BGSD = tensors if q.dim() == 4 else map(_with_heads, tensors)
    check_tensors(q_BHSD, k_BGSD, v_BGSD, enable_gqa)
    settings = _settings(q_BHSD, scale, is_causal, causal_alignment, fp32_precision, tiles)
    with span("attention"):
        # torch.compile must see the operator; else we call its autograd part as the dispatcher would, at less cost
        if torch.compiler.is_compiling():
            o, lse = _forward_op(q_BHSD, k_BGSD, v_BGSD, *settings)
            o, lse = (o.squeeze(1), lse.squeeze(1)) if q.dim() == 3 else (o, lse)
        else:
            o, lse = _forward_autograd(*tensors, *settings)
    o = o.transpose(1, 2) if layout == "BSHD" and q.dim() == 4 else o
    return (o, lse) if return_lse else o


def flash_attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_alignment: str = "top_left",
    layout: str = "BHSD",
    fp32_precision: str | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `flash_attention`, from its output's gradient do and the o and lse that it returned (return_lse=True).

        p = exp(scale q k^T - lse);  delta = rowsum(do o);  ds = p (do v^T - delta)
        dv = p^T do;  dk = scale ds^T q;  dq = scale ds k

    All other arguments are those of that call and have the same meaning. do and o have q's shape, dtype and device; lse is
    (B, H, S), or (B, S) for 3-D tensors, in fp32 (in fp64 for fp64 tensors). The gradients have the shapes, dtypes and layouts of
    q, k and v; they have no gradient themselves. ValueError for tensors that do not fit together.
    """
    check_settings(None, 0.0, causal_alignment, layout, fp32_precision)
    tensors = [_heads_first(x, layout) for x in _autocast(do, q, k, v, o)]
    do_BHSD, q_BHSD, k_BGSD, v_BGSD, o_BHSD = tensors if q.dim() == 4 else map(_with_heads, tensors)
    check_tensors(q_BHSD, k_BGSD, v_BGSD, enable_gqa)
    check_results(q_BHSD, do_BHSD, o_BHSD, lse.unsqueeze(1) if q.dim() == 3 else lse)
    settings = _settings(q_BHSD, scale, is_causal, causal_alignment, fp32_precision, tiles)
    backward = _backward_op if torch.compiler.is_compiling() else _backward_autograd
    gradients = _gradients(backward, *tensors, lse.contiguous(), *settings)
    dq, dk, dv = (dx.transpose(1, 2) if layout == "BSHD" and dx.dim() == 4 else dx for dx in gradients)
    return dq, dk, dv


def _settings(
    q_BHSD: Tensor, scale: float | None, is_causal: bool, causal_alignment: str, fp32_precision: str | None,
    tiles: Tiles | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The settings in the form of the operators' arguments."""
    scale = 1 / math.sqrt(q_BHSD.shape[-1]) if scale is None else scale
    check_scale(scale)
    return scale, is_causal, causal_alignment == "bottom_right", fp32_precision, tiles and tiles.numbers()


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of autocast, as for torch's own matmuls: all but fp64 tensors are cast."""
    device_type = tensors[0].device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # autocast knows no meta device
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _heads_first(x: Tensor, layout: str) -> Tensor:
    """The tensor as (B, H, S, D) or (B, S, D), with last stride 1."""
    if layout == "BSHD" and x.dim() == 4:
        x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _with_heads(x: Tensor) -> Tensor:
    """(B, S, D) as (B, 1, S, D)."""
    return x.unsqueeze(1) if x.dim() == 3 else x


# Implementations: the kernels on CUDA, else algorithm.py ----------------------------------------------------------------------


def _forward_cuda(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    *_, tiles = settings
    problem = _problem(q.dtype, *settings)
    with _current(q.device):
        if why_never_hopper(tiles, backward=False) is None:
            results = launch_hopper_forward(q, k, v, problem)
            if results is not None:
                return results
        launch = launch_split_forward if problem.arithmetic is Arithmetic.FP16X3 else launch_forward
        return launch(q, k, v, problem, Tiles.of_numbers(tiles).forward if tiles else None)


def _backward_cuda(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, tiles = settings
    chosen = Tiles.of_numbers(tiles) if tiles else None
    key_config, query_config = (chosen.key_gradients, chosen.query_gradients) if chosen else (None, None)
    if do.stride(-1) != 1:  # the gradient of out.sum() is an expanded number
        do = do.contiguous()
    problem = _problem(q.dtype, *settings)
    with _current(q.device):
        if why_never_hopper(tiles, backward=True) is None:
            gradients = launch_hopper_backward(do, q, k, v, o, lse, problem)
            if gradients is not None:
                return gradients
        launch = launch_split_backward if problem.arithmetic is Arithmetic.FP16X3 else launch_backward
        return launch(do, q, k, v, o, lse, problem, key_config, query_config)


def _problem(
    dtype: torch.dtype, scale: float, causal: bool, bottom_right: bool, fp32_precision: str | None, _tiles: object
) -> Problem:
    arithmetic = Arithmetic.HALF if dtype != torch.float32 else Arithmetic(fp32_precision or _matmul_precision())
    return Problem(scale, causal, bottom_right, arithmetic)


def _matmul_precision() -> str:
    """How torch multiplies fp32 matrices on a GPU."""
    # Not by torch.get_float32_matmul_precision, which raises in programs that use the newer setting.
    setting = torch.backends.cuda.matmul.fp32_precision
    if setting == "none":
        setting = torch.backends.fp32_precision  # type: ignore[attr-defined]
    return "tf32" if setting == "tf32" else "ieee"


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which `device` is the current device, on which Triton launches."""
    return _NOTHING if device.index == torch.cuda.current_device() else torch.cuda.device(device)


_NOTHING: AbstractContextManager[Any] = nullcontext()


def _forward_anywhere(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bottom_right: bool, *_gpu_settings: Any
) -> tuple[Tensor, Tensor]:
    with torch.autocast(
        q.device.type, enabled=False
    ):  # which the dispatcher has left behind if a mode has seen the operator
        return algorithm.forward(q, k, v, _mask(q, k, causal, bottom_right), scale)


def _backward_anywhere(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    scale: float, causal: bool, bottom_right: bool, *_gpu_settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    with torch.autocast(q.device.type, enabled=False):
        return algorithm.backward(do, q, k, v, o, lse, _mask(q, k, causal, bottom_right), scale)


def _mask(q: Tensor, k: Tensor, causal: bool, bottom_right: bool) -> algorithm.Mask:
    return algorithm.Mask(causal=causal, offset=k.shape[2] - q.shape[2] if bottom_right else 0)


def _forward_fake(q: Tensor, _k: Tensor, _v: Tensor, *_settings: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=lse_dtype)


def _backward_fake(_do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _forward_below_autograd(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    if _may_skip_dispatcher(q, k, v):
        return _forward_cuda(q, k, v, *settings)
    with torch._C._AutoDispatchBelowAutograd():
        o, lse = _forward_op(q, k, v, *settings)
    return o, lse


def _backward_below_autograd(do: Tensor, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    if _may_skip_dispatcher(do, q, k):
        return _backward_cuda(do, q, k, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        dq, dk, dv = _backward_op(do, q, k, *rest)
    return dq, dk, dv


def _may_skip_dispatcher(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the dispatcher, a tenth of the host's cost, would only call the CUDA implementation."""
    # No subclass, no mode (FLOP counter, fake tensors, selective checkpointing), no profiler that should see the operator.
    return (
        q.is_cuda
        and launch_forward is not None
        and type(q) is type(k) is type(v) is Tensor
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._autograd._profiler_enabled()
    )


# Autograd ----------------------------------------------------------------------------------------------------------------------


def _attend(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """o and lse; (B, S, D) and (B, S) for (B, S, D) tensors, not as views, so that the caller may write to them."""
    if q.dim() == 4:
        return _forward_below_autograd(q, k, v, *settings)
    o, lse = _forward_below_autograd(*map(_with_heads, (q, k, v)), *settings)
    return torch.ops.aten._unsafe_view(o, q.shape), torch.ops.aten._unsafe_view(lse, q.shape[:2])


def _gradients(
    backward: Any, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *settings: Any
) -> tuple[Tensor, ...]:
    """The result of `backward`, which takes (B, H, S, D) tensors, also for (B, S, D) tensors."""
    if q.dim() == 4:
        return backward(do, q, k, v, o, lse, *settings)  # type: ignore[no-any-return]
    gradients = backward(*map(_with_heads, (do, q, k, v, o)), lse.unsqueeze(1), *settings)
    return tuple(dx.squeeze(1) if x.dim() == 3 else dx for x, dx in zip((q, k, v), gradients, strict=True))


class _FlashAttention(torch.autograd.Function):
    """Saves tensors in the caller's form, with a dimension of heads or without."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        o, lse = _attend(q, k, v, *settings)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.settings = settings
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, _dlse: None) -> tuple[Tensor | None, ...]:
        if do is None:
            return None, None, None, None
        saved = ctx.saved_tensors  # may run the forward again, for checkpointing, so not below autograd
        # Grad is enabled with create_graph=True.
        backward = _backward_op if torch.is_grad_enabled() else _backward_below_autograd
        return *_gradients(backward, do, *saved, *ctx.settings), None


class _FlashAttentionBackward(torch.autograd.Function):
    """The backward pass where a second derivative is asked for: raises only when that is computed."""

    @staticmethod
    def forward(_ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _backward_below_autograd(*arguments)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> None:
        raise RuntimeError(
            f"flash_attention has no second derivative: use {SDPA} under sdpa_kernel(SDPBackend.MATH) where you need one"
        )


def _forward_autograd(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Any:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _FlashAttention.apply(q, k, v, settings)  # type: ignore[no-untyped-call]
    return _attend(q, k, v, *settings)


def _backward_autograd(*arguments: Any) -> Any:
    if torch.is_grad_enabled() and any(x.requires_grad for x in arguments if isinstance(x, Tensor)):
        return _FlashAttentionBackward.apply(*arguments)  # type: ignore[no-untyped-call]
    return _backward_below_autograd(*arguments)


def _register(name: str, *, cuda: Any, anywhere: Any, fake: Any, autograd: Any) -> None:
    if launch_forward is not None:
        _library.impl(name, cuda, "CUDA")
    _library.impl(name, anywhere, "CompositeExplicitAutograd")
    _library.impl(name, fake, "Meta")
    _library.impl(name, autograd, "Autograd")


_register(
    "flash_attention", cuda=_forward_cuda, anywhere=_forward_anywhere, fake=_forward_fake, autograd=_forward_autograd
)
_register(
    "flash_attention_backward",
    cuda=_backward_cuda,
    anywhere=_backward_anywhere,
    fake=_backward_fake,
    autograd=_backward_autograd,
)


# FLOPs, for torch.utils.flop_counter ----------------------------------------------------------------------------------------------


@register_flop_formula(torch.ops.trainstep.flash_attention)
def _forward_flops(
    q: torch.Size, k: torch.Size, _v: torch.Size, _scale: float, causal: bool, bottom_right: bool, *_: Any, **__: Any
) -> int:
    return attention_flops(q[0] * q[1], q[2], k[2], q[3], causal=causal, bottom_right=bottom_right)


@register_flop_formula(torch.ops.trainstep.flash_attention_backward)
def _backward_flops(
    _do: torch.Size, q: torch.Size, k: torch.Size, _v: torch.Size, _o: torch.Size, _lse: torch.Size,
    _scale: float, causal: bool, bottom_right: bool, *_: Any, **__: Any,
) -> int:  # fmt: skip
    return attention_backward_flops(q[0] * q[1], q[2], k[2], q[3], causal=causal, bottom_right=bottom_right)

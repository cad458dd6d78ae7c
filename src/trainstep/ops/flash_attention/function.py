"""`flash_attention` and its backward pass: choice of kernel, and what makes them operators torch knows: autograd, compile, FLOPs.

Registered with torch.library's Library, an implementation a dispatch key, because that costs the host less than custom_op does.
On CUDA devices the Triton kernels run (choice.py: which), anywhere else algorithm.py. Memory kept for backward is linear in S:
q, k, v, the output and the log-sum-exp. The gradient has no gradient of its own.

flash_attention -> _forward_autograd -> _FlashAttention -> _attend -> _forward_below_autograd -> _forward_cuda, which launches
flash_attention -> _forward_op, while torch.compile traces; the dispatcher then calls what stands at the end of the file:
    Autograd: _forward_autograd; CUDA: _forward_cuda; other devices: _forward_anywhere (algorithm.py); Meta: _forward_fake
_forward_below_autograd goes by _forward_op too where somebody stands between: a mode, a profiler, a subclass, a CPU.
The backward functions are named and call each other alike.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from trainstep.costs.attention import attention_backward_flops, attention_flops
from trainstep.ops.flash_attention import algorithm
from trainstep.ops.flash_attention.checks import SDPA, check_results, check_scale, check_settings, check_tensors
from trainstep.ops.flash_attention.choice import why_always_portable
from trainstep.ops.flash_attention.launch import Problem
from trainstep.ops.flash_attention.tiles import Arithmetic, Tiles
from trainstep.spans import span

try:
    from trainstep.ops.flash_attention.backward import launch_backward
    from trainstep.ops.flash_attention.forward import launch_forward
    from trainstep.ops.flash_attention.split_backward import launch_split_backward
    from trainstep.ops.flash_attention.split_forward import launch_split_forward
except ImportError:  # no triton for this platform: no GPU it could drive either
    launch_backward = launch_forward = launch_split_backward = launch_split_forward = None  # type: ignore[assignment]
try:
    from trainstep.ops.flash_attention.hopper import launch_hopper_backward, launch_hopper_forward
except ImportError:  # as choice.py finds too
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
    """softmax(scale q k^T) v without the S x S matrix; called as torch's scaled_dot_product_attention is.

    q (B, H, S, D), k and v (B, G, S', D); with layout="BSHD" (B, S, H, D); or all (B, S, D). fp32, fp16, bf16; autocast applies.
    D is 8 to 256. S and S' are any; H is a multiple of G with enable_gqa. A tensor whose last stride is not 1 is copied once;
    all others are read as they lie. The output is laid out as q is.

    is_causal: query i sees keys 0..i, as in torch; with causal_alignment="bottom_right" the last query sees all keys, and a query
    that sees none gives 0. fp32_precision, for fp32 tensors on a GPU: "ieee", "tf32", or, by three products and with errors up to 4
    times fp32's, "tf32x3" (of TF32 parts) and "fp16x3" (of fp16 parts that are split beforehand and scaled by head, see
    split_parts.py: faster, and while it runs it takes as much memory again as q, k, v and in backward do); by default as torch's
    matmuls are set. return_lse: also log(sum(exp(scores))), (B, H, S) or (B, S), in fp32; it carries no gradient. CPU tensors go
    through algorithm.py, the same algorithm in PyTorch, in their dtype's own arithmetic.

    Kept for the backward pass: q, k, v, o and the log-sum-exp, which `o.grad_fn.saved_tensors` shows (of BSHD tensors one view on).
    """
    check_settings(attn_mask, dropout_p, causal_alignment, layout, fp32_precision)
    given = [_heads_first(x, layout) for x in _autocast(q, k, v)]
    q_BHSD, k_BGSD, v_BGSD = given if q.dim() == 4 else map(_with_heads, given)
    check_tensors(q_BHSD, k_BGSD, v_BGSD, enable_gqa)
    settings = _settings(q_BHSD, scale, is_causal, causal_alignment, fp32_precision, tiles)
    with span("attention"):
        # torch.compile has to see the operator; else its autograd half is called as the dispatcher would, at less cost
        if torch.compiler.is_compiling():
            o, lse = _forward_op(q_BHSD, k_BGSD, v_BGSD, *settings)
            o, lse = (o.squeeze(1), lse.squeeze(1)) if q.dim() == 3 else (o, lse)
        else:
            o, lse = _forward_autograd(*given, *settings)
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
    """dq, dk, dv of `flash_attention`, from its output's gradient do, and from o and lse as it returned them (return_lse=True).

        p = exp(scale q k^T - lse);  delta = rowsum(do o);  ds = p (do v^T - delta)
        dv = p^T do;  dk = scale ds^T q;  dq = scale ds k

    All other arguments are those of that call, which says what they mean. do and o have q's shape, dtype and device; lse is
    (B, H, S), or (B, S) of 3-D tensors, in fp32 (of fp64 tensors in fp64). The gradients have the shapes and dtypes of q, k and v
    and lie as they do; they have no gradient of their own. ValueError for whatever does not fit together.
    """
    check_settings(None, 0.0, causal_alignment, layout, fp32_precision)
    given = [_heads_first(x, layout) for x in _autocast(do, q, k, v, o)]
    do_BHSD, q_BHSD, k_BGSD, v_BGSD, o_BHSD = given if q.dim() == 4 else map(_with_heads, given)
    check_tensors(q_BHSD, k_BGSD, v_BGSD, enable_gqa)
    check_results(q_BHSD, do_BHSD, o_BHSD, lse.unsqueeze(1) if q.dim() == 3 else lse)
    settings = _settings(q_BHSD, scale, is_causal, causal_alignment, fp32_precision, tiles)
    backward = _backward_op if torch.compiler.is_compiling() else _backward_autograd
    gradients = _gradients(backward, *given, lse.contiguous(), *settings)
    dq, dk, dv = (dx.transpose(1, 2) if layout == "BSHD" and dx.dim() == 4 else dx for dx in gradients)
    return dq, dk, dv


def _settings(
    q_BHSD: Tensor, scale: float | None, is_causal: bool, causal_alignment: str, fp32_precision: str | None,
    tiles: Tiles | None,
) -> tuple[Any, ...]:  # fmt: skip
    """As the operators take them."""
    scale = 1 / math.sqrt(q_BHSD.shape[-1]) if scale is None else scale
    check_scale(scale)
    return scale, is_causal, causal_alignment == "bottom_right", fp32_precision, tiles and tiles.numbers()


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As torch's own matmuls under autocast: all but fp64 in its dtype."""
    device_type = tensors[0].device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # a meta tensor has no autocast to ask for
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _heads_first(x: Tensor, layout: str) -> Tensor:
    """(B, H, S, D) or (B, S, D), its last stride 1."""
    if layout == "BSHD" and x.dim() == 4:
        x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _with_heads(x: Tensor) -> Tensor:
    """(B, 1, S, D) of (B, S, D)."""
    return x.unsqueeze(1) if x.dim() == 3 else x


# What runs where: on CUDA the kernels, else the algorithm ----------------------------------------------------------------------


def _forward_cuda(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    *_, tiles = settings
    problem = _problem(q.dtype, *settings)
    with _current(q.device):
        if why_always_portable(tiles, backward=False) is None:
            results = launch_hopper_forward(q, k, v, problem)
            if results is not None:
                return results
        launch = launch_split_forward if problem.arithmetic is Arithmetic.FP16X3 else launch_forward
        return launch(q, k, v, problem, Tiles.of_numbers(tiles).forward if tiles else None)


def _backward_cuda(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, tiles = settings
    given = Tiles.of_numbers(tiles) if tiles else None
    key_config, query_config = (given.key_gradients, given.query_gradients) if given else (None, None)
    if do.stride(-1) != 1:  # out.sum() hands back one number, expanded
        do = do.contiguous()
    problem = _problem(q.dtype, *settings)
    with _current(q.device):
        if why_always_portable(tiles, backward=True) is None:
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
    """How torch multiplies fp32 on a GPU. torch.get_float32_matmul_precision raises for who has used the newer setting."""
    setting = torch.backends.cuda.matmul.fp32_precision
    if setting == "none":
        setting = torch.backends.fp32_precision  # type: ignore[attr-defined]
    return "tf32" if setting == "tf32" else "ieee"


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return _NOTHING if device.index == torch.cuda.current_device() else torch.cuda.device(device)


_NOTHING: AbstractContextManager[Any] = nullcontext()


def _forward_anywhere(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bottom_right: bool, *_gpu_settings: Any
) -> tuple[Tensor, Tensor]:
    return algorithm.forward(q, k, v, _mask(q, k, causal, bottom_right), scale)


def _backward_anywhere(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    scale: float, causal: bool, bottom_right: bool, *_gpu_settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return algorithm.backward(do, q, k, v, o, lse, _mask(q, k, causal, bottom_right), scale)


def _mask(q: Tensor, k: Tensor, causal: bool, bottom_right: bool) -> algorithm.Mask:
    return algorithm.Mask(causal=causal, offset=k.shape[2] - q.shape[2] if bottom_right else 0)


def _forward_fake(q: Tensor, _k: Tensor, _v: Tensor, *_settings: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=lse_dtype)


def _backward_fake(_do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _forward_below_autograd(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    if _nobody_between(q, k, v):
        return _forward_cuda(q, k, v, *settings)
    with torch._C._AutoDispatchBelowAutograd():
        o, lse = _forward_op(q, k, v, *settings)
    return o, lse


def _backward_below_autograd(do: Tensor, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    if _nobody_between(do, q, k):
        return _backward_cuda(do, q, k, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        dq, dk, dv = _backward_op(do, q, k, *rest)
    return dq, dk, dv


def _nobody_between(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the dispatcher, a tenth of the host's cost, would only call the CUDA implementation.

    No mode is on (FLOP counter, fake tensors, selective checkpointing), no profiler that should see the operator, no subclass.
    """
    return (
        q.is_cuda
        and launch_forward is not None
        and type(q) is type(k) is type(v) is Tensor
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._autograd._profiler_enabled()
    )


# Autograd ----------------------------------------------------------------------------------------------------------------------


def _attend(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """Of (B, S, D) tensors (B, S, D) and (B, S): no views, so that they may be written to."""
    if q.dim() == 4:
        return _forward_below_autograd(q, k, v, *settings)
    o, lse = _forward_below_autograd(*map(_with_heads, (q, k, v)), *settings)
    return torch.ops.aten._unsafe_view(o, q.shape), torch.ops.aten._unsafe_view(lse, q.shape[:2])


def _gradients(
    backward: Any, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *settings: Any
) -> tuple[Tensor, ...]:
    """What `backward` computes of (B, H, S, D) tensors; of those that were (B, S, D) as such."""
    if q.dim() == 4:
        return backward(do, q, k, v, o, lse, *settings)  # type: ignore[no-any-return]
    gradients = backward(*map(_with_heads, (do, q, k, v, o)), lse.unsqueeze(1), *settings)
    return tuple(dx.squeeze(1) if x.dim() == 3 else dx for x, dx in zip((q, k, v), gradients, strict=True))


class _FlashAttention(torch.autograd.Function):
    """Tensors are kept as they were given, with heads or without."""

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
        saved = ctx.saved_tensors  # not below autograd: checkpointing runs the forward again here
        backward = _backward_op if torch.is_grad_enabled() else _backward_below_autograd  # create_graph=True or not
        return *_gradients(backward, do, *saved, *ctx.settings), None


class _FlashAttentionBackward(torch.autograd.Function):
    """The backward pass as something that was asked to be differentiated, which it cannot be."""

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
    "flash_attention",
    cuda=_forward_cuda,
    anywhere=_forward_anywhere,
    fake=_forward_fake,
    autograd=_forward_autograd,
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

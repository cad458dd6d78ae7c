"""Chooses a call's kernels: Hopper's where they can run, split/ for fp16x3, else the portable ones; checks the call's arguments.

`why_never_hopper` gives the reasons that hold for any tensors, hopper/host.py those that depend on the tensors. function.py
launches by both; `describe_choice` puts both into words.
"""

import math
from typing import Any

import torch
from torch import Tensor

from trainstep.ops.flash_attention.portable.tiles import MOST_HEAD_DIM, Arithmetic

try:
    from trainstep.ops.flash_attention.hopper.host import why_not as why_not_hopper

    HAS_GLUON = True
except ImportError:  # no triton, or a triton without Gluon
    HAS_GLUON = False

LAYOUTS = ("BHSD", "BSHD")
ALIGNMENTS = ("top_left", "bottom_right")
PRECISIONS = (None, "ieee", "tf32", "tf32x3", "fp16x3")
LEAST_HEAD_DIM = 8
SDPA = "torch.nn.functional.scaled_dot_product_attention"


def why_never_hopper(tiles: Any, *, backward: bool) -> str | None:
    """Why a pass cannot use Hopper's kernels, whatever its tensors; None if it may. `tiles`: the caller's."""
    if tiles is not None:
        return "tiles were given, and Hopper's kernels take none"
    if not HAS_GLUON:
        return "this triton has no Gluon for Hopper"
    if backward and torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are required, and Hopper's kernel adds up dq in any order"
    return None


def describe_choice(
    q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *, backward: bool, fp32_precision: str | None = None,
    tiles: Any = None,
) -> str:  # fmt: skip
    """The choice of kernels for these tensors, as a sentence. `fp32_precision`, `tiles`: the arguments of flash_attention."""
    if not q_BHSD.is_cuda:
        return "algorithm.py: the tensors are not on a GPU"
    if q_BHSD.dtype == torch.float32 and fp32_precision == Arithmetic.FP16X3:
        return f"split kernels: fp32_precision is {fp32_precision}"
    reason = why_never_hopper(tiles, backward=backward) or why_not_hopper(q_BHSD, k_BGSD, v_BGSD)
    return "Hopper kernels" if reason is None else f"portable kernels: {reason}"


# Checks of flash_attention's arguments: each ValueError is a sentence that names the argument and what to use instead.


def check_settings(
    attn_mask: object, dropout_p: float, causal_alignment: str, layout: str, fp32_precision: str | None
) -> None:
    """ValueError for an option that flash_attention lacks, naming a function that has it."""
    if attn_mask is not None:
        raise ValueError(f"flash_attention takes no attn_mask: use {SDPA}, or torch's flex_attention for masks by rule")
    if dropout_p:
        raise ValueError(f"flash_attention has no dropout: pass dropout_p=0.0, or use {SDPA}")
    if causal_alignment not in ALIGNMENTS:
        raise ValueError(f"causal_alignment={causal_alignment!r}: must be one of {ALIGNMENTS}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: must be one of {LAYOUTS}")
    if fp32_precision not in PRECISIONS:
        raise ValueError(f"fp32_precision={fp32_precision!r}: must be one of {PRECISIONS}")


def check_scale(scale: float) -> None:
    """ValueError unless the scale is positive and finite."""
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale} must be positive and finite: negate q instead")


def check_results(q: Tensor, do: Tensor, o: Tensor, lse: Tensor) -> None:
    """ValueError unless do and o are like q, (B, H, S, D), and lse, (B, H, S), is what the forward pass returns."""
    for name, x in (("do", do), ("o", o)):
        if x.shape != q.shape or x.dtype is not q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} {tuple(x.shape)} is {x.dtype} on {x.device}: shape, dtype and device must be q's, "
                f"{tuple(q.shape)}, {q.dtype} on {q.device}"
            )
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if lse.shape != q.shape[:3] or lse.dtype is not lse_dtype or lse.device != q.device:
        raise ValueError(
            f"lse {tuple(lse.shape)} is {lse.dtype} on {lse.device}: pass what flash_attention(..., return_lse=True) returned, "
            f"{tuple(q.shape[:3])} of {lse_dtype} on {q.device}"
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    """ValueError for shapes, dtypes and devices that the kernels do not support. q (B, H, S, D), k and v (B, G, S', D)."""
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"q, k, v have {q.dim()}, {k.dim()}, {v.dim()} dimensions: all must have 4, or all 3 (B, S, D)"
        )
    if q.dtype is not k.dtype or q.dtype is not v.dtype or q.device != k.device or q.device != v.device:
        raise ValueError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype} on {q.device}, {k.device}, {v.device}: make them alike"
        )
    batch, heads, queries, head_dim = q.shape
    key_batch, key_heads, keys, key_dim = k.shape
    if key_batch != batch or key_dim != head_dim or k.shape != v.shape:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must agree, and with q {tuple(q.shape)} in batch and head width; "
            f"{SDPA} takes a v of another width"
        )
    if not (batch and heads and queries and key_heads and keys):
        raise ValueError(f"q {tuple(q.shape)} or k {tuple(k.shape)} is empty: it must have at least one element")
    if heads != key_heads and not (enable_gqa and heads % key_heads == 0):
        raise ValueError(
            f"{heads} query heads and {key_heads} key heads: pass enable_gqa=True, with a multiple of the key heads in q"
        )
    if not LEAST_HEAD_DIM <= head_dim <= MOST_HEAD_DIM:
        raise ValueError(f"heads are {head_dim} wide: the kernels take {LEAST_HEAD_DIM} to {MOST_HEAD_DIM}; use {SDPA}")
    if q.is_cuda and q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"the kernels take float32, float16 and bfloat16, not {q.dtype}: use {SDPA}")

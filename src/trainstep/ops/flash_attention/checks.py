"""What `flash_attention` does not take: each a ValueError in one sentence that names the argument and the way out."""

import math

import torch
from torch import Tensor

from trainstep.ops.flash_attention.tiles import MOST_HEAD_DIM

LAYOUTS = ("BHSD", "BSHD")
ALIGNMENTS = ("top_left", "bottom_right")
PRECISIONS = (None, "ieee", "tf32", "tf32x3", "fp16x3")
LEAST_HEAD_DIM = 8
SDPA = "torch.nn.functional.scaled_dot_product_attention"


def check_settings(
    attn_mask: object, dropout_p: float, causal_alignment: str, layout: str, fp32_precision: str | None
) -> None:
    """ValueError for what the function has not, naming what has it."""
    if attn_mask is not None:
        raise ValueError(f"flash_attention takes no attn_mask: use {SDPA}, or torch's flex_attention for masks by rule")
    if dropout_p:
        raise ValueError(f"flash_attention has no dropout: pass dropout_p=0.0, or use {SDPA}")
    if causal_alignment not in ALIGNMENTS or layout not in LAYOUTS or fp32_precision not in PRECISIONS:
        raise ValueError(
            f"causal_alignment={causal_alignment!r} is one of {ALIGNMENTS}, layout={layout!r} of {LAYOUTS}, "
            f"fp32_precision={fp32_precision!r} of {PRECISIONS}: one of them is not"
        )


def check_scale(scale: float) -> None:
    """ValueError unless positive and finite."""
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale} must be positive and finite: negate q instead")


def check_results(q: Tensor, do: Tensor, o: Tensor, lse: Tensor) -> None:
    """ValueError unless do and o are as q (B, H, S, D) is, and lse (B, H, S) as the forward pass made it."""
    for name, x in (("do", do), ("o", o)):
        if x.shape != q.shape or x.dtype is not q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} {tuple(x.shape)} is {x.dtype} on {x.device}: shape, dtype and device must be q's, "
                f"{tuple(q.shape)}, {q.dtype} on {q.device}"
            )
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if lse.shape != q.shape[:3] or lse.dtype is not lse_dtype or lse.device != q.device:
        raise ValueError(
            f"lse {tuple(lse.shape)} is {lse.dtype} on {lse.device}: pass what flash_attention(..., return_lse=True) gave, "
            f"{tuple(q.shape[:3])} of {lse_dtype} on {q.device}"
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    """ValueError for shapes, dtypes and devices that the kernels would get wrong. q (B, H, S, D), k and v (B, G, S', D)."""
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"q, k, v have {q.dim()}, {k.dim()}, {v.dim()} dimensions: all 4, or all 3 (B, S, D), please")
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
        raise ValueError(f"q {tuple(q.shape)} or k {tuple(k.shape)} is empty: there is nothing to attend to")
    if heads != key_heads and not (enable_gqa and heads % key_heads == 0):
        raise ValueError(
            f"{heads} query heads and {key_heads} key heads: pass enable_gqa=True, with a multiple of the key heads in q"
        )
    if not LEAST_HEAD_DIM <= head_dim <= MOST_HEAD_DIM:
        raise ValueError(f"heads are {head_dim} wide, and {LEAST_HEAD_DIM} to {MOST_HEAD_DIM} is what fits: use {SDPA}")
    if q.is_cuda and q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"the kernels take float32, float16 and bfloat16, not {q.dtype}: use {SDPA}")

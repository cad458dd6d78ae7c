"""The one place an attention's name becomes a callable (q, k, v) -> output, causal, all of shape (B, H, S, D)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from trainstep.ops import flash_attention, reference
from trainstep.spans import span

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

_SDPA_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}


def attention_named(name: str, context: int, device: torch.device) -> Attention:
    """The attention of that name (RunConfig.attention) for sequences of `context` tokens."""
    if name == "plain":
        return _plain
    if name == "sdpa":
        return _sdpa
    if name == "flex":
        return _flex(context, device)
    if name == "flash":
        return _flash
    return _sdpa_on(_SDPA_BACKENDS[name])


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return reference.attention(q, k, v, causal=True)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with span("attention"):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    output: Tensor = flash_attention(q, k, v, is_causal=True)  # type: ignore[assignment]
    return output


def _sdpa_on(backend: SDPBackend) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with span("attention"), sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return run


def _flex(context: int, device: torch.device) -> Attention:
    """FlexAttention with a causal block mask. Compiled on a GPU, where it is meant to be."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # it imports the compiler: 1.5 s

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, context, context, device=device)
    run_flex = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with span("attention"):
            output: Tensor = run_flex(q, k, v, block_mask=mask)
            return output

    return run

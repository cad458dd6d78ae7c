"""The one place where an attention's name becomes a callable (q, k, v) -> output on (B, H, S, D).

`attention_named` returns the model's attention: causal, in the span "attention". SDPA on one backend, FlexAttention and the
packages flash-attn and flash-attn-4 also have functions with other masks and shared key heads, which measure/attention/peers.py
times alone.
"""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from trainstep.config.attention import PACKAGES
from trainstep.ops import flash_attention, reference
from trainstep.ops.operators import autocast_dtype
from trainstep.spans import span

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
PackagedAttention = Callable[..., Tensor | tuple[Tensor, ...]]
"""flash_attn_func of a package: (B, S, H, D), options by name; flash-attn-4 also returns the log-sum-exp."""

_SDPA_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}
_MODULES = {"flash_attn": "flash_attn", "flash_attn_4": "flash_attn.cute"}
"""The module that has each package's flash_attn_func."""
_MASK_BYTES = 1 << 30


def attention_named(name: str, context: int, device: torch.device) -> Attention:
    """The attention with this name (RunConfig.attention) for sequences of `context` tokens. ImportError if it is not installed."""
    if name == "plain":
        return _plain
    if name == "trainstep":
        return _trainstep
    if name == "flex":
        return _in_span(flex_attention(context, context, device))
    if name == "flash_attn_4":
        return _in_span(_of_package(flash_attn_func(name, "attention")))
    return _in_span(_sdpa if name == "sdpa" else sdpa_on(name))


def flash_attn_func(name: str, field: str) -> PackagedAttention:
    """The function of the package flash-attn or flash-attn-4. ImportError, with the reason, if anything it needs is absent.

    `field`: the option that names it, for the error.
    """
    module, reason = _MODULES[name], "it has no flash_attn_func"
    try:
        # With flash-attn-4 alone there is an empty module flash_attn too.
        function: PackagedAttention | None = getattr(importlib.import_module(module), "flash_attn_func", None)
    except (ImportError, OSError, RuntimeError) as error:  # OSError, RuntimeError: a shared library does not load
        function, reason = None, str(error)
    if function is None:
        raise ImportError(f"{field}: {name} is not installed; pip install {PACKAGES[name]} (import {module}: {reason})")
    return function


def sdpa_on(name: str, *, causal: bool = True, shares_keys: bool = False) -> Attention:
    """SDPA on the backend with this name only. The causal mask starts at the top left.

    The callable raises RuntimeError for inputs that the backend does not take.
    """
    backend = _SDPA_BACKENDS[name]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shares_keys)

    return run


def flex_attention(
    queries: int, keys: int, device: torch.device, *, causal: bool = True, offset: int = 0, shares_keys: bool = False
) -> Attention:
    """FlexAttention for these lengths, compiled on a GPU; with a causal mask query i attends to keys 0..i + offset."""
    from torch.nn.attention import flex_attention as flex  # imports the compiler, which takes 1.5 s

    on_gpu = device.type == "cuda"
    mask = None
    if causal:
        # Made eagerly, a block mask needs a queries x keys matrix of bools; compiling its making takes 10 s.
        eager = queries * keys <= _MASK_BYTES or not on_gpu
        make_mask = flex.create_block_mask if eager else torch.compile(flex.create_block_mask, dynamic=False)
        mask = make_mask(lambda _b, _h, q, k: q + offset >= k, None, None, queries, keys, device=device)
    attend = torch.compile(flex.flex_attention, dynamic=False) if on_gpu else flex.flex_attention

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output: Tensor = attend(q, k, v, block_mask=mask, enable_gqa=shares_keys)
        return output

    return run


def _of_package(attend: PackagedAttention) -> Attention:
    # Its kernels need addresses, which a compiler's fake tensors lack, so the compiled graph breaks here.
    uncompiled: PackagedAttention = torch.compiler.disable(attend)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dtype = autocast_dtype(q)
        if dtype is not None:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        output = uncompiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
        o_BSHD = output[0] if isinstance(output, tuple) else output
        return o_BSHD.transpose(1, 2)

    return run


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return reference.attention(q, k, v, causal=True)


def _trainstep(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    output: Tensor = flash_attention(q, k, v, is_causal=True)  # type: ignore[assignment]
    return output


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def _in_span(attend: Attention) -> Attention:
    """The attention in the span "attention", which our kernel and the reference open themselves."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with span("attention"):
            return attend(q, k, v)

    return run

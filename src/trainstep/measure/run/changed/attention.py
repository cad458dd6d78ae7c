"""Changes a script's attention from outside: runs another kernel, and replaces causal masks by is_causal=True.

    with_our_kernel(applied)                 # scaled_dot_product_attention by trainstep's kernel, where it takes the call
    said_causal(applied)                     # a causal mask becomes is_causal=True
    models_said_causal(applied, module)      # Hugging Face's models are told to make no mask

`applied` notes what was done and what was left (applied.py).

[Note: is it causal] Kernels skip what is_causal hides and compute all that a mask hides. In the warm-ups each mask is read, for
which the host waits. If one mask is not causal, all masks of its shape stay masks. Afterwards only the first mask of a new shape is
read: if all masks of a shape that were read are causal, the later ones count as causal, as if their author had written is_causal.

[Note: masks of Hugging Face's models] Before transformers makes a mask, it checks whether any token is padding or packed. While
torch.compile traces the model it cannot check, so every compiled model attends with a mask (seen in transformers 5.17 and 5.23
with GPT-2 and Llama). transformers makes no mask for an attention whose name it does not know. Whoever asks for this change
promises that no sequence is padded or packed; if one was, the losses show it. Models with a window, an encoder or cross attention
keep their masks.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from trainstep.ops import flash_attention
from trainstep.ops.operators import autocast_dtype

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HEAD_DIMS = range(8, 257)
_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HIDDEN = -1e4
"""An additive mask hides a position where its value is this or less."""
_NAME = "sdpa_said_causal"


class Notes(Protocol):
    """Notes what a change did, or why it did nothing."""

    @property
    def in_warmups(self) -> bool:
        """Whether nothing is timed yet."""
        ...

    def did(self, name: str) -> None:
        """Count that the change found something to change."""
        ...

    def left(self, name: str, why: str) -> None:
        """Note why something stays as it is."""
        ...


def with_our_kernel(applied: Notes) -> None:
    """Run torch.nn.functional.scaled_dot_product_attention by trainstep's kernel, where the kernel takes the call."""

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def noted() -> bool:  # while a graph is traced, this runs once and is not part of the graph
        applied.did("attention")
        return True

    def attention(
        original: Callable[..., torch.Tensor], mask: torch.Tensor | None, call: dict[str, Any]
    ) -> torch.Tensor:
        taken = call["query"], call["key"], call["value"], call["enable_gqa"]
        if mask is not None or call["dropout_p"] != 0.0 or not _takes(*taken):
            return original(attn_mask=mask, **call)
        noted()
        options = {name: call[name] for name in ("is_causal", "scale", "enable_gqa")}
        output = flash_attention(*taken[:3], **options)
        return output if isinstance(output, torch.Tensor) else output[0]

    applied.left("attention", "each call has a mask, dropout, or tensors that the kernel does not take")
    _wrap(attention)


def _takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> bool:
    """Whether the kernel takes these tensors: on a GPU, or anywhere where Triton's interpreter is on."""
    if not (query.is_cuda or _INTERPRETED) or query.dim() != 4 or query.shape[-1] not in _HEAD_DIMS:
        return False
    # Autocast casts them for our kernel as for torch's.
    dtypes = {autocast_dtype(tensor) or tensor.dtype for tensor in (query, key, value)}
    if len(dtypes) > 1 or dtypes.isdisjoint(_KERNEL_DTYPES):
        return False
    heads, groups = query.shape[1], key.shape[1]
    fits = heads == groups or (enable_gqa and heads % groups == 0)
    return fits and key.shape == value.shape and key.shape[-1] == query.shape[-1] and key.shape[0] == query.shape[0]


def said_causal(applied: Notes) -> None:
    """Replace a causal mask of scaled_dot_product_attention by is_causal=True. [Note: is it causal]"""
    seen: dict[tuple[int, ...], bool] = {}

    def attention(
        original: Callable[..., torch.Tensor], mask: torch.Tensor | None, call: dict[str, Any]
    ) -> torch.Tensor:
        if mask is None or torch.compiler.is_compiling():
            return original(attn_mask=mask, **call)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():  # no mask can be read
            return original(attn_mask=mask, **call)
        shape = tuple(mask.shape)
        is_causal = seen.get(shape, True)
        if is_causal and (applied.in_warmups or shape not in seen):
            is_causal = seen[shape] = _is_causal(mask, call["query"].shape[-2], call["key"].shape[-2])
        if not is_causal:
            return original(attn_mask=mask, **call)
        applied.did("mask")
        return original(attn_mask=None, **{**call, "is_causal": True})

    applied.left("mask", "no mask that could be looked at is causal; what a compiled module makes cannot be")
    _wrap(attention)


def _is_causal(mask: torch.Tensor, queries: int, keys: int) -> bool:
    """Whether the mask hides what comes later, and nothing else."""
    if queries != keys or mask.shape[-2:] != (queries, keys) or mask.requires_grad:
        return False
    is_flag = mask.dtype == torch.bool
    seen, hidden = (mask, ~mask) if is_flag else (mask == 0, mask <= _HIDDEN)
    earlier = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
    return bool(torch.where(earlier, seen, hidden).all())


def models_said_causal(applied: Notes, module: torch.nn.Module) -> None:
    """Have each Hugging Face model in the module whose attention is sdpa make no mask. [Note: masks of Hugging Face's models]"""
    interface: Any = getattr(sys.modules.get("transformers"), "AttentionInterface", None)
    sdpa = interface().get("sdpa") if interface is not None else None
    told: set[torch.nn.Module] = set()
    for part in module.modules() if sdpa is not None else ():
        name = getattr(getattr(part, "config", None), "_attn_implementation", None)
        tell: Any = getattr(part, "set_attn_implementation", None)
        if name is None or tell is None or part in told:
            continue
        told.update(part.modules())
        if why := _why_masked(part):
            applied.left("mask", why)
        else:
            interface.register(_NAME, sdpa)
            tell(_NAME)
            applied.did("mask")


def _why_masked(model: Any) -> str:
    """Why a model needs more than is_causal says; empty if it does not, as far as its config and its attentions tell."""
    config = model.config
    if config._attn_implementation != "sdpa":
        return f"the model's attention is {config._attn_implementation}, not sdpa"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
        return "not all of the model's attentions see everything before: some have a window"
    causal = [part.is_causal for part in model.modules() if hasattr(part, "is_causal")]
    return "" if causal and all(causal) else "not all of the model's attentions are causal"


def _wrap(
    attention: Callable[[Callable[..., torch.Tensor], torch.Tensor | None, dict[str, Any]], torch.Tensor],
) -> None:
    """Replace scaled_dot_product_attention by a function that gets the original, the mask, and all other arguments."""
    original = torch.nn.functional.scaled_dot_product_attention

    @functools.wraps(original)
    def called(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = {"query": query, "key": key, "value": value, "dropout_p": dropout_p}
        return attention(
            original, attn_mask, {**call, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        )

    torch.nn.functional.scaled_dot_product_attention = called

"""`flash_attention` in models of Hugging Face transformers, under the name "trainstep":

    from trainstep.ops.flash_attention import hugging_face
    hugging_face.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="trainstep")

Two functions are registered: the attention, and what transformers calls to make its mask. Without the second transformers drops the
mask on its way, and padding would be attended. What our kernels cannot compute is a ValueError that names the alternative; under
torch.compile or in a CUDA graph, where a value cannot be read, it is an assertion on the device. Needs `pip install trainstep[hf]`;
tested with transformers 5.5 and 5.23.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainstep.ops.flash_attention.function import flash_attention

NAME = "trainstep"
SDPA, FLEX, EAGER = (f'attn_implementation="{name}"' for name in ("sdpa", "flex_attention", "eager"))
HARMLESS = {
    *(
        "cache_position",
        "deterministic",
        "layer_idx",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
    ),
    *("past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache"),
}
"""What models pass on to their attention that changes none of its numbers; position_ids are looked at."""


def register() -> None:
    """Make `attn_implementation="trainstep"` a choice, for models made before and after. Calling it again changes nothing."""
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
    )  # seconds to import, and an extra of this package

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query (B, H, S, D), key and value (B, G, S', D), to (B, S, H, D): an AttentionInterface function.

    A query shorter than the keys follows cached ones, so its last row sees all of them.
    """
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _refuse(module, attention_mask, dropout, {name: value for name, value in others.items() if name not in HARMLESS})
    if sliding_window is not None and keys >= sliding_window:
        raise ValueError(f"{NAME} attention has no sliding window, and {keys} keys fill {sliding_window}: use {FLEX}")
    if causal and queries > keys:
        raise ValueError(f"a causal mask over {queries} queries and only {keys} keys has no one meaning: use {SDPA}")
    if getattr(module, "layer_idx", None) in (0, None):  # once a pass: it waits for the GPU
        _refuse_restarts(others.get("position_ids"))
    o = flash_attention(
        query, key, value, is_causal=causal, causal_alignment="bottom_right", scale=scaling, enable_gqa=True
    )
    return o.transpose(1, 2).contiguous(), None  # type: ignore[union-attr]


def _refuse(module: torch.nn.Module, attention_mask: object, dropout: float, others: dict[str, object]) -> None:
    if attention_mask is not None:
        raise ValueError(f"{NAME} attention takes no mask but causal or none: use {SDPA}, or {FLEX} for masks by rule")
    if dropout:
        raise ValueError(
            f"{NAME} attention has no dropout: set attention_dropout=0.0 in the model's config, or use {SDPA}"
        )
    if others.get("output_attentions"):
        raise ValueError(f"{NAME} attention never holds the weights that output_attentions asks for: use {EAGER}")
    for name, value in others.items():
        if value is not None and value is not False:
            raise ValueError(f"{NAME} attention does not know {name} of {type(module).__name__}: use {EAGER} or {SDPA}")


def _refuse_restarts(position_ids: Tensor | None) -> None:
    """Positions that do not count up are several sequences in one row."""
    if position_ids is not None and position_ids.dim() == 2 and position_ids.shape[1] > 1:
        _require((position_ids.diff(dim=-1) == 1).all(), _PACKED)


_PACKED = f"{NAME} attention takes one sequence a row, and position_ids restart in one: use {FLEX} for packed sequences"
_PADDED = f"{NAME} attention takes no padding, and attention_mask has zeros: make rows equally long, or use {SDPA}"


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    *,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **_others: Any,
) -> None:
    """An AttentionMaskInterface function: no mask, as the attention knows whether it is causal, or a ValueError."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function  # see register

    if attention_mask is not None:
        covered = attention_mask[:, kv_offset : kv_offset + kv_length]
        if covered.shape[1] < kv_length:
            raise ValueError(_PADDED)
        _require(covered.all(), _PADDED)
    if mask_function is bidirectional_mask_function:
        return
    if isinstance(q_offset, Tensor) or q_offset - kv_offset != kv_length - q_length:
        raise ValueError(f"{NAME} attention needs a cache that ends with the newest key, as DynamicCache: use {SDPA}")
    if mask_function is causal_mask_function:
        return
    within = local_size is not None and kv_length < local_size
    if within and allow_is_causal_skip:  # a window, or a chunk, that none of these sequences fills
        return
    if use_vmap or not (within or local_size is None) or not torch.compiler.is_compiling():
        raise ValueError(
            f"{NAME} attention takes one causal sequence a row, no window, no packing: use {FLEX} or {SDPA}"
        )
    _require(_looks_causal(mask_function, batch_size, q_length, kv_length, device), _PACKED)


def _looks_causal(
    mask_function: Callable[..., Tensor], batch_size: int, queries: int, keys: int, device: torch.device | str
) -> Tensor:
    """Whether each query sees the first key and itself, and not the next key.

    Under torch.compile transformers puts its test of packed sequences into every mask, needed or not; this finds out in O(S).
    """
    batch = torch.arange(batch_size, device=device)[:, None]
    query = torch.arange(queries, device=device)[None, :]
    head = torch.zeros((), dtype=torch.int64, device=device)
    own = query + keys - queries
    seen = mask_function(batch, head, own, torch.zeros_like(own)) & mask_function(batch, head, own, own)
    ahead = mask_function(batch, head, own[:, :-1], own[:, 1:])
    return seen.all() & ~ahead.any()


def _require(condition: Tensor, message: str) -> None:
    """ValueError unless true; on the device where the host cannot look at it."""
    if torch.compiler.is_compiling() or (condition.is_cuda and torch.cuda.is_current_stream_capturing()):
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)

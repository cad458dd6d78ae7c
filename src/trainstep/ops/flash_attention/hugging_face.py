"""Registers `flash_attention` in Hugging Face transformers under the name "trainstep".

    from trainstep.ops.flash_attention import hugging_face
    hugging_face.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="trainstep")

Two functions are registered: the attention, and the function that transformers calls to make its mask. Without the second,
transformers would drop the mask and padding would be attended. Calls that our kernels cannot compute raise a ValueError that names
the alternative; under torch.compile or in a CUDA graph, where the host cannot read values, an assertion on the device fails. Needs
`pip install trainstep[hf]`; tested with transformers 5.5 and 5.23.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainstep.ops.flash_attention.function import flash_attention

NAME = "trainstep"
SDPA, FLEX, EAGER = (f'attn_implementation="{name}"' for name in ("sdpa", "flex_attention", "eager"))
HARMLESS = {
    "cache_position", "deterministic", "layer_idx", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache",
}  # fmt: skip
"""Arguments of models to their attention that do not change its result; position_ids are checked."""
_PACKED = f"{NAME} attention takes one sequence a row, and position_ids restart in one: use {FLEX} for packed sequences"
_PADDED = f"{NAME} attention takes no padding, and attention_mask has zeros: make rows equally long, or use {SDPA}"


def register() -> None:
    """Add `attn_implementation="trainstep"`, for models made before and after. Calling it again changes nothing."""
    # Imported here: transformers takes seconds to import, and is an extra of this package.
    from transformers import AttentionInterface, AttentionMaskInterface

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
    """An AttentionInterface function: query (B, H, S, D), key and value (B, G, S', D), to (B, S, H, D).

    Fewer queries than keys follow cached positions, so the last query sees all keys.
    """
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _refuse(module, attention_mask, dropout, {name: value for name, value in others.items() if name not in HARMLESS})
    if sliding_window is not None and keys >= sliding_window:
        raise ValueError(f"{NAME} attention has no sliding window, and {keys} keys fill {sliding_window}: use {FLEX}")
    if causal and queries > keys:
        raise ValueError(f"a causal mask over {queries} queries and only {keys} keys is ambiguous: use {SDPA}")
    if getattr(module, "layer_idx", None) in (0, None):  # only once per pass, since it waits for the GPU
        position_ids = others.get("position_ids")
        if position_ids is not None and position_ids.dim() == 2 and position_ids.shape[1] > 1:
            _require((position_ids.diff(dim=-1) == 1).all(), _PACKED)
    o = flash_attention(
        query, key, value, is_causal=causal, causal_alignment="bottom_right", scale=scaling, enable_gqa=True
    )
    return o.transpose(1, 2).contiguous(), None  # type: ignore[union-attr]


def _refuse(module: torch.nn.Module, attention_mask: object, dropout: float, others: dict[str, object]) -> None:
    if attention_mask is not None:
        raise ValueError(f"{NAME} attention takes only a causal mask or none: use {SDPA}, or {FLEX} for masks by rule")
    if dropout:
        raise ValueError(
            f"{NAME} attention has no dropout: set attention_dropout=0.0 in the model's config, or use {SDPA}"
        )
    if others.get("output_attentions"):
        raise ValueError(f"{NAME} attention never has the weights that output_attentions asks for: use {EAGER}")
    for name, value in others.items():
        if value is not None and value is not False:
            raise ValueError(f"{NAME} attention does not know {name} of {type(module).__name__}: use {EAGER} or {SDPA}")


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
    """An AttentionMaskInterface function: makes no mask, as the attention knows whether it is causal; else ValueError."""
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
    if within and allow_is_causal_skip:  # no sequence fills the window or chunk
        return
    if use_vmap or not (within or local_size is None) or not torch.compiler.is_compiling():
        raise ValueError(
            f"{NAME} attention takes one causal sequence a row, no window, no packing: use {FLEX} or {SDPA}"
        )
    _require(_looks_causal(mask_function, batch_size, q_length, kv_length, device), _PACKED)


def _looks_causal(
    mask_function: Callable[..., Tensor], batch_size: int, queries: int, keys: int, device: torch.device | str
) -> Tensor:
    """Whether each query sees the first key and itself, and not the next key: a check of the mask in O(S).

    Under torch.compile transformers adds a test for packed sequences to every mask, whether or not there are any.
    """
    batch = torch.arange(batch_size, device=device)[:, None]
    query = torch.arange(queries, device=device)[None, :]
    head = torch.zeros((), dtype=torch.int64, device=device)
    position = query + keys - queries
    first_key = torch.zeros_like(position)
    seen = mask_function(batch, head, position, first_key) & mask_function(batch, head, position, position)
    ahead = mask_function(batch, head, position[:, :-1], position[:, 1:])
    return seen.all() & ~ahead.any()


def _require(condition: Tensor, message: str) -> None:
    """ValueError unless `condition` is true; an assertion on the device where the host cannot read it."""
    if torch.compiler.is_compiling() or (condition.is_cuda and torch.cuda.is_current_stream_capturing()):
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)

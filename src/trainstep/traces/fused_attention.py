"""Which of torch's fused attention ops was given a mask: `mask_of(opened)` is its shape, if it is square.

Only these ops of a GPU are known: flash takes no mask, and on a CPU the fused op takes as long with a mask as without.
"""

from typing import Any

from trainstep.traces.kineto import Range

_PREFIX = "aten::_scaled_dot_product_"
_MASK_AT = {
    "cudnn_attention": 3,
    "cudnn_attention_backward": 8,
    "efficient_attention": 3,
    "efficient_attention_backward": 4,
    "fused_attention_overrideable": 3,
    "fused_attention_overrideable_backward": 4,
}
"""Op, without the prefix -> which of its arguments is the mask (torch's native_functions.yaml: `attn_bias`)."""


def mask_of(opened: Range) -> tuple[Any, ...]:
    """The shape of an op's mask of T x T, T > 1; () of an op without one, and where no shapes were recorded."""
    at = _MASK_AT.get(opened.name.removeprefix(_PREFIX), len(opened.shapes))
    mask = opened.shapes[at] if at < len(opened.shapes) else ()
    is_square = isinstance(mask, tuple) and len(mask) >= 2 and mask[-1] == mask[-2] and mask[-1] != 1
    return mask if is_square else ()

"""The sizes of each op beside attention, and the least bytes and the FLOPs of its passes when it runs by itself.

The formulas are those of element_wise.py and transformer.py; here an op's name and sizes choose among them.
"""

from collections.abc import Mapping

from trainstep.costs.element_wise import linear_cross_entropy_flops, rms_norm_bytes, rotary_bytes, swiglu_bytes
from trainstep.costs.transformer import adamw_bytes

SIZES: Mapping[str, tuple[str, ...]] = {
    "rms_norm": ("tokens", "width"),
    "add_rms_norm": ("tokens", "width"),
    "rotary": ("tokens", "heads", "key_heads", "head_dim"),
    "swiglu": ("tokens", "width"),
    "linear_cross_entropy": ("tokens", "width", "vocabulary"),
    "adamw": ("parameters",),
}
"""Op -> the names of its sizes, in the order in which people write them."""


def op_bytes(op: str, direction: str, sizes: Mapping[str, int], element_bytes: int) -> int | None:
    """The least bytes of a direction (forward, backward, both); None for linear_cross_entropy, which its matmuls limit."""
    if op == "linear_cross_entropy":
        return None
    if op == "adamw":
        return adamw_bytes(sizes["parameters"], element_bytes)
    passes = ("forward", "backward") if direction == "both" else (direction,)
    return sum(_pass_bytes(op, sizes, element_bytes, backward=name == "backward") for name in passes)


def op_flops(op: str, direction: str, sizes: Mapping[str, int]) -> int | None:
    """The FLOPs of linear_cross_entropy in a direction; None for the other ops, which memory limits."""
    if op != "linear_cross_entropy":
        return None
    forward, both = (linear_cross_entropy_flops(**sizes, backward=backward) for backward in (False, True))
    return {"forward": forward, "backward": both - forward, "both": both}[direction]


def _pass_bytes(op: str, sizes: Mapping[str, int], element_bytes: int, *, backward: bool) -> int:
    if op == "rotary":
        # Without values: as many heads as queries and keys have together.
        heads = sizes["heads"] + sizes["key_heads"]
        return rotary_bytes(sizes["tokens"], heads, 0, sizes["head_dim"], element_bytes)
    rows, width = sizes["tokens"], sizes["width"]
    if op == "swiglu":
        return swiglu_bytes(rows, width, element_bytes, backward=backward)
    return rms_norm_bytes(rows, width, element_bytes, residual=op == "add_rms_norm", backward=backward)

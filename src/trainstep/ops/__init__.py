"""The mathematics of a step, one op a file. Uses nothing of ours but costs and spans, so it can be lifted out alone."""

from trainstep.ops.flash_attention import flash_attention, flash_attention_backward

__all__ = ["flash_attention", "flash_attention_backward"]

"""The mathematics of a step, one op per file; it uses only costs and spans of ours, so it can be taken out alone."""

from trainstep.ops.flash_attention import flash_attention, flash_attention_backward

__all__ = ["flash_attention", "flash_attention_backward"]

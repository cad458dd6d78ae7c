"""FlashAttention-2: the algorithm in PyTorch, its Triton kernels, and the function that chooses among them."""

from trainstep.ops.flash_attention.function import flash_attention, flash_attention_backward
from trainstep.ops.flash_attention.portable.tiles import Tiles

__all__ = ["Tiles", "flash_attention", "flash_attention_backward"]

"""FlashAttention-2: the algorithm in PyTorch (algorithm.py), its Triton kernels, and the function that chooses."""

from trainstep.ops.flash_attention.function import Tiles, flash_attention

__all__ = ["Tiles", "flash_attention"]

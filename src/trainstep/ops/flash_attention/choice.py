"""Which kernels a call runs on, and why: Hopper's own where they can, else the portable ones, which take everything."""

from typing import Any

import torch
from torch import Tensor

try:
    from trainstep.ops.flash_attention.hopper import why_not as why_not_hopper

    HAS_GLUON = True
except ImportError:  # no triton, or one without Gluon
    HAS_GLUON = False


def why_always_portable(tiles: Any, *, backward: bool) -> str | None:
    """Why a pass runs on the portable kernels whatever its tensors, in a few words, or None. `tiles`: what the caller gave."""
    if tiles is not None:
        return "tiles were given, which are theirs"
    if not HAS_GLUON:
        return "this triton has no Gluon for Hopper"
    if backward and torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and Hopper's adds up dq in any order"
    return None


def describe_choice(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *, backward: bool) -> str:
    """In a sentence, for people."""
    if not q_BHSD.is_cuda:
        return "algorithm.py: the tensors are not on a GPU"
    reason = why_always_portable(None, backward=backward) or why_not_hopper(q_BHSD, k_BGSD, v_BGSD)
    return "Hopper kernels" if reason is None else f"portable kernels: {reason}"

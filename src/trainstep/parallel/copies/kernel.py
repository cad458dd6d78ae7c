"""The kernel that adds up what arrived in an inbox, and shows the sum to the other ranks (copies/messages.py)."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_PROGRAMS = 64
"""Programs that add up an inbox: enough to keep up with NVLink, few enough to leave most multiprocessors to the step."""


def add_up_on_gpu(own: Tensor, slots: Tensor, into: Tensor, scale: float, also: Tensor | None = None) -> None:
    """Do what messages.add_up does, on the current stream."""
    numel = own.numel()
    if numel:
        blocks = triton.cdiv(numel, _BLOCK)
        add_up_kernel[(min(blocks, _PROGRAMS),)](
            own, slots, into, into if also is None else also, numel, slots.stride(0), scale,
            SLOTS=slots.shape[0], ALSO=also is not None, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit
def add_up_kernel(
    own_ptr, slots_ptr, into_ptr, also_ptr, numel, slot_stride, scale,
    SLOTS: tl.constexpr, ALSO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes every `programs`-th block of the chunk."""
    for first in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        mask = place < numel
        total = tl.load(own_ptr + place, mask=mask, other=0.0).to(tl.float32)
        for slot in tl.static_range(SLOTS):
            total += tl.load(slots_ptr + slot * slot_stride + place, mask=mask, other=0.0).to(tl.float32)
        total = (total * scale).to(into_ptr.dtype.element_ty)
        tl.store(into_ptr + place, total, mask=mask)
        if ALSO:
            tl.store(also_ptr + place, total, mask=mask)

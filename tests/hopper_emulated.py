"""`flash_attention` by emulated Hopper kernels on a CPU; formulas replace the small kernels between them.

Outputs start as NaN, as unwritten memory may.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gluon_emulator import emulate
from trainstep.ops.flash_attention.hopper import host as hopper
from trainstep.ops.flash_attention.hopper.schedules import (
    BACKWARD,
    BackwardSchedule,
    BoxedKernel,
    ForwardSchedule,
    tile_width,
)
from trainstep.ops.flash_attention.portable.tiles import Arithmetic
from trainstep.ops.flash_attention.problem import CallMeta, Problem


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """An implementation of attention with these schedules; `late`: asynchronous work runs late; `seed`: the order of partitions."""

    forward: ForwardSchedule | None = None
    backward: BackwardSchedule | None = None
    late: bool = False
    seed: int = 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, causal_alignment: str = "top_left"
    ) -> tuple[Tensor, Tensor]:
        assert hopper.why_not_shape(q.dtype, (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride())) is None
        problem = Problem(q.shape[-1] ** -0.5, causal, causal_alignment == "bottom_right", Arithmetic.HALF)
        return _Emulated.apply(q, k, v, problem, self)  # type: ignore[no-any-return, no-untyped-call]

    def run(self, kernel: BoxedKernel, *tensors: Tensor) -> None:
        emulate(kernel.kernel, kernel.programs, kernel.arguments(*tensors), late=self.late, seed=self.seed)


class _Emulated(torch.autograd.Function):
    """The kernels, launched in the order of launch_hopper_forward and launch_hopper_backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, problem: Problem, how: Emulated) -> tuple[Tensor, Tensor]:
        o, lse = unwritten(q), torch.full(q.shape[:3], math.nan)
        kernel = hopper.bind_hopper_forward(CallMeta.forward(q, k, v), problem, how.forward)
        how.run(kernel.attend, q, k, v, o, lse, kernel.order)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.problem, ctx.how = problem, how
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = map(unwritten, (q, k, v))
        kernels = hopper.bind_hopper_backward(CallMeta.backward(do, q, k, v, o), ctx.problem, ctx.how.backward)
        lse_log2, delta = rows(o, do, lse, padded=kernels.padded_queries)
        _, _, dq_sum = hopper.backward_buffers(q, kernels.padded_queries)
        ctx.how.run(kernels.gradients, q, k, v, do, lse_log2, delta, dk, dv, dq_sum.zero_())
        width = tile_width(q.shape[-1])
        schedule = ctx.how.backward or BACKWARD[width]
        dq = out_of_pieces(dq_sum, q.shape, columns=schedule.dq_columns(width))
        return (dq * ctx.problem.scale).to(q.dtype), dk, dv, None, None


def unwritten(x: Tensor) -> Tensor:
    """A tensor as from torch.empty_like, filled with NaN."""
    return torch.empty_like(x).fill_(math.nan)


def rows(o: Tensor, do: Tensor, lse: Tensor, *, padded: int) -> tuple[Tensor, Tensor]:
    """(log-sum-exp base 2, delta) as hopper_rows_kernel writes them: padded, +inf for padding and for queries that see no key."""
    batch, heads, queries, _ = o.shape
    lse_log2 = torch.full((batch, heads, padded), math.inf)
    lse_log2[..., :queries] = torch.where(lse == -math.inf, math.inf, lse / math.log(2))
    delta = torch.zeros(batch, heads, padded)
    delta[..., :queries] = (o.float() * do.float()).sum(-1)
    return lse_log2.flatten(), delta.flatten()


def out_of_pieces(dq_sum: Tensor, shape: torch.Size, *, columns: Sequence[int]) -> Tensor:
    """dq's sum (B, H, S, D) from pieces in the order of a warpgroup's registers, as hopper_cast_kernel reads them.

    A result of wgmma lies so: row 16 w + 8 h + l // 4, column 8 j + 2 (l % 4) + n in lane l of warp w, register (j, h, n).
    """
    batch, heads, queries, head_dim = shape
    together = dq_sum.view(batch, heads, -1, 64 * sum(columns))  # the pieces are adjacent
    in_place = []
    for piece in together.split([64 * n for n in columns], dim=-1):
        registers = piece.reshape(*piece.shape[:3], -1, 4, 8, 4, 2, 2)  # piece down, j, w, l // 4, l % 4, h, n
        in_place.append(registers.permute(0, 1, 2, 4, 7, 5, 3, 6, 8).reshape(batch, heads, registers.shape[2] * 64, -1))
    return torch.cat(in_place, dim=-1)[:, :, :queries, :head_dim]

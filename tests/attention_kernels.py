"""Calls of the attention kernels for tests: on a GPU by the public function, in Triton's interpreter by their launchers.

Import it after pytest.importorskip("triton").
"""

import os

import torch
from torch import Tensor

from trainstep.ops import flash_attention
from trainstep.ops.flash_attention.portable.backward import launch_backward
from trainstep.ops.flash_attention.portable.forward import launch_forward
from trainstep.ops.flash_attention.portable.tiles import Arithmetic, TileConfig
from trainstep.ops.flash_attention.problem import Problem
from trainstep.ops.flash_attention.split.backward import launch_split_backward
from trainstep.ops.flash_attention.split.forward import launch_split_forward

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
RUNNABLE = INTERPRETED or torch.cuda.is_available()
SMALL = TileConfig(block_q=64, block_k=32, num_warps=4, num_stages=2, heads_together=2)
"""Small tiles, so that short sequences have full, cut and hidden ones; two heads together, so that the last group is smaller."""


class _Interpreted(torch.autograd.Function):
    """The autograd function that function.py uses on a GPU, with the launchers called directly."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, problem: Problem):  # type: ignore[no-untyped-def]
        launch = launch_split_forward if problem.arithmetic is Arithmetic.FP16X3 else launch_forward
        o, lse = launch(q, k, v, problem, SMALL)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.problem = problem
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx, do: Tensor, _dlse: Tensor):  # type: ignore[no-untyped-def]
        q, k, v, o, lse = ctx.saved_tensors
        launch = launch_split_backward if ctx.problem.arithmetic is Arithmetic.FP16X3 else launch_backward
        return *launch(do.contiguous(), q, k, v, o, lse, ctx.problem, SMALL, SMALL), None


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, causal_alignment: str = "top_left", precision: str = "ieee"
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of GQA at the default scale."""
    if INTERPRETED:
        arithmetic = Arithmetic(precision) if q.dtype == torch.float32 else Arithmetic.HALF
        problem = Problem(q.shape[-1] ** -0.5, causal, causal_alignment == "bottom_right", arithmetic)
        return _Interpreted.apply(q, k, v, problem)  # type: ignore[no-any-return, no-untyped-call]
    return flash_attention(  # type: ignore[return-value]
        q, k, v, is_causal=causal, causal_alignment=causal_alignment, enable_gqa=True, fp32_precision=precision,
        return_lse=True,
    )  # fmt: skip

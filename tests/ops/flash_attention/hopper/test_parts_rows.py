"""The small kernels before and after Hopper's backward do in Triton's interpreter what the emulated backward assumes."""

import os

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from hopper_emulated import out_of_pieces, rows, unwritten
from interpreter import in_the_interpreter
from trainstep.ops.flash_attention.hopper import host as hopper
from trainstep.ops.flash_attention.hopper.schedules import BACKWARD, WIDTHS, tile_width
from trainstep.ops.flash_attention.portable.tiles import Arithmetic
from trainstep.ops.flash_attention.problem import CallMeta, Problem

SCALE = 0.125
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="test_in_the_interpreter runs it")


@pytest.mark.slow
def test_in_the_interpreter():
    passed = in_the_interpreter(__file__, "-k", "not test_in_the_interpreter")
    assert passed == len(WIDTHS) + 1


@interpreted
@pytest.mark.parametrize("head_dim", [72, *WIDTHS])
def test_rows_and_cast(head_dim: int):
    """Two sequences of three heads, laid out (B, S, H, D), that end within a tile; the buffers are NaN before."""
    o, do = (torch.randn(2, 100, 3, head_dim).half().transpose(1, 2) for _ in range(2))
    lse = torch.randn(o.shape[:3])
    lse[..., 7] = -torch.inf
    problem = Problem(SCALE, True, False, Arithmetic.HALF)
    kernels = hopper.bind_hopper_backward(CallMeta.backward(*[o] * 5), problem, schedule=None)
    lse_log2, delta, dq_sum = (x.fill_(torch.nan) for x in hopper.backward_buffers(o, kernels.padded_queries))
    kernels.rows(o, do, lse, lse_log2, delta, dq_sum)
    expected = rows(o, do, lse, padded=kernels.padded_queries)
    torch.testing.assert_close((lse_log2, delta), expected)
    assert (dq_sum == 0).all()
    assert dq_sum.numel() == 6 * kernels.padded_queries * tile_width(head_dim)

    dq = unwritten(o)
    kernels.cast(dq_sum.normal_(), dq)
    width = tile_width(head_dim)
    in_place = out_of_pieces(dq_sum, o.shape, columns=BACKWARD[width].dq_columns(width))
    assert torch.equal(dq, (in_place * SCALE).half())

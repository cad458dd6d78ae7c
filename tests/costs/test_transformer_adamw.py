"""Bytes and FLOPs of an AdamW update, term by term."""

from trainstep.costs.transformer import adamw_bytes, adamw_flops


def test_bytes_are_those_read_and_written():
    fp32 = 4 * 4 + 3 * 4  # parameter, gradient and two moments read; all but the gradient written
    assert adamw_bytes(1000, 4) == 1000 * fp32
    assert adamw_bytes(1000, 4, 2) == 1000 * (fp32 - 2)  # gradients in bf16
    assert adamw_bytes(1000, 2) == 1000 * fp32 // 2


def test_flops_are_14_per_parameter():
    assert adamw_flops(1000) == 14 * 1000

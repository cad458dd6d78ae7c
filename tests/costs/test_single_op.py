"""Bytes and FLOPs of one op: tensors counted by hand, and both passes together are their sum."""

import pytest

from trainstep.costs.single_op import SIZES, op_bytes, op_flops

ROWS = {"tokens": 8, "width": 4}


@pytest.mark.parametrize(
    ("op", "direction", "tensors"),
    [
        ("rms_norm", "forward", 2),  # x in, y out
        ("rms_norm", "backward", 3),  # dy and x in, dx out
        ("add_rms_norm", "forward", 4),  # x and residual in, y and their sum out
        ("add_rms_norm", "backward", 4),  # dy, the sum and its gradient in, dx out
        ("swiglu", "forward", 3),  # gate and up in, y out
        ("swiglu", "backward", 5),  # dy, gate and up in, their gradients out
    ],
)
def test_bytes_are_those_of_whole_tensors(op: str, direction: str, tensors: int):
    assert op_bytes(op, direction, ROWS, 2) == tensors * 8 * 4 * 2


def test_rotary_moves_queries_and_keys_in_and_out():
    sizes = {"tokens": 8, "heads": 4, "key_heads": 2, "head_dim": 16}
    assert op_bytes("rotary", "forward", sizes, 2) == 2 * 8 * (4 + 2) * 16 * 2


def test_adamw_reads_four_tensors_and_writes_three():
    assert op_bytes("adamw", "both", {"parameters": 10}, 4) == 7 * 10 * 4


@pytest.mark.parametrize("op", [op for op in SIZES if op not in ("adamw", "linear_cross_entropy")])
def test_both_passes_are_their_sum(op: str):
    sizes = dict.fromkeys(SIZES[op], 8)
    forward, backward, both = (op_bytes(op, direction, sizes, 2) for direction in ("forward", "backward", "both"))
    assert forward
    assert backward
    assert both == forward + backward


def test_the_loss_is_counted_in_flops_alone():
    sizes = {"tokens": 8, "width": 4, "vocabulary": 16}
    flops = [op_flops("linear_cross_entropy", direction, sizes) for direction in ("forward", "backward", "both")]
    assert flops == [2 * 8 * 4 * 16, 4 * 8 * 4 * 16, 6 * 8 * 4 * 16]
    assert op_bytes("linear_cross_entropy", "both", sizes, 2) is None
    assert op_flops("rms_norm", "both", ROWS) is None

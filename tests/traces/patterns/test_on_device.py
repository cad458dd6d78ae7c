"""Patterns of made-up steps on a GPU: what a fused attention takes there, and another process's turns."""

from dataclasses import replace

import pytest

from trace_maker import launched, op, span, trace
from trainstep.traces.patterns.pattern import ATTENTION, FP32_ATTENTION, MASK
from trainstep.traces.patterns.table import Patterns, find_patterns
from trainstep.traces.work import read_work

BF16 = "c10::BFloat16"
BOOL_MASK = (1, 1, 512, 512)
Op = tuple[str, list[tuple[int, ...]], int]
"""A name, shapes, and the microseconds of its kernel."""


def found(*ops: Op, dtype: str = BF16) -> Patterns:
    events, at = [span("step 0", 0, 1_000_000), span("forward", 0, 900_000)], 10
    for place, (name, shapes, time_us) in enumerate(ops):
        dtypes = tuple("bool" if shape == BOOL_MASK else BF16 if name == "aten::mm" else dtype for shape in shapes)
        opened = replace(op(name, at, at + 20), shapes=tuple(shapes), dtypes=dtypes)
        events += [opened, *launched("kernel", at + 2, at + 30, at + 30 + time_us, place)]
        at += 50 + time_us
    return find_patterns(read_work(trace(*events)))


def attention(*, masked: bool, copied: bool = False) -> list[Op]:
    """Attention of 2 x 8 heads, 512 positions, 64 wide, in forward: two batched matmuls of 2 x 16 x 512 x 512 x 64 FLOPs."""
    scores, wide = (2, 8, 512, 512), (16, 512, 64)
    ops: list[Op] = [("aten::bmm", [wide, (16, 64, 512)], 300)]
    ops += [("aten::masked_fill", [scores, BOOL_MASK], 100)] * masked
    ops += [("aten::_softmax", [scores], 200), ("aten::bmm", [(16, 512, 512), wide], 300)]
    return ops + [("aten::copy_", [(2, 8, 512, 64), (2, 8, 512, 64)], 40)] * copied


PLAIN: Op = ("aten::mm", [(1024, 1024), (1024, 1024)], 100)
FLOPS = 2 * 2 * 16 * 512 * 512 * 64
RATE = 2 * 1024**3 / 100e-6


@pytest.mark.parametrize(("masked", "work"), [(False, 1.0), (True, 0.5)])
def test_a_fused_attention_takes_its_flops_at_a_share_of_the_plain_matmuls_rate(masked: bool, work: float):
    """A square mask of bools is taken to be causal, which skips half."""
    table = found(PLAIN, *attention(masked=masked)).table()
    assert table["pattern"] == [ATTENTION]
    assert table["least_s"][0] == pytest.approx(work * FLOPS / (0.3 * RATE))
    assert table["least_s"][0] < 600e-6


def test_without_plain_matmuls_or_where_they_are_slow_it_takes_the_batched_ones():
    slow = (PLAIN[0], PLAIN[1], 10_000)
    for more in ([], [slow]):
        assert found(*more, *attention(masked=False)).table()["least_s"] == pytest.approx([600e-6])


def test_attention_in_fp32_is_not_held_to_the_rate_of_16_bits():
    table = found(PLAIN, *attention(masked=False), dtype="float").table()
    assert table["least_s"][table["pattern"].index(ATTENTION)] == pytest.approx(600e-6)


def test_a_fused_attention_of_fp32_is_found_as_such():
    shapes = [(2, 8, 512, 64)] * 3
    efficient, by_matmuls = (f"aten::_scaled_dot_product_{name}" for name in ("efficient_attention", "attention_math"))
    masked = (efficient, [*shapes, (2, 8, 512, 512)], 400)
    table = found((efficient, shapes, 300), masked, (by_matmuls, shapes, 500), dtype="float").table()
    seconds = dict(zip(table["pattern"], table["time_s"], strict=True))
    assert seconds == {FP32_ATTENTION: pytest.approx(500e-6), MASK: pytest.approx(400e-6)}, (
        "half is left without a mask"
    )
    assert not found((efficient, shapes, 300)).table(), "in 16 bits"


def test_a_mask_without_a_batch_makes_no_copy_attentions():
    """Its shape is no shape of scores, and neither is that of a cast weight."""
    product = ("aten::baddbmm", [(512, 512), (16, 512, 64), (16, 64, 512)], 300)
    ops = [PLAIN, product, *attention(masked=False)[1:], ("aten::copy_", [(1024, 1024), (1024, 1024)], 2000)]
    assert found(*ops).table()["time_s"][0] == pytest.approx(800e-6)


def test_copies_of_its_factors_belong_to_attention_and_others_do_not():
    other = ("aten::copy_", [(64, 128), (64, 128)], 40)
    plain, copied = (found(PLAIN, *attention(masked=False, copied=copied), other).table() for copied in (False, True))
    assert copied["time_s"][0] - plain["time_s"][0] == pytest.approx(40e-6)


def test_what_alike_ops_take_longer_than_each_other_was_another_processs_turn():
    """Two of twelve are interrupted for 2 ms each; what is there once or twice says nothing."""
    times = [100] * 10 + [2100] * 2
    share = found(*(("aten::mm", [(8, 8), (8, 8)], time) for time in times), ("aten::bmm", [(2, 8, 8)] * 2, 900))
    assert share.interrupted_share == pytest.approx(4000 / 5200)


@pytest.mark.parametrize("times", [[100] * 7, []])
def test_too_few_alike_ops_do_not_tell(times: list[int]):
    ops = [("aten::mm", [(8, 8), (8, 8)], time) for time in times]
    assert found(*ops, ("aten::mm", [(16, 8), (8, 8)], 900)).interrupted_share is None


@pytest.mark.parametrize("name", ["aten::copy_", "c10d::allreduce_"])
def test_copies_and_messages_do_not_tell(name: str):
    assert found(*((name, [(8, 8), (8, 8)], time) for time in [100] * 6 + [2000] * 6)).interrupted_share is None


def test_ops_longer_than_a_turn_and_ops_without_shapes_do_not_tell():
    """Each of these is interrupted, and the others are not known to be alike."""
    assert found(*[("aten::mm", [(8, 8), (8, 8)], 10_000)] * 12).interrupted_share is None
    assert found(*(("MyFunction", [], time) for time in [10] * 4 + [500] * 8)).interrupted_share is None


def test_alike_ops_that_are_a_small_part_of_the_step_do_not_tell():
    ops: list[Op] = [("aten::mm", [(8, 8), (8, 8)], 10)] * 10
    assert found(*ops, ("aten::mm", [(16, 8), (8, 8)], 900)).interrupted_share is None
    assert found(*ops, ("aten::mm", [(16, 8), (8, 8)], 90)).interrupted_share == pytest.approx(0.0)

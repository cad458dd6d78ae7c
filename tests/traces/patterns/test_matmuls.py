"""FLOPs of the matmuls of a made-up step on a GPU, by the shapes of torch's ops."""

from dataclasses import replace
from typing import Any

import pytest

from trace_maker import launched, op, span, trace
from trainstep.traces.patterns.pattern import ODD_SIZES, PRECISION
from trainstep.traces.patterns.table import find_patterns
from trainstep.traces.work import read_work

BF16 = "c10::BFloat16"


Matmul = tuple[str, list[tuple[int, ...]], str, int]
"""A name, shapes, a dtype, and the microseconds of its kernel."""


def found(*matmuls: Matmul | tuple[str, list[tuple[int, ...]], str]) -> Any:
    """A step whose matmuls take 100 us each, or as long as they say."""
    events, at = [span("step 0", 0, 100_000), span("forward", 0, 90_000)], 10
    for place, (name, shapes, dtype, *rest) in enumerate(matmuls):
        time_us = rest[0] if rest else 100
        opened = replace(op(name, at, at + 20), shapes=tuple(shapes), dtypes=(dtype,) * len(shapes))
        events += [opened, *launched("nvjet_gemm", at + 2, at + 30, at + 30 + time_us, place)]
        at += 50 + time_us
    return find_patterns(read_work(trace(*events)))


def test_each_product_counts_twice_its_multiplications():
    work = found(
        ("aten::mm", [(8, 16), (16, 32)], BF16),
        ("aten::addmm", [(32,), (8, 16), (16, 32)], BF16),
        ("aten::bmm", [(4, 8, 16), (4, 16, 32)], BF16),
        ("aten::baddbmm", [(4, 8, 32), (4, 8, 16), (4, 16, 32)], BF16),
    ).sixteen_bit
    assert work.flops == 2 * 8 * 16 * 32 * (1 + 1 + 4 + 4)
    assert work.time_s == pytest.approx(4e-4)


def test_fp32_counts_apart_and_what_does_not_fit_has_no_flops():
    both = found(("aten::mm", [(8, 16), (16, 32)], "float"), ("aten::mm", [(8, 16), (16, 32)], BF16))
    assert (both.sixteen_bit.flops, both.sixteen_bit.time_s) == (2 * 8 * 16 * 32, pytest.approx(1e-4))
    assert [pattern.name for pattern in both.patterns] == [PRECISION]
    assert found(("aten::mm", [(8, 16), (15, 32)], BF16)).sixteen_bit.numbers() == {}
    assert found(("aten::mm", [(8, 16), (16, 32)], "float")).sixteen_bit.numbers() == {}


def mm(rows: int, inner: int, columns: int, time_us: int, dtype: str = BF16, name: str = "aten::mm") -> Matmul:
    shapes = [(rows, inner), (inner, columns)]
    return name, [(columns,), *shapes] if "addmm" in name else shapes, dtype, time_us


EVEN = mm(1024, 1024, 1024, 100)


def odd(*matmuls: Matmul) -> Any:
    return [pattern for pattern in found(*matmuls).patterns if pattern.name == ODD_SIZES]


def test_matmuls_of_odd_sizes_are_held_to_the_rate_of_the_others():
    slow = [mm(1024, 1024, 1027, 500, name=name) for name in ("aten::mm", "aten::addmm", "aten::addmm_")]
    [pattern] = odd(EVEN, *slow, mm(1024, 1024, 1027, 500, "float"))
    assert (pattern.calls, pattern.time_ns) == (3, 1_500_000)
    assert [cost.gap_ns for cost in pattern.costs.values()] == [0], "the device's idle time before them is not theirs"
    assert pattern.least_ns == pytest.approx(3 * 100_000 * 1027 / 1024)
    assert pattern.what == "16-bit matmuls with a size of 1,027, no multiple of 8, take 5.0 times as long as others"
    assert not odd(EVEN)


@pytest.mark.parametrize(("time_us", "is_slow"), [(90, False), (199, False), (203, True)])
def test_only_those_with_less_than_half_the_others_rate_count(time_us: int, is_slow: bool):
    assert bool(odd(EVEN, mm(1024, 1024, 1027, time_us))) == is_slow


@pytest.mark.parametrize(("rows", "counts"), [(128, False), (500, False), (520, True), (8192, True)])
def test_only_others_of_at_most_twice_the_flops_tell_what_is_slow(rows: int, counts: bool):
    """Experts with few tokens beside projections of all say nothing; the large matmul of a head does."""
    assert bool(odd(EVEN, mm(rows, 1024, 1027, 3 * rows // 10))) == counts


@pytest.mark.parametrize(("size", "is_odd"), [(1004, True), (1016, False), (1024, False), (1028, True)])
def test_multiples_of_8_are_not_odd(size: int, is_odd: bool):
    assert bool(odd(EVEN, mm(1024, 1024, size, 500))) == is_odd


@pytest.mark.parametrize("place", [0, 1, 2], ids=["rows", "inner", "columns"])
def test_each_size_may_be_odd_and_that_of_the_longest_time_is_named(place: int):
    sizes = [1021 if at == place else 1024 for at in range(3)]
    [pattern] = odd(EVEN, mm(*sizes, 500), mm(*(1013 if size == 1021 else size for size in sizes), 400))
    assert "a size of 1,021," in pattern.what
    assert pattern.calls == 2


@pytest.mark.parametrize("narrow", [(40_000, 1024, 17), (40_000, 17, 1024), (17, 40_000, 1024), (40_001, 64, 1024)])
def test_narrow_ones_are_slow_for_other_reasons(narrow: tuple[int, int, int]):
    assert not odd(mm(512, 1024, 1024, 50), mm(*narrow, 900))


@pytest.mark.parametrize(("columns", "counts"), [(64, False), (72, True)])
def test_narrow_ones_do_not_tell_the_others_rate(columns: int, counts: bool):
    assert bool(odd(mm(8192, 1024, columns, 100), mm(1024, 1024, 1027, 500))) == counts


def test_without_others_to_compare_with_nothing_is_said_of_odd_sizes():
    assert not odd(mm(1024, 1024, 1027, 500))
    assert not odd(mm(1024, 1024, 1027, 500), ("aten::bmm", [(1, 1024, 1024)] * 2, BF16, 100)), (
        "batched ones are others"
    )


def test_an_op_without_kernels_is_no_matmul_of_the_step():
    """A compiler that traces in the step records its ops with shapes."""
    opened = replace(op("aten::mm", 700, 720), shapes=((448, 1024), (1024, 1024)), dtypes=(BF16, BF16))
    events = [span("step 0", 0, 2000), span("forward", 0, 900), opened]
    real = replace(op("aten::mm", 10, 30), shapes=((200, 1024), (1024, 1027)), dtypes=(BF16, BF16))
    events += [real, *launched("nvjet_gemm", 12, 40, 140, 0)]
    assert find_patterns(read_work(trace(*events))).patterns == ()
    work = find_patterns(read_work(trace(*events))).sixteen_bit
    assert (work.flops, work.time_s) == (2 * 200 * 1024 * 1027, pytest.approx(1e-4))


@pytest.mark.parametrize(
    "shapes", [[(-8, 16), (16, 32)], [(8, 16), (16, 2**50)], [(8, 0), (0, 32)], [(16,), (16, 32)], [], [(8, 16)]]
)
def test_shapes_that_no_tensor_has_are_left_out(shapes: list[tuple[int, ...]]):
    work = found(("aten::mm", shapes, BF16), ("aten::addmm", [(32,), (8, 16), (16, 32)], BF16))
    assert work.sixteen_bit.flops == 2 * 8 * 16 * 32
    assert not work.patterns


@pytest.mark.parametrize("shapes", [[(8, 16), (16, 32)], [(32,), (8, 16), (16, 32)], [(8, 32), (8, 16), (16, 32)]])
@pytest.mark.parametrize("out", [[], [(8, 32)]])
def test_the_factors_of_addmm_lie_behind_what_is_added_and_before_out(shapes: list[Any], out: list[Any]):
    """Where a scalar is added it has no shape."""
    assert found(("aten::addmm", [*shapes, *out], BF16)).sixteen_bit.flops == 2 * 8 * 16 * 32

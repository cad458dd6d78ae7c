"""FLOPs of the matmuls of a made-up step on a GPU, by the shapes of torch's ops."""

from dataclasses import replace
from typing import Any

import pytest

from trace_maker import launched, op, span, trace
from trainstep.traces.patterns.pattern import ODD_SIZES, PRECISION
from trainstep.traces.patterns.table import find_patterns
from trainstep.traces.work import read_work

BF16 = "c10::BFloat16"


def found(*matmuls: tuple[str, list[tuple[int, ...]], str]) -> Any:
    """A step whose matmuls take 100 us each."""
    events = [span("step 0", 0, 2000), span("forward", 0, 900)]
    for place, (name, shapes, dtype) in enumerate(matmuls):
        at = 10 + 150 * place
        opened = replace(op(name, at, at + 20), shapes=tuple(shapes), dtypes=(dtype,) * len(shapes))
        events += [opened, *launched("nvjet_gemm", at + 2, at + 30, at + 130, place)]
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


def odd(*matmuls: tuple[str, list[tuple[int, ...]], str]) -> Any:
    return [pattern for pattern in found(*matmuls).patterns if pattern.name == ODD_SIZES]


def test_matmuls_of_odd_sizes_are_held_to_the_rate_of_the_others():
    """They take as long for a quarter of the FLOPs. Sizes up to 64 are too small to matter, and fp32 has other multiples."""
    even = ("aten::mm", [(1024, 1024), (1024, 4096)], BF16)
    [pattern] = odd(
        even,
        ("aten::mm", [(512, 1024), (1024, 1027)], BF16),
        ("aten::addmm", [(1027,), (512, 1024), (1024, 1027)], BF16),
        ("aten::mm", [(1024, 1024), (1024, 10)], BF16),
        ("aten::mm", [(512, 1024), (1024, 1027)], "float"),
    )
    share = 512 * 1024 * 1027 / ((1024 * 1024 * 4096 + 1024 * 1024 * 10) / 2)
    assert (pattern.calls, pattern.time_ns) == (2, 200_000)
    assert pattern.least_ns == pytest.approx(share * 200_000)
    assert (
        pattern.what
        == f"16-bit matmuls with a size of 1,027, no multiple of 8, reach {share:.0%} of the rate of the others"
    )
    assert not odd(even)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["rows", "inner", "columns"])
def test_each_size_may_be_odd(place: int):
    rows, inner, columns = (1001 if at == place else 1024 for at in range(3))
    other = ("aten::mm", [(1024, 1024), (1024, 1024)], BF16)
    [pattern] = odd(other, ("aten::mm", [(rows, inner), (inner, columns)], BF16))
    assert "a size of 1,001," in pattern.what


def test_without_others_to_compare_with_nothing_is_said_of_odd_sizes():
    assert not odd(("aten::mm", [(512, 1024), (1024, 1027)], BF16))

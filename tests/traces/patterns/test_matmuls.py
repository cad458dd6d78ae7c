"""FLOPs of the matmuls of a made-up step on a GPU, by the shapes of torch's ops."""

from dataclasses import replace
from typing import Any

import pytest

from trace_maker import launched, op, span, trace
from trainstep.traces.patterns.pattern import PRECISION
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

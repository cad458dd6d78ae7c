"""The clock that a power limit leaves, against what an H200 did in results/h200/power_limit.txt."""

import pytest

from trainstep.plan.time.kernels import Kernel, Kind, matmul, traffic
from trainstep.plan.time.power import Load, load_of, sustained_clock

PRODUCT = Load(time_s=1.0, watts=1275.0, slows=True)
COPY = Load(time_s=1.0, watts=537.0, slows=False)


def test_matmuls_alone_slow_down_as_measured():
    clock = sustained_clock([PRODUCT])
    assert 1980 * clock == pytest.approx(1515, rel=0.01)
    assert 798 / PRODUCT.at(clock) == pytest.approx(660, rel=0.01)


def test_copies_alone_keep_the_clock():
    assert sustained_clock([COPY]) == 1.0
    assert COPY.at(0.5) == 1.0


@pytest.mark.parametrize(
    ("products_s", "copies_s", "mhz"), [(60 * 0.172e-3, 7 * 0.506e-3, 1590), (0.0206, 0.00202, 1545)]
)
def test_mixtures_that_were_not_fitted(products_s: float, copies_s: float, mhz: float):
    clock = sustained_clock(
        [Load(time_s=products_s, watts=1275.0, slows=True), Load(time_s=copies_s, watts=537.0, slows=False)]
    )
    assert 1980 * clock == pytest.approx(mhz, rel=0.02)


def test_a_slower_matmul_draws_less():
    symbols = {"a": 2048, "b": 4096, "c": 1024}
    fast = load_of(matmul("x", "a / b / c", "bf16"), symbols, one_s=2 * 2048 * 4096 * 1024 / 798e12, count=3)
    slow = load_of(matmul("x", "a / b / c", "bf16"), symbols, one_s=2 * 2048 * 4096 * 1024 / 636e12, count=3)
    assert fast.watts == 1275.0
    assert slow.watts == pytest.approx(756, rel=0.02)
    assert slow.time_s == pytest.approx(3 * 2 * 2048 * 4096 * 1024 / 636e12)


@pytest.mark.parametrize(
    ("kernel", "slows"),
    [
        (matmul("x", "a / a / a", "fp32"), False),
        (matmul("x", "a / a / a", "tf32"), True),
        (Kernel(op="trainstep", kind=Kind.ATTENTION_BACKWARD, shape="a a", element_bytes=2), True),
        (Kernel(op="trainstep", kind=Kind.ATTENTION_BACKWARD, shape="a a", element_bytes=4), False),
        (traffic("x", Kind.CONTIGUOUS, 8, "a"), False),
    ],
)
def test_only_tensor_cores_slow_down(kernel: Kernel, slows: bool):
    load = load_of(kernel, {"a": 64}, one_s=1e-6, count=1)
    assert load.slows is slows
    assert load.watts > 0


def test_no_kernels_draw_nothing():
    assert sustained_clock([]) == 1.0

"""test_kernels.py in Triton's interpreter, which must be chosen before triton is imported: hence a process of its own."""

import pytest

from interpreter import in_the_interpreter

KERNELS = "tests/ops/flash_attention/test_kernels.py"
SECONDS = 90
"""What CI may spend here."""


def test_a_few_shapes():
    shapes = [f"{KERNELS}::test_small_random_shapes[{seed}]" for seed in range(1, 5)]
    passed, _ = in_the_interpreter(*shapes, f"{KERNELS}::test_queries_that_see_nothing")
    assert passed == 5


@pytest.mark.slow
@pytest.mark.timeout(4 * SECONDS)
def test_kernels_in_the_interpreter():
    passed, seconds = in_the_interpreter(KERNELS)
    assert passed >= 60
    assert seconds <= SECONDS

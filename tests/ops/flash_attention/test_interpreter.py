"""test_kernels.py and test_split_kernels.py in Triton's interpreter, which must be chosen before triton is imported: hence
processes of their own."""

import pytest

from interpreter import in_the_interpreter

KERNELS = "tests/ops/flash_attention/test_kernels.py"
SPLIT_KERNELS = "tests/ops/flash_attention/test_split_kernels.py"
SECONDS = 90
"""What CI may spend on each."""


def test_a_few_shapes():
    shapes = [f"{KERNELS}::test_small_random_shapes[{seed}]" for seed in range(1, 5)]
    passed, _ = in_the_interpreter(
        *shapes, *(f"{KERNELS}::test_{name}" for name in ("queries_that_see_nothing", "the_backward_function"))
    )
    assert passed == 9


@pytest.mark.slow
def test_a_few_shapes_of_parts():
    shapes = [f"{SPLIT_KERNELS}::test_small_random_shapes[{seed}]" for seed in (10, 14)]
    passed, _ = in_the_interpreter(
        *shapes, *(f"{SPLIT_KERNELS}::test_{name}" for name in ("parts", "queries_that_see_nothing"))
    )
    assert passed >= 4


@pytest.mark.slow
@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize(("kernels", "least"), [(KERNELS, 60), (SPLIT_KERNELS, 35)])
def test_kernels_in_the_interpreter(kernels: str, least: int):
    passed, seconds = in_the_interpreter(kernels)
    assert passed >= least
    assert seconds <= SECONDS

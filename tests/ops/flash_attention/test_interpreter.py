"""The tests of the portable and the split kernels run in Triton's interpreter, in processes of their own, since it must be
chosen before triton is imported. `make test` runs a few of them from tests/test_interpreter.py."""

import pytest

from interpreter import in_the_interpreter

KERNELS = "tests/ops/flash_attention/test_kernels.py"
SPLIT_KERNELS = "tests/ops/flash_attention/split/test_kernels.py"


@pytest.mark.slow
def test_a_few_shapes_of_parts_pass_in_the_interpreter():
    shapes = [f"{SPLIT_KERNELS}::test_small_random_shapes[{seed}]" for seed in (10, 14)]
    passed = in_the_interpreter(
        *shapes, *(f"{SPLIT_KERNELS}::test_{name}" for name in ("parts", "queries_that_see_nothing"))
    )
    assert passed >= 4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kernels", "least"), [(KERNELS, 60), (SPLIT_KERNELS, 35)])
def test_all_kernels_pass_in_the_interpreter(kernels: str, least: int):
    assert in_the_interpreter(kernels) >= least

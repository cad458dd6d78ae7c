"""The tests of AdamW with its kernel in Triton's interpreter; kernels are compiled in flash_attention/test_compilation.py."""

import pytest

from interpreter import in_the_interpreter

TESTS = "tests/ops/test_adamw.py"


def test_a_few_in_the_interpreter():
    few = (
        "test_moments_as_accurate_as_torch",
        "test_narrow_parameters",
        "test_parts_of_a_group_may_step_in_turns",
        "test_scaler_skips_and_unscales",
    )
    passed, _ = in_the_interpreter(*(f"{TESTS}::{name}" for name in few))
    assert passed == len(few)


@pytest.mark.slow
def test_all_in_the_interpreter():
    passed, _ = in_the_interpreter(TESTS)
    assert passed >= 14

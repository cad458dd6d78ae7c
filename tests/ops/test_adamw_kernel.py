"""The tests of AdamW run with its kernel in Triton's interpreter; flash_attention/test_compilation.py compiles the kernel."""

import pytest

from interpreter import in_the_interpreter

TESTS = "tests/ops/test_adamw.py"


def test_a_few_tests_pass_in_the_interpreter():
    few = (
        "test_moments_as_accurate_as_torch",
        "test_narrow_parameters",
        "test_parts_of_a_group_may_step_separately",
        "test_scaler_skips_and_unscales",
    )
    passed = in_the_interpreter(*(f"{TESTS}::{name}" for name in few))
    assert passed == len(few)


@pytest.mark.slow
def test_all_tests_pass_in_the_interpreter():
    passed = in_the_interpreter(TESTS)
    assert passed >= 14

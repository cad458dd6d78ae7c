"""A few cases of every kernel pass in Triton's interpreter. They share one process, since a start imports torch (2 s)."""

from interpreter import in_the_interpreter

CASES = {
    "ops/flash_attention/test_kernels.py": [
        *(f"test_small_random_shapes[{seed}]" for seed in range(1, 5)),
        "test_queries_that_see_nothing",
        "test_the_backward_function",
    ],
    "ops/test_rms_norm.py": ["test_the_residual_is_added_first_and_returned"],
    "ops/test_rotary.py": ["test_separate_projections_in_any_layout"],
    "ops/test_swiglu.py": ["test_with_the_matmul_behind_it"],
    "ops/test_linear_cross_entropy.py": [
        "test_only_what_needs_a_gradient_gets_one",
        "test_rows_of_several_blocks[plain-True-three blocks-cpu]",
        "test_rows_of_several_blocks[label_smoothing-False-and a part-cpu]",
        "test_ignored_rows_are_not_read_and_nothing_behind_a_row_is_written",
    ],
    "parallel/copies/test_kernel.py": ["test_interpreted"],
}
"""File under tests/ -> its tests that run. All of each file run with `make test-slow`."""


def test_a_few_cases_of_every_kernel_pass_in_the_interpreter():
    assert in_the_interpreter(*(f"tests/{file}::{name}" for file, names in CASES.items() for name in names)) == 40

"""The tests of AdamW run with its kernel in Triton's interpreter; flash_attention/test_compilation.py compiles the kernel."""

import pytest
import torch

from interpreter import in_the_interpreter

TESTS = "tests/ops/test_adamw.py"


@pytest.mark.slow
def test_a_few_tests_pass_in_the_interpreter():
    few = (
        "test_an_update_writes_rounded_copies",
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


def test_a_capture_leaves_the_tables_of_eager_calls_alone():
    """What a capture uploads is on the device only once its graph is launched, and pinned memory may not be made in it."""
    pytest.importorskip("triton")
    from trainstep.ops import adamw_kernel

    def operands(count: int = 2) -> adamw_kernel.Operands:
        return adamw_kernel.Operands(*([torch.zeros(3) for _ in range(count)] for _ in range(6)))

    device, launch, first = torch.device("cpu"), adamw_kernel.Launch(), operands()
    eager = launch._tables_of(first, device, capturing=False)
    launch._tables = eager
    assert launch._tables_of(first, device, capturing=True) is eager
    with pytest.raises(RuntimeError, match="more than 4 times"):
        launch._tables_of(operands(), device, capturing=True)
    launch._spares = {2: [torch.empty(0)]}
    captured = launch._tables_of(operands(), device, capturing=True)
    assert captured.rows != eager.rows
    assert captured.chunks is eager.chunks, "of the same sizes, and uploaded before the capture"
    assert launch._tables is eager
    launch._spares = {3: [torch.empty(0)]}
    with pytest.raises(RuntimeError, match="updates other parameters"):
        launch._tables_of(operands(3), device, capturing=True)

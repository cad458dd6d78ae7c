"""The tests of AdamW with its kernel in Triton's interpreter; kernels are compiled in flash_attention/test_compilation.py."""

from interpreter import in_the_interpreter


def test_kernel_in_the_interpreter():
    passed, _ = in_the_interpreter("tests/ops/test_adamw.py")
    assert passed >= 14

"""The ops beside attention run with their kernels in Triton's interpreter, and their kernels compile for GPUs that are not here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from interpreter import in_the_interpreter
from kernel_checks import check_compiled, oldest_triton
from kernel_compiler import SHARED_MEMORY_BYTES

FILES = {"rms_norm": 30, "rotary": 35, "swiglu": 25, "linear_cross_entropy": 80}
"""File of tests -> the least number of them that pass in the interpreter."""
STRIDES = [
    f"{x}_{axis}" for x in ("q", "k", "v", "q_target", "k_target", "v_target") for axis in ("batch", "position", "head")
]
LOSS_TYPES = {
    "targets_ptr": "*i64",
    "loss_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "scale_ptr": "*fp32",
    "smoothing": "fp32",
    "z_loss": "fp32",
}


def test_a_few_cases_pass_in_the_interpreter():
    few = [
        "test_rms_norm.py::test_the_residual_is_added_first_and_returned",
        "test_rotary.py::test_separate_projections_in_any_layout",
        "test_swiglu.py::test_with_the_matmul_behind_it",
        "test_linear_cross_entropy.py::test_only_what_needs_a_gradient_gets_one",
    ]
    assert in_the_interpreter(*(f"tests/ops/{name}" for name in few)) >= 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FILES)
def test_all_cases_pass_in_the_interpreter(name: str):
    assert in_the_interpreter(f"tests/ops/test_{name}.py") >= FILES[name]


def requests() -> Iterator[dict[str, Any]]:
    """Every kernel for every architecture, with 16-byte accesses wherever sizes are multiples of 16 elements."""
    for index, architecture in enumerate(SHARED_MEMORY_BYTES):
        element = ("bf16", "fp16", "bf16", "fp32")[index]

        def request(
            module: str, kernel: str, warps: int, least: int, types: dict[str, str], **constants: Any
        ) -> dict[str, Any]:
            return {
                "module": f"trainstep.ops.kernels.{module}",
                "kernel": kernel,
                "constants": constants,
                "types": types,
                "aligned": ["width", "elements", "row_stride", "vocabulary", *STRIDES],
                "element": element,  # noqa: B023 - used in this turn of the loop alone
                "architecture": architecture,  # noqa: B023
                "num_warps": warps,
                "num_stages": 3,
                "most_spilled_bytes": 0,
                "least_vector_accesses": least,
            }

        norm = {"eps": "fp32", "inverse_rms_ptr": "*fp32", "dweight_ptr": "*fp32"}
        for rows, width, warps in ((1, 4096, 8), (16, 256, 8), (1, 8192, 16)):
            tile = {"ADD": True, "ROWS": rows, "WIDTH": width}
            yield request("rms_norm", "rms_norm_kernel", warps, 8, norm, **tile)
            yield request("rms_norm", "rms_norm_backward_kernel", warps, 8, norm, **tile)
        angles = {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
        for interleaved in (True, False):
            heads = {"INTERLEAVED": interleaved, "INVERSE": interleaved, "HEAD_DIM": 80, "HEADS": 16, "HALF": 64}
            yield request("rotary", "rotary_kernel", 4, 6, angles, **heads)
        yield request("swiglu", "swiglu_kernel", 4, 6, {}, BLOCK=2048)
        yield request("swiglu", "swiglu_backward_kernel", 4, 12, {}, BLOCK=2048, WRITE_Y=True)
        for has_lse in (True, False):
            loss = {"HAS_LSE": has_lse, "GRADIENT": True, "BLOCK": 8192}
            yield request("cross_entropy", "cross_entropy_kernel", 16, 4, LOSS_TYPES, **loss)
        yield request("cross_entropy", "scale_kernel", 8, 4, {"factor_ptr": "*fp32"}, BLOCK=8192)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_kernels_compile_and_fit(tmp_path: Path, record_property: Any):
    check_compiled([*requests()], tmp_path, record_property, pytest.importorskip("triton").__version__)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_kernels_compile_with_the_oldest_triton(tmp_path: Path, record_property: Any):
    check_compiled([*requests()], tmp_path, record_property, *oldest_triton())

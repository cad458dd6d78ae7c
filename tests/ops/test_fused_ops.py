"""The ops beside attention run with their kernels in Triton's interpreter (with `make test` a few cases, from test_interpreter.py),
and their kernels compile for GPUs that are not here."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from interpreter import in_the_interpreter
from kernel_checks import check_compiled, oldest_triton
from kernel_compiler import SHARED_MEMORY_BYTES
from op_check import INTERPRETED, normal
from trainstep.ops import linear_cross_entropy, reference, rms_norm, rotary, swiglu

FILES = {"rms_norm": 30, "rotary": 35, "swiglu": 25, "linear_cross_entropy": 100, "fused_ops_autograd": 20}
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


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_operators_pass_torchs_checks_in_the_interpreter():
    assert in_the_interpreter("tests/ops/test_fused_ops.py", "-k", "finds_no_fault") == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FILES)
def test_all_cases_pass_in_the_interpreter(name: str):
    assert in_the_interpreter(f"tests/ops/test_{name}.py") >= FILES[name]


class Unprintable:
    def __repr__(self) -> str:
        raise AssertionError("an argument was written out")


@pytest.mark.parametrize("is_old", [True, False])
def test_an_old_inductor_writes_out_no_arguments_of_an_operator(monkeypatch: pytest.MonkeyPatch, is_old: bool):
    issue = pytest.importorskip("torch._inductor.exc").OperatorIssue
    written = issue.operator_str
    monkeypatch.setattr(issue, "operator_str", staticmethod(written))  # undoes what follows
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0+cu130" if is_old else "2.13.0"))
    with FakeTensorMode():
        x = torch.empty(4, 8, dtype=torch.bfloat16)
        torch.ops.trainstep.swiglu(x)
    assert (issue.operator_str is written) is not is_old
    if is_old:
        assert issue.operator_str("trainstep.swiglu", [Unprintable()], {}) == "  target: trainstep.swiglu"
        assert issue.operator_str("aten.mm", ["x"], {}) == written("aten.mm", ["x"], {})


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter, from the test above")
def test_torch_finds_no_fault_in_the_operators():
    """Schemas, gradients, fake tensors, and the same results traced by the compiler's front with dynamic shapes."""
    for operator, arguments in operator_cases():
        torch.library.opcheck(getattr(torch.ops.trainstep, operator.__name__).default, arguments)


def operator_cases() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    def leaf(*shape: int, seed: int = 0) -> Tensor:
        return normal(*shape, seed=seed).requires_grad_()

    cos, sin = reference.rotary_tables(5, 16, 1e4, torch.device("cpu"))
    x, weight = leaf(2, 3, 40), leaf(40, seed=1)
    yield rms_norm._rms_norm, (x, weight, 1e-5, torch.float16)
    yield rms_norm._add_rms_norm, (x, leaf(2, 3, 40, seed=2), weight, 1e-5, torch.float32)
    yield rotary._rotary, (leaf(2, 3, 5, 16), leaf(2, 1, 5, 16, seed=1), cos, sin, True, False)
    yield rotary._rotary_split, (leaf(2, 5, 80), cos, sin, 3, 1, False)
    yield swiglu._swiglu, (leaf(3, 8),)
    yield swiglu._swiglu_pair, (leaf(3, 8), leaf(3, 8, seed=1))
    targets = torch.tensor([1, 2, -100, 4, 0, 3])
    for wanted in itertools.product((True, False), repeat=2):
        settings = (-100, 0.1, 1e-3, True, 4, torch.float32, *wanted)
        yield linear_cross_entropy._linear_cross_entropy, (leaf(6, 8), leaf(30, 8, seed=1), targets, *settings)


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
            is_pipelined = element != "fp32"
            tile |= {"STAGES": 3 if is_pipelined else 1}
            yield request("rms_norm", "rms_norm_backward_kernel", 8 if is_pipelined else warps, 8, norm, **tile)
        tile = {"ROWS": 128, "COLUMNS": 16}
        yield request("rms_norm", "rms_norm_weight_kernel", 4, 1, {"table_ptr": "*fp32"}, **tile)
        angles = {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
        for interleaved in (True, False):
            heads = {"INTERLEAVED": interleaved, "INVERSE": interleaved, "HEAD_DIM": 80, "HEADS": 16, "HALF": 64}
            yield request("rotary", "rotary_kernel", 4, 6, angles, **heads)
        yield request("swiglu", "swiglu_kernel", 8, 3, {}, BLOCK=2048)
        yield request("swiglu", "swiglu_backward_kernel", 4, 12, {}, BLOCK=2048, WRITE_Y=True)
        for block, has_lse in ((4096, True), (4096, False), (8192, False), (16_384, False), (16_384, True)):
            loss = {"HAS_LSE": has_lse, "GRADIENT": True, "SMOOTHING": not has_lse, "BLOCK": block, "GROUP": 8}
            yield request("cross_entropy", "cross_entropy_kernel", block // 512, 4, LOSS_TYPES, **loss)
        yield request("cross_entropy", "scale_kernel", 8, 4, {"factor_ptr": "*fp32"}, BLOCK=8192)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_kernels_compile_and_fit(tmp_path: Path, record_property: Any):
    check_compiled([*requests()], tmp_path, record_property, pytest.importorskip("triton").__version__)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_kernels_compile_with_the_oldest_triton(tmp_path: Path, record_property: Any):
    check_compiled([*requests()], tmp_path, record_property, *oldest_triton())

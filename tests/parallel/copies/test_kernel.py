"""The kernel that adds up an inbox gives what its twin on the CPU gives, to the bit, and compiles for GPUs that are not here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_checks import check_compiled, oldest_triton
from kernel_compiler import SHARED_MEMORY_BYTES
from op_check import INTERPRETED
from trainstep.parallel.copies.kernel import add_up_on_gpu
from trainstep.parallel.copies.messages import add_up

SIZES = (1, 17, 1000, 4096, 300_000)


def both(
    numel: int, slots: int, dtype: torch.dtype, device: str, *, in_place: bool, shows: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's result and the CPU's, on the same random numbers."""
    generator = torch.Generator().manual_seed(numel + slots)
    own = torch.randn(numel, generator=generator).to(dtype)
    inbox = torch.randn(slots, numel + 64, generator=generator).to(dtype)
    exact, own_there = torch.empty_like(own), own.clone().to(device)
    add_up(own, inbox, exact, 1 / (slots + 1))
    into = own_there if in_place else torch.full_like(own_there, float("nan"))
    also = torch.full_like(own_there, float("nan")) if shows else None
    add_up_on_gpu(own_there, inbox.to(device), into, 1 / (slots + 1), also)
    assert also is None or torch.equal(also, into)
    return into.cpu(), exact


@pytest.mark.skipif(not INTERPRETED, reason="tests/test_interpreter.py runs it in the interpreter")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_interpreted(dtype: torch.dtype, in_place: bool):
    for numel in SIZES[:4]:
        for shows in (False, True):
            result, exact = both(numel, 1, dtype, "cpu", in_place=in_place, shows=shows)
            assert torch.equal(result, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype, slots: int):
    for numel in SIZES:
        result, exact = both(numel, slots, dtype, "cuda", in_place=numel % 2 == 0, shows=numel > 1000)
        assert torch.equal(result, exact)


def requests() -> Iterator[dict[str, Any]]:
    for index, architecture in enumerate(SHARED_MEMORY_BYTES):
        for slots in (1, 7):
            yield {
                "module": "trainstep.parallel.copies.kernel",
                "kernel": "add_up_kernel",
                "constants": {"SLOTS": slots, "ALSO": slots == 7, "BLOCK": 4096},
                "types": {"scale": "fp32"},
                "aligned": ["slot_stride", "numel"],
                "element": ("bf16", "fp16", "bf16", "fp32")[index],
                "architecture": architecture,
                "num_warps": 8,
                "num_stages": 3,
                "most_spilled_bytes": 0,
                "least_vector_accesses": 2,
            }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_kernel_compiles(tmp_path: Path, record_property: Any):
    check_compiled([*requests()], tmp_path, record_property, pytest.importorskip("triton").__version__)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_kernel_compiles_with_the_oldest_triton(tmp_path: Path, record_property: Any):
    check_compiled([*requests()], tmp_path, record_property, *oldest_triton())

"""Allocators' messages are understood word for word, and each kind of error becomes its kind of failure."""

import pytest
import torch

from trainstep.measure.harness.failures import (
    CellFailed,
    asked_bytes,
    failure_of,
    is_out_of_memory,
    out_of_memory,
    out_of_memory_as,
)
from trainstep.records.record import Failure, Holder

CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 123 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.10 GiB is free. "
    "Including non-PyTorch memory, this process has 138.61 GiB memory in use. Of the allocated memory 130.00 GiB is "
    "allocated by PyTorch, and 7.50 GiB is reserved by PyTorch but unallocated."
)
NUMPY = "Unable to allocate 149. MiB for an array with shape (1,) and data type int64"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CPU, 123),
        (CUDA, 3 * 2**29),
        (CUDA.replace("1.50 GiB", "20.00 MiB"), 20 * 2**20),
        (CUDA.replace("1.50 GiB", "512 bytes"), 512),
        (CUDA.replace("1.50 GiB", "2.00 KiB"), 2048),
        (CUDA.replace("1.50 GiB", "1.25 TiB"), 5 * 2**38),
        (NUMPY, 149 * 2**20),
        ("something else of 5 bytes", None),
        ("", None),
    ],
)
def test_asked_bytes_are_read_from_the_message(text: str, expected: int | None):
    assert asked_bytes(text) == expected


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(CPU),
        RuntimeError(CUDA),
        torch.OutOfMemoryError(CUDA),
        torch.OutOfMemoryError("whatever words"),
        MemoryError(),
        MemoryError(NUMPY),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Resource temporarily unavailable"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_allocators_errors_are_out_of_memory(error: Exception):
    assert is_out_of_memory(error)
    wrapped = RuntimeError("backend='inductor' raised")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("memory"),
        BlockingIOError(11, "Resource temporarily unavailable"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"),
        OSError(12, "disk full"),
    ],
)
def test_other_errors_are_crashes(error: Exception):
    assert not is_out_of_memory(error)
    assert failure_of(error, "forward").kind == "crash"


def test_a_real_allocation_that_is_too_large_is_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert asked_bytes(str(caught.value)) == 2**60


def test_an_out_of_memory_failure_has_bytes_and_holders():
    failure = out_of_memory(
        RuntimeError(CPU + "\nframes follow"),
        "backward",
        allocated_bytes=7,
        capacity_bytes=9,
        holders={"gradients": 5, "nothing": 0, "parameters": 6, "negative": -1},
    )
    assert failure == Failure(
        kind="out_of_memory",
        phase="backward",
        message="ran out of memory in backward asking for 123 bytes",
        asked_bytes=123,
        allocated_bytes=7,
        capacity_bytes=9,
        holders=(Holder(name="parameters", bytes=6), Holder(name="gradients", bytes=5)),
        last_lines=(CPU,),
    )


def test_an_out_of_memory_failure_without_numbers_has_none():
    failure = out_of_memory(MemoryError(), "build")
    assert (failure.message, failure.asked_bytes) == ("ran out of memory in build", None)
    assert failure.last_lines == ("MemoryError",)


def test_an_error_becomes_its_failure():
    failure = failure_of(RuntimeError(CPU), "forward")
    assert (failure.kind, failure.phase, failure.asked_bytes) == ("out_of_memory", "forward", 123)
    wrapped = out_of_memory(MemoryError(), "warmup")
    assert failure_of(CellFailed(wrapped), "elsewhere") is wrapped
    assert str(CellFailed(wrapped)) == "ran out of memory in warmup"


@pytest.mark.parametrize(("phase", "kind"), [("start", "import_error"), ("build", "import_error"), ("steps", "crash")])
def test_a_missing_module_is_an_import_error_before_the_steps(phase: str, kind: str):
    failure = failure_of(ModuleNotFoundError("No module named 'xformers'"), phase)
    assert (failure.kind, failure.message) == (kind, "ModuleNotFoundError: No module named 'xformers'")


def test_a_value_error_is_its_sentence_and_other_errors_are_named():
    assert failure_of(ValueError("context: too long"), "build").message == "context: too long"
    assert failure_of(KeyError("x"), "build").message == "KeyError: 'x'"
    assert failure_of(RuntimeError(), "build").message == "RuntimeError: RuntimeError"
    assert failure_of(RuntimeError("first\nsecond"), "build").message == "RuntimeError: first"


def test_text_that_cannot_be_encoded_is_replaced():
    for failure in (failure_of(OSError("\udc80"), "build"), failure_of(MemoryError("\udc80"), "build")):
        assert str(failure).encode()
        assert "?" in failure.last_lines[-1]


def deep(levels: int) -> None:
    if levels == 0:
        raise RuntimeError("at the bottom")
    deeper(levels)


def deeper(levels: int) -> None:  # the two call each other: a traceback folds a line that repeats itself
    deep(levels - 1)


def test_the_last_lines_are_the_tracebacks_end():
    with pytest.raises(RuntimeError) as caught:
        deep(30)
    lines = failure_of(caught.value, "forward").last_lines
    assert len(lines) == 20
    assert lines[-1] == "RuntimeError: at the bottom"
    assert any("deep" in line for line in lines)


def test_out_of_memory_becomes_the_failure_that_the_caller_gives():
    replacement = CellFailed(out_of_memory(MemoryError(), "forward"))
    with pytest.raises(CellFailed) as caught, out_of_memory_as(lambda error: replacement):
        raise MemoryError
    assert caught.value is replacement
    with pytest.raises(KeyError), out_of_memory_as(lambda error: replacement):
        raise KeyError("another fault")

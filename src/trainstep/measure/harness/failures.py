"""Turns an exception in a cell into a Failure: out of memory with its bytes, a failed import, or a crash.

This file imports no torch: the process of a workload without torch uses it too.
"""

import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO

from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Failure, Holder

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ASKED = re.compile(r"(?:tried|unable) to allocate ([0-9.]+) (bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_LAST_LINES = 20
_TAIL_BYTES = 16_384


class CellFailed(Exception):
    """Raised by a workload that knows how it failed. `facts`: what its record holds in spite of the failure."""

    def __init__(self, failure: Failure, facts: Mapping[str, Fact] | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.facts = facts or {}


def refused(message: str, kind: str = "unsupported") -> CellFailed:
    """The failure of a cell that cannot run."""
    return CellFailed(Failure(kind=kind, phase="build", message=" ".join(message.split())))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host ran out of memory, or that caused this error (inside a compiler, for example)."""
    text = str(error)
    return (
        (error.__cause__ is not None and is_out_of_memory(error.__cause__))
        or isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or text == "Resource temporarily unavailable"  # the process's limit has no room for a thread's stack
        or "DefaultCPUAllocator: can't allocate memory" in text
        or "CUDA out of memory" in text
        or "CUDA error: out of memory" in text
        or "CUBLAS_STATUS_ALLOC_FAILED" in text
    )


def out_of_memory(
    error: BaseException,
    phase: str,
    *,
    allocated_bytes: int | None = None,
    capacity_bytes: int | None = None,
    holders: Mapping[str, int] | None = None,
) -> Failure:
    """The failure of a cell that ran out of memory in a phase; `holders`: name -> bytes of what held the rest."""
    requested_bytes = asked_bytes(str(error))
    request = f" asking for {requested_bytes:,} bytes" if requested_bytes else ""
    ranked = sorted((holders or {}).items(), key=lambda item: -item[1])
    return Failure(
        kind="out_of_memory",
        phase=phase,
        message=f"ran out of memory in {phase}{request}",
        asked_bytes=requested_bytes,
        allocated_bytes=allocated_bytes,
        capacity_bytes=capacity_bytes,
        holders=tuple(Holder(name=name, bytes=size_bytes) for name, size_bytes in ranked if size_bytes > 0),
        last_lines=(_first_line(error),),
    )


@contextmanager
def out_of_memory_as(failed: Callable[[Exception], CellFailed]) -> Iterator[None]:
    """Replace an out-of-memory error by the exception that `failed` makes of it.

    `failed` runs while the tensors that filled the memory are still alive and can be counted.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise failed(error) from None


def failure_of(error: BaseException, phase: str) -> Failure:
    """The failure that an exception in a phase amounts to."""
    if isinstance(error, CellFailed):
        return error.failure
    if is_out_of_memory(error):
        return out_of_memory(error, phase)
    stack = storable("".join(traceback.format_exception(error))).rstrip()
    kind = "import_error" if isinstance(error, ImportError) and phase in ("start", "build") else "crash"
    name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return Failure(kind=kind, phase=phase, message=name + _first_line(error), last_lines=_last_lines(stack))


def try_afterwards(facts: dict[str, Fact], what: str, inspect: Callable[[dict[str, Fact]], object]) -> bool:
    """Let `inspect` add facts from extra steps that follow the timed steps, and return whether it succeeded.

    If it raises, the fact `afterwards_failed` says why, and the facts that it has added stay.
    """
    try:
        inspect(facts)
    except Exception as error:  # noqa: BLE001  (a user's model or a peer may raise anything)
        sentence = f"{what}: {failure_of(error, 'afterwards').message}"
        before = facts.get("afterwards_failed")
        facts |= facts_of(afterwards_failed=f"{before.value}; {sentence}" if before else sentence)
        return False
    return True


def last_lines_of(printed: IO[bytes], *, since: int = 0) -> tuple[str, ...]:
    """The last lines that a process printed into this file after byte `since`."""
    end = os.fstat(printed.fileno()).st_size
    start = max(since, end - _TAIL_BYTES)
    # pread leaves the file's offset alone: the process writes there.
    return _last_lines(os.pread(printed.fileno(), end - start, start).decode(errors="replace"))


def asked_bytes(text: str) -> int | None:
    """The bytes that were requested, from an allocator's message; None if the text names none."""
    match = _ASKED.search(text)
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


def storable(text: str) -> str:
    """The text without lone surrogates, which no file takes; a file name that is not UTF-8 has them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _last_lines(text: str) -> tuple[str, ...]:
    return tuple(text.splitlines()[-_LAST_LINES:])


def _first_line(error: BaseException) -> str:
    return next(iter(storable(str(error)).splitlines()), "") or type(error).__name__

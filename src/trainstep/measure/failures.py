"""Turns what went wrong in a cell into a Failure: out of memory with its bytes, an import that failed, anything else.

Torch-free: the cell's process of a workload without torch uses it too.
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
    """Raised by a workload that knows how it failed. `facts`: what its record tells all the same."""

    def __init__(self, failure: Failure, facts: Mapping[str, Fact] | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.facts = facts or {}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is the device's or the host's memory running out, or was caused by it (inside a compiler, say)."""
    text = str(error)
    return (
        (error.__cause__ is not None and is_out_of_memory(error.__cause__))
        or isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or text == "Resource temporarily unavailable"  # a thread whose stack the process's limit has no room for
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
    asked = asked_bytes(str(error))
    asked_text = f" asking for {asked:,} bytes" if asked else ""
    ranked = sorted((holders or {}).items(), key=lambda item: -item[1])
    return Failure(
        kind="out_of_memory",
        phase=phase,
        message=f"ran out of memory in {phase}{asked_text}",
        asked_bytes=asked,
        allocated_bytes=allocated_bytes,
        capacity_bytes=capacity_bytes,
        holders=tuple(Holder(name=name, bytes=held) for name, held in ranked if held > 0),
        last_lines=(_first_line(error),),
    )


@contextmanager
def out_of_memory_as(failed: Callable[[Exception], CellFailed]) -> Iterator[None]:
    """Memory running out becomes what `failed` makes of it, while the tensors that filled it are still alive to be counted."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise failed(error) from None


def failure_of(error: BaseException, phase: str) -> Failure:
    """The failure any other exception amounts to."""
    if isinstance(error, CellFailed):
        return error.failure
    if is_out_of_memory(error):
        return out_of_memory(error, phase)
    said = storable("".join(traceback.format_exception(error))).rstrip()
    kind = "import_error" if isinstance(error, ImportError) and phase in ("start", "build") else "crash"
    name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return Failure(kind=kind, phase=phase, message=name + _first_line(error), last_lines=_last_lines(said))


def try_afterwards(facts: dict[str, Fact], what: str, look: Callable[[dict[str, Fact]], object]) -> bool:
    """Let `look` add to the facts what is seen only once the steps are timed. Where it fails, the fact `afterwards_failed` says
    why, what is there already is kept, and the answer is False."""
    try:
        look(facts)
    except Exception as error:  # noqa: BLE001  (a user's model or a peer may raise anything)
        sentence = f"{what}: {failure_of(error, 'afterwards').message}"
        before = facts.get("afterwards_failed")
        facts |= facts_of(afterwards_failed=f"{before.value}; {sentence}" if before else sentence)
        return False
    return True


def last_lines_of(printed: IO[bytes], *, since: int = 0) -> tuple[str, ...]:
    """The end of what a process printed from that byte on. Read by position: it writes where the file's own offset stands."""
    end = os.fstat(printed.fileno()).st_size
    start = max(since, end - _TAIL_BYTES)
    return _last_lines(os.pread(printed.fileno(), end - start, start).decode(errors="replace"))


def asked_bytes(text: str) -> int | None:
    """The bytes an allocator's message says were asked for."""
    found = _ASKED.search(text)
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


def storable(text: str) -> str:
    """The text without lone surrogates (a file name that is not UTF-8 has them), which no file takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _last_lines(text: str) -> tuple[str, ...]:
    return tuple(text.splitlines()[-_LAST_LINES:])


def _first_line(error: BaseException) -> str:
    return next(iter(storable(str(error)).splitlines()), "") or type(error).__name__

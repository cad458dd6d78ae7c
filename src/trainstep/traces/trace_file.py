"""Reads a trace file of torch's profiler or of nsys' export: `read_trace_file(path, limits.file_bytes, profile_of)`."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainstep.traces.kineto import Trace, read_trace
from trainstep.traces.nsys import is_report, read_report

Seen = TypeVar("Seen")


def read_trace_file(path: Path, largest_bytes: int, use: Callable[[Trace], Seen]) -> Seen:
    """The result of `use` on the trace. A ValueError of reading or of `use` is one sentence that names the file."""
    try:
        return use(read_report(path) if is_report(path) else read_trace(path, largest_bytes=largest_bytes))
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None

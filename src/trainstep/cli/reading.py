"""`--from FILE`: what somebody else recorded, read and shown within limits of memory and time."""

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO, TypeVar, cast

from trainstep.cli.options import check_positive
from trainstep.cli.streams import outliving_reader
from trainstep.reading import ReadLimits, read_within
from trainstep.report.visible import VisibleStream, one_line, stream_within

Result = TypeVar("Result")
_LONG_BYTES = 2 * 2**20
"""The size from which a file takes seconds to read."""


def read_limits(timeout_s: float | None, memory_limit_gib: float | None) -> ReadLimits:
    """The limits of the command line, and the usual ones where it says nothing. ValueError for what is no positive number."""
    check_positive({"timeout_s": timeout_s, "memory_limit_gib": memory_limit_gib})
    usual = ReadLimits()
    return ReadLimits(
        memory_bytes=usual.memory_bytes if memory_limit_gib is None else int(memory_limit_gib * 2**30),
        time_s=usual.time_s if timeout_s is None else timeout_s,
    )


def tell_reading(files: Sequence[Path]) -> None:
    """Say on standard error that these files are being read, where they are so large that it takes seconds."""
    size = sum(file.stat().st_size for file in files if file.is_file())
    if size > _LONG_BYTES:
        what = f"{len(files)} files" if len(files) > 1 else str(files[0])
        with outliving_reader(sys.stderr):
            print(one_line(f"reading {what}, {size / 2**20:.0f} MiB"), file=sys.stderr, flush=True)


def show_within(limits: ReadLimits, path: Path, show: Callable[[TextIO], Result]) -> Result:
    """Print what `show` writes, and return what it returns. Reading, analysis and layout all happen in the limited process."""
    tell_reading([path])
    page = _Page(is_terminal=sys.stdout.isatty())

    def shown() -> tuple[str, Result]:
        result = show(cast(TextIO, VisibleStream(page)))
        return page.getvalue(), result

    text, result = read_within(limits, path, shown)
    # The text was made visible there: from now on its escape sequences are the tables' own colours.
    stream_within(sys.stdout).write(text)
    return result


class _Page(io.StringIO):
    """Text that is laid out as standard output would be: with colours where a person sits at it."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

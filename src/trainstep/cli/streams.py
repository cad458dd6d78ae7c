"""Standard output and error of a command line: always open, named in errors, and free of other people's escape sequences."""

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from trainstep.report.visible import VisibleStream

_NO_OUTPUT = "standard output is closed, so nothing can be shown: send it to a file, or to /dev/null"


class NamedStream:
    """A text stream whose OSError says which stream it is, as a file's error has the file's name."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name

    def write(self, text: str) -> int:
        """Write the text. OSError with this stream's name."""
        with self._named():
            return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the lines. OSError with this stream's name."""
        with self._named():
            self._stream.writelines(lines)

    def flush(self) -> None:
        """Flush. OSError with this stream's name."""
        with self._named():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # BrokenPipeError stays one: OSError chooses its class by the number
            raise OSError(error.errno, error.strerror, self._name) from None


def open_streams() -> None:
    """Put streams that show control characters in place of standard output and error. Call it before any file is opened.

    What was closed at the start (`>&-`) becomes the null device: the next file would be given the number of a standard stream,
    and what a library or a child of ours prints would end up in it. ValueError where standard output was closed.
    """
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:  # the lowest free number is the one that the stream should have
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that is no text (a lone surrogate) must not cost the table
        sys.stdout.reconfigure(errors="replace")
    sys.stdout = cast(TextIO, VisibleStream(cast(TextIO, NamedStream(sys.stdout, "standard output"))))
    sys.stderr = cast(TextIO, VisibleStream(cast(TextIO, NamedStream(sys.stderr, "standard error"))))
    if "stdout" in closed:
        raise ValueError(_NO_OUTPUT)


@contextlib.contextmanager
def outliving_reader(stream: TextIO) -> Iterator[None]:
    """Whoever read the stream may leave (`2>&1 | head`): we go on, and what is said from then on goes nowhere.

    So does what cannot be written to standard error (`2> log` on a full disk), where only progress and errors are told.
    """
    try:
        yield
    except OSError as error:
        if not isinstance(error, BrokenPipeError) and stream is not sys.stderr:
            raise
        silence(stream)


def silence(stream: TextIO) -> None:
    """What the stream still holds, and what is written from now on, goes nowhere."""
    with contextlib.suppress(OSError):  # a stream without a file behind it holds nothing back
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

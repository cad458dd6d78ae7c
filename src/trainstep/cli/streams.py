"""Standard output and error of the command line: always open, named in errors, without escape sequences from outside.

Also `show_within`, for `--from FILE`: read and show a file from outside within limits of memory and time.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

from trainstep.reading import ReadLimits, read_within
from trainstep.report.kit.visible import VisibleStream, one_line, stream_within

if TYPE_CHECKING:
    from trainstep.report.kit.answer import Answer
    from trainstep.report.kit.tables import Table

Result = TypeVar("Result")
_NO_OUTPUT = "standard output is closed, so nothing can be shown: send it to a file, or to /dev/null"
_ERROR = "standard error"
_LONG_BYTES = 2 * 2**20
"""Reading a file of this size takes seconds."""


class NamedStream:
    """A text stream whose errors name the stream, as a file's errors name the file."""

    def __init__(self, stream: TextIO, name: str, given_errors: str | None = None) -> None:
        self.given = stream
        self.given_errors = given_errors
        """How the stream treated letters that it cannot encode before we changed that; None if we did not."""
        self._stream = stream
        self._name = name

    def write(self, text: str) -> int:
        """Write the text. OSError names this stream."""
        with self._named():
            return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the lines. OSError names this stream."""
        with self._named():
            self._stream.writelines(lines)

    def flush(self) -> None:
        """Flush the stream. OSError names this stream."""
        with self._named():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # BrokenPipeError remains a BrokenPipeError: OSError chooses its class by the number
            raise OSError(error.errno, error.strerror, self._name) from None


def open_streams() -> None:
    """Replace standard output and error by streams that make control characters visible. Call it before any file is opened.

    ValueError if standard output was closed at the start (`>&-`).
    """
    # A closed stream becomes the null device. Otherwise the next opened file would get the number of a standard stream, and output
    # of libraries and child processes would go into that file.
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:  # `open` takes the lowest free number, which is this stream's
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    errors = None
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # a file name that is not text (a lone surrogate) must not fail the table
        errors = sys.stdout.errors
        sys.stdout.reconfigure(errors="replace")
    sys.stdout = cast(TextIO, VisibleStream(cast(TextIO, NamedStream(sys.stdout, "standard output", errors))))
    sys.stderr = cast(TextIO, VisibleStream(cast(TextIO, NamedStream(sys.stderr, _ERROR))))
    if "stdout" in closed:
        raise ValueError(_NO_OUTPUT)


def give_back_streams() -> TextIO:
    """Undo `open_streams`: standard output and error as Python opened them, for a script. Returns a stream for our own words.

    Our words go to standard error, also if the script replaces or closes `sys.stderr`: they have a file descriptor of their own.
    """
    ours = sys.stderr
    with contextlib.suppress(OSError):  # a stream without a file behind it
        own = os.fdopen(os.dup(sys.stderr.fileno()), "w", 1, sys.stderr.encoding, "backslashreplace")
        ours = cast(TextIO, VisibleStream(cast(TextIO, NamedStream(own, _ERROR))))
    for name in ("stdout", "stderr"):
        named = getattr(getattr(sys, name), "stream", None)
        if isinstance(named, NamedStream):
            if named.given_errors is not None and isinstance(named.given, io.TextIOWrapper):
                named.given.reconfigure(errors=named.given_errors)
            setattr(sys, name, named.given)
    return ours


@contextlib.contextmanager
def outliving_reader(stream: TextIO) -> Iterator[None]:
    """Continue if the reader of the stream leaves (`2>&1 | head`): later output is discarded.

    The same holds for standard error that cannot be written (`2> log` on a full disk), because it has only progress and errors.
    """
    try:
        yield
    except OSError as error:
        if not isinstance(error, BrokenPipeError) and stream is not sys.stderr and error.filename != _ERROR:
            raise
        silence(stream)


def silence(stream: TextIO) -> None:
    """Discard what the stream has buffered, and everything that is written to it from now on."""
    with contextlib.suppress(OSError):  # a stream without a file behind it buffers nothing
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def tell_progress(sentence: str) -> None:
    """Print a line on standard error at once, while the work that it names goes on."""
    with outliving_reader(sys.stderr):
        print(one_line(sentence), file=sys.stderr, flush=True)


def tell_reading(files: Sequence[Path]) -> None:
    """Say on standard error that these files are being read, if they are so large that it takes seconds."""
    size = sum(file.stat().st_size for file in files if file.is_file())
    if size > _LONG_BYTES:
        names = f"{len(files)} files" if len(files) > 1 else str(files[0])
        with outliving_reader(sys.stderr):
            print(one_line(f"reading {names}, {size / 2**20:.0f} MiB"), file=sys.stderr, flush=True)


def show_within(limits: ReadLimits, path: Path, show: Callable[[TextIO], Result]) -> Result:
    """Print what `show` writes, and return its result. Reading, analysis and layout all happen in the limited process."""
    tell_reading([path])
    buffer = _TextBuffer(is_terminal=sys.stdout.isatty())

    def show_into_buffer() -> tuple[str, Result]:
        result = show(cast(TextIO, VisibleStream(buffer)))
        return buffer.getvalue(), result

    text, result = read_within(limits, path, show_into_buffer)
    # Control characters were made visible in that process, so the escape sequences in this text are the colours of the tables.
    stream_within(sys.stdout).write(text)
    return result


class _TextBuffer(io.StringIO):
    """Text that is laid out as for standard output: with colours if that is a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def show_found(
    answers: "Sequence[Answer]",
    tables: "Sequence[Table]",
    *,
    as_json: bool,
    every: bool,
    notes: Sequence[str] = (),
    for_programs: "Sequence[Table] | None" = None,
) -> None:
    """Print answers, tables and `notes` on standard output. `for_programs`: the tables of JSON, where a terminal gets fewer."""
    from trainstep.report.kit.answer import print_answers
    from trainstep.report.kit.frames import json_text
    from trainstep.report.kit.terminal import print_tables

    with outliving_reader(sys.stdout):
        if as_json:
            sys.stdout.write(json_text(tables if for_programs is None else for_programs, answers))
        else:
            print_answers(answers, sys.stdout)
            print_tables(tables, notes, sys.stdout, every=every)

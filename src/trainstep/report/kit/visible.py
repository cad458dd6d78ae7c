"""Makes text from records and foreign files safe to print: control characters are shown as text.

An escape sequence in a kernel's name or in the last line of a crash could rename the window, hide other lines or type for
the reader; a carriage return overwrites the line; a bidi override changes the order in which letters are read.
`VisibleStream` wraps standard output and standard error at the edge of the program, so that no verb can forget it.
Tables, Markdown, LaTeX, CSV and the page call the same functions, because their files are shown on terminals too.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_ACTS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline; DEL; C1, of which U+009B alone begins an escape sequence
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidi controls, which set the direction of text
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff]"  # lone surrogates, which UTF-8 cannot encode
)


def visible(text: str) -> str:
    r"""The text with its control characters written out, as `\x1b` and `\u202e`; tabs and newlines stay, and so do letters
    of any language. Applying it twice changes nothing more."""
    return _ACTS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The visible text on one line: each run of spaces, tabs and newlines becomes one space."""
    return " ".join(visible(text.replace("\r\n", "\n")).split())


def ascii_json(value: Any, *, indent: int, allow_nan: bool = True) -> str:
    """JSON in plain ASCII, which is safe on a terminal; a record's frozen mappings become objects.

    ValueError for a number that is not finite, unless `allow_nan`.
    """
    text = json.dumps(value, indent=indent, allow_nan=allow_nan, default=dict)
    return text.replace("\x7f", r"\u007f")  # DEL is the only control character that json does not escape


class VisibleStream:
    """A text stream that writes control characters out; everything else is passed to the wrapped `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text, visible."""
        self.stream.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the lines, visible."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def stream_within(stream: TextIO) -> TextIO:
    """The stream inside a `VisibleStream`, for a console that writes control codes of its own."""
    return stream.stream if isinstance(stream, VisibleStream) else stream


class VisibleConsole(Console):
    """The console of every verb: rich's own control codes act, control characters in the printed text are shown."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=stream_within(stream))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments to print, their text visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, which the caller handles; rich would end the whole program here."""
        raise BrokenPipeError

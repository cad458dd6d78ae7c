"""Text from records and from anyone's files, made safe to show: no character in it acts on the terminal that shows it.

An escape sequence in a kernel's name or in the last line of a crash could rename the window, hide other lines or type for
the reader; a carriage return writes over what stands there; a bidi override turns the order in which letters are read.
`VisibleStream` stands at the edge of the program, around standard output and standard error, so that no verb can forget it.
Tables, Markdown, LaTeX, CSV and the page call the same functions, because their files are shown on terminals too.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, TextIO

_ACTS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline; DEL; C1, of which U+009B alone begins an escape sequence
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # what sets the direction of text
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff]"  # halves of a pair, which no file takes
)


def visible(text: str) -> str:
    r"""The text with its control characters written out, as `\x1b` and `\u202e`; tabs and newlines stay, and so do letters
    of any language. To do it twice changes nothing."""
    return _ACTS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The text on one line: visible, each run of spaces, tabs and newlines as one space."""
    return " ".join(visible(text.replace("\r\n", "\n")).split())


def ascii_json(value: Any, *, indent: int, allow_nan: bool = True) -> str:
    """JSON in plain ASCII, so that a terminal may show it; a record's frozen mappings become objects.

    ValueError for a number that is not finite, unless `allow_nan`.
    """
    text = json.dumps(value, indent=indent, allow_nan=allow_nan, default=dict)
    return text.replace("\x7f", r"\u007f")  # the one control character that json leaves as it is


class VisibleStream:
    """A text stream that shows control characters instead of obeying them; all else is the stream's own.

    A console that colours its text itself takes the `stream` within.
    """

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
    """The stream that takes control characters as they are, for a console that writes its own."""
    return stream.stream if isinstance(stream, VisibleStream) else stream

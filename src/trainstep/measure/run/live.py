"""A line on a terminal that says, while a script trains, how long its steps take and where their time goes.

It is drawn below what the script prints, and taken away before the script prints again: on a terminal its standard output and
error are wrapped for that. Where they are no terminal, nothing is wrapped and nothing drawn. A script that draws a line of its
own (a progress bar) leaves the cursor inside it; ours then waits for the next line.
"""

import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from trainstep.config.script import Part
from trainstep.measure.run.recording import StepTimes

_BETWEEN_S = 0.5
_RECENT = 50
_WORDS = {Part.DATA: "data", Part.EVALUATION: "no gradients"}
_ERASE = "\r\x1b[2K"


class LiveLine:
    """The line; give `show` to a watch as its `on_step`. `open` wraps the script's streams, `close` puts them back."""

    def __init__(self) -> None:
        self._stream = sys.__stderr__
        self._recent: deque[StepTimes] = deque(maxlen=_RECENT)
        self._next_s = 0.0
        self._drawn = False
        self.at_line_start = True
        """Whether what the script printed last ends its line."""

    @property
    def is_possible(self) -> bool:
        """Whether standard error is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def open(self) -> None:
        """Wrap those of the script's streams that are terminals."""
        self._given = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (self._wrapped(stream) for stream in self._given)

    def close(self) -> None:
        """Take the line away, and the wrapping of streams that the script has not replaced since."""
        self.erase()
        self._next_s = float("inf")
        for name, given in zip(("stdout", "stderr"), self._given, strict=True):
            if isinstance(getattr(sys, name), _Erasing):
                setattr(sys, name, given)

    def show(self, step: int, times: Sequence[StepTimes]) -> None:
        """Redraw the line after steps that have ended, at most every so often."""
        self._recent.extend(times)
        now_s = time.monotonic()
        if now_s < self._next_s or not self.at_line_start or self._stream is None:
            return
        self._next_s = now_s + _BETWEEN_S
        try:
            console = Console(file=self._stream)
            text = Text(live_words(step, self._recent), style="dim", no_wrap=True, overflow="ellipsis")
            text.truncate(console.width - 1, overflow="ellipsis")
            self._stream.write(_ERASE)
            console.print(text, end="")
            self._stream.flush()
            self._drawn = True
        except OSError:  # the terminal has gone
            self._next_s = float("inf")

    def erase(self) -> None:
        """Take the line away, if it is there."""
        if self._drawn and self._stream is not None:
            self._drawn = False
            try:
                self._stream.write(_ERASE)
                self._stream.flush()
            except OSError:
                self._next_s = float("inf")

    def _wrapped(self, stream: Any) -> Any:
        return _Erasing(stream, self) if stream is not None and stream.isatty() else stream


class _Erasing:
    """A stream of the script that takes the live line away before it writes."""

    def __init__(self, stream: TextIO, live: LiveLine) -> None:
        self._stream = stream
        self._live = live

    def write(self, text: str) -> int:
        """Write the text, unchanged."""
        if text:
            self._live.erase()
            self._live.at_line_start = text.endswith("\n")
        return self._stream.write(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Write the lines, unchanged."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def live_words(step: int, recent: Sequence[StepTimes]) -> str:
    """`step 1,234: 12.3 ms, backward 50 %, forward 24 %, data 20 %`: medians and shares of the last steps."""
    step_s = statistics.median(times.step_s for times in recent)
    total_s = sum(times.step_s for times in recent) or 1.0
    shares = {part: sum(times.parts_s.get(part, 0.0) for times in recent) / total_s for part in Part}
    largest = sorted(shares.items(), key=lambda item: -item[1])
    parts = [f"{_WORDS.get(part, part.value)} {100 * share:.0f} %" for part, share in largest if share >= 0.005]
    time_words = f"{step_s * 1e3:,.1f} ms" if step_s < 1 else f"{step_s:,.2f} s"
    return f"step {step:,}: {', '.join([time_words, *parts])}"

"""The console of every verb: rich's, which colours and moves the cursor itself and lets no other text do so."""

from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from trainstep.report.visible import stream_within, visible


class VisibleConsole(Console):
    """A rich console on a stream. Its own codes are obeyed; control characters in what it prints are shown."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=stream_within(stream))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments to print, their text visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Rich would end the whole program."""
        raise BrokenPipeError

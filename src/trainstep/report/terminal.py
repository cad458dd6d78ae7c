"""The tables for a terminal: rich where a person sits at it, plain aligned text where the output goes elsewhere.

A table wider than the terminal is not squeezed: a cut number is a wrong number.
"""

from collections.abc import Sequence
from typing import TextIO

import tabulate
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from trainstep.report.console import VisibleConsole
from trainstep.report.tables import Table
from trainstep.report.visible import one_line

_FAILURE_STYLE = "bold red"
_UNLIMITED = 10_000
"""Characters; wider than any table."""


def print_tables(tables: Sequence[Table], notes: Sequence[str], stream: TextIO) -> None:
    """Print to a stream, with the notes (mixed machines, MFU's convention) under the tables."""
    if not stream.isatty():
        stream.write(plain(tables, notes))
        return
    console = VisibleConsole(stream)
    width = console.width
    for table in tables:
        made = _rich(table, titled=len(tables) > 1)
        console.width = max(width, console.measure(made, options=console.options.update(max_width=_UNLIMITED)).minimum)
        console.print(made)
        if table.note:
            console.print(Text(one_line(table.note), style="dim"))
    console.width = width
    for note in notes:
        console.print(Text(one_line(note), style="dim"))


def plain(tables: Sequence[Table], notes: Sequence[str] = ()) -> str:
    """Aligned columns without colours or limits of width."""
    parts = []
    for table in tables:
        texts = [[one_line(entry.text) for entry in row] for row in table.entries]
        sides = ["right" if column.number else "left" for column in table.columns]
        titles = [one_line(column.title) for column in table.columns]
        body = tabulate.tabulate(texts, headers=titles, tablefmt="simple", colalign=sides, disable_numparse=True)
        note = f"\n{one_line(table.note)}" if table.note else ""
        parts.append((f"{one_line(table.title)}\n" if len(tables) > 1 else "") + body + note)
    return "\n\n".join([*parts, *map(one_line, notes)]) + "\n"


def _rich(table: Table, *, titled: bool) -> RichTable:
    title = Text(one_line(table.title), style="bold") if titled else None
    made = RichTable(title=title, header_style="bold", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        words = Text(one_line(column.title).replace(" (", "\n("))
        wraps = column is table.columns[-1]
        made.add_column(
            words, justify="right" if column.number else "left", no_wrap=not wraps, min_width=16 if wraps else None
        )
    for row in table.entries:
        made.add_row(*(Text(one_line(entry.text), style=_FAILURE_STYLE if entry.failure else "") for entry in row))
    return made

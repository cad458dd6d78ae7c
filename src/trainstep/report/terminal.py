"""The tables for a terminal: rich where a person sits at it, plain aligned text where the output goes elsewhere.

Either shows few columns unless asked for `every` one. On a terminal nothing is cut, for a cut number is a wrong number: texts wrap,
numbers do not; a table wider than the terminal is split into blocks that repeat the columns which name a row; where those alone
are too wide, it is set row by row.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import TextIO

import tabulate
from rich import box
from rich.cells import cell_len
from rich.table import Table as RichTable
from rich.text import Text

from trainstep.report.console import VisibleConsole
from trainstep.report.forms import ABSENT
from trainstep.report.tables import Column, Entry, Table
from trainstep.report.visible import one_line

_FAILURE_STYLE = "bold red"
_NARROWEST = 40
"""Columns of characters; a narrower terminal wraps lines by itself."""
_TEXT_WIDTH = 20
"""The width that a text with long words is not squeezed below, so that it is still read."""
_NAMES_SHARE = 2 / 3
"""The share of the width that the names of a row may have in every block."""
_GAP = 2
"""Characters between columns."""


def print_tables(tables: Sequence[Table], notes: Sequence[str], stream: TextIO, *, every: bool = False) -> None:
    """Print to a stream, with the notes (mixed machines, MFU's convention) under the tables."""
    if not stream.isatty():
        stream.write(plain(tables, notes, every=every))
        return
    console = VisibleConsole(stream)
    width = max(console.width, _NARROWEST)
    shown = _shown(tables, every=every)
    for table in shown:
        if len(shown) > 1:
            console.print(Text(one_line(table.title), style="bold"))
        for number, block in enumerate(_laid_out(table, width)):
            console.print(*([""] if number else []), block, sep="\n")
        if table.note:
            console.print(Text(one_line(table.note), style="dim", overflow="fold"))
        console.print()
    for note in [*notes, *_left_out(tables, shown)]:
        console.print(Text(one_line(note), style="dim", overflow="fold"))


def print_paragraphs(paragraphs: Sequence[str], stream: TextIO) -> None:
    """Print a line each, wrapped between words where a person sits at the stream."""
    if not stream.isatty():
        stream.write("".join(f"{one_line(text)}\n" for text in paragraphs))
        return
    console = VisibleConsole(stream)
    for text in paragraphs:
        console.print(Text(one_line(text), overflow="fold"))


def plain(tables: Sequence[Table], notes: Sequence[str] = (), *, every: bool = False) -> str:
    """Aligned columns without colours or limits of width."""
    parts = []
    shown = _shown(tables, every=every)
    for table in shown:
        texts = [[one_line(entry.text) for entry in row] for row in table.entries]
        sides = ["right" if column.number else "left" for column in table.columns]
        titles = [one_line(column.title) for column in table.columns]
        body = tabulate.tabulate(texts, headers=titles, tablefmt="simple", colalign=sides, disable_numparse=True)
        note = f"\n{one_line(table.note)}" if table.note else ""
        parts.append((f"{one_line(table.title)}\n" if len(shown) > 1 else "") + body + note)
    return "\n\n".join([*parts, *map(one_line, [*notes, *_left_out(tables, shown)])]) + "\n"


def _shown(tables: Sequence[Table], *, every: bool) -> list[Table]:
    return [table if every else table.brief() for table in tables]


def _left_out(tables: Sequence[Table], shown: Sequence[Table]) -> list[str]:
    count = sum(len(table.columns) for table in tables) - sum(len(table.columns) for table in shown)
    return [f"{count} more column{'s' * (count > 1)}: add --all."] if count else []


def _laid_out(table: Table, width: int) -> list[RichTable]:
    """The whole table; else blocks of it; else its rows one below the other."""
    places = list(range(len(table.columns)))
    if _least_width(table, places) <= width:
        return [_block(table, places, width)]
    naming = list(takewhile(lambda place: table.columns[place].names, places[:-1])) or [0]
    others = places[len(naming) :]
    own = _least_width(table, naming)
    if own > _NAMES_SHARE * width or any(own + _least_width(table, [place]) > width for place in others):
        return [_one_by_one(table, row, naming, width) for row in table.entries]
    blocks = [list(naming)]
    for place in others:
        if _least_width(table, [*blocks[-1], place]) > width:
            blocks.append(list(naming))
        blocks[-1].append(place)
    return [_block(table, block, width) for block in blocks]


def _block(table: Table, places: Sequence[int], width: int) -> RichTable:
    made = RichTable(header_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, _GAP - 1, 0, 0))
    for place, own_width in zip(places, _widths(table, places, width), strict=True):
        column = table.columns[place]
        side = "right" if column.number else "left"
        made.add_column(_title(column), justify=side, width=own_width, overflow="fold")  # type: ignore[arg-type]
    for row in table.entries:
        made.add_row(*(_cell(table.columns[place], row[place]) for place in places))
    return made


def _one_by_one(table: Table, row: Sequence[Entry], naming: Sequence[int], width: int) -> RichTable:
    """A row as lines of a title and a value, below the values that name it."""
    titles = [one_line(column.title) for column in table.columns]
    left = min(max(map(cell_len, titles)), width // 2)
    made = RichTable.grid(padding=(0, _GAP, 0, 0))
    made.add_column(width=left, overflow="fold")
    made.add_column(width=width - left - 2 * _GAP, overflow="fold")
    for place, (title, entry) in enumerate(zip(titles, row, strict=True)):
        if place in naming or entry.text != ABSENT:
            made.add_row(Text(title, style="bold" if place in naming else ""), _cell(table.columns[place], entry))
    made.add_row("", "")
    return made


def _title(column: Column) -> Text:
    return Text(one_line(column.title).replace(" (", "\n("))


def _cell(column: Column, entry: Entry) -> Text:
    return Text(
        one_line(entry.text),
        style=_FAILURE_STYLE if entry.failure else "",
        no_wrap=True if _is_whole(column, entry) else None,
    )


def _is_whole(column: Column, entry: Entry) -> bool:
    """Whether it stands on one line: numbers do, and words in their place (why a cell failed) do not."""
    return column.number and entry.failure is None


def _least_width(table: Table, places: Sequence[int]) -> int:
    return sum(_bounds(table, place)[0] + _GAP for place in places)


def _widths(table: Table, places: Sequence[int], width: int) -> list[int]:
    """The widths of these columns: what each needs at least, and an even part of what is left for those that would take more."""
    bounds = [_bounds(table, place) for place in places]
    left = width - sum(least + _GAP for least, _ in bounds)
    widths = [least for least, _ in bounds]
    wanting = sorted(range(len(bounds)), key=lambda index: bounds[index][1] - bounds[index][0])
    for waiting, index in zip(range(len(wanting), 0, -1), wanting, strict=True):
        more = min(bounds[index][1] - bounds[index][0], left // waiting)
        widths[index] += more
        left -= more
    return widths


def _bounds(table: Table, place: int) -> tuple[int, int]:
    """The least width of a column in which no number and no word of its title is cut, and the width in which nothing wraps."""
    column = table.columns[place]
    title = _title(column).plain
    least = max(map(cell_len, title.split()), default=0)
    most = max(map(cell_len, title.split("\n")), default=0)
    for row in table.entries:
        text = one_line(row[place].text)
        longest = max(map(cell_len, text.split()), default=0)
        least = max(least, cell_len(text) if _is_whole(column, row[place]) else min(longest, _TEXT_WIDTH))
        most = max(most, cell_len(text))
    return least, most

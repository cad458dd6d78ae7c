"""Tables as text: coloured and fitted to the width of a terminal, plain and aligned for a pipe or a file.

Columns marked `more` are shown only if `every` column is requested. On a terminal nothing is truncated, because a truncated number
is a wrong number: texts wrap and numbers do not. A table wider than the terminal is split into blocks that repeat the columns
which name a row; if those columns alone are too wide, each row is printed as a list of titles and values.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import TextIO

import tabulate
from rich import box
from rich.cells import cell_len
from rich.table import Table as RichTable
from rich.text import Text

from trainstep.report.kit.forms import ABSENT
from trainstep.report.kit.tables import Column, Entry, Table
from trainstep.report.kit.visible import VisibleConsole, one_line

_FAILURE_STYLE = "bold red"
_NARROWEST = 40
"""Characters per line; a narrower terminal wraps lines by itself."""
_TEXT_WIDTH = 20
"""The least width of a column of text with long words, so that it stays readable."""
_NAMES_SHARE = 2 / 3
"""The largest share of the width that the columns naming a row may take in every block."""
_GAP = 2
"""Characters between columns."""


def print_tables(tables: Sequence[Table], notes: Sequence[str], stream: TextIO, *, every: bool = False) -> None:
    """Print the tables to a stream, with the notes (mixed machines, MFU's convention) under them."""
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
            if number:
                console.print()
            console.print(block)
        if table.note:
            console.print(Text(one_line(table.note), style="dim", overflow="fold"))
        console.print()
    for note in [*notes, *_left_out(tables, shown)]:
        console.print(Text(one_line(note), style="dim", overflow="fold"))


def print_paragraphs(paragraphs: Sequence[str], stream: TextIO) -> None:
    """Print each paragraph on a line; on a terminal, wrapped between words."""
    if not stream.isatty():
        stream.write("".join(f"{one_line(text)}\n" for text in paragraphs))
        return
    console = VisibleConsole(stream)
    for text in paragraphs:
        console.print(Text(one_line(text), overflow="fold"))


def plain(tables: Sequence[Table], notes: Sequence[str] = (), *, every: bool = False) -> str:
    """The tables and notes as aligned columns, without colours and without a limit of width."""
    parts = []
    shown = _shown(tables, every=every)
    for table in shown:
        texts = [[one_line(entry.text) for entry in row] for row in table.entries]
        sides = [column.side for column in table.columns]
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
    """The whole table if it fits; else in blocks of columns; else its rows as lists, one below the other."""
    indices = list(range(len(table.columns)))
    if _least_width(table, indices) <= width:
        return [_block(table, indices, width)]
    name_columns = list(takewhile(lambda index: table.columns[index].names, indices[:-1])) or [0]
    others = indices[len(name_columns) :]
    names_width = _least_width(table, name_columns)
    if names_width > _NAMES_SHARE * width or any(
        names_width + _least_width(table, [index]) > width for index in others
    ):
        return [_row_as_list(table, row, name_columns, width) for row in table.entries]
    blocks = [list(name_columns)]
    for index in others:
        if _least_width(table, [*blocks[-1], index]) > width:
            blocks.append(list(name_columns))
        blocks[-1].append(index)
    return [_block(table, block, width) for block in blocks]


def _block(table: Table, indices: Sequence[int], width: int) -> RichTable:
    grid = RichTable(header_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, _GAP - 1, 0, 0))
    for index, column_width in zip(indices, _widths(table, indices, width), strict=True):
        column = table.columns[index]
        grid.add_column(_title(column), justify=column.side, width=column_width, overflow="fold")
    for row in table.entries:
        grid.add_row(*(_cell(table.columns[index], row[index]) for index in indices))
    return grid


def _row_as_list(table: Table, row: Sequence[Entry], name_columns: Sequence[int], width: int) -> RichTable:
    """A row as lines of a title and a value, with the columns that name the row in bold."""
    titles = [one_line(column.title) for column in table.columns]
    left = min(max(map(cell_len, titles)), width // 2)
    grid = RichTable.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(width=left, overflow="fold")
    grid.add_column(width=width - left - 2 * _GAP, overflow="fold")
    for index, (title, entry) in enumerate(zip(titles, row, strict=True)):
        if index in name_columns or entry.text != ABSENT:
            grid.add_row(Text(title, style="bold" if index in name_columns else ""), _cell(table.columns[index], entry))
    grid.add_row("", "")
    return grid


def _title(column: Column) -> Text:
    return Text(one_line(column.title).replace(" (", "\n("))


def _cell(column: Column, entry: Entry) -> Text:
    return Text(
        one_line(entry.text),
        style=_FAILURE_STYLE if entry.failure else "",
        no_wrap=True if _is_whole(column, entry) else None,
    )


def _is_whole(column: Column, entry: Entry) -> bool:
    """Whether the entry must stay on one line: a number must, the words of a failure in its place need not."""
    return column.number and entry.failure is None


def _least_width(table: Table, indices: Sequence[int]) -> int:
    return sum(_least_and_full_width(table, index)[0] + _GAP for index in indices)


def _widths(table: Table, indices: Sequence[int], width: int) -> list[int]:
    """The widths of these columns: the least width of each, and an even share of the remaining width for columns that wrap."""
    bounds = [_least_and_full_width(table, index) for index in indices]
    left = width - sum(least + _GAP for least, _ in bounds)
    widths = [least for least, _ in bounds]
    extra = [full - least for least, full in bounds]
    # Serve the column that needs the least extra width first; what it leaves over goes to the others.
    order = sorted(range(len(extra)), key=extra.__getitem__)
    for remaining, position in zip(range(len(order), 0, -1), order, strict=True):
        more = min(extra[position], left // remaining)
        widths[position] += more
        left -= more
    return widths


def _least_and_full_width(table: Table, index: int) -> tuple[int, int]:
    """The least width of a column that cuts no number and no word of its title, and the width at which nothing wraps."""
    column = table.columns[index]
    title = _title(column).plain
    least = max(map(cell_len, title.split()), default=0)
    full = max(map(cell_len, title.split("\n")), default=0)
    for row in table.entries:
        text = one_line(row[index].text)
        longest = max(map(cell_len, text.split()), default=0)
        least = max(least, cell_len(text) if _is_whole(column, row[index]) else min(longest, _TEXT_WIDTH))
        full = max(full, cell_len(text))
    return least, full

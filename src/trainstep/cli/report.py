"""`trainstep report`: tables of records for a terminal, a paper or a program, or one page to show others."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from trainstep.report.rows import Row

Format = Literal["terminal", "markdown", "latex", "csv", "json", "html"]
_BY_SUFFIX: dict[str, Format] = {
    ".md": "markdown",
    ".tex": "latex",
    ".csv": "csv",
    ".json": "json",
    ".html": "html",
    ".htm": "html",
}


def report(
    paths: Annotated[list[Path], Parameter(consume_multiple=True)],
    /,
    *,
    format: Format | None = None,
    out: Path | None = None,
) -> None:
    """Show records: every cell's times, rates, peak memory and doubts, or how it failed.

    Parameters
    ----------
    paths
        Files of records, or folders: every *.jsonl under them.
    format
        How to write them; by default as --out's name ends, else for the terminal. html is one self-contained page.
    out
        File to write; without one html goes to ./report.html, the rest to standard output.
    """
    from trainstep.report.rows import read_rows

    rows = read_rows(paths)
    chosen = format or _BY_SUFFIX.get(out.suffix.lower() if out else "", "terminal")
    if chosen == "terminal" and out is None:
        from trainstep.report.notes import notes
        from trainstep.report.tables import cell_tables
        from trainstep.report.terminal import print_tables

        print_tables(cell_tables(rows), notes(rows), sys.stdout)
        return
    text = _text(rows, chosen)
    target = out or (Path("report.html") if chosen == "html" else None)
    if target is None:
        sys.stdout.write(text)
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"out: {target} cannot be written: {error.strerror}") from None
    print(target)


def _text(rows: "list[Row]", chosen: Format) -> str:
    """The whole report as text; pandas, Jinja2 and plotly are imported only for the formats that need them."""
    if chosen == "html":
        from trainstep.report.page import page

        return page(rows)
    from trainstep.report.notes import notes
    from trainstep.report.tables import cell_tables

    tables = cell_tables(rows)
    if chosen == "terminal":
        from trainstep.report.terminal import plain

        return plain(tables, notes(rows))
    from trainstep.report import frames

    write: dict[str, Callable[..., str]] = {
        "markdown": frames.markdown,
        "latex": frames.latex,
        "csv": frames.csv,
        "json": frames.json_text,
    }
    return write[chosen](tables)

"""`trainstep report`: tables of records for a terminal, a paper or a program, or one page in HTML."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trainstep.cli.options import EveryColumn

if TYPE_CHECKING:
    from trainstep.report.kit.rows import Row
    from trainstep.report.kit.tables import Table

Format = Literal["terminal", "markdown", "latex", "csv", "json", "html", "tensorboard"]
_BY_SUFFIX: dict[str, Format] = {
    ".md": "markdown",
    ".tex": "latex",
    ".csv": "csv",
    ".json": "json",
    ".html": "html",
    ".htm": "html",
}


def report(
    paths: Annotated[list[Path], Parameter(consume_multiple=True, json_list=False)],
    /,
    *,
    format: Format | None = None,
    out: Path | None = None,
    timeout_s: float | None = None,
    memory_limit_gib: float | None = None,
    every: EveryColumn = False,
) -> None:
    """Show records: the answer, then every cell's times, rates, peak memory and doubts, or its failure; ratios of compared cells.

    Examples:

        trainstep report runs/end_to_end.jsonl

        trainstep report runs/ --format latex --out table.tex

        trainstep report results/h200/warmup.jsonl --format html

        trainstep report runs/ --format tensorboard --out runs/tensorboard    (then: tensorboard --logdir runs/tensorboard)

    Parameters
    ----------
    paths
        Files of records, or folders: every *.jsonl in them.
    format
        Output format; by default that of --out's suffix, else for the terminal. html is one self-contained page. tensorboard
        (pip install 'trainstep[tensorboard]') is a new folder of scalars, one run per cell: steps, rates, memory. In every format,
        text from records is shown literally: control characters as \\x1b, markup without effect; in csv, text that a spreadsheet
        would compute begins with a single quote.
    out
        File to write; by default ./report.html for html, else standard output. An existing file is replaced only if it is empty or
        trainstep wrote it in the same format, which its last line, its head or its columns show.
    timeout_s
        Seconds after which reading the records is stopped, by default 60.
    memory_limit_gib
        Memory in GiB for reading the records, by default 1.86.
    """
    from trainstep.cli.options import read_limits
    from trainstep.cli.streams import tell_reading
    from trainstep.reading import limited_here
    from trainstep.report.kit.rows import read_rows, record_files
    from trainstep.report.tensorboard import check_folder, write_runs

    files = {os.path.realpath(file) for path in paths for file in record_files(path)}
    if out is not None and os.path.realpath(out) in files:
        raise ValueError(f"out: {out} is one of the files of records; give the report another name")
    chosen = format or _format_of(out)
    folder = check_folder(out) if chosen == "tensorboard" else None
    tell_reading([Path(file) for file in files])
    with limited_here(read_limits(timeout_s, memory_limit_gib), ", ".join(map(str, paths))):
        rows = read_rows(paths)
    if folder is not None:
        count = write_runs(rows, folder)
        failed = f"; no scalars for {len(rows) - count} of {len(rows)} cells, which failed" if count < len(rows) else ""
        print(f"{folder}: {count} runs{failed}; to view them: tensorboard --logdir {shlex.quote(str(folder))}")
        return
    if chosen == "terminal" and out is None:
        from trainstep.report.answers import answers
        from trainstep.report.kit.answer import print_answers
        from trainstep.report.kit.notes import notes
        from trainstep.report.kit.terminal import print_tables

        print_answers(answers(rows), sys.stdout)
        print_tables(_tables(rows), notes(rows), sys.stdout, every=every)
        return
    target = out or (Path("report.html") if chosen == "html" else None)
    if target is None:
        sys.stdout.write(_text(rows, chosen, every=every))
        return
    from trainstep.report.kit.output_file import check_output, write_output

    check_output("out", target, chosen)
    write_output("out", target, chosen, _text(rows, chosen, every=every))
    print(target)


def _text(rows: "list[Row]", chosen: Format, *, every: bool) -> str:
    """The whole report as text."""
    # pandas, Jinja2 and plotly are imported only for the formats that need them.
    if chosen == "html":
        from trainstep.report.page import page

        return page(rows)
    from trainstep.report.answers import answers

    if chosen == "terminal":
        from trainstep.report.kit.answer import answer_lines
        from trainstep.report.kit.notes import notes
        from trainstep.report.kit.terminal import plain

        return answer_lines(answers(rows)) + plain(_tables(rows), notes(rows), every=every)
    from trainstep.report.kit import frames

    if chosen == "csv":
        return frames.csv(_tables(rows, compared=False))  # a sheet has one kind of row
    if chosen == "latex":
        return frames.latex(_tables(rows))
    write = frames.markdown if chosen == "markdown" else frames.json_text
    return write(_tables(rows), answers(rows))


def _tables(rows: "list[Row]", *, compared: bool = True) -> "list[Table]":
    from trainstep.report.kit.tables import all_tables
    from trainstep.report.step.comparison import comparison_tables

    return [*all_tables(rows, compared=compared), *(comparison_tables(rows) if compared else [])]


def _format_of(out: Path | None) -> Format:
    """The format of the file's suffix; text for .txt or no suffix."""
    suffix = out.suffix.lower() if out else ""
    if suffix not in ("", ".txt", *_BY_SUFFIX):
        known = ", ".join(_BY_SUFFIX)
        raise ValueError(f"out: {suffix} is not a known format; end the name in {known} or .txt, or give --format")
    return _BY_SUFFIX.get(suffix, "terminal")

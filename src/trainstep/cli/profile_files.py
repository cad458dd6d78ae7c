"""Profiles that come from a file: anyone's trace (`--from`), and the report of nsys, recorded first (`--nsys`)."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from trainstep.cli.reading import show_within
from trainstep.config.cell import Cell
from trainstep.config.parsing import from_plain
from trainstep.config.profile import ProfileConfig
from trainstep.reading import ReadLimits

UNVERIFIED = "unverified: nobody has run this with nsys yet"
_HOW_TO_GET = (
    "nsys comes with the CUDA toolkit, or alone from NVIDIA's pages of Nsight Systems: put its folder on PATH, or run the "
    "commands above where it is and read the export here with --from"
)


def show_trace(
    path: Path, top: int, limits: ReadLimits, *, page: Path | None = None, as_json: bool, every: bool
) -> int:
    """What a trace of torch's profiler or an export of nsys says, and its tables; the page that shows them."""
    # Imported before the limited process begins: what libraries take is not the file's doing.
    from trainstep.report.answer_text import print_answers
    from trainstep.report.answers_profile import trace_answer
    from trainstep.report.frames import json_text
    from trainstep.report.profile_tables import TORCH_COLUMNS, detail_tables
    from trainstep.report.profile_words import sentences
    from trainstep.report.terminal import print_paragraphs, print_tables
    from trainstep.report.trace_record import trace_record
    from trainstep.traces.kineto import read_trace
    from trainstep.traces.nsys import is_report, read_report
    from trainstep.traces.profile import profile_of

    if page is not None:
        from trainstep.report.output_file import check_output, write_output
        from trainstep.report.page import page as make_page
        from trainstep.report.rows import rows_of

        check_output("page", page, "html")

    def show(stream: TextIO) -> str:
        try:
            trace = read_report(path) if is_report(path) else read_trace(path, largest_bytes=limits.file_bytes)
            found = profile_of(trace, kernels_kept=top)
        except ValueError as error:
            raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
        tables = detail_tables(found.tables, whole=as_json)
        record = trace_record(found, path, trace.gpu)
        answers = trace_answer(found.tables, record.fact)
        if as_json:
            stream.write(json_text(tables, answers))
        else:
            print_answers(answers, stream)
            _, *others = sentences(found.tables, record.fact)
            print_paragraphs([*others, ""] if others else [], stream)
            print_tables(tables, [TORCH_COLUMNS], stream, every=every)
        return "" if page is None else make_page(rows_of([(str(path), record)]), title=f"Profile of {path.name}")

    text = show_within(limits, path, show)
    if page is not None:
        write_output("page", page, "html", text)
        print(f"page: {page}", file=sys.stderr if as_json else sys.stdout, flush=True)
    return 0


def check_nsys(cells: Sequence[Cell], page: Path | None) -> None:
    """Refuse what one report of nsys cannot hold."""
    if len(cells) != 1:
        raise ValueError(f"nsys: records one run, not a grid of {len(cells)}; give each option one value")
    config = cells[0].config
    unheeded = {"page": page, "keep_trace": config["keep_trace"], "graph_replay": config["graph_replay"] or None}
    given = next((name for name, value in unheeded.items() if value is not None), None)
    if given is not None:
        raise ValueError(f"{given}: has no effect with --nsys, which keeps a report of its own; leave one of them out")


def profile_with_nsys(
    cell: Cell,
    report: Path,
    *,
    pytorch: str,
    python_backtrace: bool,
    top: int,
    timeout_s: float,
    limits: ReadLimits,
    as_json: bool,
    every: bool,
) -> int | None:
    """Print the command lines, run them and show what was recorded; None, and why in a sentence, where nsys is of no use."""
    from trainstep.measure.nsys import NsysFailed, export_command, record, steps_command

    command = steps_command(
        from_plain(ProfileConfig, cell.config), report, pytorch=pytorch, python_backtrace=python_backtrace
    )
    where = sys.stderr if as_json else sys.stdout
    print(f"nsys ({UNVERIFIED}):", file=where)
    for line in (command, export_command(report)):
        print(f"    {shlex.join(line)}", file=where, flush=True)
    if shutil.which("nsys") is None:
        print(f"nsys is not on PATH, so torch.profiler is used: {_HOW_TO_GET}.", file=where, flush=True)
        return None
    if cell.config["device"] == "cpu":
        print("nsys sees the work of a GPU, and this is a CPU, so torch.profiler is used.", file=where, flush=True)
        return None
    for path in (report, report.with_suffix(".sqlite")):
        if os.path.lexists(path):
            raise ValueError(f"out: {path} is there already, and nsys would write over it; give --out another name")
    try:
        exported = record(command, report, timeout_s=timeout_s)
    except NsysFailed as error:
        print(f"trainstep: {error} ({UNVERIFIED})", file=sys.stderr)
        return 3
    code = show_trace(exported, top, limits, as_json=as_json, every=every)
    print(f"report: {report} (opens in Nsight Systems)\nexport: {exported}", file=where, flush=True)
    return code

"""`trainstep profile`: where the time of a step goes, by kernel and phase, and what limits it.

It profiles steps itself, records them under nsys, or reads a trace from a file.
"""

import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

from cyclopts import Group, Parameter

from trainstep.cli.options import (
    TIMEOUT_S,
    GridOptions,
    check_cells,
    check_file_alone,
    limits,
    read_limits,
    this_machine,
    with_fields,
)
from trainstep.cli.streams import show_within
from trainstep.config.grid import Cell, expand, grid_from_text, groups_along
from trainstep.config.parsing import from_plain
from trainstep.config.profile import ProfileConfig
from trainstep.reading import ReadLimits
from trainstep.records.record import Record
from trainstep.records.store import Store

if TYPE_CHECKING:
    from trainstep.measure.harness.runner import Limits
    from trainstep.records.record import Environment

_TOP = 10
_UNVERIFIED = "unverified: nobody has run this with nsys yet"
_NSYS = Group(f"nsys ({_UNVERIFIED})", sort_key=3)
_NSYS_HELP = "Record under nsys instead, and read its report, a new file that is named after --out (.nsys-rep)."
_PYTORCH_HELP = (
    "nsys's --pytorch. With autograd-nvtx, backward's kernels are assigned to layers and spans, and the host is slower; an older "
    "nsys does not know it."
)
_BACKTRACE_HELP = "nsys's --python-backtrace=cuda: Python's stack at each launch, shown in Nsight Systems."
_HOW_TO_GET_NSYS = (
    "nsys comes with the CUDA toolkit, or alone from NVIDIA's pages of Nsight Systems: put its folder on PATH, or run the "
    "commands above on a machine that has it, and read the export here with --from"
)
_IN_HELP: dict[str, dict[str, list[Any]]] = {
    device: {"keep_trace": ["beside the records; none: keep no trace"]} for device in ("cpu", "cuda")
}
_Pytorch = Literal["none", "autograd-nvtx", "autograd-shapes-nvtx", "functions-trace"]


def _nsys_option(help: str) -> Parameter:
    return Parameter(group=_NSYS, help=help, negative=())


@with_fields(ProfileConfig, _IN_HELP)
def profile(
    *,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
    top: int = _TOP,
    timeout_s: float | None = None,
    memory_limit_gib: float | None = None,
    nsys: Annotated[bool, _nsys_option(_NSYS_HELP)] = False,
    nsys_pytorch: Annotated[_Pytorch | None, _nsys_option(_PYTORCH_HELP)] = None,
    nsys_python_backtrace: Annotated[bool, _nsys_option(_BACKTRACE_HELP)] = False,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Show where the time of a step goes: every kernel by phase, span and class, what the host does, and what limits the step.

    Each cell of the grid is timed as by `bench`, then three more steps run under torch's profiler. Without options: a tiny model
    on a CPU, small at context 256 on a GPU, with plain attention. The trace of one more step is kept beside the records, in a
    folder of the same name: open it at https://ui.perfetto.dev, or read it here with --from.

    Columns: time and calls are per step. On a GPU, time is what torch's table calls Self CUDA (kernels that an op launched itself;
    CUDA total includes those of the ops it calls); on a CPU, Self CPU (an op without the ops it calls; CPU total includes them).
    torch's # of calls counts all profiled steps. lead: from a launch on the host to the kernel's start. blocked: host time in
    synchronisations. queue full: launches that waited for room in the driver's queue.

    Examples:

        trainstep profile --model medium --precision bf16_autocast --compile none,block --top 20

        trainstep profile --model small --keep-trace traces    (another folder for the traces; none: keep no trace)

        trainstep profile --model small --graph-replay    (do the kernels add up to a replay of the step as a CUDA graph?)

        trainstep profile --from trace.json.gz --page report.html    (any trace of torch.profiler; report.sqlite: any nsys export)

        trainstep profile --model small --nsys    (prints nsys's command line; runs it if nsys is installed)

    Parameters
    ----------
    from_
        Read this file instead of running anything: .json or .json.gz of torch's profiler, .sqlite of `nsys export --type sqlite`. A
        trace that marks no steps is split at its optimizer's steps, else by what repeats; else it counts as one step. A note says
        which.
    top
        Kernels shown for each phase; the others are in the row `rest`. A record keeps 20 of each phase.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out, by default 600; with --from the limit for reading, 60.
    memory_limit_gib
        GiB of memory that a CPU cell may use, by default 90 % of the machine's; with --from the reader's, 1.86, which is enough for
        about 600 MB of unpacked JSON.
    """
    if top < 1:
        raise ValueError(f"top: must be a whole number of at least 1, not {top}")
    if not nsys and (nsys_pytorch or nsys_python_backtrace):
        raise ValueError("nsys_pytorch and nsys_python_backtrace: have no effect without --nsys")
    if from_ is not None:
        check_file_alone("a trace", {"nsys": nsys, **fields, **how.given, "page": None})
        reading = read_limits(timeout_s, memory_limit_gib)
        return show_trace(from_, top, reading, page=how.page, as_json=how.json, every=how.every)
    bounds = limits(TIMEOUT_S if timeout_s is None else timeout_s, memory_limit_gib)
    here, cells = profile_cells(fields, memory_limit_gib, forks=not how.dry_run)
    store = how.open_store("profile")
    if nsys:
        check_nsys(cells, how.page)
    if nsys and not how.dry_run:
        report = store.path.with_suffix(".nsys-rep")
        options: dict[str, Any] = {"pytorch": nsys_pytorch or "none", "python_backtrace": nsys_python_backtrace}
        options |= {"top": top, "as_json": how.json, "every": how.every}
        reading = read_limits(timeout_s, memory_limit_gib)
        code = profile_with_nsys(cells[0], report, timeout_s=bounds.timeout_s, limits=reading, **options)
        if code is not None:
            return code
    traces = store.path.with_suffix(".traces") if fields.get("keep_trace") is None else None
    return _run(groups_along(cells, None), store, bounds, how, here, traces=traces, top=top)


def profile_cells(
    fields: Mapping[str, str | None], memory_limit_gib: float | None, *, forks: bool
) -> "tuple[Environment, list[Cell]]":
    """This machine, and the cells to run on it."""
    grid = grid_from_text({name: text for name, text in fields.items() if name != "device"})
    here, device = this_machine(fields.get("device"), forks=forks)
    model = "small" if device == "cuda" else "tiny"
    cells = expand({"workload": ["profile"], "model": [model], **grid}, {"device": device})
    check_cells(cells, memory_limit_gib=memory_limit_gib)
    return here, cells


def _run(
    groups: Sequence[Sequence[Cell]],
    store: Store,
    bounds: "Limits",
    how: GridOptions,
    here: "Environment",
    *,
    traces: Path | None,
    top: int,
) -> int:
    """Run the cells under torch's profiler, then print their verdicts and tables. Returns the exit code."""
    from trainstep.cli.cells import check_kept, check_page, run_cells, show, show_dry_run, unfinished, write_page
    from trainstep.cli.streams import outliving_reader
    from trainstep.report.kit.terminal import print_paragraphs
    from trainstep.report.profile.tables import TORCH_COLUMNS

    check_page(how.page, store.path)
    if how.dry_run:
        return show_dry_run(groups, store, environment=here, options=how, rerun=not how.resume, as_json=how.json)
    check_kept([cell for group in groups for cell in group], "keep_trace")

    def execute(waiting: Sequence[Sequence[Cell]], tell: Callable[[Cell, str], None]) -> Iterator[list[Record]]:
        return _profiled(waiting, bounds, tell, traces)

    records = run_cells(groups, store, execute, environment=here, options=how, rerun=not how.resume)
    ran = [record for record in records if record.failure is None]
    code = show(_with_top(records, top), store, None, as_json=how.json, every=how.every, paragraphs=_sentences(ran))
    if how.page is not None:
        write_page(records, store, how.page)
    with outliving_reader(sys.stdout):
        if ran and not how.json:
            print_paragraphs([TORCH_COLUMNS], sys.stdout)
        if how.page is not None:
            print(f"page: {how.page}", file=sys.stderr if how.json else sys.stdout, flush=True)
    return unfinished(groups, records, store, how) or code


def _profiled(
    groups: Sequence[Sequence[Cell]], bounds: "Limits", tell: Callable[[Cell, str], None], traces: Path | None
) -> Iterator[list[Record]]:
    """Run the cells, with their traces in the folder `traces`."""
    from trainstep.measure.harness.local import run_groups

    if traces is None:
        yield from run_groups(groups, bounds, tell)
        return
    keep_trace = {"keep_trace": str(traces)}
    keeping = [[dataclasses.replace(cell, config={**cell.config, **keep_trace}) for cell in group] for group in groups]
    for [cell], [record] in zip(groups, run_groups(keeping, bounds, tell), strict=False):
        # The record gets the key and config of the cell: it is the same cell wherever its trace is kept.
        yield [dataclasses.replace(record, key=cell.key, config=cell.config)]


def _with_top(records: Sequence[Record], top: int) -> list[Record]:
    """The records with only the longest kernels of each phase."""
    from trainstep.traces.tables import top_kernels

    return [
        dataclasses.replace(record, tables={**record.tables, "kernels": top_kernels(record.tables["kernels"], top)})
        if "kernels" in record.tables
        else record
        for record in records
    ]


def _sentences(records: Sequence[Record]) -> list[str]:
    """The reasons of each cell's verdict, which stand between the answer and the tables."""
    from trainstep.report.kit.rows import rows_of
    from trainstep.report.profile.answer import sentences

    paragraphs = []
    for row in rows_of([("", record) for record in records]):
        verdict, *others = sentences(row.record.tables, row.record.fact)
        paragraphs += [f"{row.label()}: {verdict}", *others] if len(records) > 1 else others
    return paragraphs


def show_trace(
    path: Path, top: int, limits: ReadLimits, *, page: Path | None = None, as_json: bool, every: bool
) -> int:
    """Print the answer and tables of a trace (torch's profiler, or an export of nsys), and write its page. The exit code is 0."""
    # Imported before the limited process begins, so that the memory of these libraries does not count as the file's.
    from trainstep.report.kit.answer import print_answers
    from trainstep.report.kit.frames import json_text
    from trainstep.report.kit.terminal import print_paragraphs, print_tables
    from trainstep.report.profile.answer import sentences, trace_answer
    from trainstep.report.profile.tables import TORCH_COLUMNS, detail_tables, trace_record
    from trainstep.traces.profile import profile_of
    from trainstep.traces.trace_file import read_trace_file

    if page is not None:
        from trainstep.report.kit.output_file import check_output, write_output
        from trainstep.report.kit.rows import rows_of
        from trainstep.report.page import page as make_page

        check_output("page", page, "html")

    def show(stream: TextIO) -> str:
        profiled, gpu = read_trace_file(
            path, limits.file_bytes, lambda trace: (profile_of(trace, kernels_kept=top), trace.gpu)
        )
        tables = detail_tables(profiled.tables, whole=as_json)
        record = trace_record(profiled, path, gpu)
        answers = trace_answer(profiled.tables, record.fact)
        if as_json:
            stream.write(json_text(tables, answers))
        else:
            print_answers(answers, stream)
            _, *others = sentences(profiled.tables, record.fact)
            print_paragraphs([*others, ""] if others else [], stream)
            print_tables(tables, [TORCH_COLUMNS], stream, every=every)
        return "" if page is None else make_page(rows_of([(str(path), record)]), title=f"Profile of {path.name}")

    text = show_within(limits, path, show)
    if page is not None:
        write_output("page", page, "html", text)
        print(f"page: {page}", file=sys.stderr if as_json else sys.stdout, flush=True)
    return 0


def check_nsys(cells: Sequence[Cell], page: Path | None) -> None:
    """ValueError for a grid, and for options that have no effect with --nsys."""
    if len(cells) != 1:
        raise ValueError(f"nsys: records one run, not a grid of {len(cells)}; give each option one value")
    config = cells[0].config
    ineffective = {"page": page, "keep_trace": config["keep_trace"], "graph_replay": config["graph_replay"] or None}
    name = next((name for name, value in ineffective.items() if value is not None), None)
    if name is not None:
        raise ValueError(f"{name}: has no effect with --nsys, which keeps its own report; leave one of them out")


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
    """Print nsys's command lines, run them and show the recorded profile.

    Returns the exit code; or None, after a sentence that says why, if torch.profiler must be used instead.
    """
    from trainstep.measure.step.nsys import NsysFailed, export_command, record, steps_command

    command = steps_command(
        from_plain(ProfileConfig, cell.config), report, pytorch=pytorch, python_backtrace=python_backtrace
    )
    stream = sys.stderr if as_json else sys.stdout
    print(f"nsys ({_UNVERIFIED}):", file=stream)
    for line in (command, export_command(report)):
        print(f"    {shlex.join(line)}", file=stream, flush=True)
    if shutil.which("nsys") is None:
        print(f"nsys is not on PATH, so torch.profiler is used: {_HOW_TO_GET_NSYS}.", file=stream, flush=True)
        return None
    if cell.config["device"] == "cpu":
        print("nsys records the work of a GPU, and this is a CPU, so torch.profiler is used.", file=stream, flush=True)
        return None
    for path in (report, report.with_suffix(".sqlite")):
        if os.path.lexists(path):
            raise ValueError(f"out: {path} exists already, and nsys would overwrite it; give --out another name")
    try:
        exported = record(command, report, timeout_s=timeout_s)
    except NsysFailed as error:
        print(f"trainstep: {error} ({_UNVERIFIED})", file=sys.stderr)
        return 3
    code = show_trace(exported, top, limits, as_json=as_json, every=every)
    print(f"report: {report} (opens in Nsight Systems)\nexport: {exported}", file=stream, flush=True)
    return code

"""`trainstep profile`: where the time of a step goes, kernel by kernel and phase by phase, and what limits it."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from trainstep.cli.options import TIMEOUT_S, check_cells, check_file_alone, limits, this_machine, with_fields
from trainstep.cli.profile_files import check_nsys, profile_with_nsys, show_trace
from trainstep.cli.reading import read_limits
from trainstep.cli.run_options import GridOptions
from trainstep.config.cell import Cell
from trainstep.config.grid import expand, grid_from_text, groups_along
from trainstep.config.profile import ProfileConfig
from trainstep.records.record import Record
from trainstep.records.store import Store

if TYPE_CHECKING:
    from trainstep.measure.runner import Limits
    from trainstep.records.record import Environment

_TOP = 10
_NSYS = Group("nsys (unverified: nobody has run this with nsys yet)", sort_key=3)
_PYTORCH_HELP = (
    "Its --pytorch. With autograd-nvtx backward's kernels find their layer and span, and the host is slower; an older nsys does "
    "not know it."
)
_BACKTRACE_HELP = "Its --python-backtrace=cuda: Python's stack at each launch, seen in Nsight Systems."
_IN_HELP: dict[str, dict[str, list[Any]]] = {
    device: {"keep_trace": ["beside the records; none: nowhere"]} for device in ("cpu", "cuda")
}
_Pytorch = Literal["none", "autograd-nvtx", "autograd-shapes-nvtx", "functions-trace"]


def _of_nsys(help: str) -> Parameter:
    return Parameter(group=_NSYS, help=help, negative=())


@with_fields(ProfileConfig, _IN_HELP)
def profile(
    *,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
    top: int = _TOP,
    out: Path | None = None,
    page: Path | None = None,
    timeout_s: float | None = None,
    memory_limit_gib: float | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    nsys: Annotated[bool, _of_nsys("Record under nsys instead, and read its report.")] = False,
    nsys_pytorch: Annotated[_Pytorch | None, _of_nsys(_PYTORCH_HELP)] = None,
    nsys_python_backtrace: Annotated[bool, _of_nsys(_BACKTRACE_HELP)] = False,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Say where the time of a step goes: every kernel by phase, span and class, what the host does, and what limits the step.

    Each cell of the grid is timed as `bench` does, then three more steps run under torch's profiler. Without options: a tiny
    model on a CPU, small at context 256 on a GPU, with its attention written out. The trace of one step more is kept beside the
    records, in a folder of their name: open it at https://ui.perfetto.dev, or read it here with --from.

    Columns: time is a step's, so calls are too. On a GPU time is what torch's own table calls Self CUDA (kernels that an op
    launched itself; CUDA total: with those of ops it calls), on a CPU Self CPU (an op without the ops it calls; CPU total:
    with them); its # of calls counts all profiled steps. lead: from a launch on the host to the kernel's start. blocked: host
    time in synchronisations. queue full: launches that waited for room in the driver's queue.

    Examples:

        trainstep profile --model medium --precision bf16_autocast --compile none,block --top 20

        trainstep profile --model small --keep-trace traces    (another folder for the traces; none: keep no trace)

        trainstep profile --model small --graph-replay    (do the kernels add up to a replay of the step as a CUDA graph?)

        trainstep profile --from trace.json.gz --page report.html    (of anyone's torch.profiler; report.sqlite: of anyone's nsys)

        trainstep profile --model small --nsys    (prints nsys's command line; runs it where nsys is)

    Parameters
    ----------
    from_
        Read this instead of running anything: .json or .json.gz of torch's profiler, .sqlite of `nsys export --type sqlite`. Where
        no step is marked, it is split at its optimizer's steps, else by what repeats; else it counts as one step, and says so.
    top
        Kernels shown for each phase; the others stand in its row `rest`. A record keeps 20 of each phase.
    out
        File of records to append to; by default a new one under ./runs/. nsys's report, a new file, is named after it (.nsys-rep).
    page
        Also write the page here, over an earlier page of trainstep's but over no other file.
    timeout_s
        Seconds until a cell is killed and recorded as a time-out, by default 600; with --from until reading is given up, 60.
    memory_limit_gib
        Memory a CPU cell may take, by default 90 % of the machine's; with --from reading, 1.86: some 600 MB of unpacked JSON.
    json
        Print JSON: `answer`, and the tables as `rows` with plain numbers, units in the names.
    """
    if top < 1:
        raise ValueError(f"top: must be a whole number of at least 1, not {top}")
    if not nsys and (nsys_pytorch or nsys_python_backtrace):
        raise ValueError("nsys_pytorch and nsys_python_backtrace: have no effect without --nsys")
    if from_ is not None:
        check_file_alone("a trace", {"out": out, "nsys": nsys, **fields, **how.given})
        reading = read_limits(timeout_s, memory_limit_gib)
        return show_trace(from_, top, reading, page=page, as_json=json, every=how.every)
    bounds = limits(TIMEOUT_S if timeout_s is None else timeout_s, memory_limit_gib)
    here, cells = _cells(fields, memory_limit_gib, forks=not how.dry_run)
    store = how.store(out, "profile")
    if nsys:
        check_nsys(cells, page)
    if nsys and not how.dry_run:
        report = store.path.with_suffix(".nsys-rep")
        options: dict[str, Any] = {"pytorch": nsys_pytorch or "none", "python_backtrace": nsys_python_backtrace}
        options |= {"top": top, "as_json": json, "every": how.every}
        reading = read_limits(timeout_s, memory_limit_gib)
        code = profile_with_nsys(cells[0], report, timeout_s=bounds.timeout_s, limits=reading, **options)
        if code is not None:
            return code
    traces = store.path.with_suffix(".traces") if fields.get("keep_trace") is None else None
    return _run(groups_along(cells, None), store, bounds, how, here, traces=traces, top=top, page=page, as_json=json)


def _cells(
    fields: Mapping[str, str | None], memory_limit_gib: float | None, *, forks: bool
) -> "tuple[Environment, list[Cell]]":
    """Where we are, and what to run there."""
    grid = grid_from_text({name: text for name, text in fields.items() if name != "device"})
    here, device = this_machine(fields.get("device"), forks=forks)
    small = "small" if device == "cuda" else "tiny"
    cells = expand({"workload": ["profile"], "model": [small], **grid}, {"device": device})
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
    page: Path | None,
    as_json: bool,
) -> int:
    """Run the cells under torch's profiler; what they say, then their tables."""
    from trainstep.cli.cells import check_kept, check_page, run_cells, show, unfinished, write_page
    from trainstep.cli.dry_run import show_cells
    from trainstep.cli.streams import outliving_reader
    from trainstep.report.profile_tables import TORCH_COLUMNS
    from trainstep.report.terminal import print_paragraphs

    check_page(page, store.path)
    if how.dry_run:
        return show_cells(groups, store, here=here, anew=not how.resume, as_json=as_json)
    check_kept([cell for group in groups for cell in group], "keep_trace")

    def execute(waiting: Sequence[Sequence[Cell]], tell: Callable[[Cell, str], None]) -> Iterator[list[Record]]:
        return _profiled(waiting, bounds, tell, traces)

    records = run_cells(groups, store, execute, here=here, how=how, anew=not how.resume)
    ran = [record for record in records if record.failure is None]
    code = show(_with_top(records, top), store, None, as_json=as_json, every=how.every, paragraphs=_sentences(ran))
    if page is not None:
        write_page(records, store, page)
    with outliving_reader(sys.stdout):
        if ran and not as_json:
            print_paragraphs([TORCH_COLUMNS], sys.stdout)
        if page is not None:
            print(f"page: {page}", file=sys.stderr if as_json else sys.stdout, flush=True)
    return unfinished(groups, records, store, how) or code


def _profiled(
    groups: Sequence[Sequence[Cell]], bounds: "Limits", tell: Callable[[Cell, str], None], traces: Path | None
) -> Iterator[list[Record]]:
    """Records of the cells, the trace of each in that folder. A cell is the same wherever its trace goes: its key must not tell."""
    from trainstep.measure.executor_local import run_groups

    if traces is None:
        yield from run_groups(groups, bounds, tell)
        return
    kept = {"keep_trace": str(traces)}
    keeping = [[dataclasses.replace(cell, config={**cell.config, **kept}) for cell in group] for group in groups]
    for [cell], [record] in zip(groups, run_groups(keeping, bounds, tell), strict=False):
        yield [dataclasses.replace(record, key=cell.key, config=cell.config)]


def _with_top(records: Sequence[Record], top: int) -> list[Record]:
    """The records with fewer kernels, for showing."""
    from trainstep.traces.tables import top_kernels

    return [
        dataclasses.replace(record, tables={**record.tables, "kernels": top_kernels(record.tables["kernels"], top)})
        if "kernels" in record.tables
        else record
        for record in records
    ]


def _sentences(records: Sequence[Record]) -> list[str]:
    """What stands between the answer and the tables: why each cell's verdict is what it is."""
    from trainstep.report.profile_words import sentences
    from trainstep.report.rows import rows_of

    said = []
    for row in rows_of([("", record) for record in records]):
        verdict, *others = sentences(row.record.tables, row.record.fact)
        said += [f"{row.label()}: {verdict}", *others] if len(records) > 1 else others
    return said

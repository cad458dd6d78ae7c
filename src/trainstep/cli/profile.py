"""`trainstep profile`: where the time of a step goes, kernel by kernel and phase by phase, and what limits it."""

import dataclasses
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trainstep.cli.options import check_data, limits, this_machine, with_profile_fields
from trainstep.config.grid import expand, grid_from_text, groups_along
from trainstep.records.record import Record
from trainstep.records.store import Store

_TOP = 10


@with_profile_fields
def profile(
    *,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
    top: int = _TOP,
    out: Path | None = None,
    page: Path | None = None,
    timeout_s: float = 600.0,
    memory_limit_gib: float | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    **fields: str | None,
) -> int:
    """Say where the time of a step goes: every kernel by phase, span and class, what the host does, and what limits the step.

    Each cell of the grid is timed as `bench` does, then three more steps run under torch's profiler. Without options: a tiny
    model on a CPU, small at context 256 on a GPU, with its attention written out.

    Columns: time is a step's, so calls are too. On a GPU time is what torch's own table calls Self CUDA (kernels that an op
    launched itself; CUDA total: with those of ops it calls), on a CPU Self CPU (an op without the ops it calls; CPU total:
    with them); its # of calls counts all profiled steps. lead: from a launch on the host to the kernel's start. blocked: host
    time in synchronisations. queue full: launches that waited for room in the driver's queue.

    Examples:

        trainstep profile --model small --mode forward_no_grad,forward_backward,step

        trainstep profile --model medium --precision bf16_autocast --compile none,block --top 20

        trainstep profile --model small --keep-trace traces    (one step; open the file at ui.perfetto.dev)

        trainstep profile --from trace.json.gz    (of anyone's torch.profiler: export_chrome_trace)

    Parameters
    ----------
    from_
        Read this trace instead of running anything: .json or .json.gz as torch's profiler exports it.
    top
        Kernels shown for each phase; the others stand in its row `rest`. A record keeps 20 of each phase.
    out
        File of records to append to; by default a new one under ./runs/.
    page
        Also write the page here.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out.
    memory_limit_gib
        Memory a CPU cell may take; by default 90 % of the machine's.
    json
        Print the tables as JSON: plain numbers, units in the names.
    """
    if top < 1:
        raise ValueError(f"top: must be a whole number of at least 1, not {top}")
    if from_ is not None:
        return _show_trace(from_, top, fields, out or page, as_json=json)
    grid = grid_from_text({name: text for name, text in fields.items() if name != "device"})
    check_data(grid)
    bounds = limits(timeout_s, memory_limit_gib)
    here, device = this_machine(fields.get("device"))
    small = "small" if device == "cuda" else "tiny"
    grid = {"workload": ["profile"], "model": [small], **grid}
    groups = groups_along(expand(grid, {"device": device}), None)

    from trainstep.cli.cells import check_page, run_cells, show, write_page
    from trainstep.measure.executor_local import run_groups

    store = Store(out or Path("runs") / f"profile-{datetime.now():%Y%m%d-%H%M%S}.jsonl")
    check_page(page, store.path)
    records = run_cells(groups, store, lambda waiting, tell: run_groups(waiting, bounds, tell), here=here, anew=True)
    code = show(_with_top(records, top), store, None, as_json=json)
    if not json:
        _print_sentences(records)
    if page is not None:
        write_page(records, store, page)
        print(f"page: {page}", file=sys.stderr if json else sys.stdout)
    return code


def _show_trace(path: Path, top: int, fields: dict[str, str | None], files: Path | None, *, as_json: bool) -> int:
    """The tables of a trace, and what they say."""
    given = next((name for name, value in fields.items() if value is not None), None)
    if given is not None or files is not None:
        named = given or "out and page"
        raise ValueError(f"from: a trace is read, nothing runs: {named} would have no effect; leave it out")
    from trainstep.report.frames import json_text
    from trainstep.report.profile_columns import TORCH_COLUMNS
    from trainstep.report.profile_tables import detail_tables
    from trainstep.report.terminal import print_tables
    from trainstep.traces.kineto import read_trace
    from trainstep.traces.profile import profile_of

    try:
        found = profile_of(read_trace(path), kernels_kept=top)
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    tables = detail_tables({name: columns for name, columns in found.tables.items() if as_json or name != "layers"})
    if as_json:
        sys.stdout.write(json_text(tables))
        return 0
    verdict = found.verdict
    words = [f"{verdict.kind.capitalize()}: {verdict.reason}", verdict.alike, found.stall, TORCH_COLUMNS]
    print_tables(tables, [word for word in words if word], sys.stdout)
    return 0


def _with_top(records: Sequence[Record], top: int) -> list[Record]:
    """The records with fewer kernels, for showing."""
    from trainstep.traces.tables import top_kernels

    return [
        dataclasses.replace(record, tables={**record.tables, "kernels": top_kernels(record.tables["kernels"], top)})
        if "kernels" in record.tables
        else record
        for record in records
    ]


def _print_sentences(records: Sequence[Record]) -> None:
    from trainstep.report.profile_columns import TORCH_COLUMNS
    from trainstep.report.profile_tables import sentences
    from trainstep.report.rows import rows_of
    from trainstep.report.terminal import printable

    rows = [row for row in rows_of([("", record) for record in records]) if row.record.failure is None]
    for row in rows:
        said = " ".join(sentences(row.record.fact))
        print(printable(f"{row.label()}: {said}" if len(rows) > 1 else said))
    print(TORCH_COLUMNS)

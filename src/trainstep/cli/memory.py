"""`trainstep memory`: where the memory of a step goes, when it peaks, and the largest batch or context that fits."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from cyclopts import Parameter

from trainstep.cli.cells import check_kept, check_page, interrupt_says, measure_grid, show, show_dry_run
from trainstep.cli.options import (
    TIMEOUT_S,
    GridOptions,
    check_cells,
    check_file_alone,
    check_gpus,
    check_nodes,
    check_sync_options,
    limits,
    read_limits,
    this_machine,
    with_fields,
    with_nodes,
)
from trainstep.cli.streams import outliving_reader, show_within
from trainstep.config.grid import Cell, expand, grid_from_text, groups_along
from trainstep.config.memory import LARGEST_TRIED, MemoryConfig
from trainstep.config.parallel import USED_BY, SyncConfig
from trainstep.costs.strategies import BASELINE
from trainstep.measure.harness.local import run_groups
from trainstep.measure.harness.runner import Limits, at, largest_fit, with_facts
from trainstep.reading import ReadLimits
from trainstep.records.record import Environment, Record
from trainstep.records.store import Store
from trainstep.report.kit.visible import one_line

_MIN_SHARE = 0.005


@with_fields(MemoryConfig)
def memory(
    *,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
    fit: Literal["batch_size", "context"] | None = None,
    timeout_s: float | None = None,
    memory_limit_gib: float | None = None,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Record one step's allocations: peaks by phase, a ledger by category, the largest allocations with their stacks.

    The ledger has every byte in a category (parameters, gradients, optimizer state, activations by layer, logits and loss,
    temporaries, workspaces...) and says what remains unexplained between tensors, allocator and driver. Each cell runs in its own
    process, with --ranks one per rank (NCCL between GPUs, gloo on a CPU) under the parallel strategy --sync. Each rank has its
    ledger, timeline and snapshot, beside the ledger by formula, and the page shows the fullest rank.
    Without options: a tiny model on a CPU, small at context 256 on a GPU; with several ranks: bucketed.

    Examples:

        trainstep memory --model 2.7B --context 128,256,512 --mode forward_no_grad,step --precision fp32,bf16_autocast

        trainstep memory --model medium --recompute none,selective,block --page report.html

        trainstep memory --model large --fit batch_size

        trainstep memory --model small --keep-snapshot runs/snapshots

        trainstep memory --model xl --ranks 2 --sync bucketed,sharded_flat,fsdp --precision bf16_autocast --page report.html

        trainstep memory --device cpu --ranks 2 --sync fsdp --reshard-after-forward true,false --keep-snapshot runs/snapshots

        trainstep memory --from snapshot.pickle.gz

    A kept snapshot (one per rank: ...rank0.pickle) can be dragged to pytorch.org/memory_viz, or read here with --from; so can any
    other snapshot.

    Parameters
    ----------
    from_
        Read a snapshot of torch.cuda.memory (pickle or .gz) instead of running anything; nothing in the file is executed.
    fit
        Find the largest batch_size or context that fits, by trials in fresh processes: doubling, then halving the gap. It stops at
        a batch of 4,096 or a context of 131,072 and says 'at least'; to search further, start there: --fit batch_size --batch-size
        8192.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out, by default 600; with --from the limit for reading, 60.
    memory_limit_gib
        GiB of memory that a CPU cell may use, all its ranks together, by default 90 % of the machine's; with --from the reader's,
        1.86.
    """
    if from_ is not None:
        check_file_alone("a snapshot", {"fit": fit, **fields, **how.given, "min_share": None})
        reading = read_limits(timeout_s, memory_limit_gib)
        return _show_snapshot(from_, fields.get("min_share"), reading, as_json=how.json, every=how.every)
    bounds = limits(TIMEOUT_S if timeout_s is None else timeout_s, memory_limit_gib, nodes=how.nodes)
    here, cells = _cells(fields, memory_limit_gib, how)
    groups = groups_along(cells, None)
    if fit is None:
        return measure_grid(groups, "memory", bounds, how, here, kept_files="keep_snapshot")
    store = how.open_store("memory")
    check_page(how.page, store.path)
    if how.budget_minutes is not None:
        raise ValueError("budget_minutes: a search with --fit has no result before its end; leave one of them out")
    if how.dry_run:
        note = f"--fit begins at each of these; how many values of {fit} it tries is not known."
        return show_dry_run(
            groups, store, environment=here, options=how, rerun=not how.resume, as_json=how.json, note=note
        )
    check_kept(cells, "keep_snapshot", how.nodes)
    return _fit_cells(cells, fit, store, bounds, how)


def _cells(
    fields: Mapping[str, str | None], memory_limit_gib: float | None, how: GridOptions
) -> tuple[Environment, list[Cell]]:
    """This machine, and the cells to run on it."""
    grid = grid_from_text({name: text for name, text in fields.items() if name != "device"})
    here, device = this_machine(fields.get("device"), forks=not how.dry_run)
    if grid.get("ranks", [1]) != [1]:
        grid = with_nodes(grid, device, here, how.nodes)
    grid = _with_strategies({"workload": ["memory"], "model": ["small" if device == "cuda" else "tiny"], **grid})
    check_gpus(grid.get("ranks", ()), device, here, verb="memory", nodes=grid.get("nodes", [1]))
    cells = expand(grid, {"device": device})
    check_cells(cells, memory_limit_gib=memory_limit_gib)
    check_nodes(cells, how, here)
    return here, cells


def _with_strategies(grid: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The grid, with a parallel strategy if there are several ranks. ValueError for a strategy or option without effect."""
    if all(ranks == 1 for ranks in grid.get("ranks", [1])):
        if option := next(
            (name for name in ("sync", *USED_BY) if grid.get(name, [None]) not in ([None], [BASELINE])), None
        ):
            raise ValueError(f"{option}: has no effect on one rank; add --ranks 2 or more")
        return dict(grid)
    strategies = grid.get("sync", [SyncConfig.name])
    check_sync_options(grid, strategies)
    return {**grid, "sync": strategies}


def _show_snapshot(path: Path, min_share: str | None, limits: ReadLimits, *, as_json: bool, every: bool) -> int:
    """Print the tables of a snapshot in a file."""
    # Imported before the limited process begins, so that the memory of these libraries does not count as the file's.
    from trainstep.report.kit.answer import print_answers
    from trainstep.report.kit.frames import json_text
    from trainstep.report.kit.terminal import print_tables
    from trainstep.report.memory.snapshot import snapshot_answer, snapshot_notes, snapshot_tables
    from trainstep.traces.memory_timeline import MemoryTimeline
    from trainstep.traces.snapshot import read_snapshot

    try:
        share = _MIN_SHARE if min_share is None else float(min_share)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"min_share: must be a share from 0 to 1, not {min_share!r}")

    def show_tables(stream: TextIO) -> None:
        timeline = MemoryTimeline(read_snapshot(path, limits))
        tables = snapshot_tables(timeline, min_share=share)
        if as_json:
            stream.write(json_text(tables, [snapshot_answer(timeline)]))
        else:
            print_answers([snapshot_answer(timeline)], stream)
            print_tables(tables, snapshot_notes(timeline), stream, every=every)

    show_within(limits, path, show_tables)
    return 0


def _fit_cells(cells: Sequence[Cell], field: str, store: Store, bounds: Limits, how: GridOptions) -> int:
    """Search for the largest value of the field that fits, starting from each cell, and show the trials. Returns the exit code.

    Every trial is a record on disk before the next trial begins.
    """
    command = shlex.join(["trainstep", *sys.argv[1:]])

    def tell(line: str) -> None:
        if not how.quiet:
            with outliving_reader(sys.stderr):
                print(one_line(line), file=sys.stderr, flush=True)

    def run(cell: Cell) -> Record:
        [record] = next(run_groups([[cell]], bounds, lambda _cell, _stage: None))
        record = with_facts(
            record,
            command=command,
            defaults_from=how.defaults_from,
            fit_of=field,
            memory_limit_bytes=bounds.memory_for(cell),
        )
        store.append(record)
        tell(f"{cell.label}: {'fits' if record.failure is None else record.failure.message}")
        return record

    starts = {at(cell, field, 1).key: cell for cell in cells}  # cells that differ in the field alone are one search
    records: list[Record] = []
    tell(
        f"searching for the largest {field} that fits, up to {LARGEST_TRIED[field]:,}: each trial is reported at its end"
    )
    with store.locked(), interrupt_says(lambda: _kept_words(len(records), store)):
        for cell in starts.values():
            for record in largest_fit(cell, field, run):
                records.append(record)  # not extend: an interrupt counts the trials so far
    return show(records, store, how.page, as_json=how.json, every=how.every)


def _kept_words(count: int, store: Store) -> str:
    if not count:
        return "no trial was finished"
    return f"{count} trial{'s are' if count > 1 else ' is'} finished and kept in {store.path}"

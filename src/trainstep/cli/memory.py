"""`trainstep memory`: where the memory of a step goes, what peaks when, and what is the largest that fits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

from cyclopts import Parameter

from trainstep.cli.options import TIMEOUT_S, check_cells, check_file_alone, limits, this_machine, with_fields
from trainstep.cli.rank_options import check_gpus, check_sync_options
from trainstep.cli.reading import read_limits, show_within
from trainstep.cli.run_options import GridOptions
from trainstep.config.cell import Cell
from trainstep.config.grid import expand, grid_from_text, groups_along
from trainstep.config.memory import MemoryConfig
from trainstep.config.sync import USED_BY, SyncConfig
from trainstep.costs.strategies import YARDSTICK
from trainstep.reading import ReadLimits
from trainstep.records.record import Environment
from trainstep.records.store import Store

if TYPE_CHECKING:
    from trainstep.measure.runner import Limits

_MIN_SHARE = 0.005


@with_fields(MemoryConfig)
def memory(
    *,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
    fit: Literal["batch_size", "context"] | None = None,
    out: Path | None = None,
    page: Path | None = None,
    timeout_s: float | None = None,
    memory_limit_gib: float | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Record one step's allocations: peaks by phase, who holds what and when, the largest allocations with their stacks.

    The ledger has every byte in a category (parameters, gradients, optimizer state, activations by layer, logits and loss,
    temporaries, workspaces...) and says what is left unexplained between tensors, allocator and driver. Each cell runs in a
    process of its own; with --ranks in one a rank (NCCL between GPUs, gloo on a CPU), kept together as --sync says: each rank
    has its ledger, timeline and snapshot, beside what it should hold by formula, and the page shows the fullest rank.
    Without options: a tiny model on a CPU, small at context 256 on a GPU; with several ranks: bucketed.

    Examples:

        trainstep memory --model 2.7B --context 128,256,512 --mode forward_no_grad,step --precision fp32,bf16_autocast

        trainstep memory --model medium --recompute none,block --page report.html

        trainstep memory --model large --fit batch_size

        trainstep memory --model small --keep-snapshot runs/snapshots

        trainstep memory --model xl --ranks 2 --sync bucketed,sharded_flat,fsdp --precision bf16_autocast --page report.html

        trainstep memory --device cpu --ranks 2 --sync fsdp --reshard-after-forward true,false --keep-snapshot runs/snapshots

        trainstep memory --from snapshot.pickle.gz

    A kept snapshot (one a rank: ...rank0.pickle) can be dragged to pytorch.org/memory_viz, or read here with --from; so can
    anyone's own.

    Parameters
    ----------
    from_
        Read a snapshot of torch.cuda.memory (pickle or .gz) instead of running anything; nothing in the file is run.
    fit
        Find the largest batch_size or context that fits, by trials in fresh processes: doubling, then halving the gap. It stops at
        a batch of 4,096 or a context of 131,072 and says 'at least'; to go on, begin there: --fit batch_size --batch-size 8192.
    out
        File of records to append to; by default a new one under ./runs/.
    page
        Also write the page here, over an earlier page of trainstep's but over no other file.
    timeout_s
        Seconds until a cell is killed and recorded as a time-out, by default 600; with --from until reading is given up, 60.
    memory_limit_gib
        GiB that a CPU cell may take, all its ranks together, by default 90 % of the machine's; with --from the reader, 1.86.
    json
        Print JSON: `answer`, and the tables as `rows` with plain numbers, units in the names.
    """
    if from_ is not None:
        check_file_alone("a snapshot", {"fit": fit, "out": out, "page": page, **fields, **how.given, "min_share": None})
        reading = read_limits(timeout_s, memory_limit_gib)
        return _show_snapshot(from_, fields.get("min_share"), reading, as_json=json, every=how.every)
    bounds = limits(TIMEOUT_S if timeout_s is None else timeout_s, memory_limit_gib)
    here, cells = _cells(fields, memory_limit_gib, forks=not how.dry_run)
    return _run(cells, fit, how.store(out, "memory"), bounds, how, here, page=page, as_json=json)


def _run(
    cells: Sequence[Cell],
    fit: Literal["batch_size", "context"] | None,
    store: Store,
    bounds: "Limits",
    how: GridOptions,
    here: Environment,
    *,
    page: Path | None,
    as_json: bool,
) -> int:
    """Run the cells, or the trials from each of them, and show their tables. Returns the exit code."""
    from trainstep.cli.cells import check_kept, check_page, run_here, show, unfinished
    from trainstep.cli.dry_run import show_cells

    check_page(page, store.path)
    groups = groups_along(cells, None)
    if fit is not None and how.budget_minutes is not None:
        raise ValueError("budget_minutes: a search with --fit says nothing before its end; leave one of them out")
    if how.dry_run:
        note = f"--fit begins at each of these; how many values of {fit} it tries is not known." if fit else ""
        return show_cells(groups, store, here=here, anew=not how.resume, as_json=as_json, note=note)
    check_kept(cells, "keep_snapshot")
    if fit is not None:
        from trainstep.cli.memory_fit import fit_cells

        return fit_cells(cells, fit, store, bounds, how, page=page, as_json=as_json)
    records = run_here(groups, store, bounds, how, here=here)
    code = show(records, store, page, as_json=as_json, every=how.every)
    return unfinished(groups, records, store, how) or code


def _cells(
    fields: Mapping[str, str | None], memory_limit_gib: float | None, *, forks: bool
) -> tuple[Environment, list[Cell]]:
    """Where we are, and what to run there."""
    grid = grid_from_text({name: text for name, text in fields.items() if name != "device"})
    here, device = this_machine(fields.get("device"), forks=forks)
    grid = _with_strategies({"workload": ["memory"], "model": ["small" if device == "cuda" else "tiny"], **grid})
    check_gpus(grid.get("ranks", ()), device, here, verb="memory")
    cells = expand(grid, {"device": device})
    check_cells(cells, memory_limit_gib=memory_limit_gib)
    return here, cells


def _with_strategies(grid: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The grid with a parallel strategy where there are several ranks; ValueError for one, or an option, without effect."""
    if all(ranks == 1 for ranks in grid.get("ranks", [1])):
        if given := next(
            (name for name in ("sync", *USED_BY) if grid.get(name, [None]) not in ([None], [YARDSTICK])), None
        ):
            raise ValueError(f"{given}: has no effect on one rank; add --ranks 2 or more")
        return dict(grid)
    ways = grid.get("sync", [SyncConfig.name])
    check_sync_options(grid, ways)
    return {**grid, "sync": ways}


def _show_snapshot(path: Path, min_share: str | None, limits: ReadLimits, *, as_json: bool, every: bool) -> int:
    """The tables of a snapshot that anyone recorded."""
    # Imported before the limited process begins: what libraries take is not the file's doing.
    from trainstep.report.answer_text import print_answers
    from trainstep.report.frames import json_text
    from trainstep.report.snapshot_tables import snapshot_answer, snapshot_notes, snapshot_tables
    from trainstep.report.terminal import print_tables
    from trainstep.traces.memory_timeline import MemoryTimeline
    from trainstep.traces.snapshot import read_snapshot

    least_share = _share(min_share)

    def show(stream: TextIO) -> None:
        timeline = MemoryTimeline(read_snapshot(path, limits))
        tables = snapshot_tables(timeline, min_share=least_share)
        if as_json:
            stream.write(json_text(tables, [snapshot_answer(timeline)]))
        else:
            print_answers([snapshot_answer(timeline)], stream)
            print_tables(tables, snapshot_notes(timeline), stream, every=every)

    show_within(limits, path, show)
    return 0


def _share(text: str | None) -> float:
    """The share under which allocations are not listed."""
    try:
        share = _MIN_SHARE if text is None else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"min_share: must be a share from 0 to 1, not {text!r}")
    return share

"""`trainstep parallel`: which parallel strategy is cheapest here, and is its communication hidden."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from trainstep.cli.options import check_cells, check_compared, limits, this_machine, with_fields
from trainstep.cli.rank_options import check_gpus, check_sync_options
from trainstep.cli.run_options import GridOptions
from trainstep.config.grid import expand, grid_from_text, groups_along
from trainstep.config.parallel import ParallelConfig
from trainstep.config.sync import OURS, USED_BY
from trainstep.costs.strategies import YARDSTICK
from trainstep.records.record import Environment

_DEFAULTS: dict[str, dict[str, list[Any]]] = {
    "cpu": {"model": ["tiny"], "context": [64], "sync": list(OURS), "ranks": [2]},
    "cuda": {"model": ["small"], "context": [256], "sync": list(OURS)},
}
_IN_HELP: dict[str, dict[str, list[Any]]] = {
    "cpu": {name: values for name, values in _DEFAULTS["cpu"].items() if name != "model"},
    "cuda": {"sync": list(OURS), "context": [256], "ranks": ["all GPUs"]},
}


@with_fields(ParallelConfig, _IN_HELP)
def parallel(
    *,
    out: Path | None = None,
    page: Path | None = None,
    timeout_s: float = 600.0,
    memory_limit_gib: float | None = None,
    rounds: int | None = None,
    processes: int | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Time a training step on several ranks, in every way of keeping them together: step, what is sent, hidden, and held.

    Ways of one model and context take turns; ratios are to the yardstick none (each rank trains for itself), so name it among
    them. Bucket sizes multiply those that have buckets. batch_size is a rank's. Beside the time: messages and bytes against the
    formula, communication that is not hidden, memory at four points of a step against the formula. What is replicated is
    compared bit by bit: a divergence is a failure that names parameter and rank.
    Without options: a tiny model and two processes on the CPU; where there are several GPUs small at context 256 on all of them.

    Examples:

        trainstep parallel

        trainstep parallel --model xl --ranks 2 --precision bf16_autocast --compile block --sync none,bucketed,flat,fsdp,torch_ddp

        trainstep parallel --model medium --sync none,bucketed,torch_ddp --bucket-mib 1,10,25,100,1000 --page report.html

        trainstep parallel --device cpu --model mini --ranks 4 --sync none,sharded,sharded_flat,fsdp --keep-trace traces

    Parameters
    ----------
    out
        File of records to append to; by default a new one under ./runs/.
    page
        Also write the page here, over an earlier page of trainstep's but over no other file.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out.
    memory_limit_gib
        Memory a CPU cell may take, all its ranks together; by default 90 % of the machine's.
    rounds
        Compared variants run in so many rounds of whole processes, steps rounded up; by default in turns, or 5 where not all fit.
    processes
        Fresh processes that run each compared variant, and of which a verdict takes the pairs; by default 12, or as many as take a
        minute, but at least 6. Each takes all --steps while that is under a second, else its share of them.
    json
        Print JSON: `answer`, and the tables as `rows` with plain numbers, units in the names.
    """
    asked = grid_from_text({name: text for name, text in fields.items() if name != "device"})
    bounds = limits(timeout_s, memory_limit_gib, rounds, processes)
    here, device = this_machine(fields.get("device"), forks=False)
    if fields.get("device") is None and "ranks" not in asked and here.gpu_count < 2:
        device = "cpu"
    grid = _with_defaults(asked, device, here)
    check_sync_options(asked, grid["sync"])
    check_gpus(grid["ranks"], device, here, verb="parallel")
    cells = expand({"workload": ["parallel"], **grid}, {"device": device})
    check_cells(cells, memory_limit_gib=memory_limit_gib)
    groups = groups_along(cells, "sync" if len(cells) > 1 and len(grid["sync"]) > 1 else None)
    check_compared(bounds, groups)

    from trainstep.cli.cells import check_kept, check_page, run_here, show, unfinished
    from trainstep.cli.dry_run import show_cells

    store = how.store(out, "parallel")
    check_page(page, store.path)
    if how.dry_run:
        return show_cells(groups, store, here=here, anew=not how.resume, as_json=json)
    check_kept(cells, "keep_trace")
    records = run_here(groups, store, bounds, how, here=here)
    code = show(records, store, page, as_json=json, every=how.every)
    return unfinished(groups, records, store, how) or code


def _with_defaults(asked: Mapping[str, list[Any]], device: str, here: Environment) -> dict[str, list[Any]]:
    """The grid with what it leaves open; the yardstick first, and ways innermost."""
    grid = {**_DEFAULTS[device], **({"ranks": [here.gpu_count]} if device == "cuda" else {}), **asked}
    ways = [str(way) if way is not None else YARDSTICK for way in grid["sync"]]
    ordered = [way for way in ways if way == YARDSTICK] + [way for way in ways if way != YARDSTICK]
    options = {name: values for name, values in grid.items() if name in USED_BY}
    rest = {name: values for name, values in grid.items() if name not in (*USED_BY, "sync")}
    return {**rest, "sync": list(dict.fromkeys(ordered)), **options}

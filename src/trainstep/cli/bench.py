"""`trainstep bench`: time the step of one model or a grid of them."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trainstep.cli.options import check_cells, check_compared, limits, this_machine, with_fields
from trainstep.cli.run_options import GridOptions
from trainstep.config.grid import expand, grid_from_text, groups_along
from trainstep.config.run import RunConfig


@with_fields(RunConfig)
def bench(
    *,
    compare: str | None = None,
    processes: int | None = None,
    out: Path | None = None,
    page: Path | None = None,
    timeout_s: float = 600.0,
    memory_limit_gib: float | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Time forward, backward and optimizer of a training step; each cell of the grid in a process of its own.

    Without options: a tiny model on a CPU, small at context 256 on a GPU.

    Examples:

        trainstep bench

        trainstep bench --model small,medium --context 128,256 --precision bf16_autocast

        trainstep bench --model small --compare attention --attention plain,sdpa --steps 20

        trainstep bench --model small --adamw trainstep --compare capture --capture none,step

        trainstep bench --model my_package.my_module:build --page report.html

    Parameters
    ----------
    compare
        The option whose values are compared: their processes take turns, so that drift falls on all alike.
    processes
        Fresh processes that run each compared variant, and of which a verdict takes the pairs; by default 12, or as many as take a
        minute, but at least 6. Each takes all --steps while that is under a second, else its share of them.
    out
        File of records to append to; by default a new one under ./runs/.
    page
        Also write the page here, over an earlier page of trainstep's but over no other file.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out.
    memory_limit_gib
        Memory a CPU cell may take; by default 90 % of the machine's.
    json
        Print JSON: `answer`, and the tables as `rows` with plain numbers, units in the names.
    """
    grid = grid_from_text({name: text for name, text in fields.items() if name != "device"})
    bounds = limits(timeout_s, memory_limit_gib, processes=processes)
    here, device = this_machine(fields.get("device"), forks=not how.dry_run)
    grid = {"model": ["small" if device == "cuda" else "tiny"], **grid}
    cells = expand(grid, {"device": device})
    check_cells(cells, memory_limit_gib=memory_limit_gib)
    groups = groups_along(cells, compare)
    check_compared(bounds, groups)

    from trainstep.cli.cells import check_page, run_here, show, unfinished
    from trainstep.cli.dry_run import show_cells

    store = how.store(out, "bench")
    check_page(page, store.path)
    if how.dry_run:
        return show_cells(groups, store, here=here, anew=not how.resume, as_json=json)
    records = run_here(groups, store, bounds, how, here=here)
    code = show(records, store, page, compare=compare, as_json=json, every=how.every)
    return unfinished(groups, records, store, how) or code

"""`trainstep sweep`: a whole table from a TOML file, resumable, here or on Slurm."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trainstep.cli.options import check_data, limits, this_machine, with_run_fields
from trainstep.config.grid import expand, grid_from_text, groups_along
from trainstep.config.sweep import load_sweep
from trainstep.records.store import Store


@with_run_fields
def sweep(
    file: Path,
    /,
    *,
    out: Path | None = None,
    page: Path | None = None,
    timeout_s: float | None = None,
    memory_limit_gib: float | None = None,
    allow_mixed: Annotated[bool, Parameter(negative=())] = False,
    retry_failed: Annotated[bool, Parameter(negative=())] = False,
    slurm: str | None = None,
    **fields: str | None,
) -> int:
    """Run every cell of a sweep file that is not on disk yet. Kill it whenever you like: the same command goes on.

    Examples:

        trainstep sweep sweeps/end_to_end.toml

        trainstep sweep sweeps/end_to_end.toml --model small,medium --out runs/mine.jsonl

        trainstep sweep sweeps/warmup.toml --slurm gpu

    Exit code 3: all cells ran, but some crashed, timed out or could not be imported (out of memory is a result).

    Parameters
    ----------
    file
        The sweep: TOML with title, description, compare, timeout_s and a table [grid] of fields to lists.
    out
        File of records; by default runs/NAME.jsonl, NAME being the sweep file's.
    page
        Also write the page here.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out, over the file's.
    memory_limit_gib
        Memory a CPU cell may take; by default 90 % of the machine's.
    allow_mixed
        Go on although the records there were made with another GPU, torch or commit.
    retry_failed
        Run cells again that crashed, timed out or could not be imported.
    slurm
        Submit each cell as a job to this partition.
    """
    config = load_sweep(file)
    grid = {**config.grid, **grid_from_text({name: text for name, text in fields.items() if name != "device"})}
    check_data(grid)
    bounds = limits(timeout_s if timeout_s is not None else config.timeout_s, memory_limit_gib)
    here, device = this_machine(fields.get("device"))
    groups = groups_along(expand(grid, {"device": device}), config.compare)

    from trainstep.cli.cells import run_cells, show
    from trainstep.measure.executor_local import run_groups

    store = Store(out or Path("runs") / f"{config.name}.jsonl")
    records = run_cells(
        groups,
        store,
        lambda waiting, tell: run_groups(waiting, bounds, tell),
        here=here,
        allow_mixed=allow_mixed,
        retry_failed=retry_failed,
    )
    return show(records, store, page)

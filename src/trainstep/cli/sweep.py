"""`trainstep sweep`: a whole table from a TOML file, resumable, here or on Slurm."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from trainstep.cli.options import check_cells, check_compared, chosen_device, limits, this_machine, with_fields
from trainstep.cli.run_options import RunOptions
from trainstep.config.grid import expand_all, grid_from_settings, grid_from_text, groups_along
from trainstep.config.run import RunConfig
from trainstep.config.sweep import SweepConfig, load_sweep
from trainstep.records.store import RUNS, Store

if TYPE_CHECKING:
    from trainstep.cli.cells import Execute
    from trainstep.config.cell import Cell
    from trainstep.measure.connection import Tell
    from trainstep.measure.executor_slurm_queue import JobRequest
    from trainstep.measure.runner import Limits
    from trainstep.records.record import Environment, Record

_SLURM = Group("On a Slurm cluster", sort_key=3)
_PARTITION_HELP = (
    "Submit each cell (variants that take turns: together) as a job to this partition, and wait. The nodes must see this "
    "folder, the records' folder and this Python. Parts and logs are kept beside the records in NAME.slurm/."
)
_SET_HELP = (
    "FIELD=VALUE over the file's, of any field of the sweep's own workload; commas make a list. Repeat it for more fields. "
    "Of a field that the file's [[rows]] give, it chooses the rows that have the value."
)
_ARGUMENTS_HELP = (
    "More options of sbatch as key=value,key=value: account, qos, constraint, cpus_per_task, mem; exclusive=true."
)
_SIDE_BY_SIDE = "Times are those of one cell after the other; jobs run side by side."


def _on_slurm(help: str) -> Parameter:
    return Parameter(group=_SLURM, help=help)


@with_fields(RunConfig)
def sweep(
    file: Path,
    /,
    *,
    settings: Annotated[list[str] | None, Parameter(name="--set", help=_SET_HELP, negative=())] = None,
    out: Path | None = None,
    page: Path | None = None,
    timeout_s: float | None = None,
    memory_limit_gib: float | None = None,
    rounds: int | None = None,
    processes: int | None = None,
    allow_mixed: Annotated[bool, Parameter(negative=())] = False,
    retry_failed: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    slurm: Annotated[str | None, _on_slurm(_PARTITION_HELP)] = None,
    slurm_gpus: Annotated[int | None, _on_slurm("GPUs of a job; 0: run on CPUs [1].")] = None,
    slurm_time: Annotated[float | None, _on_slurm("Minutes a job may take [its cells' time-outs and five].")] = None,
    slurm_jobs: Annotated[int | None, _on_slurm("Jobs that may run at the same time [16].")] = None,
    slurm_args: Annotated[str | None, _on_slurm(_ARGUMENTS_HELP)] = None,
    how: RunOptions = RunOptions(),
    **fields: str | None,
) -> int:
    """Run every cell of a sweep file that is not on disk yet. Kill it whenever you like: the same command goes on.

    Examples:

        trainstep sweep sweeps/end_to_end.toml --model small,medium --out runs/mine.jsonl

        trainstep sweep sweeps/flash.toml --set dtype=bf16 --set seq=1024,4096

        trainstep sweep sweeps/warmup.toml --slurm gpu --slurm-args account=me,cpus_per_task=8

    Exit code 3: all cells ran, but some crashed, timed out or could not be imported (out of memory is a result).

    Parameters
    ----------
    file
        The sweep: TOML with title, description, compare, timeout_s, a table [grid] of fields to lists, tables [[rows]].
    out
        File of records; by default runs/NAME.jsonl, NAME being the sweep file's.
    page
        Also write the page here, over an earlier page of trainstep's but over no other file.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out, over the file's.
    memory_limit_gib
        Memory a CPU cell may take; by default 90 % of the machine's.
    rounds
        Rounds of whole processes for compared variants; by default turns, or 5 where not all fit. A killed sweep goes on in one.
    processes
        Fresh processes that run each compared variant; by default 12, or as many as take a minute, but at least 6.
    allow_mixed
        Go on although the records there were made with another GPU, torch or commit.
    retry_failed
        Run cells again that crashed, timed out or could not be imported.
    json
        Print JSON: `answer`, and the tables as `rows` with plain numbers, units in the names.
    """
    config = load_sweep(file)
    bounds = limits(timeout_s if timeout_s is not None else config.timeout_s, memory_limit_gib, rounds, processes)
    request = _job_request(slurm, slurm_gpus, slurm_time, slurm_jobs, slurm_args, how.budget_minutes)
    here, groups = _groups(config, _overrides(fields, settings or []), request, memory_limit_gib)
    check_compared(bounds, groups)
    from trainstep.cli.cells import check_page, run_cells, show, unfinished
    from trainstep.cli.dry_run import show_cells

    store = how.store(out or RUNS / f"{config.name}.jsonl", "sweep")
    check_page(page, store.path)
    if how.dry_run:
        which = {"allow_mixed": allow_mixed, "retry_failed": retry_failed}
        return show_cells(groups, store, here=here, **which, as_json=json, note=_SIDE_BY_SIDE if request else "")
    execute = _executor(bounds, request, store, groups, retry_failed)
    records = run_cells(groups, store, execute, here=here, how=how, allow_mixed=allow_mixed, retry_failed=retry_failed)
    shown = partial(show, compare=config.compare, title=config.title, description=config.description or None)
    code = shown(records, store, page, as_json=json, every=how.every)
    return unfinished(groups, records, store, how) or code


def _groups(
    config: SweepConfig,
    overrides: tuple[dict[str, list[Any]], str | None],
    request: "JobRequest | None",
    memory_limit_gib: float | None,
) -> "tuple[Environment | None, list[list[Cell]]]":
    """This machine, or None where jobs of Slurm's run on others, and the cells, those that are compared together."""
    grids = config.grids(overrides[0])
    asked = chosen_device(overrides[1], grids[0])
    here, device = this_machine(asked, forks=False) if request is None else (None, _device_of_jobs(asked, request.gpus))
    cells = expand_all(grids, {"device": device})
    check_cells(cells, memory_limit_gib=memory_limit_gib)
    return here, groups_along(cells, config.compare)


def _overrides(fields: Mapping[str, str | None], settings: Sequence[str]) -> tuple[dict[str, list[Any]], str | None]:
    """What the command line puts over the file's grid: options of a training step's fields, and --set of any workload's.

    And, apart, the device that it asks for.
    """
    options, own = grid_from_text(fields), grid_from_settings(settings)
    if twice := next((name for name in own if name in options), None):
        raise ValueError(f"set: {twice} is given as an option too; give it once")
    overrides = {**options, **own}
    device = ",".join(map(str, overrides.pop("device", [])))
    return overrides, device or None


def _executor(
    bounds: "Limits",
    request: "JobRequest | None",
    store: Store,
    groups: "Sequence[Sequence[Cell]]",
    retry_failed: bool,
) -> "Execute":
    """Cells run here one after the other, or on Slurm. `groups`: all of the sweep's."""
    from trainstep.measure.executor_local import run_groups
    from trainstep.measure.executor_slurm import run_groups_on_slurm
    from trainstep.measure.round_parts import RoundParts

    parts = RoundParts(store, retry_failed=retry_failed)

    def execute_here(waiting: "Sequence[Sequence[Cell]]", tell: "Tell") -> "Iterator[list[Record]]":
        yield from run_groups(waiting, bounds, tell, parts)
        parts.drop(groups)  # all are stored, also those that an earlier sweep was killed behind

    if request is None:
        return execute_here
    return lambda waiting, tell: run_groups_on_slurm(waiting, bounds, tell, request=request, store=store)


def _device_of_jobs(asked: str | None, gpus: int) -> str:
    """The machine we are on says nothing: what the jobs ask for decides."""
    if asked == "cuda" and not gpus:
        raise ValueError("device: cuda needs a GPU in each job; take --slurm-gpus 1")
    return asked if asked not in (None, "auto") else "cuda" if gpus else "cpu"


def _job_request(
    partition: str | None,
    gpus: int | None,
    minutes: float | None,
    at_once: int | None,
    arguments: str | None,
    budget_minutes: float | None,
) -> "JobRequest | None":
    """What the --slurm options ask for; None without a partition, and ValueError then for what jobs alone would heed.

    A comma only parts arguments where a new key begins: nodelist=n1,n2,qos=high.
    """
    given = {"slurm_gpus": gpus, "slurm_time": minutes, "slurm_jobs": at_once, "slurm_args": arguments}
    asked = {name: value for name, value in given.items() if value is not None}
    if partition is None:
        if asked:
            raise ValueError(f"{next(iter(asked))}: has no effect without --slurm PARTITION; add that, or leave it out")
        return None
    if budget_minutes is not None:
        raise ValueError("budget_minutes: jobs of Slurm run side by side; --slurm-time limits each of them")

    from trainstep.measure.executor_slurm_queue import JobRequest

    pairs = [pair.strip().partition("=") for pair in re.split(r",(?=[^,=]+=)", arguments or "") if pair.strip()]
    for key, _, value in pairs:
        if not key.strip() or not value.strip():
            raise ValueError(
                f"slurm_args: {key!r} has no value; write key=value,key=value, and a flag as exclusive=true"
            )
    named = {key.strip().lstrip("-").replace("_", "-"): value.strip() for key, _, value in pairs}
    return JobRequest(
        partition=partition,
        gpus=JobRequest.gpus if gpus is None else gpus,
        minutes=minutes,
        at_once=JobRequest.at_once if at_once is None else at_once,
        arguments=named,
    )

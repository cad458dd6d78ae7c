"""`trainstep sweep`: run a whole table from a TOML file, resumable, on this machine or on Slurm."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainstep.cli.options import (
    ARGUMENTS_HELP,
    SLURM,
    RunOptions,
    check_cells,
    check_compared,
    check_nodes,
    chosen_device,
    limits,
    slurm_arguments,
    this_machine,
    with_fields,
)
from trainstep.config.grid import expand_all, grid_from_settings, grid_from_text, groups_along
from trainstep.config.run import RunConfig
from trainstep.config.sweep import SweepConfig, load_sweep
from trainstep.records.store import RUNS, Store

if TYPE_CHECKING:
    from trainstep.cli.cells import Execute
    from trainstep.config.grid import Cell
    from trainstep.measure.harness.connection import Tell
    from trainstep.measure.harness.runner import Limits
    from trainstep.measure.harness.slurm_queue import JobRequest
    from trainstep.records.record import Environment, Record

_PARTITION_HELP = (
    "Submit each cell (or group of compared variants) as a job to this partition, and wait. The nodes must see this folder, the "
    "records' folder and this Python. Partial results and logs are kept beside the records in NAME.slurm/."
)
_SET_HELP = (
    "FIELD=VALUE, for any field of the sweep's workload, replaces the file's value; commas make a list. Repeat it for more fields. "
    "If the file's [[rows]] give the field, it selects the rows that have the value."
)
_SIDE_BY_SIDE = "The estimate is for one cell after the other, but jobs run side by side."


def _on_slurm(help: str) -> Parameter:
    return Parameter(group=SLURM, help=help)


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
    retry_failed: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    slurm: Annotated[str | None, _on_slurm(_PARTITION_HELP)] = None,
    slurm_gpus: Annotated[int | None, _on_slurm("GPUs of a job; 0: run on CPUs [1].")] = None,
    slurm_time: Annotated[float | None, _on_slurm("Time limit of a job in minutes [its cells' time-outs + 5].")] = None,
    slurm_jobs: Annotated[int | None, _on_slurm("Jobs that may run at the same time [16].")] = None,
    slurm_args: Annotated[str | None, _on_slurm(ARGUMENTS_HELP)] = None,
    how: RunOptions = RunOptions(),
    **fields: str | None,
) -> int:
    """Run every cell of a sweep file that is not on disk yet. Kill it whenever you like: the same command continues.

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
        File of records; by default runs/NAME.jsonl, with the name of the sweep file.
    page
        Also write the page to this file. It may replace an earlier page of trainstep, but no other file.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out, instead of the file's.
    memory_limit_gib
        GiB of memory that a CPU cell may use; by default 90 % of the machine's.
    rounds
        Run compared variants in this many rounds of whole processes; by default their processes live side by side, or 5 rounds if
        not all fit. A killed sweep continues within a round.
    processes
        Fresh processes for each compared variant; by default 12, or as many as fit into a minute, but at least 6; up to
        24 where the machine is noisy.
    retry_failed
        Run cells again that crashed, timed out, diverged or could not be imported; those that a lost node failed run again anyway.
    json
        Print JSON: `answer`, and the tables as `rows` with plain numbers and units in the names.
    """
    config = load_sweep(file)
    timeout_s = config.timeout_s if timeout_s is None else timeout_s
    bounds = limits(timeout_s, memory_limit_gib, rounds, processes, how.nodes)
    request = _job_request(slurm, slurm_gpus, slurm_time, slurm_jobs, slurm_args, how.budget_minutes)
    here, groups = _groups(config, _overrides(fields, settings or []), request, memory_limit_gib, how)
    check_compared(bounds, groups)
    from trainstep.cli.cells import check_page, run_cells, show, show_dry_run, unfinished

    store = how.store(out or RUNS / f"{config.name}.jsonl", "sweep")
    check_page(page, store.path)
    if how.dry_run:
        note = _SIDE_BY_SIDE if request else ""
        return show_dry_run(
            groups, store, environment=here, options=how, retry_failed=retry_failed, as_json=json, note=note
        )
    execute = _executor(bounds, request, store, groups, retry_failed)
    records = run_cells(groups, store, execute, environment=here, options=how, retry_failed=retry_failed)
    show_sweep = partial(show, compare=config.compare, title=config.title, description=config.description or None)
    code = show_sweep(records, store, page, as_json=json, every=how.every)
    return unfinished(groups, records, store, how) or code


def _groups(
    config: SweepConfig,
    overrides: tuple[dict[str, list[Any]], str | None],
    request: "JobRequest | None",
    memory_limit_gib: float | None,
    how: RunOptions,
) -> "tuple[Environment | None, list[list[Cell]]]":
    """This machine (None if Slurm jobs run on others), and the groups of cells that are compared with each other."""
    grids = config.grids(overrides[0])
    requested = chosen_device(overrides[1], grids[0])
    here, device = None, ""
    if request is None:
        here, device = this_machine(requested, forks=False)
    else:
        device = _device_of_jobs(requested, request.gpus)
    cells = expand_all(grids, {"device": device})
    check_cells(cells, memory_limit_gib=memory_limit_gib)
    groups = groups_along(cells, config.compare)
    if request is None:
        check_nodes(cells, how, here)
    else:
        request.check(groups)
    return here, groups


def _overrides(fields: Mapping[str, str | None], settings: Sequence[str]) -> tuple[dict[str, list[Any]], str | None]:
    """The values of the command line that replace the file's (options and --set), and separately the requested device."""
    options, set_values = grid_from_text(fields), grid_from_settings(settings)
    if repeated := next((name for name in set_values if name in options), None):
        raise ValueError(f"set: {repeated} is given as an option too; give it once")
    overrides = {**options, **set_values}
    device = ",".join(map(str, overrides.pop("device", [])))
    return overrides, device or None


def _executor(
    bounds: "Limits", request: "JobRequest | None", store: Store, groups: "Sequence[Sequence[Cell]]", retry_failed: bool
) -> "Execute":
    """The function that runs groups of cells here, one after the other, or on Slurm. `groups`: all groups of the sweep."""
    from trainstep.measure.harness.local import run_groups
    from trainstep.measure.harness.slurm import run_groups_on_slurm
    from trainstep.measure.harness.sweep import RoundParts

    parts = RoundParts(store, retry_failed=retry_failed)

    def execute_here(waiting: "Sequence[Sequence[Cell]]", tell: "Tell") -> "Iterator[list[Record]]":
        yield from run_groups(waiting, bounds, tell, parts)
        parts.drop(groups)  # all records are stored now; parts of a sweep that was killed earlier are dropped too

    if request is None:
        return execute_here
    return lambda waiting, tell: run_groups_on_slurm(waiting, bounds, tell, request=request, store=store)


def _device_of_jobs(requested: str | None, gpus: int) -> str:
    """The device of Slurm jobs: by default cuda if the jobs have GPUs, whatever this machine has."""
    if requested == "cuda" and not gpus:
        raise ValueError("device: cuda needs a GPU in each job; take --slurm-gpus 1")
    return requested if requested not in (None, "auto") else "cuda" if gpus else "cpu"


def _job_request(
    partition: str | None,
    gpus: int | None,
    minutes: float | None,
    at_once: int | None,
    arguments: str | None,
    budget_minutes: float | None,
) -> "JobRequest | None":
    """The request of the --slurm options; None without a partition. ValueError for options that have no effect."""
    options = {"slurm_gpus": gpus, "slurm_time": minutes, "slurm_jobs": at_once, "slurm_args": arguments}
    if partition is None:
        if name := next((name for name, value in options.items() if value is not None), None):
            raise ValueError(f"{name}: has no effect without --slurm PARTITION; add that, or leave it out")
        return None
    if budget_minutes is not None:
        raise ValueError("budget_minutes: jobs of Slurm run side by side; --slurm-time limits each of them")

    from trainstep.measure.harness.slurm_queue import JobRequest

    return JobRequest(
        partition=partition,
        gpus=JobRequest.gpus if gpus is None else gpus,
        minutes=minutes,
        at_once=JobRequest.at_once if at_once is None else at_once,
        arguments=slurm_arguments(arguments),
    )

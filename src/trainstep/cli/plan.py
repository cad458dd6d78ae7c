"""`trainstep plan`: will a step fit, how long does it take, and what to cut first; by formula, without a GPU and without torch."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from trainstep.cli.options import CONFIG_HELP, with_fields
from trainstep.cli.running.plan_options import SearchOptions, planned_strategies
from trainstep.cli.streams import tell_progress
from trainstep.config.grid import grid_from_text
from trainstep.config.machine import gpu_named, machine_spec
from trainstep.config.model import UserModel
from trainstep.config.parsing import build
from trainstep.config.plan import FLEET_FIELDS, PlanConfig, with_ranks
from trainstep.config.run import RunConfig

_MOST_STEPS = 200


@with_fields(PlanConfig)
def plan(
    *,
    gpu: str | None = None,
    gpu_memory_gib: float | None = None,
    peak_tflops: float | None = None,
    bandwidth: float | None = None,
    calibration: Path | None = None,
    tokens: float | None = None,
    grade: Path | None = None,
    terms: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    quiet: Annotated[bool, Parameter(negative=(), help="Show no progress of a long search or grade.")] = False,
    config: Annotated[Path | None, Parameter(help=CONFIG_HELP)] = None,
    searching: SearchOptions = SearchOptions(),
    **fields: str | None,
) -> int:
    """Predict the memory and the time of a training step by formula: whether it fits on a GPU, and how long it takes.

    Nothing runs, and no GPU is needed. The step is replayed tensor by tensor, with the rules of torch's allocator, and timed kernel
    by kernel, as fast as a calibration says, with an interval. Lists compare steps: one row each. Several ranks are bucketed
    without --sync. With --nodes the messages of many nodes are simulated, and --ranks are those of all nodes together. A model of
    your own is traced first, which needs torch and no memory, and has a time on one GPU, not compiled.

    Exit codes: 0 it fits (of several steps: one of them), or no GPU was named; 1 it does not fit; 2 bad input.

    Examples:

        trainstep plan --model 8B --context 32768 --ranks 2 --gpu h200

        trainstep plan --model 8B --nodes 1,2,16,128 --sync fsdp --shard-ranks 8 --gpu h100 --tokens 5e10

        trainstep plan --model 8B --ranks 8 --gpu h200 --precision bf16_autocast --global-batch 64 --minimize time

        trainstep plan --model 2.7B --ranks 8 --gpu h100 --minimize ranks --precision fp32,bf16_autocast --out-config best.toml

        trainstep plan --model 2.7B --gpu h200 --fit context --precision bf16_autocast --recompute block

        trainstep plan --grade results/h200

    Parameters
    ----------
    gpu
        The GPU that it should fit on: h200, h100, a100-sxm4-80gb, rtx-4090...
    gpu_memory_gib
        Its memory in GiB, for a GPU that is not in the list, or for a part of one.
    peak_tflops
        Its dense TFLOP/s in bf16; with --bandwidth, for a GPU that is not in the list.
    bandwidth
        The bandwidth of its memory in TB/s; with --peak-tflops.
    calibration
        What `trainstep doctor --measure --out` wrote; by default that of H200s, for other GPUs at their data sheets' rates.
    tokens
        Also predict the GPU-hours to train on so many tokens.
    grade
        A file of records or a folder of them: predict each measured step anew and compare. For tables that others published, as in
        results/published, one factor is fitted to the smallest row. Prints Markdown into a file or pipe.
    terms
        Also print the formula of each tensor that forward keeps, with its source, and of each kernel's time; of a model of your own
        its products and attention by shape, with their FLOPs.
    json
        Print JSON, which begins with `answer`; sizes in bytes.
    """
    tell = None if quiet else tell_progress
    machine = {"gpu": gpu, "gpu_memory_gib": gpu_memory_gib, "peak_tflops": peak_tflops, "bandwidth": bandwidth}
    extra = {"tokens": tokens, "terms": terms or None}
    if grade is not None:
        from trainstep.cli.running.grades import show_grades

        _check_alone("grade", {**machine, **extra, **searching.given(), **fields, "config": config})
        return show_grades(grade, None if calibration is None else _calibration(calibration), as_json=json, tell=tell)
    memory_bytes = _gpu_memory_bytes(gpu, gpu_memory_gib)
    _check_positive(tokens=tokens, peak_tflops=peak_tflops, bandwidth=bandwidth)
    speeds = _calibration(calibration, gpu, peak_tflops, bandwidth, tokens)
    where = {"gpu": None if gpu_memory_gib else gpu, "memory_bytes": memory_bytes, "speeds": speeds}
    if searching.given():
        from trainstep.cli.running.search import run_search

        return run_search(fields, searching, extra, **where, as_json=json, tell=tell)
    return _plan_steps(fields, **where, card=gpu, tokens=tokens, terms=terms, as_json=json)


def _plan_steps(
    fields: Mapping[str, str | None],
    *,
    gpu: str | None,
    memory_bytes: int | None,
    speeds: Any,
    card: str | None,
    tokens: float | None,
    terms: bool,
    as_json: bool,
) -> int:
    """Predict one step, or compare several. Returns the exit code. `card`: the GPU whose links the nodes have."""
    points = _points(fields, single=terms)
    configs = [build(PlanConfig, point, where="plan") for point in points]

    from trainstep.plan.prediction import cuts
    from trainstep.report.plan.prediction import Planned

    predictions = _predictions(configs, memory_bytes)
    shown: dict[str, Any] = {"gpu": gpu, "tokens": tokens}
    has_nodes = any(fields.get(name) is not None for name in FLEET_FIELDS)
    times = [_timed(item, speeds, card, has_nodes=has_nodes) for item in predictions]
    planned = [Planned(prediction=item, **shown, **time) for item, time in zip(predictions, times, strict=True)]
    if len(planned) == 1:
        planned = [replace(planned[0], cuts=cuts(predictions[0]))]
    _show(planned, _varied(points), terms=terms, as_json=as_json)
    return 1 if all(prediction.fits is False for prediction in predictions) else 0


def _check_alone(mode: str, others: Mapping[str, Any]) -> None:
    """ValueError for an option that has no effect on this mode."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ValueError(f"{given[0]}: has no effect on --{mode}, whose records say what was run; leave it out")


def _check_positive(**values: float | None) -> None:
    """ValueError for what no GPU has and nobody trains on: it would be a number without a meaning, or too large for one."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}: must be a positive number, not {value:g}")
        if value is not None and not 1e-3 <= value <= 1e18:
            raise ValueError(f"{name}: must be from 0.001 to 1e18, not {value:g}")


def _calibration(
    path: Path | None,
    gpu: str | None = None,
    peak_tflops: float | None = None,
    bandwidth: float | None = None,
    tokens: float | None = None,
) -> Any:
    """The machine's speeds: measured, of a data sheet, or shipped; None where no machine is named."""
    from trainstep.plan.time.calibration import calibration_for, data_sheet

    if (peak_tflops is None) != (bandwidth is None):
        missing = "bandwidth" if bandwidth is None else "peak_tflops"
        raise ValueError(f"{missing}: a data sheet's time needs both --peak-tflops and --bandwidth; add this one")
    if path is not None:
        if peak_tflops is not None:
            raise ValueError("calibration: has measured what --peak-tflops and --bandwidth say; leave these out")
        if not path.exists():
            raise ValueError(f"calibration: {path} is not there; write it with trainstep doctor --measure --out {path}")
        from trainstep.plan.time.stored import read_calibration  # imports what reads records

        measured = read_calibration(path)
        if gpu is not None and machine_spec(measured.name) not in (None, gpu_named(gpu)):
            raise ValueError(
                f"calibration: {path} was measured on {measured.name}, not on {gpu}; leave one of the two out"
            )
        return measured
    if peak_tflops is not None and bandwidth is not None:
        return data_sheet(peak_tflops=peak_tflops, memory_bytes_per_s=bandwidth * 1e12)
    if gpu is None:
        if tokens is not None:
            raise ValueError(
                "tokens: GPU-hours need a time; name --gpu, --calibration, or --peak-tflops and --bandwidth"
            )
        return None
    return calibration_for(gpu_named(gpu))


def _predictions(configs: Sequence[Any], memory_bytes: int | None) -> list[Any]:
    from trainstep.plan.prediction import predict

    trace = _tracer() if any(isinstance(config.run.model, UserModel) for config in configs) else None
    return [predict(config, gpu_memory_bytes=memory_bytes, trace=trace) for config in configs]


def _timed(prediction: Any, speeds: Any, gpu: str | None, *, has_nodes: bool) -> dict[str, Any]:
    """The step's time, or why there is none; a step whose time has no formula still has its memory."""
    from trainstep.plan.fleet.fleet_time import planned_fleet
    from trainstep.plan.time.traced_kernels import traced_time

    config = prediction.config
    if speeds is None:
        return {"no_time": "name a GPU for the time of many nodes: --gpu h100"} if has_nodes else {}
    try:
        if prediction.traced is not None:
            return {"time": traced_time(config, speeds, prediction.traced, has_nodes=has_nodes)}
        time, fleet = planned_fleet(config, speeds, None if gpu is None else gpu_named(gpu), has_nodes=has_nodes)
    except ValueError as error:
        return {"no_time": str(error)}
    return {"time": time, "fleet": fleet}


def _tracer() -> Callable[[RunConfig], Any]:
    """What traces models of the user's own. It imports torch, and their code with it."""
    from trainstep.config.import_path import search_current_folder
    from trainstep.training.trace import Tracer

    search_current_folder()
    tracer = Tracer()

    def trace(run: RunConfig) -> Any:
        with redirect_stdout(sys.stderr):  # what the user's code prints is no part of the answer
            return tracer(run)

    return trace


def _gpu_memory_bytes(gpu: str | None, gpu_memory_gib: float | None) -> int | None:
    if gpu_memory_gib is not None:
        if not 0 < gpu_memory_gib <= 2**20:
            raise ValueError(f"gpu_memory_gib: must be a positive number of GiB, not {gpu_memory_gib:g}")
        return round(gpu_memory_gib * 2**30)
    return None if gpu is None else gpu_named(gpu).memory_bytes


def _points(fields: Mapping[str, str | None], *, single: bool) -> list[dict[str, Any]]:
    """The flat values of each step. `single`: ValueError for several."""
    options = grid_from_text(dict(fields))
    grid = {"model": ["small"], **options}
    grid["sync"] = planned_strategies(options)
    count = 1
    for values in grid.values():
        count *= len(values)
    if count > _MOST_STEPS:
        raise ValueError(
            f"plan: {count:,} steps are too many to compare; give fewer values, {_MOST_STEPS} steps at most"
        )
    if single and count > 1:
        raise ValueError("terms: are those of one step; give one value for each option")
    return [with_ranks(dict(zip(grid, values, strict=True))) for values in product(*grid.values())]


def _varied(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The values of each step that differ among the steps."""
    names = [name for name in points[0] if len({str(point[name]) for point in points}) > 1]
    return [{name: point[name] for name in names} for point in points]


def _show(planned: Sequence[Any], points: Sequence[Mapping[str, Any]], *, terms: bool, as_json: bool) -> None:
    from trainstep.report.kit.answer import plain_answers, print_answers
    from trainstep.report.kit.visible import ascii_json
    from trainstep.report.plan.prediction import comparison_answer, comparison_table, plain, plan_answer, plan_tables

    is_single = len(planned) == 1
    answers = [plan_answer(planned[0]) if is_single else comparison_answer(planned, points)]
    if as_json:
        rows = [
            {**plain(item), **({"options": point} if point else {})}
            for item, point in zip(planned, points, strict=True)
        ]
        extra = {name: table.raw for name, table in _terms(planned[0]).items()} if terms else {}
        print(ascii_json({"answer": plain_answers(answers), "rows": rows, **extra}, indent=1))
        return
    from trainstep.report.kit.terminal import print_tables

    print_answers(answers, sys.stdout)
    tables = plan_tables(planned[0]) if is_single else [comparison_table(planned, points)]
    if terms:
        tables += _terms(planned[0]).values()
    print_tables(tables, [], sys.stdout)


def _terms(planned: Any) -> dict[str, Any]:
    """The tables of `--terms`, by their names in JSON."""
    from trainstep.report.plan.prediction import terms_table
    from trainstep.report.plan.time import time_terms_table
    from trainstep.report.plan.work import work_table

    tables = {"terms": terms_table(planned.prediction)}
    if planned.prediction.traced is not None:
        tables["work"] = work_table(planned.prediction.traced)
    if planned.time is not None:
        tables["time_terms"] = time_terms_table(planned.time)
    return tables

"""For --fit of `trainstep plan`: the largest batch, context or number of layers, by formula, and by one trial with --verify."""

import sys
from collections.abc import Mapping
from typing import Any

from trainstep.cli.running.plan_options import planned_strategies
from trainstep.cli.streams import outliving_reader
from trainstep.config.grid import grid_from_text
from trainstep.config.machine import gpu_named, machine_spec
from trainstep.config.model import UserModel
from trainstep.config.parsing import build
from trainstep.config.plan import FLEET_FIELDS, PlanConfig, with_ranks
from trainstep.plan.search.fit import BOUNDS, Fit, largest_fit
from trainstep.report.kit.answer import plain_answers, print_answers
from trainstep.report.kit.visible import ascii_json
from trainstep.report.plan.fit import fit_answer, fit_table, plain

_RANKS_BY = ("nodes", "gpus_per_node")
"""Options of nodes that say how many ranks there are."""


def run_fit(
    fields: Mapping[str, str | None],
    field: str,
    *,
    gpu: str | None,
    memory_bytes: int | None,
    verify: bool,
    as_json: bool,
) -> int:
    """Search and show. Returns the exit code: 0, or 1 if nothing fits or the trial failed. ValueError for bad input."""
    if field not in BOUNDS:
        raise ValueError(f"fit: {field!r} is not known; known: {', '.join(BOUNDS)}")
    if memory_bytes is None:
        raise ValueError("fit: needs a GPU's memory; name --gpu or --gpu-memory-gib")
    if fields.get(field) is not None:
        raise ValueError(f"{field}: is what --fit searches; leave it out")
    options = _options(fields)
    if name := next((name for name in options if name in FLEET_FIELDS and name not in _RANKS_BY), None):
        raise ValueError(f"{name}: has no effect on --fit, since links hold no memory; leave it out")
    if verify and (name := next((name for name in options if name in FLEET_FIELDS), None)):
        raise ValueError(f"verify: a trial runs on the GPUs here, whatever {name} says; leave one of the two out")
    config = build(PlanConfig, options, where="plan")
    if isinstance(config.run.model, UserModel):
        raise ValueError(
            "fit: a model of your own would be traced again for each value; search by trials: trainstep memory --fit, or plan a "
            "few values as a list"
        )
    fits = largest_fit(config, field, gpu_memory_bytes=memory_bytes)
    best, trial = fits.surely or fits.probably, None
    if verify and best is not None:
        trial = _verified(options, field, best, gpu)
    answer = fit_answer(fits, gpu, memory_bytes, trial)
    with outliving_reader(sys.stdout):
        if as_json:
            print(ascii_json({"answer": plain_answers([answer]), **plain(fits, gpu, memory_bytes, trial)}, indent=1))
        else:
            from trainstep.report.kit.terminal import print_tables

            print_answers([answer], sys.stdout)
            print_tables([fit_table(fits)], [], sys.stdout)
    return 1 if best is None or (trial is not None and trial["failure"] is not None) else 0


def _options(fields: Mapping[str, str | None]) -> dict[str, Any]:
    """The step's flat values. ValueError if an option has several values."""
    grid = {"model": ["small"], **grid_from_text(dict(fields))}
    if several := next((name for name, values in grid.items() if len(values) > 1), None):
        raise ValueError(f"{several}: --fit searches for one step; give one value")
    options = {name: value for name, [value] in grid.items()}
    [options["sync"]] = planned_strategies(grid)
    return with_ranks(options)


def _verified(options: Mapping[str, Any], field: str, best: Fit, gpu: str | None) -> dict[str, Any]:
    """One trial of this value in its own process, as of `trainstep memory`. ValueError without enough GPUs of this kind."""
    from trainstep.cli.options import TIMEOUT_S, check_gpus, limits, this_machine
    from trainstep.config.grid import expand
    from trainstep.measure.harness.local import run_groups
    from trainstep.report.kit.forms import failure_sentence

    bounds = limits(TIMEOUT_S, None)
    here, device = this_machine(None)
    if device != "cuda":
        raise ValueError("verify: there is no GPU here to run a trial on; leave it out for the answer by formula")
    if gpu is not None and machine_spec(here.gpu) != gpu_named(gpu):
        raise ValueError(
            f"verify: the GPU here is {here.gpu}, not {gpu}; name this one with --gpu, or leave --verify out"
        )
    check_gpus([options.get("ranks", 1)], device, here, verb="memory")
    grid = {name: [value] for name, value in {**options, field: best.value}.items()}
    [cell] = expand({"workload": ["memory"], **grid}, {"device": device})
    [record] = next(run_groups([[cell]], bounds, lambda _cell, _stage: None))
    return {
        "gpu": here.gpu,
        "failure": None if record.failure is None else failure_sentence(record.failure),
        "peak_reserved_bytes": record.fact("peak_reserved_bytes"),
        "predicted_reserved_bytes": best.prediction.reserved_bytes,
    }

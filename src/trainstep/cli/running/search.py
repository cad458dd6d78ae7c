"""For --minimize of `trainstep plan`: searches options by prediction, shows the best and why others lost, and writes it as TOML."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainstep.cli.running.plan_options import SearchOptions, planned_strategies
from trainstep.cli.streams import outliving_reader
from trainstep.config.grid import grid_from_text
from trainstep.config.model import UserModel
from trainstep.config.parallel import OURS, RanksConfig
from trainstep.config.parsing import build
from trainstep.config.plan import FLEET_FIELDS, PlanConfig
from trainstep.costs.strategies import BASELINE
from trainstep.plan.search.search import OBJECTIVES, RANKS, Found, search
from trainstep.plan.search.space import MOST_SEQUENCES, Space, space_of
from trainstep.plan.time.calibration import Calibration
from trainstep.report.kit.answer import Answer, plain_answers, print_answers
from trainstep.report.kit.visible import ascii_json, one_line
from trainstep.report.plan.search import plain, search_answer, search_section, search_tables

_PREDICTIONS_TO_BOUNDS = 4
"""The most time that the predictions of a search took, over that of its bounds, in searches of 40,000 combinations."""


def run_search(
    fields: Mapping[str, str | None],
    options: SearchOptions,
    unused: Mapping[str, Any],
    *,
    gpu: str | None,
    memory_bytes: int | None,
    speeds: Calibration | None,
    as_json: bool,
    tell: Callable[[str], None] | None = None,
) -> int:
    """Search and show. Returns the exit code: 0, or 1 if nothing fits. ValueError for bad input.

    `unused`: options that have no effect here, None if not given. `tell`: shows the progress of a long search.
    """
    if options.fit is not None:
        return _fit(fields, options, unused, gpu=gpu, memory_bytes=memory_bytes, as_json=as_json)
    minimize, page, out_config = options.minimize, options.page, options.out_config
    if minimize is None or options.verify:
        idle = "verify" if options.verify else next(iter(options.given()))
        needed = "--fit" if options.verify else "--minimize"
        raise ValueError(f"{idle}: has no effect without {needed}; leave it out")
    if name := next((name for name, value in unused.items() if value is not None), None):
        raise ValueError(f"{name}: has no effect on --minimize; leave it out, and plan the options that it finds")
    if memory_bytes is None or speeds is None:
        raise ValueError(
            "minimize: needs a GPU's memory and speed; name --gpu, or --gpu-memory-gib with --peak-tflops and --bandwidth"
        )
    space = _space(fields, minimize, options.global_batch)
    _check_files(page, out_config)
    if tell is not None:
        tell("searching by prediction, nothing runs: seconds, or up to a minute on a busy machine")
    on_bounds = None if tell is None else _told_by(tell)
    result = search(space, speeds, gpu_memory_bytes=memory_bytes, minimize=minimize, on_bounds=on_bounds)
    commands = _commands(result)
    answer = search_answer(result, gpu, commands)
    if page is not None:
        _write_page(page, result, answer, speeds)
    if out_config is not None and result.best is not None:
        _write_toml(out_config, space, result.best.config, answer)
    with outliving_reader(sys.stdout):
        if as_json:
            print(ascii_json({"answer": plain_answers([answer]), **plain(result, gpu, commands)}, indent=1))
        else:
            from trainstep.report.kit.terminal import print_tables

            print_answers([answer], sys.stdout)
            print_tables(search_tables(result), [], sys.stdout)
    with outliving_reader(sys.stderr):
        for name, path in (("page", page), ("options", out_config if result.best is not None else None)):
            if path is not None:
                print(one_line(f"{name}: {path}"), file=sys.stderr)
    return 0 if result.best is not None else 1


def _told_by(tell: Callable[[str], None]) -> Callable[[int, int, float], None]:
    """A callback that says how long the predictions after the bounds take, if that is seconds."""

    def on_bounds(ranks: int, candidates: int, bounds_s: float) -> None:
        most_s = _PREDICTIONS_TO_BOUNDS * bounds_s
        if most_s >= 2:
            on_ranks = f"{ranks} rank{'s' if ranks > 1 else ''}"
            tell(
                f"{candidates:,} combinations on {on_ranks} have a bound; predicting the best takes at most about {most_s:.0f} s"
            )

    return on_bounds


def _fit(
    fields: Mapping[str, str | None],
    options: SearchOptions,
    unused: Mapping[str, Any],
    *,
    gpu: str | None,
    memory_bytes: int | None,
    as_json: bool,
) -> int:
    from trainstep.cli.running.plan_fit import run_fit

    assert options.fit is not None
    if options.minimize is not None:
        raise ValueError("fit: is another search than --minimize; leave one of them out")
    others = {name: value for name, value in options.given().items() if name not in ("fit", "verify")}
    if name := next((name for name, value in {**others, **unused}.items() if value is not None), None):
        raise ValueError(f"{name}: has no effect on --fit; leave it out")
    verify = options.verify
    return run_fit(fields, options.fit, gpu=gpu, memory_bytes=memory_bytes, verify=verify, as_json=as_json)


def _space(fields: Mapping[str, str | None], minimize: str, global_batch: int | None) -> Space:
    if minimize not in OBJECTIVES:
        raise ValueError(f"minimize: {minimize!r} is not known; known: {', '.join(OBJECTIVES)}")
    if global_batch is not None and not 1 <= global_batch <= MOST_SEQUENCES:
        raise ValueError(f"global_batch: must be a whole number from 1 to {MOST_SEQUENCES:,}, not {global_batch}")
    if name := next((name for name, value in fields.items() if name in FLEET_FIELDS and value is not None), None):
        raise ValueError(f"{name}: --minimize searches one node; plan its result with --{name.replace('_', '-')}")
    named = grid_from_text(dict(fields))
    strategies = planned_strategies(named, OURS)
    ranks = named.pop("ranks", [1])
    for count in ranks:
        build(PlanConfig, {"ranks": count}, where="plan")  # refuses what is no number of ranks
    if minimize == RANKS:
        if len(ranks) > 1:
            raise ValueError(f"ranks: --minimize ranks tries 1, 2, 4... up to one number; name {max(ranks)} alone")
        ranks = [2**power for power in range(ranks[0].bit_length()) if 2**power < ranks[0]] + ranks
    named = {"model": ["small"], **named}
    if any(isinstance(model, str) and ":" in model for model in named["model"]):
        raise ValueError(
            "minimize: the time of a model of your own has no formulas, so that nothing can be compared; measure: trainstep bench "
            "--preset fastest"
        )
    if "sync" in named:
        named["sync"] = strategies
        if BASELINE in strategies:
            raise ValueError(
                "sync: with none each rank trains by itself, so that no strategy can be compared with it; leave it out"
            )
    if any(isinstance(shards, int) and shards < max(ranks) for shards in named.get("shard_ranks", ())):
        raise ValueError(
            "shard_ranks: --minimize does not compare groups of ranks; leave it out, or plan them as a list"
        )
    return space_of(named, global_batch=global_batch, ranks=ranks)


def _commands(found: Found) -> tuple[str, ...]:
    """How to measure the best and the runner-up: one command if one option differs, else one for each."""
    if found.best is None or found.runner_up is None:
        return ()
    best, other = (found.space.command_options(choice.config) for choice in (found.best, found.runner_up))
    verbs = ["bench" if choice.config.ranks == 1 else "parallel" for choice in (found.best, found.runner_up)]
    differing = [name for name in best if name in other and best[name] != other[name]]
    # An option that only one of both strategies has is ignored by the other.
    if len(differing) == 1 and verbs[0] == verbs[1] and (best.keys() == other.keys() or differing == ["sync"]):
        [name] = differing
        both = {**other, **best, name: f"{_word(best[name])},{_word(other[name])}"}
        compared = {"compare": name} if verbs[0] == "bench" else {}
        return (_command(verbs[0], {**both, **compared}),)
    return _command(verbs[0], best), _command(verbs[1], other)


def _command(verb: str, options: Mapping[str, Any]) -> str:
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", _word(value))]
    return shlex.join(["trainstep", verb, *words])


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _check_files(page: Path | None, out_config: Path | None) -> None:
    """ValueError for files that cannot be written or would replace something else."""
    from trainstep.report.kit.output_file import check_output

    if page is not None:
        check_output("page", page, "html")
    if out_config is None:
        return
    if page is not None and page.resolve() == out_config.resolve():
        raise ValueError(f"out_config: {out_config} is the page's file too; name another")
    check_output("out_config", out_config, "options")


def _write_page(page: Path, found: Found, answer: Answer, calibration: Calibration) -> None:
    from trainstep.report.kit.output_file import write_output
    from trainstep.report.page import page_of_sections

    model = found.space.fixed["model"]
    text = page_of_sections(
        [search_section(found)],
        title=f"Search of a step's options: {model}",
        answers=[answer],
        summary="Predicted by formula; nothing was run.",
        sources=[("command", shlex.join(["trainstep", *sys.argv[1:]])), ("calibration", calibration.origin)],
    )
    write_output("page", page, "html", text)


def _write_toml(path: Path, space: Space, config: RanksConfig, answer: Answer) -> None:
    from trainstep.report.kit.output_file import FIRST_LINES, write_output
    from trainstep.report.step.preset import toml_value

    assert not isinstance(config.run.model, UserModel)
    lines: Sequence[str] = [
        FIRST_LINES["options"],
        f"# By: {shlex.join(['trainstep', *sys.argv[1:]])}",
        f"# {answer.verdict}",
        f"# For: trainstep {'bench' if config.ranks == 1 else 'parallel'} --config {path}",
        *(f"{name} = {toml_value(value)}" for name, value in space.command_options(config).items()),
    ]
    write_output("out_config", path, "options", "\n".join(map(one_line, lines)) + "\n")

"""`trainstep bench --preset fastest`: runs the search of plan/preset.py on this machine, resumably, and writes TOML.

Every measurement is looked up in the file of records first, so a search that was killed goes on where it stopped, and a finished
one answers at once. A dry run is the same search, which stops at the first measurement that the file does not have.
"""

import itertools
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainstep.cli.cells import FAULTED, UNFINISHED, interrupt_says
from trainstep.cli.options import GridOptions, is_installed
from trainstep.cli.running.progress import CellProgress, duration_words
from trainstep.cli.streams import outliving_reader, show_found
from trainstep.config.grid import expand
from trainstep.config.run import PRECISIONS, TIMING_FIELDS
from trainstep.measure.harness.lab import Lab
from trainstep.measure.harness.sets_plan import FEWEST_SETS
from trainstep.measure.harness.sweep import check_same_place
from trainstep.plan.preset import Result, changes_within, search
from trainstep.plan.trials import Options
from trainstep.records.compare import MINIMUM_PAIRS
from trainstep.records.record import Environment
from trainstep.records.store import RUNS, Store
from trainstep.report.kit.visible import one_line

if TYPE_CHECKING:
    from trainstep.measure.harness.runner import Limits

_FILE = "preset-fastest.jsonl"


def run_presets(
    grid: Mapping[str, Sequence[Any]],
    given_device: str | None,
    device: str,
    allow_precision: str | None,
    bounds: "Limits",
    how: GridOptions,
    here: Environment,
) -> int:
    """Search for each cell of the grid and show the results. Returns the exit code."""
    precisions = allowed_precisions(allow_precision)
    if bounds.processes is not None and bounds.processes < MINIMUM_PAIRS:
        raise ValueError(
            f"processes: a preset keeps a change by a verdict, which needs at least {MINIMUM_PAIRS} processes a side, not "
            f"{bounds.processes}; take more, or leave processes out"
        )
    if how.page is not None:
        raise ValueError("page: a preset writes TOML and Markdown; trainstep report makes a page of its records")
    store = how.store(how.out or RUNS / _FILE, "bench")
    starts = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    labels = [cell.label for cell in expand(grid, {"device": device})]
    if len(starts) != len(labels):
        raise ValueError("preset: two cells of the grid are the same; leave one out")
    shown = [name for name in grid if name not in TIMING_FIELDS] if how.out is None else ()
    words = [
        cell.label if how.out is None or len(starts) > 1 else ""
        for cell in expand(grid, {"device": device}, named=shown)
    ]
    paths = [_toml_path(store.path, word) for word in words]
    for path in paths:
        _check_replaceable(path)
    if given_device is not None:
        starts = [{**start, "device": given_device} for start in starts]
    if not how.allow_mixed:
        check_same_place(store, here)
    lab = lab_of(store, bounds, how, device)
    if how.dry_run:
        return _show_plan([_searched(start, precisions, lab) for start in starts], starts, labels, lab, store, how)
    results = []
    with store.locked(), interrupt_says(lambda: f"finished measurements are kept in {store.path}; run it again"):
        for start, label in zip(starts, labels, strict=True):
            tell(f"{label}: searching the fastest options; records: {store.path}", how)
            results.append(_searched(start, precisions, lab))
    return _show(results, labels, paths, lab, store, how, here)


def allowed_precisions(text: str | None) -> list[str]:
    """The precisions that the search may take. ValueError for one that does not exist."""
    names = [] if text is None else list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in PRECISIONS:
            raise ValueError(f"allow_precision: {name!r} is not known; known: {', '.join(PRECISIONS)}")
    return names


def _searched(start: Options, precisions: Sequence[str], lab: Lab) -> Result:
    changes = changes_within(precisions, built_in=":" not in str(start["model"]), is_installed=is_installed)
    lab.start = start
    return search(start, changes, key_of=lab.key_of, trial=lab.trial, compare=lab.compare)


def lab_of(store: Store, bounds: "Limits", how: GridOptions, device: str, *, began_s: float | None = None) -> Lab:
    """A lab that shows its progress on standard error, and notes this command in its records.

    Under a budget a comparison takes the fewest processes that give a verdict, so that more changes are measured.
    """
    if bounds.processes is None and how.budget_minutes is not None:
        bounds = replace(bounds, processes=FEWEST_SETS)
    command = shlex.join(["trainstep", *sys.argv[1:]])
    return Lab(
        store,
        bounds,
        device=device,
        progress=lambda cells: CellProgress(cells, quiet=how.quiet),
        say=lambda line: tell(line, how),
        facts={"command": command, "defaults_from": how.defaults_from},
        budget_minutes=how.budget_minutes,
        began_s=began_s,
        dry_run=how.dry_run,
    )


def tell(line: str, how: GridOptions) -> None:
    """Print a line of progress."""
    if not how.quiet:
        with outliving_reader(sys.stderr):
            print(one_line(line), file=sys.stderr, flush=True)


def _toml_path(records: Path, label: str) -> Path:
    """`runs/preset-fastest-tiny-context-64.toml`; the records' name alone for an empty label."""
    words = "-".join("".join(c if c.isalnum() or c in "._" else " " for c in label).split())
    return records.with_name(f"{records.stem}{'-' if words else ''}{words}.toml")


def _check_replaceable(path: Path) -> None:
    """ValueError for a file that is not a preset, before hours of measuring."""
    from trainstep.report.kit.output_file import check_output

    check_output("out", path, "preset")
    check_output("out", path.with_suffix(".md"), "markdown")


def _show_plan(
    results: Sequence[Result],
    starts: Sequence[Options],
    labels: Sequence[str],
    lab: Lab,
    store: Store,
    how: GridOptions,
) -> int:
    """Print what the file of records has of each search, what would be measured next, and about how long that takes."""
    plans: list[dict[str, Any]] = []
    for result, start, label in zip(results, starts, labels, strict=True):
        left_s = len(result.untried) * (lab.trial_s(start) + lab.comparison_s(start))
        known = [{"change": step.change, "outcome": step.word, "reason": step.reason} for step in result.steps]
        plans.append({"label": label, "known": known, "to_try": result.untried, "expected_s": left_s})
    with outliving_reader(sys.stdout):
        if how.json:
            print(json.dumps({"dry_run": True, "records": str(store.path), "searches": plans}, indent=1))
            return 0
        for result, plan in zip(results, plans, strict=True):
            count = len(result.untried)
            left = (
                f"{count} to try, at most about {duration_words(plan['expected_s'])}"
                if count
                else "the search is finished"
            )
            print(one_line(f"{plan['label']}: {left}"))
            for step in result.steps:
                print(one_line(f"  {step.change}: {step.word}: {step.reason}"))
            for name in result.untried:
                print(one_line(f"  {name}: to try"))
        print(one_line(f"records: {store.path} (nothing was run)"))
    return 0


def _show(
    results: Sequence[Result],
    labels: Sequence[str],
    paths: Sequence[Path],
    lab: Lab,
    store: Store,
    how: GridOptions,
    here: Environment,
) -> int:
    """Write the files of TOML and Markdown, print the answers and tables. Returns the exit code."""
    from trainstep.records.whole_file import whole_file
    from trainstep.report.kit.frames import markdown
    from trainstep.report.kit.output_file import write_output
    from trainstep.report.kit.tables import filled
    from trainstep.report.step.preset import preset_answer, preset_table, preset_toml

    command = shlex.join(["trainstep", *sys.argv[1:]])
    answers, tables = [], []
    for result, label, path in zip(results, labels, paths, strict=True):
        answers.append(preset_answer(label, result, str(path)))
        tables.append(preset_table(label, result))
        if result.start_s is None:
            continue
        chosen = {name: value for name, value in result.chosen.items() if name not in TIMING_FIELDS}
        key = lab.record_key(result.chosen)
        record = f"{store.path}, key {key}" if key else str(store.path)
        toml = preset_toml(label, result, chosen, command=command, record=record, here=here)
        with whole_file(path) as file:
            file.write(toml.encode())
        write_output("out", path.with_suffix(".md"), "markdown", markdown(tables[-1:], answers[-1:]))
    stream = sys.stderr if how.json else sys.stdout
    show_found(answers, filled(*tables), as_json=how.json, every=how.every, for_programs=tables)
    with outliving_reader(stream):
        written = [path for result, path in zip(results, paths, strict=True) if result.start_s is not None]
        print(f"records: {store.path}", *(f"preset: {path}" for path in written), sep="\n", file=stream, flush=True)
    if any(result.untried for result in results):
        return UNFINISHED
    return FAULTED if any(result.trouble for result in results) else 0

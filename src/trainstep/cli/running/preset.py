"""`trainstep bench --preset fastest`: runs the search of plan/preset.py on this machine, resumably, and writes TOML.

Every measurement is looked up in the file of records first, so a search that was killed goes on where it stopped, and a finished
one answers at once. A dry run is the same search, which stops at the first measurement that the file does not have.
"""

import itertools
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from trainstep.cli.cells import FAULTED, UNFINISHED, interrupt_says
from trainstep.cli.options import GridOptions
from trainstep.cli.running.progress import CellProgress, span_words
from trainstep.cli.streams import outliving_reader
from trainstep.config.grid import Cell, expand, group_name
from trainstep.config.run import PRECISIONS
from trainstep.measure.harness.sweep import check_same_place
from trainstep.plan.preset import Options, Result, Trial, changes_within, search
from trainstep.records.compare import Comparison, compare_records
from trainstep.records.durations import earlier_durations, expected_time
from trainstep.records.record import Environment, Record
from trainstep.records.store import RUNS, Store
from trainstep.report.kit.visible import one_line

if TYPE_CHECKING:
    from trainstep.measure.harness.runner import Limits

TRIAL_STEPS = 10
"""The least warm-ups of a trial. Their losses are compared; wrong gradients show only after some updates."""
TIMING_FIELDS = frozenset(("steps", "warmups", "sync", "nvtx", "cold_compile", "seed"))
"""Fields that say how a step is timed: a preset leaves them to its user."""
_FILE = "preset-fastest.jsonl"
_FEWEST_PROCESSES = 6
"""Of each variant in a comparison, unless --processes says otherwise (measure/harness/interleave.py)."""
_LEAST_VOCABULARY = 256
"""Bytes of text need it."""


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
    lab = _Lab(store, bounds, how, device)
    if how.dry_run:
        return _show_plan([_searched(start, precisions, lab) for start in starts], starts, labels, lab, store, how)
    results = []
    with store.locked(), interrupt_says(lambda: f"finished measurements are kept in {store.path}; run it again"):
        for start, label in zip(starts, labels, strict=True):
            lab.tell(f"{label}: searching the fastest options; records: {store.path}")
            results.append(_searched(start, precisions, lab))
    return _show(results, labels, paths, lab, store, how, here)


def allowed_precisions(text: str | None) -> list[str]:
    """The precisions that the search may take. ValueError for one that does not exist."""
    names = [] if text is None else list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in PRECISIONS:
            raise ValueError(f"allow_precision: {name!r} is not known; known: {', '.join(PRECISIONS)}")
    return names


def _searched(start: Options, precisions: Sequence[str], lab: "_Lab") -> Result:
    changes = changes_within(precisions, built_in=":" not in str(start["model"]))
    lab.start = start
    return search(start, changes, key_of=lab.key_of, trial=lab.trial, compare=lab.compare)


class _Lab:
    """Measures for a search what the store does not have, until the budget is spent; nothing in a dry run."""

    def __init__(self, store: Store, bounds: "Limits", how: GridOptions, device: str) -> None:
        self._store, self._bounds, self._how, self._device = store, bounds, how, device
        self._records = store.finished()
        self._command = shlex.join(["trainstep", *sys.argv[1:]])
        self._began_s = time.monotonic()
        self.start: Options = {}
        """The start of the search that runs; progress names what differs from it."""
        self._trials_s: list[float] = []
        self._comparisons_s: list[float] = []

    def key_of(self, options: Options) -> str:
        """The key of the options' cell. ValueError says why the config refuses them."""
        return self._cell(options).key

    def trial(self, options: Options, repeat: int) -> Trial | None:
        """One process alone, or an earlier run's record of that."""
        cell = self._trial_cell(options)
        known = [record for record in self._records if record.key == cell.key and _is_trial(record)]
        if len(known) > repeat:
            record = known[repeat]
        elif self._how.dry_run or self._is_spent(self.trial_s(options)):
            return None
        else:
            [record] = self._run([cell], self._trials_s)
        failure = record.failure
        if failure is not None:
            return Trial(failure_kind=failure.kind, phase=failure.phase, message=failure.message)
        losses = tuple(record.tables["losses"]["loss"])
        return Trial(losses=losses, step_s=min(record.samples["step"].values))

    def compare(self, before: Options, after: Options, repeat: int) -> Comparison | None:
        """Both interleaved, or an earlier run's records of that: its first comparison of this pair, or with repeat 1 its second."""
        changed = _changed(before, after)
        cells = [self._cell(before, changed), self._cell(after, changed)]
        pairs = self._stored(cells)
        if len(pairs) > repeat:
            pair = pairs[repeat]
        elif self._how.dry_run or self._is_spent(self.comparison_s(after)):
            return None
        else:
            records = {record.key: record for record in self._run(cells, self._comparisons_s)}
            pair = (records[cells[0].key], records[cells[1].key])
            self.tell(f"{cells[1].label}: {compare_records(*pair).reason}")
        return compare_records(*pair)

    def record_key(self, options: Options) -> str | None:
        """The key of the options' records; None if the store has none."""
        key = self._cell(options).key
        return key if any(record.key == key for record in self._records) else None

    def trial_s(self, options: Options) -> float:
        """About how many seconds a trial takes."""
        if self._trials_s:
            return fmean(self._trials_s)
        return expected_time(self._trial_cell(options), earlier_durations([self._store.path, RUNS])).seconds

    def comparison_s(self, options: Options) -> float:
        """About how many seconds a comparison takes; before the first, as many trials as it has processes at least."""
        if self._comparisons_s:
            return fmean(self._comparisons_s)
        return 2 * (self._bounds.processes or _FEWEST_PROCESSES) * self.trial_s(options)

    def tell(self, line: str) -> None:
        """Print a line of progress."""
        if not self._how.quiet:
            with outliving_reader(sys.stderr):
                print(one_line(line), file=sys.stderr, flush=True)

    def _cell(self, options: Options, named: Sequence[str] = ()) -> Cell:
        grid = {name: [value] for name, value in options.items()}
        [cell] = expand(grid, {"device": self._device}, named=named)
        return cell

    def _trial_cell(self, options: Options) -> Cell:
        """The cell with enough warm-ups, and on text where the model is ours and can read it."""
        config = self._cell(options).config
        # On random tokens there is little to learn, and a wrong gradient changes the loss by less than bf16's rounding does.
        reads = config["data"] == "random" and config["model"].get("vocab_size", 0) >= _LEAST_VOCABULARY
        text = {"data": "stdlib"} if reads else {}
        trial = {**options, **text, "warmups": max(config["warmups"], TRIAL_STEPS)}
        return self._cell(trial, _changed(self.start, options))

    def _stored(self, cells: Sequence[Cell]) -> list[tuple[Record, Record]]:
        """The complete comparisons of these cells, oldest first."""
        runs: dict[str, dict[str, Record]] = {}
        for record in self._records:
            group = str(record.fact("interleaving_group", ""))
            if group.startswith(f"{group_name(cells)} "):
                runs.setdefault(group, {})[record.key] = record
        first, second = (cell.key for cell in cells)
        return [(run[first], run[second]) for run in runs.values() if run.keys() == {first, second}]

    def _run(self, cells: Sequence[Cell], durations_s: list[float]) -> list[Record]:
        """Measure one group; each record is on disk before this returns."""
        from trainstep.measure.harness.local import run_groups
        from trainstep.measure.harness.runner import with_facts

        measured: list[Record] = []
        began_s = time.monotonic()
        with CellProgress(cells, quiet=self._how.quiet) as progress:
            progress.finished(0, len(cells), ())
            for records in run_groups([cells], self._bounds, progress.tell):
                for record in records:
                    noted = with_facts(record, command=self._command, defaults_from=self._how.defaults_from)
                    self._store.append(noted)
                    measured.append(noted)
                done = len({record.key for record in measured})
                progress.finished(done, len(cells), records, whole=done == len(cells))
        durations_s.append(time.monotonic() - began_s)
        self._records += measured
        return measured

    def _is_spent(self, next_s: float) -> bool:
        """Whether a measurement of so many seconds would end after the budget. The first always runs."""
        minutes = self._how.budget_minutes
        if minutes is None or not (self._trials_s or self._comparisons_s):
            return False
        return time.monotonic() - self._began_s + next_s > minutes * 60


def _changed(before: Options, after: Options) -> list[str]:
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _is_trial(record: Record) -> bool:
    """Whether the record tells what a trial must tell; those of earlier versions have no losses."""
    alone = record.fact("interleaving_group") is None
    return alone and (record.failure is not None or "losses" in record.tables)


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
    lab: _Lab,
    store: Store,
    how: GridOptions,
) -> int:
    """What the file of records has of each search, what would be measured next, and about how long that takes."""
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
                f"{count} to try, at most about {span_words(plan['expected_s'])}" if count else "the search is finished"
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
    lab: _Lab,
    store: Store,
    how: GridOptions,
    here: Environment,
) -> int:
    """Write the files of TOML and Markdown, print the answers and tables. Returns the exit code."""
    from trainstep.records.whole_file import whole_file
    from trainstep.report.kit.answer import print_answers
    from trainstep.report.kit.frames import json_text, markdown
    from trainstep.report.kit.output_file import write_output
    from trainstep.report.kit.tables import filled
    from trainstep.report.kit.terminal import print_tables
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
    with outliving_reader(sys.stdout):
        if how.json:
            sys.stdout.write(json_text(tables, answers))
        else:
            print_answers(answers, sys.stdout)
            print_tables(filled(*tables), [], sys.stdout, every=how.every)
    with outliving_reader(stream):
        written = [path for result, path in zip(results, paths, strict=True) if result.start_s is not None]
        print(f"records: {store.path}", *(f"preset: {path}" for path in written), sep="\n", file=stream, flush=True)
    if any(result.untried for result in results):
        return UNFINISHED
    return FAULTED if any(result.trouble for result in results) else 0

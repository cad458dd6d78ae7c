"""`trainstep bench --preset fastest`: runs the search of plan/preset.py on this machine, resumably, and writes TOML."""

import itertools
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainstep.cli.cells import UNFINISHED, interrupt_says
from trainstep.cli.options import GridOptions
from trainstep.cli.streams import outliving_reader
from trainstep.config.grid import Cell, expand, group_name
from trainstep.config.run import PRECISIONS
from trainstep.measure.harness.sweep import check_same_place
from trainstep.plan.preset import Measured, Options, Probe, Result, changes_within, search
from trainstep.records.compare import compare_records
from trainstep.records.record import Environment, Record
from trainstep.records.store import RUNS, Store
from trainstep.report.kit.visible import one_line

if TYPE_CHECKING:
    from trainstep.measure.harness.runner import Limits

SEEDS = 3
"""Seeds of the start whose losses give the spread."""
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
    if how.page is not None:
        raise ValueError("page: a preset writes TOML and Markdown; trainstep report makes a page of its records")
    out = how.out or RUNS / _FILE
    store = how.store(out, "bench")
    starts = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    labels = [cell.label for cell in expand(grid, {"device": device})]
    if len(starts) != len(labels):
        raise ValueError("preset: two cells of the grid are the same; leave one out")
    if given_device is not None:
        starts = [{**start, "device": given_device} for start in starts]
    paths = [_toml_path(store.path, label if len(labels) > 1 else "") for label in labels]
    for path in paths:
        _check_replaceable(path)
    if not how.allow_mixed:
        check_same_place(store, here)
    lab = _Lab(store, bounds, how, device)
    if how.dry_run:
        return _show_plan(starts, labels, precisions, lab)
    results = []
    with store.locked(), interrupt_says(lambda: f"finished comparisons are kept in {store.path}; run it again"):
        for start, label in zip(starts, labels, strict=True):
            rows = changes_within(precisions, built_in=_is_built_in(start))
            lab.tell(f"{label}: {len(rows)} changes to try, each compared with the best before it")
            results.append(search(start, rows, refusal=lab.refusal, probe=lab.probe, compare=lab.compare))
    return _show(results, labels, paths, store, how, here)


def allowed_precisions(text: str | None) -> list[str]:
    """The precisions that the search may take. ValueError for one that does not exist."""
    names = [] if text is None else [name.strip() for name in text.split(",")]
    if wrong := next((name for name in names if name not in PRECISIONS), None):
        raise ValueError(f"allow_precision: {wrong!r} is not known; known: {', '.join(PRECISIONS)}")
    return names


class _Lab:
    """Measures for a search what the store does not have, until the budget is spent."""

    def __init__(self, store: Store, bounds: "Limits", how: GridOptions, device: str) -> None:
        self._store, self._bounds, self._how, self._device = store, bounds, how, device
        self._command = shlex.join(["trainstep", *sys.argv[1:]])
        self._began_s, self._ran = time.monotonic(), 0

    def refusal(self, options: Options) -> str | None:
        """The first sentence of the config's refusal."""
        try:
            self._cell(options)
        except ValueError as error:
            return str(error)
        return None

    def probe(self, options: Options) -> Probe | None:
        """The start alone, with several seeds."""
        seed = self._cell(options).config["seed"]
        cells = [self._cell({**options, "seed": seed + more}) for more in range(SEEDS)]
        alone = {rec.key: rec for rec in self._store.finished() if rec.fact("interleaving_group") is None}
        records = []
        for cell in cells:
            record = alone.get(cell.key)
            if record is None:
                if self._is_spent():
                    return None
                [record] = self._run([cell])
            if record.failure is not None:
                return Probe(failure_kind=record.failure.kind, message=record.failure.message)
            records.append(record)
        losses = [loss for record in records if (loss := _loss(record)) is not None]
        return Probe(spread=max(losses) - min(losses) if len(losses) == SEEDS else 0.0)

    def compare(self, before: Options, after: Options, repeat: int) -> Measured | None:
        """Both interleaved, or an earlier run's records of that: its first comparison of this pair, or with repeat 1 its second."""
        changed = [name for name, value in after.items() if before.get(name) != value]
        cells = [self._cell(before, changed), self._cell(after, changed)]
        pairs = self._stored(cells)
        if len(pairs) > repeat:
            pair = pairs[repeat]
        elif self._is_spent():
            return None
        else:
            records = {record.key: record for record in self._run(cells)}
            pair = (records[cells[0].key], records[cells[1].key])
        known = compare_records(*pair)
        self.tell(f"{', '.join(f'{name} {after[name]}' for name in changed)}: {known.word}: {known.reason}")
        return Measured(comparison=known, losses=(_loss(pair[0]), _loss(pair[1])))

    def tell(self, line: str) -> None:
        """Print a line of progress."""
        if not self._how.quiet:
            with outliving_reader(sys.stderr):
                print(one_line(line), file=sys.stderr, flush=True)

    def _cell(self, options: Options, named: Sequence[str] = ()) -> Cell:
        grid = {name: [value] for name, value in options.items()}
        [cell] = expand(grid, {"device": self._device}, named=named)
        return cell

    def _stored(self, cells: Sequence[Cell]) -> list[tuple[Record, Record]]:
        """The complete comparisons of these cells, oldest first."""
        runs: dict[str, dict[str, Record]] = {}
        for record in self._store.finished():
            group = str(record.fact("interleaving_group", ""))
            if group.startswith(f"{group_name(cells)} "):
                runs.setdefault(group, {})[record.key] = record
        first, second = (cell.key for cell in cells)
        return [(run[first], run[second]) for run in runs.values() if run.keys() == {first, second}]

    def _run(self, cells: Sequence[Cell]) -> list[Record]:
        """Measure one group; each record is on disk before this returns."""
        from trainstep.measure.harness.local import run_groups
        from trainstep.measure.harness.runner import with_facts

        measured: list[Record] = []
        for records in run_groups([cells], self._bounds, lambda _cell, _stage: None):
            for record in records:
                noted = with_facts(record, command=self._command, defaults_from=self._how.defaults_from)
                self._store.append(noted)
                measured.append(noted)
        self._ran += 1
        return measured

    def _is_spent(self) -> bool:
        """Whether another measurement, if it took as long as those before it, would end after the budget."""
        minutes = self._how.budget_minutes
        if minutes is None or not self._ran:
            return False
        return (time.monotonic() - self._began_s) * (1 + 1 / self._ran) > minutes * 60


def _loss(record: Record) -> float | None:
    """The loss of the record's last step; None if it failed or the loss is not finite."""
    loss = record.fact("loss")
    return loss if isinstance(loss, float) else None


def _is_built_in(start: Options) -> bool:
    return ":" not in str(start["model"])


def _toml_path(records: Path, label: str) -> Path:
    """`runs/preset-fastest.toml`, or with several cells `runs/preset-fastest-tiny-context-64.toml`."""
    words = "-".join("".join(c if c.isalnum() or c in "._" else " " for c in label).split())
    return records.with_name(f"{records.stem}{'-' if words else ''}{words}.toml")


def _check_replaceable(path: Path) -> None:
    """ValueError for a file that is not a preset, before hours of measuring."""
    from trainstep.report.kit.output_file import check_output
    from trainstep.report.step.preset import TOML_MARK

    try:
        ours = not path.exists() or path.read_bytes().startswith(TOML_MARK.encode())
    except OSError as error:
        raise ValueError(f"out: {path} cannot be read: {error.strerror}; give --out another name") from None
    if not ours:
        raise ValueError(f"out: {path} is not a preset of trainstep and would be replaced; give --out another name")
    check_output("out", path.with_suffix(".md"), "markdown")


def _show_plan(starts: Sequence[Options], labels: Sequence[str], precisions: Sequence[str], lab: _Lab) -> int:
    """What a search would try first, and what the start's config refuses; nothing is run."""
    with outliving_reader(sys.stdout):
        for start, label in zip(starts, labels, strict=True):
            print(f"{label}: nothing was run; the search would try")
            for change in changes_within(precisions, built_in=_is_built_in(start)):
                why = lab.refusal({**start, **change.options})
                when = "" if change.when == "always" else f" ({change.when})"
                print(one_line(f"  {change.name}{when}" + (f": refused with the start: {why}" if why else "")))
    return 0


def _show(
    results: Sequence[Result],
    labels: Sequence[str],
    paths: Sequence[Path],
    store: Store,
    how: GridOptions,
    here: Environment,
) -> int:
    """Write the files of TOML and Markdown, print the answers and tables. Returns the exit code."""
    from trainstep.cli.cells import FAULTED
    from trainstep.records.whole_file import whole_file
    from trainstep.report.kit.answer import print_answers
    from trainstep.report.kit.frames import json_text, markdown
    from trainstep.report.kit.output_file import write_output
    from trainstep.report.kit.terminal import print_tables
    from trainstep.report.step.preset import preset_answer, preset_table, preset_toml

    command = shlex.join(["trainstep", *sys.argv[1:]])
    answers, tables = [], []
    for result, label, path in zip(results, labels, paths, strict=True):
        answers.append(preset_answer(label, result, str(path)))
        tables.append(preset_table(label, result))
        if result.trouble:
            continue
        toml = preset_toml(label, result, command=command, records=str(store.path), here=here)
        with whole_file(path) as file:
            file.write(toml.encode())
        write_output("out", path.with_suffix(".md"), "markdown", markdown(tables[-1:], answers[-1:]))
    stream = sys.stderr if how.json else sys.stdout
    with outliving_reader(sys.stdout):
        if how.json:
            sys.stdout.write(json_text(tables, answers))
        else:
            print_answers(answers, sys.stdout)
            print_tables(tables, [], sys.stdout, every=how.every)
    with outliving_reader(stream):
        written = [path for result, path in zip(results, paths, strict=True) if not result.trouble]
        print(f"records: {store.path}", *(f"preset: {path}" for path in written), sep="\n", file=stream, flush=True)
    if any(result.untried for result in results):
        return UNFINISHED
    return FAULTED if any(result.trouble for result in results) else 0

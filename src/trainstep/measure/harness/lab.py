"""Measures what a search asks for: a step's options alone, or two sets of options interleaved. Finished measurements are kept.

    lab = Lab(store, limits, device="cuda", progress=progress, budget_minutes=4)
    lab.trial({"model": "small"}, 0), lab.compare({"model": "small"}, {"model": "small", "capture": "step"}, 0)

The callbacks of plan/trials.py, on this machine. Every measurement is looked up in the file of records first, so that a search that
was killed goes on where it stopped, and a finished one answers at once. A dry run may look up, and never measures.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import fmean
from typing import Any, Protocol

from trainstep.config.grid import Cell, expand, group_name
from trainstep.measure.harness.local import run_groups
from trainstep.measure.harness.runner import Limits, with_facts
from trainstep.measure.harness.sets_plan import FEWEST_SETS
from trainstep.plan.trials import Options, Trial
from trainstep.records.compare import Comparison, compare_records
from trainstep.records.durations import earlier_durations, expected_time
from trainstep.records.record import Record
from trainstep.records.store import RUNS, Store

TRIAL_STEPS = 10
"""The least warm-ups of a trial. Their losses are compared; wrong gradients show only after some updates."""
_LEAST_VOCABULARY = 256
"""The smallest vocabulary that can hold the bytes of a text."""


class Progress(Protocol):
    """Shows how far a group of cells is."""

    def tell(self, cell: Cell, stage: str) -> None:
        """A cell entered a stage."""

    def finished(self, done: int, of: int, records: Sequence[Record], *, whole: bool = True) -> None:
        """Some cells are done."""


class Lab:
    """Measures for a search what the store does not have, until the budget is spent; nothing in a dry run."""

    def __init__(
        self,
        store: Store,
        limits: Limits,
        *,
        device: str,
        progress: Callable[[Sequence[Cell]], AbstractContextManager[Progress]],
        say: Callable[[str], None],
        facts: Mapping[str, Any],
        budget_minutes: float | None = None,
        began_s: float | None = None,
        dry_run: bool = False,
    ) -> None:
        """`progress`: opens the progress of a group. `say`: shows a line. `facts`: added to every record. `began_s`: when the
        budget began, by time.monotonic; by default now."""
        self.store, self._limits, self._device = store, limits, device
        self._progress, self._say, self._facts = progress, say, facts
        self._budget_minutes, self._dry_run = budget_minutes, dry_run
        # A cell that an earlier command's time limit ended is tried again, as this command's may be longer.
        self._records = [
            record for record in store.finished() if record.failure is None or record.failure.kind != "timeout"
        ]
        self._began_s = time.monotonic() if began_s is None else began_s
        self.start: Options = {}
        """The options from which the search starts; progress names what differs from them."""
        self.reserved = 0
        """Number of comparisons for which the budget must have room after the next measurement."""
        self._trials_s: list[float] = []
        self._comparisons_s: list[float] = []

    def key_of(self, options: Options) -> str:
        """The key of the options' cell. ValueError says why the config refuses them."""
        return self._cell(options).key

    def trial(self, options: Options, repeat: int) -> Trial | None:
        """Measure one process alone, or take an earlier run's record of that."""
        cell = self._trial_cell(options)
        known = [record for record in self._records if record.key == cell.key and _is_trial(record)]
        if len(known) > repeat:
            record = known[repeat]
        elif self._dry_run or self._is_spent(self.trial_s(options), options):
            return None
        else:
            [record] = self._run([cell], self._trials_s)
        failure = record.failure
        if failure is not None:
            return Trial(failure_kind=failure.kind, phase=failure.phase, message=failure.message)
        losses = tuple(record.tables["losses"]["loss"])
        return Trial(losses=losses, step_s=min(record.samples["step"].values))

    def compare(self, before: Options, after: Options, repeat: int) -> Comparison | None:
        """Compare both interleaved, or take earlier records: of the first comparison of this pair, or with repeat 1 of the second.

        Steps of unlike numbers of tokens are compared by their times per token.
        """
        changed = changed_fields(before, after)
        cells = [self._cell(before, changed), self._cell(after, changed)]
        work = tokens_of(cells[1].config) / tokens_of(cells[0].config)
        pairs = self._stored(cells)
        if len(pairs) > repeat:
            return _compared(*pairs[repeat], work)
        if self._dry_run or self._is_spent(self.comparison_s(after), options=after):
            return None
        records = {record.key: record for record in self._run(cells, self._comparisons_s)}
        comparison = _compared(records[cells[0].key], records[cells[1].key], work)
        self._say(f"{cells[1].label}: {comparison.reason}")
        return comparison

    def record_key(self, options: Options) -> str | None:
        """The key of the options' records; None if the store has none."""
        key = self._cell(options).key
        return key if any(record.key == key for record in self._records) else None

    def trial_s(self, options: Options) -> float:
        """About how many seconds a trial takes."""
        if self._trials_s:
            return fmean(self._trials_s)
        return expected_time(self._trial_cell(options), earlier_durations([self.store.path, RUNS])).seconds

    def left_s(self, changes: int) -> float:
        """About how many seconds so many changes of the start take."""
        return changes * (self.trial_s(self.start) + self.comparison_s(self.start))

    def comparison_s(self, options: Options) -> float:
        """About how many seconds a comparison takes; before the first, a trial for each set of processes: both start at once."""
        if self._comparisons_s:
            return fmean(self._comparisons_s)
        return (self._limits.processes or FEWEST_SETS) * self.trial_s(options)

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
        return self._cell(trial, changed_fields(self.start, options))

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
        measured: list[Record] = []
        began_s = time.monotonic()
        with self._progress(cells) as progress:
            progress.finished(0, len(cells), ())
            for records in run_groups([cells], self._limits, progress.tell):
                for record in records:
                    noted = with_facts(record, **self._facts)
                    self.store.append(noted)
                    measured.append(noted)
                done = len({record.key for record in measured})
                progress.finished(done, len(cells), records, whole=done == len(cells))
        durations_s.append(time.monotonic() - began_s)
        self._records += measured
        return measured

    def _is_spent(self, next_s: float, options: Options) -> bool:
        """Whether a measurement of so many seconds, and what is reserved, would exceed the budget. The first always runs."""
        if self._budget_minutes is None or not (self._trials_s or self._comparisons_s):
            return False
        needed_s = next_s + self.reserved * self.comparison_s(options)
        return time.monotonic() - self._began_s + needed_s > self._budget_minutes * 60


def changed_fields(before: Options, after: Options) -> list[str]:
    """The names of the fields in which the options differ."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def tokens_of(config: Mapping[str, Any]) -> int:
    """Tokens that a step of the cell reads, on all ranks."""
    return int(config["batch_size"] * config["context"] * config["accumulation"] * config.get("ranks", 1))


def _is_trial(record: Record) -> bool:
    """Whether the record tells what a trial must tell; those of earlier versions have no losses."""
    alone = record.fact("interleaving_group") is None
    return alone and (record.failure is not None or "losses" in record.tables)


def _compared(before: Record, after: Record, work: float) -> Comparison:
    """The comparison of two records; `work`: tokens of a step of the second over those of the first."""
    if work == 1 or after.failure is not None:
        return compare_records(before, after)
    samples = {
        name: replace(column, values=tuple(value / work for value in column.values))
        for name, column in after.samples.items()
        if column.unit == "s"
    }
    comparison = compare_records(before, replace(after, samples=samples))
    return replace(comparison, reason=f"{comparison.reason}, per token")

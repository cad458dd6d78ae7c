"""Makes one cell of each script's runs, so that `trainstep compare` can match two files of them.

    before, after = whole_runs(records_of_a, records_of_b)

A run writes a record every few seconds, under a name that no other run has, so two runs have no record in common. A cell is what
the runs of one script share, but a before and an after differ in something. So cells are matched by all of `_LEVELS[0]`, and where
nothing is common by less and less of it, as long as no cells of one file become one.

One process may be slower than another for as long as it lives (records/compare.py), and the steps of one run do not show that: of
ten runs of one script, compared by their steps, 33 of 45 pairs are called different (results/cpu/equal_runs.py). So a run is one
value, the median of its steps, and there is a verdict from five runs a side on.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from trainstep.config.parsing import config_hash
from trainstep.grouping import grouped
from trainstep.records.facts import facts_of
from trainstep.records.record import Record, Samples
from trainstep.report.kit.rows import rows_of
from trainstep.report.run.runs import Run, runs_of

_RUN = "run"
_WORK = ("rank", "ranks", "device")
_LEVELS = (
    ("script", "arguments", "applied", "script_source"),
    ("script", "arguments", "applied"),
    ("script", "arguments"),
    ("file", "arguments"),
    ("file",),
)
"""What cells are matched by beside _WORK, the strictest first. `file`: the script's name without its folder."""


def whole_runs(before: Sequence[Record], after: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The records with one in place of all of a cell's runs. Matched cells have the same key; `compared_runs` counts their runs."""
    sides = [grouped(_runs(records), lambda run: _key(run, _LEVELS[0])) for records in (before, after)]
    level = next((level for level in _LEVELS if _is_common(level, sides)), _LEVELS[0])
    keyed = [{_key(runs[0], level): runs for runs in cells.values()} for cells in sides]
    first, second = (
        [
            *(record for record in records if not _is_run(record)),
            *(_record(key, runs) for key, runs in cells.items()),
        ]
        for records, cells in zip((before, after), keyed, strict=True)
    )
    return first, second


def _is_run(record: Record) -> bool:
    """Whether the record is of a run, and not a window that a proof took of a script: these are cells of their own."""
    return record.workload == _RUN and record.fact("process") is None


def _runs(records: Sequence[Record]) -> list[Run]:
    latest = {record.key: record for record in records if _is_run(record)}
    return runs_of(rows_of([("", record) for record in latest.values()]))


def _config(run: Run) -> dict[str, Any]:
    """What the runs of a cell share: the run's config without its name and step, and what its facts say of the script."""
    config = {name: run.last.config.get(name) for name in ("script", "arguments", *_WORK)}
    return {**config, "applied": run.latest("applied"), "script_source": run.latest("script_source")}


def _key(run: Run, level: Sequence[str]) -> str:
    config = _config(run)
    config["file"] = PurePath(str(config["script"])).name
    return config_hash(_RUN, {name: config[name] for name in (*_WORK, *level)})


def _is_common(level: Sequence[str], sides: Sequence[Mapping[str, Sequence[Run]]]) -> bool:
    """Whether both files have a cell in common at this level, and each still has all of its cells."""
    first, second = ([_key(runs[0], level) for runs in cells.values()] for cells in sides)
    return bool(set(first) & set(second)) and all(len(set(keys)) == len(keys) for keys in (first, second))


def _record(key: str, runs: Sequence[Run]) -> Record:
    """All runs of a cell as one record, whose values are the medians of each run's steps."""
    names = dict.fromkeys(["step", *(name for run in runs for name in run.samples)])
    values = {name: [statistics.median(run.samples[name]) for run in runs if run.samples.get(name)] for name in names}
    return replace(
        runs[-1].last,
        key=key,
        config=_config(runs[-1]),
        duration_s=sum(row.record.duration_s for run in runs for row in run.rows),
        samples={name: Samples(unit="s", values=tuple(column)) for name, column in values.items()},
        facts=facts_of(compared_runs=len(runs)),
        tables={},
    )

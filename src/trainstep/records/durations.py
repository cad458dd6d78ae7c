"""Estimate how long cells will take: from earlier records of the same cells, else of similar cells, else a rough guess.

    durations = earlier_durations([Path("runs")])
    expected_time(cell, durations)   # ExpectedTime(seconds=8.2, source="the same cell")

A similar cell has the same workload, device and model.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trainstep.config.grid import Cell
from trainstep.reading import read_file

ROUGH_S: Mapping[str, float] = {"cpu": 10.0, "cuda": 20.0}
"""Device -> seconds of an unknown cell: a process, torch's import, a build and some steps of a small model."""
ROUGH_SHARED_S = 2.0
"""Seconds of an unknown cell of a workload whose cells share a process."""
_SHARE_A_PROCESS = ("attention", "op", "ceiling", "collective")
SAME, LIKE, ROUGH = "the same cell", "cells like it", "a rough guess"
# Limits of what is read: an estimate is not worth more time.
_MOST_FILES = 30
_MOST_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class ExpectedTime:
    """The seconds that a cell is expected to take. `source`: SAME, LIKE or ROUGH."""

    seconds: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds that earlier cells took: the latest by key, and all by kind of cell."""

    of_key: Mapping[str, float]
    of_kind: Mapping[tuple[str, ...], Sequence[float]]


def earlier_durations(places: Iterable[Path]) -> Durations:
    """The durations of the records in these files and in the newest files of these folders; other lines are skipped."""
    of_key: dict[str, float] = {}
    of_kind: dict[tuple[str, ...], list[float]] = {}
    for path in _files(places):
        cells = list(_finished_cells(path))
        group_sizes = Counter(group for _, group in cells)
        for cell, group in cells:
            # Interleaved cells were alive together, so each record's duration is that of the whole group.
            seconds = cell["duration_s"] / (group_sizes[group] if group else 1)
            of_key[cell["key"]] = seconds
            of_kind.setdefault(_kind(cell["workload"], cell["config"]), []).append(seconds)
    return Durations(of_key=of_key, of_kind=of_kind)


def expected_time(cell: Cell, durations: Durations) -> ExpectedTime:
    """The seconds that a cell will take, and the source of that number."""
    if (seconds := durations.of_key.get(cell.key)) is not None:
        return ExpectedTime(seconds=seconds, source=SAME)
    if alike := durations.of_kind.get(_kind(cell.workload, cell.config)):
        return ExpectedTime(seconds=median(alike), source=LIKE)
    alone_s = ROUGH_S.get(str(cell.config.get("device")), ROUGH_S["cpu"])
    return ExpectedTime(seconds=ROUGH_SHARED_S if cell.workload in _SHARE_A_PROCESS else alone_s, source=ROUGH)


def _files(places: Iterable[Path]) -> list[Path]:
    """The newest files, oldest first, so that a later record of a key replaces an earlier one."""
    paths = {path for place in places for path in (place.glob("*.jsonl") if place.is_dir() else [place])}
    files = sorted((path for path in paths if path.is_file()), key=lambda path: path.stat().st_mtime)
    return files[-_MOST_FILES:]


def _finished_cells(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The finished cells of a file, each with the group of cells that were interleaved live with it (empty for none)."""
    # Plain JSON, not `Store`: an estimate needs neither the store's checks nor the tables that it fetches.
    try:
        lines = read_file(path, largest_bytes=_MOST_BYTES).splitlines()
    except ValueError:
        return
    for line in lines:
        try:
            plain = json.loads(line)
            facts = {name: fact["value"] for name, fact in plain["facts"].items()}
            finished = plain["failure"] is None and plain["duration_s"] > 0 and isinstance(plain["config"], dict)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if finished and isinstance(plain["key"], str):
            yield plain, str(facts.get("interleaving_group")) if facts.get("interleaving") == "live" else ""


def _kind(workload: object, config: Mapping[str, Any]) -> tuple[str, ...]:
    model = config.get("model")
    name = model.get("function") or model.get("name") if isinstance(model, Mapping) else model
    return str(workload), str(config.get("device")), str(name)

"""About how long cells will take: by earlier records of the same cells, else of cells like them, else by a stated rough cost.

durations = earlier_durations([Path("runs")])
expected_time(cell, durations)   # ExpectedTime(seconds=8.2, source="the same cell")
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trainstep.config.cell import Cell
from trainstep.reading import read_file

ROUGH_S: Mapping[str, float] = {"cpu": 10.0, "cuda": 20.0}
"""Device -> seconds of a cell of which nothing is known: a process, torch's import, a build and some steps of a small model."""
ROUGH_IN_COMPANY_S = 2.0
"""The same where cells of the workload share a process."""
_SHARE_A_PROCESS = ("attention", "ceiling", "collective")
SAME, LIKE, ROUGH = "the same cell", "cells like it", "a rough guess"
_MOST_FILES = 30
_MOST_BYTES = 4 * 2**20
"""The size up to which a file is read: an estimate is not worth more."""


@dataclass(frozen=True, kw_only=True)
class ExpectedTime:
    """`source`: SAME, LIKE or ROUGH."""

    seconds: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Durations:
    """What earlier cells took: of each key the last, and of each kind of cell all."""

    of_key: Mapping[str, float]
    of_kind: Mapping[tuple[str, ...], Sequence[float]]


def earlier_durations(places: Iterable[Path]) -> Durations:
    """What the records in these files, and in the newest files of these folders, took. What is no record is passed over."""
    of_key: dict[str, float] = {}
    of_kind: dict[tuple[str, ...], list[float]] = {}
    for path in _files(places):
        lines = list(_lines(path))
        company = Counter(group for _, group in lines)
        for line, group in lines:
            # Those that took turns were alive together: each one's time is that of all of them
            seconds = line["duration_s"] / (company[group] if group else 1)
            of_key[line["key"]] = seconds
            of_kind.setdefault(_kind(line["workload"], line["config"]), []).append(seconds)
    return Durations(of_key=of_key, of_kind=of_kind)


def expected_time(cell: Cell, durations: Durations) -> ExpectedTime:
    """The seconds that a cell will take, and by what. Like it is a cell of the same workload, device and model."""
    if (seconds := durations.of_key.get(cell.key)) is not None:
        return ExpectedTime(seconds=seconds, source=SAME)
    if alike := durations.of_kind.get(_kind(cell.workload, cell.config)):
        return ExpectedTime(seconds=median(alike), source=LIKE)
    alone_s = ROUGH_S.get(str(cell.config.get("device")), ROUGH_S["cpu"])
    return ExpectedTime(seconds=ROUGH_IN_COMPANY_S if cell.workload in _SHARE_A_PROCESS else alone_s, source=ROUGH)


def _files(places: Iterable[Path]) -> list[Path]:
    """The files, oldest first, so that the last word is the newest."""
    found = {path for place in places for path in (place.glob("*.jsonl") if place.is_dir() else [place])}
    there = sorted((path for path in found if path.is_file()), key=lambda path: path.stat().st_mtime)
    return there[-_MOST_FILES:]


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The finished cells of a file, each with the name of those it took turns with while alive (nothing for a cell alone).

    As JSON: an estimate needs nothing of what `Store` checks and fetches.
    """
    try:
        lines = read_file(path, largest_bytes=_MOST_BYTES).splitlines()
    except ValueError:
        return
    for line in lines:
        try:
            plain = json.loads(line)
            facts = {name: fact["value"] for name, fact in plain["facts"].items()}
            whole = plain["failure"] is None and plain["duration_s"] > 0 and isinstance(plain["config"], dict)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if whole and isinstance(plain["key"], str):
            yield plain, str(facts.get("interleaving_group")) if facts.get("interleaving") == "live" else ""


def _kind(workload: object, config: Mapping[str, Any]) -> tuple[str, ...]:
    model = config.get("model")
    name = model.get("function") or model.get("name") if isinstance(model, Mapping) else model
    return str(workload), str(config.get("device")), str(name)

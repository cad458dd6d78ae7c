"""Where the numbers of a report come from, and the command that would measure them again."""

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from trainstep import __version__
from trainstep.config.parsing import build_run, fields_of, to_plain
from trainstep.config.presets import size_names
from trainstep.config.run import RunConfig
from trainstep.records.record import FORMAT, Environment
from trainstep.report.forms import gibibytes
from trainstep.report.notes import mfu_conventions
from trainstep.report.rows import Row, flat_config, machines, of_workload, words

Facts = list[tuple[str, str]]
AGAIN = "to measure again"


def provenance(rows: Sequence[Row]) -> Facts:
    """(what, its value) of the records: commands, files, dates, format, MFU's convention and peak."""
    files = dict.fromkeys(row.file for row in rows)
    started = sorted(row.record.started_at for row in rows)
    counts = {file: sum(row.file == file for row in rows) for file in files}
    return [
        *commands(rows),
        *(("record file", f"{file} ({count} record{'s' if count > 1 else ''})") for file, count in counts.items()),
        ("started", started[0] if started[0] == started[-1] else f"{started[0]} to {started[-1]}"),
        ("measuring took", f"{sum(row.record.duration_s for row in rows):,.0f} s"),
        ("record format", f"{FORMAT}, read by trainstep {__version__}"),
        *(("model FLOPs", sentence) for sentence in mfu_conventions(rows)),
    ]


def environments(rows: Sequence[Row]) -> list[tuple[str, Facts]]:
    """Each environment that took part, by its label, fact by fact."""
    return [(name, _environment_facts(one, rows)) for name, one in machines(rows).items()]


def commands(rows: Sequence[Row]) -> Facts:
    """What was typed where the records say so; else the `trainstep bench` whose grid holds the cells."""
    found = dict.fromkeys(row.record.facts["command"].value for row in rows if "command" in row.record.facts)
    typed = [("command", str(command)) for command in found]
    steps = [row for row in of_workload(rows, "train_step") if "command" not in row.record.facts]
    if not steps:
        return typed
    flat = [flat_config(row.record) for row in steps]
    defaults = _defaults()
    names = [name for name in fields_of(RunConfig) if any(_differs(name, one, defaults) for one in flat)]
    values = {name: list(dict.fromkeys(words(one.get(name)) for one in flat)) for name in names}
    options = [f"--{name.replace('_', '-')} {shlex.quote(','.join(given))}" for name, given in values.items()]
    cells = math.prod(map(len, values.values()))
    more = "" if cells == len(steps) else f"  # a grid of {cells} cells, of which {len(steps)} are here"
    return [*typed, (AGAIN, " ".join(["trainstep bench", *options]) + more)]


def _defaults() -> Mapping[str, Any]:
    return {name: value for name, value in to_plain(build_run({})).items() if name != "model"}


def _differs(name: str, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Whether the field must be said; the shape of a known size goes without."""
    if name == "model":
        return True
    if name not in config:
        return False
    if name not in defaults:
        return config.get("model") in size_names() and config[name] != _shape(str(config["model"])).get(name)
    return bool(config[name] != defaults[name])


def _shape(model: str) -> Mapping[str, Any]:
    shape: Mapping[str, Any] = to_plain(build_run({"model": model}))["model"]
    return shape


def _environment_facts(environment: Environment, rows: Sequence[Row]) -> Facts:
    """Every field that is known; the hosts of all records that ran in the like."""
    facts = {field.name: getattr(environment, field.name) for field in dataclasses.fields(environment)}
    facts["hostname"] = ", ".join(sorted({row.record.environment.hostname for row in rows if _alike(row, environment)}))
    for name in ("memory_bytes", "gpu_memory_bytes"):
        if facts[name] is not None:
            facts[name] = f"{gibibytes(facts[name])} GiB"
    dirty = facts.pop("dirty")
    if facts["commit"] is not None:
        facts["commit"] += {True: ", with uncommitted changes", False: ", clean", None: ""}[dirty]
    return [
        (name.removesuffix("_bytes").replace("_", " "), words(value))
        for name, value in facts.items()
        if value is not None
    ]


def _alike(row: Row, environment: Environment) -> bool:
    one = dataclasses.replace(row.record.environment, hostname=environment.hostname)
    return one == environment

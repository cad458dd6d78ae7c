"""Reads records as the rows of a report, each with its point: the config values that tell it from the other rows.

`quantities(row)` has a row's numbers in SI units with the unit in each name, for CSV, JSON, tables and charts.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trainstep.config.instruments import INSTRUMENTS
from trainstep.config.model import ModelConfig
from trainstep.config.parsing import ADDED_LATER
from trainstep.config.run import Phase
from trainstep.grouping import grouped
from trainstep.records import summary as record_summary
from trainstep.records.derive import Mfu, mfu, model_flops_per_s, tokens_per_s
from trainstep.records.facts import FACTS, IN_EVERY_ROW
from trainstep.records.record import Environment, Record
from trainstep.records.store import Store
from trainstep.records.summary import summarize
from trainstep.records.tables import table_lines
from trainstep.report.kit.visible import one_line
from trainstep.traces.verdict import LAUNCH_BOUND, NEAR_THE_LINE, step_limit

ALWAYS = ("model", "context", "kind", "implementation", "seq", "head_dim")
_SHAPE = {field.name for field in dataclasses.fields(ModelConfig)} - {"name"}
_MACHINE = ("torch", "commit", "driver", "cuda", "triton", "gpu_count", "cpu", "trainstep", "source")
"""Fields that tell environments with the same chip apart; not the host's name, because the nodes of a cluster are alike."""
PROVENANCE = ("machine", "hostname", "file", "started_at")
_HASHES = {"commit": 12, "source": 12}
"""Characters of a hash shown in a label; the page's foot has the whole hash."""
PHASES = tuple(str(phase) for phase in Phase)
TIMES = (*PHASES, "step")
_UNIT_SUFFIX = {"s": "s", "Hz": "hz", "bytes": "bytes", "count": "count", "flops": "flops", "W": "w", "ratio": "ratio"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One record, its file and its point: model, context and every other config value that varies in the report."""

    record: Record
    file: str
    point: Mapping[str, Any]

    def label(self, *, without: Iterable[str] = (), named: bool = False) -> str:
        """`small 256 bf16`: the point's values, in order; with `named`, numbers have their names: `small context 256 bf16`."""
        left_out = set(without)
        values = [
            f"{name} {words(value)}" if named and type(value) in (int, float) else words(value)
            for name, value in self.point.items()
            if name not in left_out
        ]
        return " ".join(values) or self.record.workload

    def rest(self, *names: str) -> tuple[tuple[str, str], ...]:
        """The point without these names: rows with the same rest differ along them only."""
        return tuple((name, words(value)) for name, value in self.point.items() if name not in names)


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """The last record of each cell in these files; a folder means every *.jsonl under it. ValueError if there is no record."""
    pairs: list[tuple[str, Record]] = []
    for file in dict.fromkeys(file for path in paths for file in record_files(path)):
        latest = {record.key: record for record in Store(file).read()}
        pairs += [(str(file), record) for record in latest.values()]
    if not pairs:
        raise ValueError(f"{', '.join(map(str, paths))}: holds no records")
    return rows_of(pairs)


def record_files(path: Path) -> list[Path]:
    """The file, or every *.jsonl under the folder. ValueError for a folder without any."""
    if path.is_dir():
        files = sorted(path.rglob("*.jsonl"))
        if not files:
            raise ValueError(f"{path}: a folder without any *.jsonl in it")
        return files
    return [path]


def rows_of(pairs: Sequence[tuple[str, Record]]) -> list[Row]:
    """Rows with their points, from (file, record) pairs."""
    workloads = dict.fromkeys(record.workload for _, record in pairs)
    points = {name: iter(_points([pair for pair in pairs if pair[1].workload == name])) for name in workloads}
    return [Row(record=record, file=file, point=next(points[record.workload])) for file, record in pairs]


def of_workload(rows: Iterable[Row], name: str) -> list[Row]:
    """The rows of one workload."""
    return [row for row in rows if row.record.workload == name]


def flat_config(record: Record) -> dict[str, Any]:
    """The config as one flat mapping: `model` is the model's name, and the fields of its shape stand beside the others."""
    later = {name: value for name, value in ADDED_LATER.get(record.workload, {}).items() if name not in record.config}
    config = {**record.config, **later}
    model = config.pop("model", None)
    if isinstance(model, Mapping):
        shape = {name: value for name, value in model.items() if name not in ("name", "function")}
        return {"model": model.get("function") or model.get("name"), **config, **shape}
    return {"model": model, **config} if model is not None else config


def varying(rows: Sequence[Row]) -> list[str]:
    """The names along which these rows differ."""
    names = dict.fromkeys(name for row in rows for name in row.point)
    return [name for name in names if len({words(row.point.get(name)) for row in rows}) > 1]


def machines(rows: Sequence[Row]) -> dict[str, Environment]:
    """Label -> environment of each kind of machine and software in these rows."""
    environments: dict[str, Environment] = {}
    for label, row in zip(machine_labels([row.record.environment for row in rows]), rows, strict=True):
        environments.setdefault(label, row.record.environment)
    return environments


def needless(rows: Sequence[Row]) -> list[str]:
    """The names of machine, host, file and time that labels can leave out: all of them if labels stay distinct, else none."""
    named = [name for name in PROVENANCE if any(name in row.point for row in rows)]
    distinct = {row.label(without=named) for row in rows}
    return named if len(distinct) == len(rows) else []


def words(value: Any) -> str:
    """A config value as people write it, on one line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else one_line(str(value))


def _points(pairs: Sequence[tuple[str, Record]]) -> list[dict[str, Any]]:
    """Model, context, and every field that varies; the machine if it varies; host, file and time only where points are equal
    without them."""
    configs = [flat_config(record) for _, record in pairs]
    kept = [name for name in ALWAYS if any(config.get(name) is not None for config in configs)]
    names = dict.fromkeys(name for config in configs for name in config)
    kept += [name for name in names if name not in kept and _varies(name, configs)]
    points = [{name: config.get(name) for name in kept} for config in configs]
    environments = [record.environment for _, record in pairs]
    _add(points, "machine", machine_labels(environments), if_doubled=False)
    _add(points, "hostname", [environment.hostname for environment in environments], if_doubled=True)
    _add(points, "file", [file for file, _ in pairs], if_doubled=True)
    _add(points, "started_at", [record.started_at for _, record in pairs], if_doubled=True)
    return points


def _varies(name: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a field varies; a field of the model's shape must vary among configs with the same model name."""
    values: dict[str | None, set[str]] = {}
    for config in configs:
        model = words(config.get("model")) if name in _SHAPE else None
        values.setdefault(model, set()).add(words(config.get(name)))
    return any(len(distinct) > 1 for distinct in values.values())


def _add(points: Sequence[dict[str, Any]], name: str, values: Sequence[Any], *, if_doubled: bool) -> None:
    """Add a name to every point if its values differ and, for `if_doubled`, if two points are still equal."""
    doubled = len({tuple(map(words, point.values())) for point in points}) < len(points)
    if len(set(values)) > 1 and (doubled or not if_doubled):
        for point, value in zip(points, values, strict=True):
            point[name] = value


def machine_labels(environments: Sequence[Environment]) -> list[str]:
    """Each environment's chip, followed by only those fields that tell it from other environments with the same chip."""
    identities = [
        (environment.gpu or environment.cpu, *(getattr(environment, name) for name in _MACHINE))
        for environment in environments
    ]
    labels = {identity: str(identity[0]) for identity in identities}
    for place, name in enumerate(_MACHINE, 1):
        for label, alike in grouped(labels, labels.__getitem__).items():
            if len({identity[place] for identity in alike}) > 1:
                for identity in alike:
                    labels[identity] = f"{label}, {name} {words(identity[place])[: _HASHES.get(name)]}"
    return [labels[identity] for identity in identities]


def quantities(row: Row) -> dict[str, Any]:
    """The point, statistics of each quantity (mean, standard deviation, median, quartiles), derived rates, facts, the failure.

    All undeclared facts are included: a user's workload has them. A failed row has no numbers: half a cell is no result.
    """
    record = row.record
    numbers: dict[str, Any] = {"workload": record.workload, **row.point}
    if record.failure is None:
        derived, errors = _derived(record)
        numbers |= _times(record) | derived | facts_in(record, IN_EVERY_ROW)
        numbers |= facts_in(record, _beside(record, numbers))
        if "launch_bound" in numbers:
            numbers["launch_bound"] = host_limit(record) == LAUNCH_BOUND  # by the present rule, as the doubts beside it
        numbers["doubts"] = "; ".join([*doubts(record), *errors])
    numbers |= _failure(record)
    machine = ("gpu", "cpu", "torch", "hostname")
    numbers |= {name: getattr(record.environment, name) for name in machine if name not in row.point}
    source = {"started_at": record.started_at, "key": record.key, "record_file": row.file}
    return {**numbers, "commit": record.environment.commit, **source}


def doubts(record: Record) -> tuple[str, ...]:
    """Short phrases that say why the record's time is doubtful, also where it is the host's time; empty if it is not."""
    phrase = {LAUNCH_BOUND: LAUNCH_BOUND, NEAR_THE_LINE: "near launch-bound"}.get(host_limit(record) or "")
    return (*record_summary.doubts(record), *([phrase] if phrase else []))


def host_limit(record: Record) -> str | None:
    """What limits the cell's step or call, by `step_limit` from its medians; without them, by the flag that the record stored.

    None if neither is known: on a CPU, or where each phase was synchronised. Every answer, table and raw row asks here.
    """
    if record.config.get("sync") == "phase" or record.failure is not None:
        return None
    profiled = next((line for line in table_lines(record.tables.get("verdict")) if line["on_device"]), None)
    if profiled:
        return step_limit(**{name: profiled[name] for name in ("busy_s", "enqueue_s", "step_s")})
    busy_s = record.fact("device_busy_s")
    step_s, enqueue_s = (_median_of(record, names) for names in (("step", "time_s"), ("enqueue", "host_s")))
    if busy_s and step_s:
        return step_limit(busy_s=busy_s, enqueue_s=enqueue_s, step_s=step_s)
    return LAUNCH_BOUND if record.fact("launch_bound") else None


def _median_of(record: Record, names: Sequence[str]) -> float | None:
    """The median of the first of these quantities that was timed."""
    timed = (record.samples[name].values for name in names if name in record.samples)
    return next((median(values) for values in timed if values), None)


def known_mfu(record: Record) -> Mfu | None:
    """A record's MFU; None if it cannot be computed, or is over 100 %, which the row's doubts then say."""
    try:
        return mfu(record)
    except ValueError:
        return None


def facts_in(record: Record, names: Iterable[str]) -> dict[str, Any]:
    """The values of the named facts that a record has, in this order."""
    return {name: record.fact(name) for name in names if name in record.facts}


def _beside(record: Record, numbers: Mapping[str, Any]) -> list[str]:
    """Facts that no other table of the workload shows: those of its instrument, and those that are not declared."""
    instrument = INSTRUMENTS.get(record.workload)
    alone = instrument is not None and not (instrument.tables or instrument.compared_tables)
    declared = instrument.facts if instrument and alone else ()
    return [*declared, *(name for name in record.facts if name not in FACTS and name not in numbers)]


def shown_facts(record: Record) -> dict[str, Any]:
    """The facts that its instrument adds to its raw rows, beside the facts in every workload's rows."""
    return facts_in(record, INSTRUMENTS[record.workload].facts)


def time_of(numbers: Mapping[str, Any], name: str) -> tuple[float, float | None] | None:
    """(median, half the interquartile range) of a quantity of time in seconds; None if it was not measured, and no range for
    a single value."""
    middle = numbers.get(f"{name}_median_s")
    if middle is None or numbers.get(f"{name}_samples_count") == 1:
        return None if middle is None else (middle, None)
    return middle, (numbers[f"{name}_p75_s"] - numbers[f"{name}_p25_s"]) / 2


def mean_of(numbers: Mapping[str, Any], name: str) -> tuple[float, float | None] | None:
    """(mean, standard deviation) of a quantity of time in seconds, as papers state it; None if it was not measured."""
    mean = numbers.get(f"{name}_mean_s")
    return None if mean is None else (mean, numbers.get(f"{name}_std_s"))


def step_means(rows: Iterable[Row]) -> list[tuple[Row, tuple[float, float | None]]]:
    """The rows with a timed step, each with its mean and standard deviation, which a few slow steps raise."""
    return [(row, time) for row in rows if (time := mean_of(quantities(row), "step"))]


def _times(record: Record) -> dict[str, Any]:
    times: dict[str, Any] = {}
    for quantity, samples in record.samples.items():
        if not samples.values:
            continue
        summary = summarize(samples)
        unit = _UNIT_SUFFIX.get(samples.unit, samples.unit)
        name = quantity.removesuffix(f"_{unit}")  # time_s: its unit goes to the end
        parts = ("mean", "std", "median", "p05", "p25", "p75", "p95")
        times |= {f"{name}_{part}_{unit}": getattr(summary, part) for part in parts}
        if summary.n == 1:
            times[f"{name}_std_{unit}"] = None
        times |= {f"{name}_median_{part}_{unit}": getattr(summary, part) for part in ("low", "high")}
        times[f"{name}_samples_count"] = summary.n
    return times


def _derived(record: Record) -> tuple[dict[str, Any], list[str]]:
    """Rates of a step, and errors in them: an MFU over 100 % is left out, and its error becomes a doubt."""
    every_rate = {"tokens_per_s": tokens_per_s(record), "model_flops_per_s": model_flops_per_s(record)}
    rates: dict[str, Any] = {name: rate for name, rate in every_rate.items() if rate is not None}
    try:
        utilisation = mfu(record)
    except ValueError as error:
        return rates, [str(error)]
    if utilisation is None:
        return rates, []
    return rates | {
        "mfu_ratio": utilisation.share,
        "mfu_peak_flops_per_s": utilisation.peak_flops,
        "mfu_dtype": utilisation.dtype,
        "mfu_convention": utilisation.convention,
        "mfu_peak_source": utilisation.peak_source,
    }, []


def _failure(record: Record) -> dict[str, Any]:
    failure = record.failure
    if failure is None:
        return {"failure": None}
    parts = ("phase", "message", "asked_bytes", "allocated_bytes", "capacity_bytes")
    return {"failure": failure.kind, **{f"failure_{part}": getattr(failure, part) for part in parts}}

"""Records as the rows of a report: read from stores, each with the values that tell it from the others.

`quantities(row)` has its numbers, raw and in SI with the unit in each name: what CSV and JSON carry, tables and charts show.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainstep.config.instruments import INSTRUMENTS
from trainstep.config.model import ModelConfig
from trainstep.config.phases import Phase
from trainstep.records.derive import mfu, model_flops_per_s, tokens_per_s
from trainstep.records.facts import FACTS, IN_EVERY_ROW
from trainstep.records.record import Environment, Record
from trainstep.records.store import Store
from trainstep.records.summary import doubts, summarize
from trainstep.report.visible import one_line

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
ALWAYS = ("model", "context", "kind", "implementation", "seq", "head_dim")
_SHAPE = {field.name for field in dataclasses.fields(ModelConfig)} - {"name"}
_MACHINE = ("torch", "commit", "driver", "cuda", "triton", "gpu_count", "cpu", "trainstep", "source")
"""What tells environments with the same chip apart; not the host's name, since the nodes of a cluster are alike."""
PROVENANCE = ("machine", "hostname", "file", "started_at")
_HASHES = {"commit": 12, "source": 12}
"""Characters of a hash that tell it from others; the page's foot has it whole."""
PHASES = tuple(str(phase) for phase in Phase)
TIMES = (*PHASES, "step")
_UNIT_SUFFIX = {"s": "s", "Hz": "hz", "bytes": "bytes", "count": "count", "flops": "flops", "W": "w", "ratio": "ratio"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One record, the file it came from and its point: model, context and whatever else varies in the report."""

    record: Record
    file: str
    point: Mapping[str, Any]

    def label(self, *, without: Iterable[str] = ()) -> str:
        """`small 256 bf16`: the point's values, in order."""
        left_out = set(without)
        values = [words(value) for name, value in self.point.items() if name not in left_out]
        return " ".join(values) or self.record.workload

    def rest(self, *names: str) -> tuple[tuple[str, str], ...]:
        """The point without these names: rows with the same rest differ along them only."""
        return tuple((name, words(value)) for name, value in self.point.items() if name not in names)


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """The last record of each cell in these files; a folder means every *.jsonl under it. ValueError if there is none."""
    found: list[tuple[str, Record]] = []
    for file in dict.fromkeys(file for path in paths for file in record_files(path)):
        latest = {record.key: record for record in Store(file).read()}
        found += [(str(file), record) for record in latest.values()]
    if not found:
        raise ValueError(f"{', '.join(map(str, paths))}: holds no records")
    return rows_of(found)


def record_files(path: Path) -> list[Path]:
    """The file, or every *.jsonl under the folder. ValueError for a folder without any."""
    if path.is_dir():
        files = sorted(path.rglob("*.jsonl"))
        if not files:
            raise ValueError(f"{path}: a folder without any *.jsonl in it")
        return files
    return [path]


def rows_of(found: Sequence[tuple[str, Record]]) -> list[Row]:
    """Rows with their points, from (file, record) pairs."""
    workloads = dict.fromkeys(record.workload for _, record in found)
    points = {name: iter(_points([pair for pair in found if pair[1].workload == name])) for name in workloads}
    return [Row(record=record, file=file, point=next(points[record.workload])) for file, record in found]


def of_workload(rows: Iterable[Row], name: str) -> list[Row]:
    """The rows of one workload."""
    return [row for row in rows if row.record.workload == name]


def flat_config(record: Record) -> dict[str, Any]:
    """The config with the model's name in place of its shape, which stands beside the other fields."""
    config = dict(record.config)
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
    """Label -> environment of each kind of machine and software that took part."""
    found: dict[str, Environment] = {}
    for label, row in zip(machine_labels(rows), rows, strict=True):
        found.setdefault(label, row.record.environment)
    return found


def machine_labels(rows: Sequence[Row]) -> list[str]:
    """Each row's label in `machines`."""
    return _machine_labels([row.record.environment for row in rows])


def needless(rows: Sequence[Row]) -> list[str]:
    """Of the machine, host, file and time in these rows' names, what a chart's labels can do without."""
    there = [name for name in PROVENANCE if any(name in row.point for row in rows)]
    kept = {row.label(without=there) for row in rows}
    return there if len(kept) == len(rows) else []


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items with one key together, in the order of appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def table_lines(table: Mapping[str, Sequence[Any]] | None) -> list[dict[str, Any]]:
    """A table of a record, from columns to lines; none where there is no table."""
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)] if table else []


def words(value: Any) -> str:
    """A config value as people write it, on one line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else one_line(str(value))


def _points(pairs: Sequence[tuple[str, Record]]) -> list[dict[str, Any]]:
    """Model, context and what else varies; the machine where it does; host, file and time only where nothing else tells."""
    flat = [flat_config(record) for _, record in pairs]
    kept = [name for name in ALWAYS if any(name in one for one in flat)]
    kept += [
        name for name in dict.fromkeys(name for one in flat for name in one) if name not in kept and _tells(name, flat)
    ]
    points = [{name: one.get(name) for name in kept} for one in flat]
    environments = [record.environment for _, record in pairs]
    _add(points, "machine", _machine_labels(environments), if_doubled=False)
    _add(points, "hostname", [one.hostname for one in environments], if_doubled=True)
    _add(points, "file", [file for file, _ in pairs], if_doubled=True)
    _add(points, "started_at", [record.started_at for _, record in pairs], if_doubled=True)
    return points


def _tells(name: str, flat: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a field varies; a field of the model's shape, whether it varies where the model's name does not."""
    seen: dict[str | None, set[str]] = {}
    for one in flat:
        seen.setdefault(words(one.get("model")) if name in _SHAPE else None, set()).add(words(one.get(name)))
    return any(len(values) > 1 for values in seen.values())


def _add(points: Sequence[dict[str, Any]], name: str, values: Sequence[Any], *, if_doubled: bool) -> None:
    """Add a name to every point if its values differ and, where asked, if two points are still the same."""
    doubled = len({tuple(map(words, point.values())) for point in points}) < len(points)
    if len(set(values)) > 1 and (doubled or not if_doubled):
        for point, value in zip(points, values, strict=True):
            point[name] = value


def _machine_labels(environments: Sequence[Environment]) -> list[str]:
    """The chip's name for each, with just as much more as tells unlike environments apart."""
    identities = [(one.gpu or one.cpu, *(getattr(one, name) for name in _MACHINE)) for one in environments]
    labels = {identity: str(identity[0]) for identity in identities}
    for place, name in enumerate(_MACHINE, 1):
        for label, alike in grouped(labels, labels.__getitem__).items():
            if len({identity[place] for identity in alike}) > 1:
                for identity in alike:
                    labels[identity] = f"{label}, {name} {words(identity[place])[: _HASHES.get(name)]}"
    return [labels[identity] for identity in identities]


def quantities(row: Row) -> dict[str, Any]:
    """The point, then mean, standard deviation, median and quartiles of each quantity, what is derived, the facts, the failure. Of
    facts that are declared nowhere, a workload of one's own has them, all.

    A failed row keeps its numbers empty: half of a cell is no result.
    """
    record = row.record
    numbers: dict[str, Any] = {"workload": record.workload, **row.point}
    if record.failure is None:
        derived, errors = _derived(record)
        numbers |= _times(record) | derived | facts_in(record, IN_EVERY_ROW)
        numbers |= facts_in(record, _beside(record, numbers))
        numbers["doubts"] = "; ".join([*doubts(record), *errors])
    numbers |= _failure(record)
    machine = ("gpu", "cpu", "torch", "hostname")
    numbers |= {name: getattr(record.environment, name) for name in machine if name not in row.point}
    source = {"started_at": record.started_at, "key": record.key, "record_file": row.file}
    return {**numbers, "commit": record.environment.commit, **source}


def facts_in(record: Record, names: Iterable[str]) -> dict[str, Any]:
    """The values of those of these facts that a record has, in this order."""
    return {name: record.fact(name) for name in names if name in record.facts}


def _beside(record: Record, numbers: Mapping[str, Any]) -> list[str]:
    """Facts that no other table of the workload shows: its instrument's, and those that are declared nowhere."""
    instrument = INSTRUMENTS.get(record.workload)
    alone = instrument is not None and not (instrument.tables or instrument.compared_tables)
    named = instrument.facts if instrument and alone else ()
    return [*named, *(name for name in record.facts if name not in FACTS and name not in numbers)]


def shown_facts(record: Record) -> dict[str, Any]:
    """What its instrument's raw rows show beside the facts in every workload's."""
    return facts_in(record, INSTRUMENTS[record.workload].facts)


def time_of(numbers: Mapping[str, Any], name: str) -> tuple[float, float | None] | None:
    """(median, half the interquartile range) in seconds of a quantity of time, or None where it was not seen; of a single value
    without a range."""
    median = numbers.get(f"{name}_median_s")
    if median is None or numbers.get(f"{name}_samples_count") == 1:
        return None if median is None else (median, None)
    return median, (numbers[f"{name}_p75_s"] - numbers[f"{name}_p25_s"]) / 2


def mean_of(numbers: Mapping[str, Any], name: str) -> tuple[float, float | None] | None:
    """The same with mean and standard deviation, which papers ask for."""
    mean = numbers.get(f"{name}_mean_s")
    return None if mean is None else (mean, numbers.get(f"{name}_std_s"))


def step_means(rows: Iterable[Row]) -> list[tuple[Row, tuple[float, float | None]]]:
    """The rows whose step was timed, each with mean and standard deviation: for what a few slow steps do to a mean."""
    return [(row, time) for row in rows if (time := mean_of(quantities(row), "step"))]


def _times(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for named, samples in record.samples.items():
        if not samples.values:
            continue
        summary = summarize(samples)
        unit = _UNIT_SUFFIX.get(samples.unit, samples.unit)
        name = named.removesuffix(f"_{unit}")  # time_s: its unit goes to the end
        parts = ("mean", "std", "median", "p05", "p25", "p75", "p95")
        found |= {f"{name}_{part}_{unit}": getattr(summary, part) for part in parts}
        if summary.n == 1:
            found[f"{name}_std_{unit}"] = None
        found |= {f"{name}_median_{part}_{unit}": getattr(summary, part) for part in ("low", "high")}
        found[f"{name}_samples_count"] = summary.n
    return found


def _derived(record: Record) -> tuple[dict[str, Any], list[str]]:
    """Rates of a step, and what is wrong with them: an MFU over 100 % is no number, its error is a doubt."""
    rates = {"tokens_per_s": tokens_per_s(record), "model_flops_per_s": model_flops_per_s(record)}
    found: dict[str, Any] = {name: rate for name, rate in rates.items() if rate is not None}
    try:
        utilisation = mfu(record)
    except ValueError as error:
        return found, [str(error)]
    if utilisation is None:
        return found, []
    found |= {
        "mfu_ratio": utilisation.share,
        "mfu_peak_flops_per_s": utilisation.peak_flops,
        "mfu_dtype": utilisation.dtype,
    }
    return found | {"mfu_convention": utilisation.convention, "mfu_peak_source": utilisation.peak_source}, []


def _failure(record: Record) -> dict[str, Any]:
    failure = record.failure
    if failure is None:
        return {"failure": None}
    parts = ("phase", "message", "asked_bytes", "allocated_bytes", "capacity_bytes")
    return {"failure": failure.kind, **{f"failure_{part}": getattr(failure, part) for part in parts}}

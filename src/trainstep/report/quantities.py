"""A row's numbers, raw and in SI with the unit in each name: what CSV and JSON carry, and what tables and charts show."""

from collections.abc import Iterable, Mapping
from typing import Any

from trainstep.config.instruments import INSTRUMENTS
from trainstep.config.phases import Phase
from trainstep.records.derive import mfu, model_flops_per_s, tokens_per_s
from trainstep.records.facts import FACTS, IN_EVERY_ROW
from trainstep.records.record import Record
from trainstep.records.summary import doubts, summarize
from trainstep.report.rows import Row

PHASES = tuple(str(phase) for phase in Phase)
TIMES = (*PHASES, "step")
_UNIT_SUFFIX = {"s": "s", "Hz": "hz", "bytes": "bytes", "count": "count", "flops": "flops", "W": "w", "ratio": "ratio"}


def quantities(row: Row) -> dict[str, Any]:
    """The point, then mean, standard deviation and median of each quantity, what is derived, the facts, the failure. Of facts that
    are declared nowhere, a workload of one's own has them, all.

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
    environment = record.environment
    machine = {
        "gpu": environment.gpu,
        "cpu": environment.cpu,
        "torch": environment.torch,
        "hostname": environment.hostname,
    }
    return (
        numbers
        | {name: value for name, value in machine.items() if name not in row.point}
        | {
            "commit": environment.commit,
            "started_at": record.started_at,
            "key": record.key,
            "record_file": row.file,
        }
    )


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
    """(mean, std) in seconds of a quantity of time, or None where it was not seen."""
    mean = numbers.get(f"{name}_mean_s")
    return None if mean is None else (mean, numbers.get(f"{name}_std_s"))


def _times(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for named, samples in record.samples.items():
        if not samples.values:
            continue
        summary = summarize(samples)
        unit = _UNIT_SUFFIX.get(samples.unit, samples.unit)
        name = named.removesuffix(f"_{unit}")  # time_s: its unit goes to the end
        found[f"{name}_mean_{unit}"] = summary.mean
        found[f"{name}_std_{unit}"] = summary.std if summary.n > 1 else None
        found[f"{name}_median_{unit}"] = summary.median
        found |= {f"{name}_{part}_{unit}": getattr(summary, part) for part in ("p05", "p95")}
        found |= {f"{name}_median_{part}_{unit}": getattr(summary, part) for part in ("low", "high")}
        found[f"{name}_samples_count"] = summary.n
    return found


def _derived(record: Record) -> tuple[dict[str, Any], list[str]]:
    """Rates of a step, and what is wrong with them: an MFU over 100 % is no number, its error is a doubt."""
    tokens = tokens_per_s(record)
    found: dict[str, Any] = {} if tokens is None else {"tokens_per_s": tokens}
    flops = model_flops_per_s(record)
    if flops is not None:
        found["model_flops_per_s"] = flops
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
    return {
        "failure": failure.kind,
        "failure_phase": failure.phase,
        "failure_message": failure.message,
        "failure_asked_bytes": failure.asked_bytes,
        "failure_allocated_bytes": failure.allocated_bytes,
        "failure_capacity_bytes": failure.capacity_bytes,
    }

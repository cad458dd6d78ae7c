"""Reads and writes the JSON of pytest-benchmark (`pytest --benchmark-json FILE`, `pytest-benchmark compare`).

    read_benchmarks(path).seconds        # {"tests/test_step.py::test_forward": 0.0123}, the median of each benchmark's rounds
    write_benchmarks(path, {"step": [0.0123, 0.0125]}, environment)

The format is that of pytest-benchmark 4 and 5: `machine_info`, `commit_info`, `benchmarks` with `fullname` and `stats` in seconds,
`datetime`, `version`. Files that we write have our environment under `machine_info.trainstep`, because a baseline must say on which
machine it was measured.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainstep.reading import check_regular
from trainstep.records.amounts import limits_of
from trainstep.records.facts import is_number
from trainstep.records.whole_file import whole_file

_VERSION = "5.2.3"
_MACHINE = ("node", "processor", "machine", "python_version", "python_implementation", "release", "system", "cpu")


@dataclass(frozen=True, kw_only=True)
class Benchmarks:
    """What a file holds. `seconds`: benchmark -> median; `rounds`: benchmark -> all its times, where the file has them."""

    seconds: Mapping[str, float]
    rounds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    """pytest-benchmark's description of the machine."""
    environment: Mapping[str, Any] | None = None
    """trainstep's environment; None in a file that pytest-benchmark wrote."""


def read_benchmarks(path: Path) -> Benchmarks:
    """The benchmarks of a file. ValueError, in a sentence, if it is missing, is other JSON, or has an impossible time."""
    check_regular(path)
    try:
        plain = json.loads(path.read_bytes())
        benchmarks = [(entry["fullname"], entry["stats"]) for entry in plain["benchmarks"]]
        machine = plain.get("machine_info") or {}
        seconds = {str(name): stats["median"] for name, stats in benchmarks}
        rounds = {str(name): tuple(stats.get("data") or ()) for name, stats in benchmarks}
        environment = machine.get("trainstep")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path}: is not JSON of pytest-benchmark") from None
    if not seconds:
        raise ValueError(f"{path}: holds no benchmark")
    for name, times in ((name, (seconds[name], *rounds[name])) for name in seconds):
        if not all(is_number(value) and value > 0 for value in times):
            raise ValueError(f"{path}: {name} has times that are not above 0")
        if (place := limits_of("s").first_outside(times)) is not None:
            raise ValueError(f"{path}: {name} has a time of {times[place]:g} s, but times must be at most a century")
    if environment is not None and not isinstance(environment, dict):
        raise ValueError(f"{path}: its environment is not a mapping")
    machine = {key: machine[key] for key in _MACHINE if key in machine}
    return Benchmarks(seconds=seconds, rounds=rounds, machine=machine, environment=environment)


def write_benchmarks(
    path: Path, rounds: Mapping[str, Sequence[float]], environment: Mapping[str, Any], commit: str | None = None
) -> None:
    """Write times in seconds as pytest-benchmark would, whole or not at all. OSError if the file cannot be written."""
    plain = {
        "machine_info": {
            "node": environment.get("hostname"),
            "machine": environment.get("cpu"),
            "python_version": environment.get("python"),
            "system": environment.get("os"),
            "cpu": {"brand_raw": environment.get("cpu"), "count": environment.get("cores")},
            "trainstep": dict(environment),
        },
        "commit_info": {"id": commit, "dirty": False, "project": None, "branch": None},
        "benchmarks": [_benchmark(name, values) for name, values in rounds.items()],
        "datetime": datetime.now(UTC).isoformat(),
        "version": _VERSION,
    }
    with whole_file(path) as file:
        file.write(json.dumps(plain, indent=1, allow_nan=False).encode() + b"\n")


def _benchmark(name: str, values: Sequence[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    inner = [value for value in values if low - 1.5 * (high - low) <= value <= high + 1.5 * (high - low)]
    far = [value for value in values if abs(value - mean) > deviation]
    return {
        "group": None,
        "name": name.rpartition("::")[2],
        "fullname": name,
        "params": None,
        "param": None,
        "extra_info": {},
        "options": {
            "disable_gc": False,
            "timer": "perf_counter",
            "min_rounds": len(values),
            "max_time": 0,
            "min_time": 0,
            "warmup": False,
        },
        "stats": {
            "min": min(values),
            "max": max(values),
            "mean": mean,
            "stddev": deviation,
            "rounds": len(values),
            "median": middle,
            "iqr": high - low,
            "q1": low,
            "q3": high,
            "iqr_outliers": len(values) - len(inner),
            "stddev_outliers": len(far),
            "outliers": f"{len(far)};{len(values) - len(inner)}",
            "ld15iqr": min(inner),
            "hd15iqr": max(inner),
            "ops": 1 / mean,
            "total": sum(values),
            "data": list(values),
            "iterations": 1,
        },
    }

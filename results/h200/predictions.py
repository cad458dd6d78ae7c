"""Predictions of a sweep that are written down before its steps are measured, and what was measured then.

    python results/h200/predictions.py freeze predicted > results/h200/predicted.ndjson        # before; needs no GPU
    trainstep sweep sweeps/predicted.toml --out results/h200/predicted.jsonl                   # on an H200
    python results/h200/predictions.py table predicted > results/h200/predicted_beside.md      # the two side by side

Measured so far: sweeps/predicted.toml and sweeps/predicted_again.toml on H200s, sweeps/predicted_ranks.toml on two H100s, which
`--machine h100` takes, in results/h100. A line of NAME.ndjson is a cell: its key, its label, and what `trainstep plan` says of its
time and memory with the calibration that comes with trainstep.

predicted_calibration.jsonl has what `trainstep doctor --measure` found on the same machine minutes before;
`trainstep plan --grade predicted.jsonl --calibration predicted_calibration.jsonl` predicts with that.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from trainstep.config.grid import Cell, expand_all
from trainstep.config.machine import machine_spec
from trainstep.config.sweep import load_sweep
from trainstep.plan.cell_config import planned_config
from trainstep.plan.time.calibration import calibration_for
from trainstep.plan.time.grade import CAPTURED, DEVICE, GROUPS, HOST
from trainstep.plan.time.recorded import recorded_prediction
from trainstep.plan.time.step_time import step_time
from trainstep.records.record import Record
from trainstep.records.store import Store
from trainstep.report.plan.grade import step_words

RESULTS = Path(__file__).parents[1]
SWEEPS = RESULTS.parent / "sweeps"
GPUS = {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3"}


def cells(sweep: str) -> list[Cell]:
    """The cells of the sweep, which are the same on a machine without a GPU."""
    return expand_all(load_sweep(SWEEPS / f"{sweep}.toml").grids({}), {"device": "cuda"})


def freeze(sweep: str, machine: str) -> None:
    """Print a line a cell, but for those of torch's strategies."""
    calibration = calibration_for(machine_spec(GPUS[machine]))
    assert calibration is not None
    for cell in cells(sweep):
        if cell.config.get("sync", "none").startswith("torch_"):
            continue  # when torch's strategies send is not known
        predicted = step_time(planned_config(cell.workload, cell.config), calibration)
        group = CAPTURED if predicted.is_captured else HOST if predicted.host_may_limit else DEVICE
        prediction = recorded_prediction(cell.workload, cell.config, gpu=GPUS[machine])
        print(json.dumps({"key": cell.key, "label": cell.label, "group": group, **(prediction or {})}))


def table(sweep: str, machine: str) -> None:
    """Print Markdown: a row a step, then the errors of each group."""
    frozen = [json.loads(line) for line in (RESULTS / machine / f"{sweep}.ndjson").read_text().splitlines()]
    measured = {record.key: record for record in Store(RESULTS / machine / f"{sweep}.jsonl").read()}
    rows = [(line, measured[line["key"]]) for line in frozen if line["key"] in measured]
    print(
        "| step | limit | predicted ms | interval | measured ms | off | peak GiB, predicted | measured | off | reserved, off |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for line, record in rows:
        print("| " + " | ".join(_row(line, record)) + " |")
    print(
        "\n| limit | steps | time off, median | worst | inside | peak off, median | worst | reserved, median | worst |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    done = [(line, record) for line, record in rows if record.failure is None]
    for name in (*GROUPS, "all"):
        own = [(line, record) for line, record in done if name in (line["group"], "all")]
        if own:
            print(f"| {name} | {len(own)} | " + " | ".join(_summary(own)) + " |")


def _row(line: Mapping[str, Any], record: Record) -> Iterator[str]:
    low, high = (1e3 * bound for bound in line["step_interval_s"])
    yield from (
        step_words(planned_config(record.workload, record.config)) + _messages(record.config),
        line["group"],
        f"{1e3 * line['step_s']:.1f}",
        f"{low:.1f} to {high:.1f}",
    )
    if record.failure is not None:
        yield from (record.failure.kind, "", f"{line['peak_allocated_bytes'] / 2**30:.2f}", "", "", "")
        return
    yield f"{1e3 * _step_s(record):.1f}"
    yield f"{_time_off(line, record):+.1%}"
    yield f"{line['peak_allocated_bytes'] / 2**30:.2f}"
    yield f"{record.fact('peak_allocated_bytes') / 2**30:.2f}"
    yield f"{_bytes_off(line, record, 'peak_allocated_bytes'):+.2%}"
    yield f"{_bytes_off(line, record, 'peak_reserved_bytes'):+.2%}"


def _messages(config: Mapping[str, Any]) -> str:
    """What tells two steps of a strategy apart: how its messages travel, and in what."""
    if config.get("sync", "none") == "none":  # a baseline, or no ranks
        return ""
    narrow = [name for name in ("compute_dtype", "reduce_dtype") if config.get(name) == "bf16"]
    copies = " by copies" if config.get("transport") == "copies" else ""
    return copies + "".join(f", {name.replace('_', ' ')} bf16" for name in narrow)


def _summary(rows: list[tuple[Mapping[str, Any], Record]]) -> Iterator[str]:
    times = [abs(_time_off(line, record)) for line, record in rows]
    inside = [line["step_interval_s"][0] <= _step_s(record) <= line["step_interval_s"][1] for line, record in rows]
    yield from (f"{median(times):.1%}", f"{max(times):.1%}", f"{sum(inside)} of {len(inside)}")
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        errors = [abs(_bytes_off(line, record, name)) for line, record in rows]
        yield from (f"{median(errors):.2%}", f"{max(errors):.2%}")


def _step_s(record: Record) -> float:
    return median(record.samples["step"].values)


def _time_off(line: Mapping[str, Any], record: Record) -> float:
    return float(line["step_s"]) / _step_s(record) - 1


def _bytes_off(line: Mapping[str, Any], record: Record, name: str) -> float:
    return float(line[name]) / float(record.fact(name)) - 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("freeze", "table"))
    parser.add_argument("sweep", help="the name of its file in sweeps/")
    parser.add_argument("--machine", choices=tuple(GPUS), default="h200")
    asked = parser.parse_args()
    (freeze if asked.what == "freeze" else table)(asked.sweep, asked.machine)

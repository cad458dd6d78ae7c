"""Make the calibration of an H200 that comes with trainstep from results/h200: `python scripts/h200_calibration.py`.

It uses kernels, attention, ops, collectives and ceilings, and no time of a step, with these exceptions, which
`trainstep plan --grade` therefore does not grade:

    profile.jsonl             the host's time per launch (small at 128 tokens), and the gaps between kernels
    profile_captured.jsonl    a graph's launch, and the gaps between its kernels
    end_to_end.jsonl          the host's time per launch, of small at 128 tokens alone
    compile.jsonl             the host's time per compiled block, of small alone

Kernels of small, large and 2.7B are used, so that those of medium and xl are new shapes to the formulas.
"""

import csv
import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from h200_kernels import RECORDS, USED_MODELS, Row, kernel_traffic, matmuls, profiles, read, rows

from trainstep.config.calibration import CalibrationConfig
from trainstep.config.parsing import to_plain
from trainstep.records.facts import facts_of
from trainstep.records.record import Record, record_to_plain

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "src" / "trainstep" / "plan" / "time" / "calibrations" / "h200.json"
_MULTIPROCESSORS = 132
"""Of an H200 SXM, by its data sheet."""
_ADAMW_FUSED = "multi_tensor_apply_kernel FusedAdamMathFunctor"


def main() -> None:
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text())
    print(f"wrote {TARGET.relative_to(ROOT)}")


def text() -> str:
    """The calibration as it is shipped."""
    return json.dumps(record_to_plain(calibration()), indent=None, separators=(",", ":")).replace("},", "},\n") + "\n"


def calibration() -> Record:
    """A record of the workload `calibration`, in the environment of the copy ceiling."""
    first = read("ops.jsonl")[0]
    tables = {
        "matmuls": [*matmuls()],
        "traffic": [*kernel_traffic()],
        "attention": [*_attention(), *_torchs_attention()],
        "optimizers": [*_optimizers()],
        "collectives": [*_collectives()],
        "host": [*_host(), *_gaps()],
    }
    return replace(
        first,
        workload="calibration",
        key="0" * 16,
        config=to_plain(CalibrationConfig(device="cuda")),
        duration_s=0.0,
        samples={},
        facts=facts_of(multiprocessors=_MULTIPROCESSORS, command="python scripts/h200_calibration.py"),
        tables={name: _columns(rows) for name, rows in tables.items()},
    )


def _columns(rows: list[Row]) -> dict[str, list[Any]]:
    """Rows as a table, times rounded to the nanosecond."""
    return {
        name: [float(f"{row[name]:.4g}") if isinstance(row[name], float) else row[name] for row in rows]
        for name in rows[0]
    }


_ATTENTION_FILES = {
    "attention_hopper.jsonl": ("trainstep", "sdpa_cudnn", "sdpa_flash"),
    "attention_hopper_widths.jsonl": ("trainstep", "sdpa_cudnn", "sdpa_flash"),
    "attention_peers.jsonl": ("sdpa_flash", "flex"),
    "attention_fp32.jsonl": ("trainstep", "sdpa_efficient", "flex"),
}
"""Files of attention with the implementations that are today's."""


def _attention() -> Iterator[Row]:
    seen = set()
    for name, implementations in _ATTENTION_FILES.items():
        for record in read(name):
            config = record.config
            if record.workload != "attention" or config["implementation"] not in implementations:
                continue
            if config["mask"] != "causal" or config["direction"] == "both" or config["key_heads"] is not None:
                continue
            if config.get("fp32_precision") not in (None, "tf32x3"):
                continue
            time_s = record.fact("device_busy_s") or statistics.median(record.samples["time_s"].values)
            row = {
                "implementation": config["implementation"],
                "dtype": config["dtype"],
                "direction": config["direction"],
                "batch_heads": config["batch"] * config["heads"],
                "context": config["seq"],
                "head_dim": config["head_dim"],
            }
            if (key := tuple(row.values())) not in seen:
                seen.add(key)
                yield row | {"time_s": time_s, "source": f"{name} {record.key}"}


_BACKWARD = ("bwd", "bprop", "dot_do_o", "convert_dq")
"""What the names of backward's kernels have in them; a pass has a few, one behind the other."""


def _torchs_attention() -> Iterator[Row]:
    """The attention that torch chooses, by its kernels in the built-in model's eager steps (sdpa_kernels.py), but for medium."""
    times_s: dict[tuple[int, int, int, str], float] = {}
    with (RECORDS / "sdpa_kernels.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            case = [row[name] for name in ("attention", "precision", "compile", "capture")]
            if case == ["sdpa", "bf16_autocast", "none", "none"] and row["size"] != "medium":
                direction = "backward" if any(word in row["kernel"] for word in _BACKWARD) else "forward"
                key = (int(row["batch"]) * int(row["heads"]), int(row["context"]), int(row["head_dim"]), direction)
                times_s[key] = times_s.get(key, 0.0) + float(row["us"]) * int(row["calls"]) / 1e6
    for (batch_heads, context, head_dim, direction), time_s in times_s.items():
        yield {
            "implementation": "sdpa",
            "dtype": "bf16",
            "direction": direction,
            "batch_heads": batch_heads,
            "context": context,
            "head_dim": head_dim,
            "time_s": time_s,
            "source": "sdpa_kernels.csv",
        }


def _optimizers() -> Iterator[Row]:
    """AdamW's fused kernels in profiles; ours as adamw_chunks.txt has it, with the chunks of ops/adamw_kernel.py."""
    for record, _, kernels in profiles():
        time_s = sum(row["time_s"] for row in kernels if row["name"] == _ADAMW_FUSED)
        yield _updated("fused", 28 * record.fact("parameters"), time_s, f"profile.jsonl {record.key}")
    line = next(
        line
        for line in (RECORDS / "adamw_chunks.txt").read_text().splitlines()
        if line.startswith("efcs chunk 2048 warps 8:")
    )
    time_s = float(line.split(":")[1].split(" ms")[0]) / 1e3
    rate = float(line.split(",")[1].split(" TB/s")[0]) * 1e12
    yield _updated("trainstep", rate * time_s, time_s, "adamw_chunks.txt")
    for name in ("fused", "trainstep"):
        yield _updated(name, 4096, 10e-6, "profile_captured.jsonl: its small kernels, which count steps")


def _updated(name: str, nbytes: float, time_s: float, source: str) -> Row:
    return {"name": name, "bytes": float(nbytes), "time_s": time_s, "source": source}


def _collectives() -> Iterator[Row]:
    for name in ("all_reduce.jsonl", "all_reduce_four.jsonl"):
        for record in read(name):
            if record.config["backend"] == "nccl":
                yield {
                    "operation": record.config["operation"],
                    "ranks": record.config["ranks"],
                    "bytes": float(record.fact("payload_bytes")),
                    "time_s": statistics.median(record.samples["time"].values),
                    "source": f"{name} {record.key}",
                }


def _cost(what: str, values: Iterable[float], source: str, *, spread: float = 1.0) -> Row:
    """The middle of the range by ratio, and the range, which other hosts widen by `spread`."""
    ordered = sorted(values)
    return {
        "what": what,
        "time_s": statistics.geometric_mean([ordered[0], ordered[-1]]) if ordered[0] else statistics.mean(ordered),
        "low_s": ordered[0] / spread,
        "high_s": ordered[-1] * spread,
        "source": source,
    }


def _host() -> Iterator[Row]:
    """The host's seconds per launch of steps that wait for it, on a slow machine (profile) and on a fast one (end_to_end)."""
    [slow] = [
        record
        for record in read("profile.jsonl")
        if (record.config["mode"], record.config["context"], record.config["model"]["name"]) == ("step", 128, "small")
    ]
    [fast] = [
        record
        for record in read("end_to_end.jsonl")
        if (record.config["context"], record.config["model"]["name"]) == (128, "small")
    ]
    host = {row["phase"]: row for row in rows(slow, "host")}
    source = f"profile.jsonl {slow.key}, end_to_end.jsonl {fast.key}"
    for phase in ("forward", "backward"):
        each = [_median(record, phase) / host[phase]["launches"] for record in (slow, fast)]
        yield _cost(f"{phase} launch", each, source, spread=1.3)
    tensors = 9 * slow.config["model"]["layers"] + 3
    tensor_s = host["optimizer"]["host_s"] / slow.fact("profiler_slowdown") / tensors
    yield _cost("optimizer tensor", [tensor_s], source, spread=2.0)
    yield _cost("message", [100e-6, 600e-6], "assumed: hooks, streams and a launch from Python")
    [compiled] = [
        record
        for record in read("compile.jsonl")
        if (record.config["model"]["name"], record.config["compile"]) == ("small", "block")
    ]
    for phase in ("forward", "backward"):
        each = [value / compiled.config["model"]["layers"] for value in compiled.samples[phase].values]
        yield _cost(f"compiled block {phase}", each, f"compile.jsonl {compiled.key}", spread=1.8)


def _gaps() -> Iterator[Row]:
    """Between kernels, and a graph's launch by kernel: the host's time before the first one starts."""
    captured = read("profile_captured.jsonl")
    launch = [_median(record, "enqueue") / record.fact("pieces") for record in captured]
    graph = [
        max(0.0, _median(record, "step") - _median(record, "enqueue") - record.fact("device_busy_s"))
        / record.fact("pieces")
        for record in captured
    ]
    source = _keys("profile_captured.jsonl", captured)
    yield _cost("graph", graph, f"step less busy time and launch, by kernel, {source}")
    yield _cost("graph launch", launch, f"enqueue, by kernel, {source}", spread=1.3)
    eager = [
        record
        for record in read("profile.jsonl")
        if record.config["mode"] == "step"
        and record.config["context"] >= 512
        and record.config["model"]["name"] in USED_MODELS
        and not record.fact("launch_bound")
    ]
    gaps = [
        max(0.0, _median(record, "step") - record.fact("device_busy_s")) / record.fact("launches") for record in eager
    ]
    yield _cost("eager", gaps, f"step less busy time, by launch, {_keys('profile.jsonl', eager)}")


def _keys(name: str, records: list[Record]) -> str:
    return f"{name} {' '.join(record.key for record in records)}"


def _median(record: Record, quantity: str) -> float:
    return statistics.median(record.samples[quantity].values)


if __name__ == "__main__":
    main()

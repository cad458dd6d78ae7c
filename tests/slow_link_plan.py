"""FSDP and buckets, in one group and in a group for each node, across the slow link of two pretend nodes, beside `trainstep plan`.

    python tests/slow_link_plan.py results/cpu/slow_link

Writes the records of each rate of the link to PREFIX_RATE.jsonl and prints a table. The step's computation is not predicted but
measured: a data sheet is chosen with which plan's step of one process takes as long as `none` did, where each rank trains for
itself. What plan adds are the messages. It is given the link's rate between nodes, and of the rest what `trainstep collectives`
measured just before: the latency of both levels, and the bandwidth inside a node.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

from slow_link_nodes import limit, on_both_nodes, pretend_nodes
from trainstep.config.parsing import build
from trainstep.config.plan import PlanConfig
from trainstep.plan.fleet.fleet_time import planned_fleet
from trainstep.plan.time.calibration import Calibration, data_sheet
from trainstep.plan.time.step_time import step_time
from trainstep.records.compare import compare_records
from trainstep.records.record import Record
from trainstep.records.store import Store
from trainstep.report.kit.rows import rows_of
from trainstep.report.parallel.collectives import fit_of, series_of

RATES = {"200mbit": 0.025, "1gbit": 0.125}
"""Rate of the link -> the same in GB/s."""
STEP = {"model": "mini", "context": 16, "batch_size": 1}
KINDS = {"plain": 4, "hybrid": 2}
"""Ranks in a group: all, or those of a node."""
SYNCS = {"fsdp": "FSDP", "bucketed": "bucketed"}
LINKS = "collectives --level in_nodes,across_nodes --mib 0.25,1,4 --warmups 2 --steps 6"
NVLINK_SHARE = 0.7
"""Of the bandwidth inside a node, what plan takes messages to reach; what they reach is measured here."""
HOPS = 2
"""Of an all-reduce of two ranks, as each level has."""
MEASURED = (
    "parallel --model mini --context 16 --batch-size 1 --sync none,bucketed,fsdp --shard-ranks 4,2 --steps 4 --window-steps 1 "
    "--warmups 1 --processes 6"
)
MEMORY_SHARE = 2.5e-3
"""TB/s of memory for each TFLOP/s of the data sheet, which the step hardly depends on."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Strategy and ranks in a group -> its record; and the links' options of plan."""

    steps: dict[tuple[str, int], Record]
    links: dict[str, float | int | str]


def measured(rate: str, path: Path) -> Found:
    """What was measured with the link at this rate; the steps' records are written to `path`."""
    with pretend_nodes() as places, tempfile.TemporaryDirectory() as folder:
        limit(places, rate)
        for command, out in ((LINKS, "links.jsonl"), (MEASURED, "it.jsonl")):
            run_on_both(places, f"{command} --out {out}", Path(folder))
        shutil.copyfile(Path(folder) / "it.jsonl", path)
        levels = Store(Path(folder) / "links.jsonl").read()
    steps = {(record.config["sync"], record.config["shard_ranks"]): record for record in Store(path).read()}
    return Found(steps=steps, links=links_of(levels, rate))


def run_on_both(places: tuple[tuple[str, str], ...], command: str, folder: Path) -> None:
    on_both_nodes(places, lambda _: ("-m", "trainstep", *command.split()), folder=folder, timeout_s=1200)


def links_of(levels: Sequence[Record], rate: str) -> dict[str, float | int | str]:
    """Options of plan: latency by level and the bandwidth inside a node as fitted, the bandwidth between nodes as it was set."""
    fits = {}
    for alike in series_of(rows_of([("links.jsonl", record) for record in levels])).values():
        fit = fit_of(alike)
        assert fit is not None, "three sizes give a fit"
        fits[alike[0].record.config["level"]] = fit
    inside, across = fits["in_nodes"], fits["across_nodes"]
    return {
        "nodes": 2,
        "backend": "gloo",
        "nvlink_gbs": round(inside.beta_bytes_per_s / 1e9 / NVLINK_SHARE, 3),
        "nvlink_latency_us": round(max(inside.alpha_s / HOPS * 1e6, 1.0)),
        "network_gbs": RATES[rate],
        "rails": 1,
        "network_latency_us": round(max(across.alpha_s / HOPS * 1e6, 1.0)),
    }


def step_s(record: Record) -> float:
    return median(record.samples["step"].values)


def peak_of(alone_s: float) -> float:
    """TFLOP/s of the data sheet with which plan's step of one process takes so long."""
    low, high = 0.1, 1e4
    for _ in range(60):
        middle = (low * high) ** 0.5
        config = build(PlanConfig, STEP, where="plan")
        slower = step_time(config, sheet(middle)).step.time_s > alone_s
        low, high = (middle, high) if slower else (low, middle)
    return low


def sheet(tflops: float) -> Calibration:
    return data_sheet(peak_tflops=tflops, memory_bytes_per_s=tflops * MEMORY_SHARE * 1e12)


def predicted_s(sync: str, shard_ranks: int, links: Mapping[str, float | int | str], tflops: float) -> float:
    point = {**STEP, **links, "ranks": 4, "sync": sync, "shard_ranks": shard_ranks}
    time, _ = planned_fleet(build(PlanConfig, point, where="plan"), sheet(tflops), None, has_nodes=True)
    return time.step.time_s


def main(prefix: str) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    print(f"Commit {commit.strip()}. Measured: trainstep {MEASURED}; trainstep {LINKS}\n")
    print("| link | strategy | measured (s) | predicted (s) | predicted / measured | plain / hybrid, 99 % interval |")
    print("|---|---|---|---|---|---|")
    commands = []
    for rate in RATES:
        found = measured(rate, Path(f"{prefix}_{rate}.jsonl"))
        [alone] = [record for (sync, _), record in found.steps.items() if sync == "none"]
        tflops = peak_of(step_s(alone))
        for sync, (kind, size) in product(SYNCS, KINDS.items()):
            found_s, said_s = step_s(found.steps[sync, size]), predicted_s(sync, size, found.links, tflops)
            ratio = compare_records(found.steps[sync, KINDS["hybrid"]], found.steps[sync, KINDS["plain"]])
            ends = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f}; {ratio.n} pairs of processes)"
            last = f"{ratio.ratio:.2f}{ends}" if kind == "hybrid" else ""
            print(
                f"| {rate} | {SYNCS[sync]}, {kind} | {found_s:.3f} | {said_s:.3f} | {said_s / found_s:.2f} | {last} |",
                flush=True,
            )
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in found.links.items())
        commands.append(
            "trainstep plan --model mini --context 16 --batch-size 1 --ranks 4 --sync bucketed,fsdp --shard-ranks 4,2 "
            f"{options} --peak-tflops {tflops:.4g} --bandwidth {tflops * MEMORY_SHARE:.4g}   # one process then takes "
            f"{step_s(alone) * 1e3:.0f} ms, as `none` did"
        )
    print("\nPredicted:\n", *commands, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])

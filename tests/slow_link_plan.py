"""FSDP and buckets, in one group and in a group for each node, across the slow link of two pretend nodes, beside `trainstep plan`.

    python tests/slow_link_plan.py results/cpu/slow_link

Writes the records of each rate of the link to PREFIX_RATE.jsonl and prints a table. The step's computation is not predicted but
measured: a data sheet is chosen with which plan's step of one process takes as long as `none` did, where each rank trains for
itself. What plan adds to it are the messages, from the link's rate alone.
"""

import shutil
import subprocess
import sys
import tempfile
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

RATES = {"200mbit": 0.025, "1gbit": 0.125}
"""Rate of the link -> the same in GB/s."""
STEP = {"model": "mini", "context": 16, "batch_size": 1}
KINDS = {"plain": 4, "hybrid": 2}
"""Ranks in a group: all, or those of a node."""
SYNCS = {"fsdp": "FSDP", "bucketed": "bucketed"}
IN_NODE_GBS = 2.0
"""What a process of a node sends another through loopback, roughly: a fiftieth of the time across the slower link."""
MEASURED = (
    "parallel --model mini --context 16 --batch-size 1 --sync none,bucketed,fsdp --shard-ranks 4,2 --steps 4 --window-steps 1 "
    "--warmups 1 --processes 6"
)
MEMORY_SHARE = 2.5e-3
"""TB/s of memory for each TFLOP/s of the data sheet, which the step hardly depends on."""


def measured(rate: str, path: Path) -> dict[tuple[str, int], Record]:
    """Strategy and ranks in a group -> its record, with the link at this rate; the records are written to `path`."""
    with pretend_nodes() as places, tempfile.TemporaryDirectory() as folder:
        limit(places, rate)
        words = ("-m", "trainstep", *MEASURED.split(), "--out", "it.jsonl")
        on_both_nodes(places, lambda _: words, folder=Path(folder), timeout_s=1200)
        shutil.copyfile(Path(folder) / "it.jsonl", path)
    return {(record.config["sync"], record.config["shard_ranks"]): record for record in Store(path).read()}


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


def predicted_s(sync: str, shard_ranks: int, rate: str, tflops: float) -> float:
    links = {"nodes": 2, "network_gbs": RATES[rate], "rails": 1, "nvlink_gbs": IN_NODE_GBS, "backend": "gloo"}
    point = {**STEP, **links, "ranks": 4, "sync": sync, "shard_ranks": shard_ranks}
    time, _ = planned_fleet(build(PlanConfig, point, where="plan"), sheet(tflops), None, has_nodes=True)
    return time.step.time_s


def main(prefix: str) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    print(f"Commit {commit.strip()}. Measured: trainstep {MEASURED}\n")
    print("| link | strategy | measured (s) | predicted (s) | predicted / measured | plain / hybrid, 99 % interval |")
    print("|---|---|---|---|---|---|")
    commands = []
    for rate in RATES:
        records = measured(rate, Path(f"{prefix}_{rate}.jsonl"))
        [alone] = [record for (sync, _), record in records.items() if sync == "none"]
        tflops = peak_of(step_s(alone))
        for sync, (kind, size) in product(SYNCS, KINDS.items()):
            found_s, said_s = step_s(records[sync, size]), predicted_s(sync, size, rate, tflops)
            ratio = compare_records(records[sync, KINDS["hybrid"]], records[sync, KINDS["plain"]])
            ends = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f}; {ratio.n} pairs of processes)"
            last = f"{ratio.ratio:.2f}{ends}" if kind == "hybrid" else ""
            print(
                f"| {rate} | {SYNCS[sync]}, {kind} | {found_s:.3f} | {said_s:.3f} | {said_s / found_s:.2f} | {last} |",
                flush=True,
            )
        commands.append(
            "trainstep plan --model mini --context 16 --batch-size 1 --nodes 2 --ranks 4 --sync bucketed,fsdp --shard-ranks 4,2 "
            f"--network-gbs {RATES[rate]} --rails 1 --nvlink-gbs {IN_NODE_GBS:g} --backend gloo --peak-tflops {tflops:.4g} "
            f"--bandwidth {tflops * MEMORY_SHARE:.4g}   # one process then takes {step_s(alone) * 1e3:.0f} ms, as `none` did"
        )
    print("\nPredicted:\n", *commands, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])

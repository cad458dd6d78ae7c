"""Sizes of messages, and what flat shards do with them, in one pair of processes that holds all variants and lets them take turns.

    torchrun --nproc-per-node 2 results/h200/message_sizes.py MODEL CONTEXT REPETITIONS VARIANT... >> message_sizes.txt
    python results/h200/message_sizes.py message_sizes.txt > message_sizes.md

A variant is WAY@MIB:OPTION...: the size of what travels together (without, the usual one); `f2`, so many units on their way at once
(now 1); `whole`, all updated before the first goes (now unit by unit). Prints a line of JSON a repetition, variant and rank: three
steps, each from a barrier to the end of the device's work (ms), their phases on the host (ms: forward, backward, but for none
grad_sync, optimizer, waiting for the device) and by events from their beginning (ms), and five steps in a row (ms a step). The
second command makes a table of them.
"""

import json
import random
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from trainstep.config.model import size
from trainstep.config.parallel import SyncConfig
from trainstep.config.run import Phase, RunConfig
from trainstep.costs import exchange
from trainstep.parallel import flat_optimizer
from trainstep.parallel.process_group import start_ranks, stop_ranks
from trainstep.training.build import Assembly, build_step
from trainstep.training.parallelism import parallel

_AS_IT_IS = flat_optimizer._may_step_in_parts


def _whole(optimizer: torch.optim.Optimizer) -> bool:
    return False


def choose(variant: str) -> None:
    """Set what a variant's options ask for."""
    options = variant.split(":")[1:]
    in_flight = [int(option[1:]) for option in options if option != "whole"]
    exchange.MOST_IN_FLIGHT["sharded_flat"] = in_flight[0] if in_flight else 1
    flat_optimizer._may_step_in_parts = _whole if "whole" in options else _AS_IT_IS


def begin() -> float:
    """All together, and nothing left on the device."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    return time.perf_counter()


def one_step(assembly: Assembly, batches: list[Any]) -> dict[str, Any]:
    host_s: list[float] = [begin()]
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()

    def mark(_phase: Phase) -> None:
        host_s.append(time.perf_counter())
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()

    assembly.step(batches, mark)
    torch.cuda.synchronize()
    host_s.append(time.perf_counter())
    return {
        "ms": 1e3 * (host_s[-1] - host_s[0]),
        "host": [round(1e3 * (end - start), 2) for start, end in pairwise(host_s)],
        "dev": [round(events[0].elapsed_time(event), 2) for event in events[1:]],
    }


def window(assembly: Assembly, batches: list[Any], steps: int) -> float:
    started_s = begin()
    for _ in range(steps):
        assembly.step(batches)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started_s) / steps


def main(model: str, context: str, repetitions: str, *variants: str) -> None:
    ranks = start_ranks("nccl")
    built = {}
    for name in dict.fromkeys(variant.split(":")[0] for variant in variants):
        sync, _, mib = name.partition("@")
        run = RunConfig(
            model=size(model),
            batch_size=2,
            context=int(context),
            precision="bf16_autocast",
            compile="block",
            device="cuda",
        )
        way = SyncConfig(name=sync, bucket_mib=float(mib) if mib else None)
        built[name] = build_step(run, parallel(ranks, way))
    batches = built["none"].micro_batches(0)
    for repetition in range(int(repetitions)):
        order = list(variants)
        random.Random(repetition).shuffle(order)
        for variant in order:
            choose(variant)
            assembly = built[variant.split(":")[0]]
            assembly.step(batches)
            rows = [one_step(assembly, batches) for _ in range(3)]
            line = {"model": model, "rep": repetition, "variant": variant, "rank": ranks.rank, "rows": rows}
            print(json.dumps({**line, "window": window(assembly, batches, 5)}), flush=True)
    del built, assembly
    stop_ranks(ranks)


def summarise(path: str) -> None:
    """A row a variant: medians over repetitions of the slower rank's time (the mean of three steps), and of its ratio to none's in
    the same repetition, with quartiles."""
    taken: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for line in map(json.loads, Path(path).read_text().splitlines()):
        taken.setdefault((line["model"], line["variant"], line["rep"]), []).append(line)
    times = {
        place: (mean(max(rows) for rows in zip(*([row["ms"] for row in rank["rows"]] for rank in both), strict=True)),
                max(rank["window"] for rank in both))
        for place, both in taken.items()
    }  # fmt: skip
    print("| model | variant | repetitions | step (ms) | of none | quartiles | window (ms) | of none | quartiles |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model, variant in dict.fromkeys(place[:2] for place in sorted(times)):
        mine = {rep: found for (its, name, rep), found in times.items() if (its, name) == (model, variant)}
        cells = []
        for kind in (0, 1):
            ratios = [found[kind] / times[model, "none", rep][kind] for rep, found in mine.items()]
            low, middle, high = quantiles(ratios, n=4)
            cells += [f"{median(found[kind] for found in mine.values()):.1f}"]
            cells += [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        print(f"| {model} | {variant} | {len(mine)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        summarise(sys.argv[1])
    else:
        main(*sys.argv[1:])

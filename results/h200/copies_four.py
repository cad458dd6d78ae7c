"""Messages by copies and by NCCL between all GPUs of a machine: alone, beside matmuls in a graph, and in captured steps.

    torchrun --nproc-per-node 4 results/h200/copies_four.py messages FILE         # half a minute
    torchrun --nproc-per-node 4 results/h200/copies_four.py steps FILE xl 512     # about 6 s a strategy, 30 s for the first
    torchrun --nproc-per-node 4 results/h200/copies_four.py pairs FILE xl 512     # about 25 s a pair
    python results/h200/copies_four.py table FILE

Appends a line of JSON for each measurement. `messages`: copies to peers alone (push, pull), then 12 messages of 124 MiB by each
transport: `alone`, `together` with matmuls on another stream, `chained` (each block of matmuls waits for the message before it,
while the next one is on its way). `steps`: strategies one after the other in one group of ranks, each built, captured, and timed
in four windows of eight steps. `pairs`: one of our strategies, captured, beside torch's counterpart, launched by the host as its
users run it: both in the same processes, nine windows of eight steps each in turns. Milliseconds of the slowest rank. Lines of
earlier designs have a field `design`.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from trainstep.config.parsing import build_config
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.copies.messages import CopyEngines
from trainstep.parallel.process_group import start_ranks
from trainstep.parallel.ranks import Ranks
from trainstep.records.compare import compare_samples
from trainstep.records.record import Samples
from trainstep.training.build import Assembly, build_step
from trainstep.training.parallelism import parallel

STEPS: dict[str, dict[str, Any]] = {
    "none": {"sync": "none"},
    "sharded_flat, copies": {"sync": "sharded_flat", "transport": "copies"},
    "fsdp in bf16, copies": {"sync": "fsdp", "compute_dtype": "bf16", "transport": "copies"},
    "fsdp, copies": {"sync": "fsdp", "transport": "copies"},
    "bucketed, copies": {"sync": "bucketed", "transport": "copies", "in_place": True, "update": "by_bucket"},
    "bucketed, copies, 1 GiB": {
        "sync": "bucketed",
        "transport": "copies",
        "in_place": True,
        "update": "by_bucket",
        "inbox_mib": 1024,
    },
    "sharded_flat, library": {"sync": "sharded_flat"},
    "fsdp in bf16, library": {"sync": "fsdp", "compute_dtype": "bf16"},
    "fsdp, library": {"sync": "fsdp"},
    "bucketed, library": {"sync": "bucketed"},
    "bucketed by bucket, library": {"sync": "bucketed", "in_place": True, "update": "by_bucket"},
    "none again": {"sync": "none"},
}
# Torch's strategies are launched by the host and have its fused AdamW, as their users run them.
BY_HOST: dict[str, dict[str, Any]] = {
    f"{sync}, launched by the host": {"sync": sync, "capture": "none"}
    for sync in ("none", "bucketed", "sharded_flat", "fsdp")
}
TORCH: dict[str, dict[str, Any]] = {
    sync: {"sync": sync, "capture": "none", "adamw": "fused"} for sync in ("torch_ddp", "torch_zero", "torch_fsdp2")
}
WAYS = STEPS | BY_HOST | TORCH
PAIRS = [
    ("bucketed, copies, 1 GiB", "torch_ddp"),
    ("sharded_flat, copies", "torch_zero"),
    ("fsdp, copies", "torch_fsdp2"),
]
OURS = {
    "device": "cuda",
    "precision": "bf16_autocast",
    "attention": "trainstep",
    "adamw": "trainstep",
    "compile": "block",
    "batch_size": 2,
    "capture": "step",
}
RAW_BYTES, MESSAGES, NUMEL = 256 * 2**20, 12, 31 * 2**20
TURNS = 9
Work = Callable[[], object]


class Rows:
    """Lines of the file, written by rank 0."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self._path, self._ranks = path, ranks
        self._alike = {"gpu": torch.cuda.get_device_name(), "ranks": ranks.world_size}

    def add(self, ms: list[float], **what: Any) -> None:
        slowest = torch.tensor(ms, device=self._ranks.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if self._ranks.is_first:
            line = {**self._alike, **what, "ms": [round(value, 3) for value in slowest.tolist()]}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)


def together(ranks: Ranks) -> None:
    """Wait until every rank's device is idle."""
    torch.cuda.synchronize()
    dist.barrier(group=ranks.group)
    torch.cuda.synchronize()


def timed_ms(work: Work, ranks: Ranks) -> list[float]:
    """Milliseconds of one call, the mean of six."""
    for _ in range(2):
        work()
    together(ranks)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(6):
        work()
    ended.record()
    torch.cuda.synchronize()
    return [began.elapsed_time(ended) / 6]


def graphed(work: Work, ranks: Ranks) -> Work:
    """The launch of a graph of the work."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    together(ranks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    together(ranks)
    return graph.replay


def measure_raw(ranks: Ranks, rows: Rows) -> None:
    """A copy of 256 MiB to the next rank, and to each of the others in turn; the same from them."""
    others = [(ranks.rank + distance) % ranks.world_size for distance in range(1, ranks.world_size)]
    block = symmetric_memory.empty(RAW_BYTES * len(others), dtype=torch.uint8, device=ranks.device)
    handle: Any = symmetric_memory.rendezvous(block, ranks.group)  # type: ignore[arg-type]
    own = torch.zeros(RAW_BYTES, dtype=torch.uint8, device=ranks.device)
    theirs = [
        handle.get_buffer(peer, (block.numel(),), torch.uint8)[place * RAW_BYTES : (place + 1) * RAW_BYTES]
        for place, peer in enumerate(others)
    ]
    for count in sorted({1, len(others)}):
        for way in ("push", "pull"):

            def copy(count: int = count, way: str = way) -> None:
                for slot in theirs[:count]:
                    (slot if way == "push" else own).copy_(own if way == "push" else slot)

            rows.add(timed_ms(graphed(copy, ranks), ranks), test=way, peers=count, bytes=count * RAW_BYTES)


class Beside:
    """Messages of one operation beside matmuls."""

    def __init__(self, collectives: Collectives, operation: str) -> None:
        ranks = collectives.ranks
        self._collectives, self._operation = collectives, operation
        self._whole = torch.zeros(NUMEL, device=ranks.device)
        self._shard = torch.zeros(NUMEL // ranks.world_size, device=ranks.device)
        self._x, self._up, self._down = (
            torch.randn(*shape, device=ranks.device, dtype=torch.bfloat16)
            for shape in ((1024, 1600), (1600, 6400), (6400, 1600))
        )
        self._sending = torch.cuda.Stream(priority=-1)

    def send(self) -> Any:
        if self._operation == "all_gather":
            return self._collectives.all_gather(self._whole, self._shard)
        return self._collectives.reduce_scatter(self._shard, self._whole, reduction="average")

    def block(self) -> None:
        y = self._x
        for _ in range(6):
            y = torch.relu(y @ self._up) @ self._down

    def matmuls(self) -> None:
        for _ in range(MESSAGES):
            self.block()

    def alone(self) -> None:
        for _ in range(MESSAGES):
            self.send().wait()

    def together(self) -> None:
        current = torch.cuda.current_stream()
        self._sending.wait_stream(current)
        with torch.cuda.stream(self._sending):
            self.alone()
        self.matmuls()
        current.wait_stream(self._sending)

    def chained(self) -> None:
        under_way = self.send()
        for _ in range(MESSAGES):
            following = self.send()
            self.block()
            under_way.wait()
            under_way = following
        under_way.wait()


def measure_messages(ranks: Ranks, rows: Rows) -> None:
    by = {name: Collectives(ranks) for name in ("library", "copies")}
    by["copies"].send_by(CopyEngines())
    for name, collectives in by.items():
        for operation in ("all_gather", "reduce_scatter"):
            beside = Beside(collectives, operation)
            for test in ("matmuls", "alone", "together", "chained"):
                work: Work = getattr(beside, test)
                rows.add(timed_ms(graphed(work, ranks), ranks), test=test, transport=name, operation=operation)


def built(ranks: Ranks, model: str, context: int, name: str) -> Assembly:
    """The strategy's step, warmed up by six steps."""
    values: Mapping[str, Any] = {
        "ranks": ranks.world_size,
        "model": model,
        "context": context,
        **OURS,
        **WAYS[name],
    }
    config = build_config("parallel", values)
    assembly = build_step(config.run, parallel(ranks, config.sync))
    for index in range(6):
        assembly.take(assembly.micro_batches(index))
    return assembly


def window_ms(assembly: Assembly, ranks: Ranks) -> float:
    """Milliseconds of a step, by eight in a row."""
    together(ranks)
    began_s = time.perf_counter()
    for index in range(8):
        assembly.take(assembly.micro_batches(index))
    torch.cuda.synchronize()
    return (time.perf_counter() - began_s) / 8 * 1e3


def forget() -> None:
    """Free what is no longer used."""
    torch.cuda.synchronize()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def measure_steps(ranks: Ranks, rows: Rows, model: str, context: int, names: list[str]) -> None:
    for name in names or STEPS:
        assembly = built(ranks, model, context, name)
        windows = [window_ms(assembly, ranks) for _ in range(4)]
        rows.add(windows, test="step", model=model, context=context, strategy=name)
        assembly.complete()
        del assembly
        forget()


def measure_pairs(ranks: Ranks, rows: Rows, model: str, context: int, names: list[str]) -> None:
    for pair in (pair for pair in PAIRS if not names or pair[0] in names):
        both = {name: built(ranks, model, context, name) for name in pair}
        windows: dict[str, list[float]] = {name: [] for name in pair}
        for turn in range(TURNS):
            for name in pair if turn % 2 == 0 else pair[::-1]:
                windows[name].append(window_ms(both[name], ranks))
        for name, beside in (pair, pair[::-1]):
            rows.add(windows[name], test="pair", model=model, context=context, strategy=name, design=f"beside {beside}")
        for assembly in both.values():
            assembly.complete()
        both.clear()
        del assembly
        forget()


def table(path: Path) -> str:
    """Medians in Markdown, a row for each design; GB/s of what a rank sends; of pairs the time over its partner's."""
    rows: dict[tuple[str, ...], list[float]] = {}
    sent: dict[tuple[str, ...], float] = {}
    partners: dict[tuple[str, ...], tuple[str, ...]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        what = line.get("strategy") or " ".join(
            str(line[key]) for key in ("operation", "transport", "peers") if key in line
        )
        model = ""
        if "model" in line:
            model = f"{line['model']} at {line['context']}, {line['ranks']} GPU{'s' * (line['ranks'] > 1)}"
        key: tuple[str, ...] = (line["test"], model, what, line.get("design", ""))
        rows.setdefault(key, []).extend(line["ms"])
        if line["test"] == "pair":
            partners[key] = "pair", model, line["design"].removeprefix("beside "), f"beside {what}"
        elif line["test"] in ("push", "pull"):
            sent[key] = line["bytes"]
        elif line["test"] == "alone":
            sent[key] = MESSAGES * NUMEL * 4 * (line["ranks"] - 1) / line["ranks"]
    lines = ["| test | model | what | design | ms | GB/s | / partner, 99 % interval | samples |", f"|{'---|' * 8}"]
    for key, ms in rows.items():  # in the order of the file
        rate = f"{sent[key] / statistics.median(ms) / 1e6:.0f}" if key in sent else ""
        ratio = ratio_words(ms, rows.get(partners[key], [])) if key in partners else ""
        lines.append(f"| {' | '.join(key)} | {statistics.median(ms):.2f} | {rate} | {ratio} | {len(ms)} |")
    return "\n".join(lines)


def ratio_words(ms: list[float], partner_ms: list[float]) -> str:
    """The median ratio of windows in pairs with its 99 % interval; empty where there are too few."""
    own, partner = (Samples(unit="s", values=tuple(value / 1e3 for value in each)) for each in (ms, partner_ms))
    found = compare_samples(partner, own)
    return "" if found.low is None else f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["messages", "steps", "pairs", "table"])
    parser.add_argument("file", type=Path)
    parser.add_argument("model", nargs="?", default="xl")
    parser.add_argument("context", nargs="?", type=int, default=512)
    parser.add_argument("--only", nargs="*", default=[], choices=list(WAYS), help="strategies (ours of a pair)")
    asked = parser.parse_args()
    if asked.what == "table":
        print(table(asked.file))
        return
    known = {"messages": [], "steps": list(WAYS), "pairs": [ours for ours, _ in PAIRS]}[asked.what]
    if unknown := set(asked.only) - set(known):
        parser.error(
            f"--only: {asked.what} has no {', '.join(sorted(unknown))}; it has {', '.join(known) or 'no choice'}"
        )
    ranks = start_ranks()
    rows = Rows(asked.file, ranks)
    if asked.what == "messages":
        measure_raw(ranks, rows)
        measure_messages(ranks, rows)
    elif asked.what == "pairs":
        measure_pairs(ranks, rows, asked.model, asked.context, asked.only)
    else:
        measure_steps(ranks, rows, asked.model, asked.context, asked.only)
    together(ranks)
    os._exit(0)  # graphs hold messages of the group, which would be torn down first


if __name__ == "__main__":
    main()

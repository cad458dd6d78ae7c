"""The workload `collective` times one collective among ranks, over many calls; `trainstep collectives` runs it.

Every call begins at a barrier, so that no call waits for the one before it, and each rank times its own call. On a GPU, `time` is
measured between CUDA events around the call and `host_time` from the barrier until the device is idle. On a CPU, `time` is read
from the host's clock.

Over several nodes a message goes among all ranks, among those of a node, or among those with the same place on every node
(config/collective.py, `level`); the barrier is always of all ranks. After the calls each neighbouring pair of the level's ring, of
nodes or of a node's ranks, sends the tensor there and back alone: the table `links`.

With the transport `copies` a tensor of any size goes as the messages of a parallel strategy do (parallel/copies/), through an inbox
that lives until a cell asks for another.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainstep.config.collective import LEVELS, CollectiveConfig
from trainstep.costs.collectives import ring_bytes
from trainstep.costs.rank_groups import at_level
from trainstep.measure.harness.workload import Findings, Stage
from trainstep.measure.parallel.meeting import check_gpus, others_on_gpu
from trainstep.parallel.collectives import Collectives, Pending, ShardGroups
from trainstep.parallel.copies.messages import CopyEngines
from trainstep.parallel.process_group import start_ranks
from trainstep.parallel.ranks import Ranks, alone
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Samples

_LINK_CALLS = 5
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class CollectiveWorkload:
    """Cells with the same backend and ranks share their processes; the ranks meet once, in the first cell."""

    shares_worker = True

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._levels: dict[str, Collectives] = {}
        self._transport: CopyEngines | None = None
        self._others: dict[str, Fact] = {}

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "CollectiveMeasurement":
        """Connect the ranks, make the tensors and warm up. CellFailed if there are too few GPUs."""
        cell = CollectiveConfig(**config)
        stage("meet")
        if self._ranks is None:
            check_gpus(cell.ranks // cell.nodes, cell.device)
            self._ranks = alone(cell.device) if cell.ranks == 1 else start_ranks(cell.backend, device=cell.device)
            self._others = others_on_gpu(self._ranks)
            self._levels = levels_of(cell, self._ranks)
        transport = transport_of(cell)
        if transport != self._transport:
            self._levels["all"].send_by(transport)
            self._transport = transport
        stage("build")
        call = CollectiveCall(cell, self._ranks, self._levels)
        stage("warmup")
        warmups = call.times(cell.warmups)  # the first call opens the connections
        call.collectives.traffic.clear()
        return CollectiveMeasurement(call, stage, self._others, warmups)


class CollectiveCall:
    """One collective on this rank's tensors; `source` is its input, or is copied into `whole` where the call works in place."""

    def __init__(self, config: CollectiveConfig, ranks: Ranks, levels: Mapping[str, Collectives]) -> None:
        self.config = config
        self.everyone = levels["all"]
        self.collectives = levels[config.level]
        generator = torch.Generator(ranks.device).manual_seed(config.seed + ranks.rank)
        whole = torch.randn(config.elements, dtype=_DTYPES[config.dtype], device=ranks.device, generator=generator)
        part = config.elements // config.members
        self.source = whole[:part].clone() if config.operation == "all_gather" else whole
        self.whole = torch.empty_like(whole)
        self.shard = torch.empty_like(whole[:part])
        self._timed = _timed_by_events if ranks.device.type == "cuda" else _timed_by_host

    def times(self, calls: int) -> list[dict[str, float]]:
        """Time this many calls, each from a barrier: sample name -> seconds."""
        return [self._time() for _ in range(calls)]

    def _time(self) -> dict[str, float]:
        if self.config.operation in ("all_reduce", "broadcast"):
            self.whole.copy_(self.source)  # untimed; a sum in place would grow with every call
        self.everyone.barrier()
        return self._timed(self._start)

    def _start(self) -> Pending:
        operation, collectives = self.config.operation, self.collectives
        if operation == "all_reduce":
            return collectives.all_reduce(self.whole)
        if operation == "broadcast":
            return collectives.broadcast(self.whole)
        if operation == "all_gather":
            return collectives.all_gather(self.whole, self.source)
        return collectives.reduce_scatter(self.shard, self.source)


@dataclass
class CollectiveMeasurement:
    """One rank's calls and their times. `others`: facts about other processes on the ranks' GPUs."""

    call: CollectiveCall
    stage: Stage
    others: Mapping[str, Fact]
    warmups: Sequence[Mapping[str, float]]
    times: list[dict[str, float]] = field(default_factory=list)

    def take(self, steps: int) -> None:
        self.stage(self.call.config.operation)
        self.times += self.call.times(steps)

    def settle(self) -> None:
        self.call.times(1)

    def finish(self) -> Findings:
        """Free the tensors and return the times and the counted messages."""
        config, traffic = self.call.config, self.call.collectives.traffic
        operation = at_level(config.operation, LEVELS[config.level])
        tables = {} if config.nodes == 1 or config.level == "all" else {"links": self._links()}
        del self.call  # the next cell of this process needs the memory
        payload_bytes = config.payload_bytes
        facts = facts_of(
            payload_bytes=payload_bytes,
            ring_bytes=ring_bytes(config.operation, payload_bytes, config.members),
            node_bytes=config.node_messages * ring_bytes(config.operation, payload_bytes, config.members) or None,
            messages=traffic.messages[operation],
            message_bytes=traffic.payload_bytes[operation],
            timing="host_clock" if config.device == "cpu" else "cuda_events",
        )
        samples = {
            name: Samples(
                unit="s",
                values=tuple(times[name] for times in self.times),
                warmups=tuple(times[name] for times in self.warmups),
            )
            for name in (("time",) if config.device == "cpu" else ("time", "host_time"))
        }
        return Findings(samples=samples, facts={**facts, **self.others}, tables=tables)

    def _links(self) -> dict[str, list[Any]]:
        """Seconds of a message one way between neighbours, measured there and back, one pair of ranks at a time."""
        self.stage("links")
        everyone, config = self.call.everyone, self.call.config
        device = everyone.ranks.device
        rows = []
        for first, second in link_ranks(config):
            for _ in range(_LINK_CALLS + 1):  # the first opens the connection
                everyone.barrier()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                started_s = time.perf_counter()
                everyone.there_and_back(self.call.whole, first, second)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                taken_s = (time.perf_counter() - started_s) / 2
                if everyone.ranks.rank == first:
                    rows.append((first, second, taken_s))
        of_ranks = [json.loads(text) for text in everyone.gather_texts(json.dumps(rows))]
        times: dict[tuple[int, int], list[float]] = {}
        for first, second, taken_s in (row for rank_rows in of_ranks for row in rank_rows):
            times.setdefault((first, second), []).append(taken_s)
        return {
            "rank": [first for first, _ in times],
            "to_rank": [second for _, second in times],
            "bytes": [self.call.whole.nbytes] * len(times),
            "times_s": [values[1:] for values in times.values()],
        }


def link_ranks(config: CollectiveConfig) -> list[tuple[int, int]]:
    """The pairs of ranks whose links are measured at a cell's level: neighbours in the ring of nodes, or of a node's ranks."""
    on_each = config.ranks // config.nodes
    if config.level == "across_nodes":
        rings = [range(0, config.ranks, on_each)]
    else:
        rings = [range(first, first + on_each) for first in range(0, config.ranks, on_each)]
    pairs = [
        tuple(sorted((ring[place - 1], rank))) for ring in rings for place, rank in enumerate(ring) if len(ring) > 1
    ]
    return [(first, second) for first, second in dict.fromkeys(pairs)]


def levels_of(config: CollectiveConfig, ranks: Ranks) -> dict[str, Collectives]:
    """Level -> the collectives of this rank's group at that level; only `all` where there is one node."""
    everyone = Collectives(ranks)
    on_each = config.ranks // config.nodes
    if config.nodes == 1:
        return {"all": everyone}
    groups = ShardGroups(everyone, on_each)
    return {"all": everyone, "in_nodes": groups.shards, "across_nodes": groups.replicas or everyone}


def transport_of(config: CollectiveConfig) -> CopyEngines | None:
    """The copies that a cell asks for; None: the library."""
    if config.transport == "library":
        return None
    return CopyEngines(inbox_bytes=config.inbox_mib * 2**20, least_bytes=0)


def _timed_by_host(start: Callable[[], Pending]) -> dict[str, float]:
    started_s = time.perf_counter()
    start().wait()
    return {"time": time.perf_counter() - started_s}


def _timed_by_events(start: Callable[[], Pending]) -> dict[str, float]:
    torch.cuda.synchronize()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started_s = time.perf_counter()
    before.record()
    start().wait()
    after.record()
    torch.cuda.synchronize()
    host_s = time.perf_counter() - started_s
    return {"time": before.elapsed_time(after) / 1e3, "host_time": host_s}


WORKLOAD = CollectiveWorkload()

"""The workload `collective` times one collective among ranks, over many calls; `trainstep collectives` runs it.

Every call begins at a barrier, so that no call waits for the one before it, and each rank times its own call. On a GPU, `time` is
measured between CUDA events around the call and `host_time` from the barrier until the device is idle. On a CPU, `time` is read
from the host's clock.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainstep.config.collective import CollectiveConfig
from trainstep.costs.collectives import ring_bytes
from trainstep.measure.harness.workload import Findings, Stage
from trainstep.measure.parallel.meeting import check_gpus, others_on_gpu
from trainstep.parallel.collectives import Collectives, Pending
from trainstep.parallel.process_group import start_ranks
from trainstep.parallel.ranks import Ranks, alone
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Samples

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class CollectiveWorkload:
    """Cells with the same backend and ranks share their processes; the ranks meet once, in the first cell."""

    shares_worker = True

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._others: dict[str, Fact] = {}

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "CollectiveMeasurement":
        """Connect the ranks, make the tensors and warm up. CellFailed if there are too few GPUs."""
        cell = CollectiveConfig(**config)
        stage("meet")
        if self._ranks is None:
            check_gpus(cell.ranks, cell.device)
            self._ranks = alone(cell.device) if cell.ranks == 1 else start_ranks(cell.backend, device=cell.device)
            self._others = others_on_gpu(self._ranks)
        stage("build")
        call = CollectiveCall(cell, self._ranks)
        stage("warmup")
        warmups = call.times(cell.warmups)  # the first call opens the connections
        call.collectives.traffic.clear()
        return CollectiveMeasurement(call, stage, self._others, warmups)


class CollectiveCall:
    """One collective on this rank's tensors; `source` is its input, or is copied into `whole` where the call works in place."""

    def __init__(self, config: CollectiveConfig, ranks: Ranks) -> None:
        self.config = config
        self.collectives = Collectives(ranks)
        generator = torch.Generator(ranks.device).manual_seed(config.seed + ranks.rank)
        whole = torch.randn(config.elements, dtype=_DTYPES[config.dtype], device=ranks.device, generator=generator)
        part = config.elements // config.ranks
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
        self.collectives.barrier()
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
        del self.call  # the next cell of this process needs the memory
        payload_bytes = config.payload_bytes
        facts = facts_of(
            payload_bytes=payload_bytes,
            ring_bytes=ring_bytes(config.operation, payload_bytes, config.ranks),
            messages=traffic.messages[config.operation],
            message_bytes=traffic.payload_bytes[config.operation],
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
        return Findings(samples=samples, facts={**facts, **self.others})


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

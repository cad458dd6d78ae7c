"""The workload `collective`: one collective among ranks, called again and again. `trainstep collectives` runs it.

Each call starts from a barrier, so that none waits for the one before; every rank times its own. The tensor is put back before each
(a sum in place would grow without end), which is not timed. On a GPU `time` is between CUDA events around the call, and
`host_time` from the barrier until the device is idle; on a CPU `time` is the host's clock.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainstep.config.collective import CollectiveConfig
from trainstep.costs.collectives import ring_bytes
from trainstep.measure.meeting import check_gpus, others_on_gpu
from trainstep.measure.workload import Findings, Stage
from trainstep.parallel.collectives import Collectives, Pending
from trainstep.parallel.process_group import start_ranks
from trainstep.parallel.ranks import Ranks, alone
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Samples

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class CollectiveWorkload:
    """Cells with the same backend and ranks share their processes: these meet once, in the first cell."""

    shares_worker = True

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._others: dict[str, Fact] = {}

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "CollectiveMeasurement":
        """Meet, make the tensors and warm up. CellFailed where the GPUs are missing."""
        asked = CollectiveConfig(**config)
        stage("meet")
        if self._ranks is None:
            check_gpus(asked.ranks, asked.device)
            self._ranks = alone(asked.device) if asked.ranks == 1 else start_ranks(asked.backend, device=asked.device)
            self._others = others_on_gpu(self._ranks)
        stage("build")
        call = CollectiveCall(asked, self._ranks)
        stage("warmup")
        warmups = call.times(asked.warmups)  # the first makes the connections
        call.collectives.traffic.clear()
        return CollectiveMeasurement(call, stage, self._others, warmups)


class CollectiveCall:
    """One collective on this rank's tensors: `source`, put back into `whole` before each call where it would change."""

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
        """Seconds of each call by name, each from a barrier."""
        return [self._time() for _ in range(calls)]

    def _time(self) -> dict[str, float]:
        if self.config.operation in ("all_reduce", "broadcast"):
            self.whole.copy_(self.source)
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


class CollectiveMeasurement:
    """One rank's side."""

    def __init__(
        self,
        call: CollectiveCall,
        stage: Stage,
        others: Mapping[str, Fact],
        warmups: Sequence[Mapping[str, float]],
    ) -> None:
        self._call = call
        self._config = call.config
        self._traffic = call.collectives.traffic
        self._stage = stage
        self._others = others
        self._warmups = warmups
        self._times: list[dict[str, float]] = []

    def take(self, steps: int) -> None:
        """Time this many more calls."""
        self._stage(self._config.operation)
        self._times += self._call.times(steps)

    def settle(self) -> None:
        """One call that is not timed."""
        self._call.times(1)

    def finish(self) -> Findings:
        """Let the tensors go and hand the times over."""
        del self._call
        config, traffic = self._config, self._traffic
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
                values=tuple(times[name] for times in self._times),
                warmups=tuple(times[name] for times in self._warmups),
            )
            for name in (("time",) if config.device == "cpu" else ("time", "host_time"))
        }
        return Findings(samples=samples, facts={**facts, **self._others})


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

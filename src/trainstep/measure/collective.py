"""The workload `collective`: one collective among ranks, called again and again. `trainstep collectives` runs it.

Each call starts from a barrier, so that none waits for the one before; every rank times its own. The tensor is put back before each
(a sum in place would grow without end), which is not timed. On a GPU `time` is between CUDA events around the call, and
`host_time` from the barrier until the device is idle; on a CPU `time` is the host's clock.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

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
        measurement = CollectiveMeasurement(asked, self._ranks, stage, self._others)
        stage("warmup")
        measurement.warm_up()
        return measurement


class CollectiveMeasurement:
    """One rank's side."""

    def __init__(self, config: CollectiveConfig, ranks: Ranks, stage: Stage, others: Mapping[str, Fact]) -> None:
        self._config = config
        self._ranks = ranks
        self._stage = stage
        self._others = others
        self._collectives = Collectives(ranks)
        generator = torch.Generator(ranks.device).manual_seed(config.seed + ranks.rank)
        whole = torch.randn(config.elements, dtype=_DTYPES[config.dtype], device=ranks.device, generator=generator)
        part = config.elements // config.ranks
        self._source: Tensor | None = whole[:part].clone() if config.operation == "all_gather" else whole
        self._tensor: Tensor | None = torch.empty_like(whole)
        self._shard: Tensor | None = torch.empty_like(whole[:part])
        self._times: dict[str, list[float]] = {"time": []}
        if ranks.device.type == "cuda":
            self._times["host_time"] = []
        self._warmups: dict[str, list[float]] = {}

    def warm_up(self) -> None:
        """The calls before the timed ones, kept apart. The first makes the connections."""
        self._call_and_time(self._config.warmups)
        self._warmups, self._times = self._times, {name: [] for name in self._times}
        self._collectives.traffic.clear()

    def take(self, steps: int) -> None:
        """Time this many more calls."""
        self._stage(self._config.operation)
        self._call_and_time(steps)

    def settle(self) -> None:
        """One call that is not timed."""
        kept = {name: list(values) for name, values in self._times.items()}
        self._call_and_time(1)
        self._times = kept

    def finish(self) -> Findings:
        """Let the tensors go and hand the times over."""
        self._source = self._tensor = self._shard = None
        config, traffic = self._config, self._collectives.traffic
        payload_bytes = config.payload_bytes
        facts = facts_of(
            payload_bytes=payload_bytes,
            ring_bytes=ring_bytes(config.operation, payload_bytes, config.ranks),
            messages=traffic.messages[config.operation],
            message_bytes=traffic.payload_bytes[config.operation],
            timing="host_clock" if config.device == "cpu" else "cuda_events",
        )
        samples = {
            name: Samples(unit="s", values=tuple(values), warmups=tuple(self._warmups[name]))
            for name, values in self._times.items()
        }
        return Findings(samples=samples, facts={**facts, **self._others})

    def _call_and_time(self, calls: int) -> None:
        timed = _timed_by_events if self._ranks.device.type == "cuda" else _timed_by_host
        for _ in range(calls):
            self._put_back()
            self._collectives.barrier()
            for name, seconds in timed(self._start).items():
                self._times[name].append(seconds)

    def _put_back(self) -> None:
        assert self._tensor is not None
        assert self._source is not None
        if self._config.operation in ("all_reduce", "broadcast"):
            self._tensor.copy_(self._source)

    def _start(self) -> Pending:
        operation, collectives = self._config.operation, self._collectives
        assert self._tensor is not None
        assert self._source is not None
        assert self._shard is not None
        if operation == "all_reduce":
            return collectives.all_reduce(self._tensor)
        if operation == "broadcast":
            return collectives.broadcast(self._tensor)
        if operation == "all_gather":
            return collectives.all_gather(self._tensor, self._source)
        return collectives.reduce_scatter(self._shard, self._source)


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

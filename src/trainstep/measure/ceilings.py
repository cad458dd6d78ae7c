"""The workload `ceiling`: how fast this machine multiplies and copies, for holding a step against what was seen here.

A data sheet's number assumes the highest clock; the power limit often does not allow it under a long matmul.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trainstep.config.ceiling import CeilingConfig
from trainstep.costs.ceilings import copied_bytes, counted, matmul_flops
from trainstep.measure.workload import Findings, Stage
from trainstep.records.record import Fact, Samples

Call = Callable[[], object]

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FLOAT32_PRECISIONS = {"fp32": "highest", "tf32": "high"}
_FLOATS_PER_MIB = 2**20 // 4


class CeilingWorkload:
    """Cells share a process: nothing outlives one but torch's caches."""

    shares_worker = True

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "CeilingMeasurement":
        """Make the operands and run the warm-ups. ValueError where the GPU it names is not there."""
        ceiling = CeilingConfig(**config)
        stage("build")
        measurement = CeilingMeasurement(ceiling, _CALLS[ceiling.kind](ceiling), stage)
        stage("warmup")
        measurement.warm_up()
        return measurement


class CeilingMeasurement:
    """One call, timed again and again: by CUDA events on a GPU, by the host's clock on a CPU."""

    def __init__(self, config: CeilingConfig, call: Call, stage: Stage) -> None:
        self._config = config
        self._call: Call | None = call
        self._stage = stage
        self._warmups_s: list[float] = []
        self._times_s: list[float] = []

    def warm_up(self) -> None:
        """The calls before the timed ones, kept apart."""
        self._warmups_s = self._time(self._config.warmups)

    def take(self, steps: int) -> None:
        """Time this many more calls."""
        self._stage(self._config.kind)
        self._times_s += self._time(steps)

    def finish(self) -> Findings:
        """Let the operands go and hand the times over."""
        self._call = None
        config = self._config
        if config.kind == "matmul":
            amount, quantity = matmul_flops(config.n), "flops"
        else:
            amount, quantity = copied_bytes(config.kind, config.mib), "bytes"
        facts = {
            quantity: Fact(value=amount, unit=quantity),
            "counted": Fact(value=counted(config.kind)),
            "timing": Fact(value="host_clock" if config.device == "cpu" else "cuda_events"),
        }
        if self._times_s:
            rate_unit = "flop/s" if quantity == "flops" else "bytes/s"
            facts["rate"] = Fact(value=amount / statistics.median(self._times_s), unit=rate_unit)
        if config.kind == "peer_copy":
            direct = torch.cuda.can_device_access_peer(0, config.peer)
            facts["route"] = Fact(value="peer to peer" if direct else "through host memory")
        samples = {"time": Samples(unit="s", values=tuple(self._times_s), warmups=tuple(self._warmups_s))}
        return Findings(samples=samples, facts=facts)

    def _time(self, calls: int) -> list[float]:
        if not calls or self._call is None:
            return []
        with _float32_precision(self._config):
            return (
                _host_times_s(self._call, calls) if self._config.device == "cpu" else _event_times_s(self._call, calls)
            )


def _host_times_s(call: Call, calls: int) -> list[float]:
    times = []
    for _ in range(calls):
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return times


def _event_times_s(call: Call, calls: int) -> list[float]:
    """Differences between neighbouring events. An untimed call goes first: the GPU is busy when the first is due."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    call()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]


@contextmanager
def _float32_precision(config: CeilingConfig) -> Iterator[None]:
    """Full fp32 or TF32 for a float32 matmul, for as long as it runs: the process measures other cells afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(_FLOAT32_PRECISIONS.get(config.dtype, before))
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _matmul(config: CeilingConfig) -> Call:
    left, right = (
        _normal(config, config.n, config.n, dtype=_DTYPES[config.dtype], seed=config.seed + i) for i in (0, 1)
    )
    product = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=product)


def _copy(config: CeilingConfig) -> Call:
    source = _normal(config, config.mib * _FLOATS_PER_MIB, seed=config.seed)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _host_to_device(config: CeilingConfig) -> Call:
    target = _normal(config, config.mib * _FLOATS_PER_MIB, seed=config.seed)
    source = target.cpu().pin_memory()
    return lambda: target.copy_(source, non_blocking=True)


def _device_to_host(config: CeilingConfig) -> Call:
    source = _normal(config, config.mib * _FLOATS_PER_MIB, seed=config.seed)
    target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    return lambda: target.copy_(source, non_blocking=True)


def _peer_copy(config: CeilingConfig) -> Call:
    count = torch.cuda.device_count()
    if config.peer >= count:
        raise ValueError(f"peer: there is no GPU {config.peer}: {count} visible, numbered from 0")
    source = _normal(config, config.mib * _FLOATS_PER_MIB, seed=config.seed)
    target = torch.empty_like(source, device=torch.device("cuda", config.peer))
    return lambda: target.copy_(source, non_blocking=True)


def _normal(config: CeilingConfig, *shape: int, dtype: torch.dtype = torch.float32, seed: int) -> Tensor:
    """Random normal numbers: constant operands switch fewer transistors and flatter the clock."""
    generator = torch.Generator(config.device).manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, device=config.device, generator=generator)


_CALLS: dict[str, Callable[[CeilingConfig], Call]] = {
    "matmul": _matmul,
    "copy": _copy,
    "host_to_device": _host_to_device,
    "device_to_host": _device_to_host,
    "peer_copy": _peer_copy,
}

WORKLOAD = CeilingWorkload()

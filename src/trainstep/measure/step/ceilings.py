"""The workload `ceiling` measures how fast this machine multiplies matrices and copies memory.

A step is compared with these measured rates. A data sheet's number assumes the highest clock, which the power limit often
does not allow during a long matmul.
"""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainstep.config.collective import CeilingConfig
from trainstep.costs.transformer import copied_bytes, counted, matmul_flops
from trainstep.measure.harness.workload import Findings, Stage
from trainstep.measure.step.clock import Call, times_in_a_row_s
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Samples
from trainstep.training.precision import DTYPES, float32_matmuls

_FLOATS_PER_MIB = 2**20 // 4


class CeilingWorkload:
    """Measures ceilings; cells share a process, because a cell leaves nothing behind but torch's caches."""

    shares_worker = True

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "CeilingMeasurement":
        """Make the operands and run the warm-ups. Raises ValueError if the config names a GPU that is missing."""
        ceiling = CeilingConfig(**config)
        stage("build")
        call = _CALLS[ceiling.kind](ceiling)
        stage("warmup")
        return CeilingMeasurement(ceiling, call, stage, _times_s(ceiling, call, ceiling.warmups))


class CeilingMeasurement:
    """Times one call repeatedly: by CUDA events on a GPU, by the host's clock on a CPU."""

    def __init__(self, config: CeilingConfig, call: Call, stage: Stage, warmups_s: list[float]) -> None:
        self._config = config
        self._call = call
        self._stage = stage
        self._warmups_s = warmups_s
        self._times_s: list[float] = []

    def take(self, steps: int) -> None:
        self._stage(self._config.kind)
        self._times_s += _times_s(self._config, self._call, steps)

    def finish(self) -> Findings:
        """Free the operands and return the times."""
        del self._call
        config = self._config
        if config.kind == "matmul":
            amount, quantity = matmul_flops(config.n), "flops"
        else:
            amount, quantity = copied_bytes(config.kind, config.mib), "bytes"
        facts = facts_of(
            **{quantity: amount},
            counted=counted(config.kind),
            timing="host_clock" if config.device == "cpu" else "cuda_events",
        )
        if self._times_s:
            rate_unit = "flop/s" if quantity == "flops" else "bytes/s"
            facts["rate"] = Fact(value=amount / statistics.median(self._times_s), unit=rate_unit)
        if config.kind == "peer_copy":
            direct = torch.cuda.can_device_access_peer(0, config.peer)
            facts |= facts_of(route="peer to peer" if direct else "through host memory")
        samples = {"time": Samples(unit="s", values=tuple(self._times_s), warmups=tuple(self._warmups_s))}
        return Findings(samples=samples, facts=facts)


def _times_s(config: CeilingConfig, call: Call, calls: int) -> list[float]:
    if not calls:
        return []
    with float32_matmuls("high" if config.dtype == "tf32" else "highest"):
        return times_in_a_row_s([call] * calls, config.device)


def _matmul(config: CeilingConfig) -> Call:
    left, right = (
        _normal(config, config.n, config.n, dtype=DTYPES.get(config.dtype, torch.float32), seed=config.seed + i)
        for i in (0, 1)
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
    # Constant operands would switch fewer transistors and so allow a higher clock than real work.
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

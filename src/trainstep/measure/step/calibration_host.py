"""The host's costs: on a machine with a GPU a launch of plain PyTorch, a compiled block's call, an update and a graph's launch; on
a CPU what Python and autograd add to each call.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainstep.config.model import ModelConfig
from trainstep.config.run import RunConfig
from trainstep.measure.step.device_trace import device_busy_s
from trainstep.plan.time.step_kernels import step_kernels
from trainstep.training.attention import attention_named
from trainstep.training.transformer import Transformer

_SMALL = ModelConfig(d_model=128, d_ff=512, layers=8, heads=2, vocab_size=1000)
"""A model whose kernels take less time than their launches."""
_CONTEXT, _TINY_CONTEXT = 64, 8
_GRAPHED = 500
_TENSORS = 200
_SLOWER, _FASTER = 2.0, 1.5
"""Factors for a busy and for a quiet moment over the measured time: host-bound plain steps took 0.73 to 0.91 of it on the same
machine minutes later (results/h200/predicted.jsonl, predicted_again.jsonl)."""


def host_rows(calls: int) -> list[dict[str, Any]]:
    """Rows of the table host."""
    rows = []
    for compiled in (False, True):
        forward_s, backward_s = _passes_s(calls, _SMALL, _CONTEXT, "cuda", compiled=compiled)
        if compiled:
            rows += [
                _row(f"compiled block {phase}", time_s / _SMALL.layers)
                for phase, time_s in (("forward", forward_s), ("backward", backward_s))
            ]
            continue
        kernels = step_kernels(RunConfig(model=_SMALL, batch_size=1, context=_CONTEXT, device="cuda"))
        for phase, time_s in (("forward", forward_s), ("backward", backward_s)):
            rows.append(_row(f"{phase} launch", time_s / sum(kernel.count for kernel in getattr(kernels, phase))))
    rows.append(_row("optimizer tensor", _update_s(calls) / _TENSORS))
    launch_s, gap_s = _graph_s(calls)
    rows += [_row("graph launch", launch_s), _row("graph", gap_s), _row("eager", gap_s)]
    return rows


def cpu_rows(calls: int) -> list[dict[str, Any]]:
    """The row `eager`: seconds between two kernels of a model that has hardly anything to compute."""
    tiny = replace(_SMALL, d_model=16, d_ff=32, vocab_size=32)
    kernels = step_kernels(RunConfig(model=tiny, batch_size=1, context=_TINY_CONTEXT))
    passes_s = sum(_passes_s(calls, tiny, _TINY_CONTEXT, "cpu"))
    count = sum(kernel.count for kernel in (*kernels.forward, *kernels.backward))
    x = torch.zeros(1, _TINY_CONTEXT, tiny.d_model)
    started_s = time.perf_counter()
    for _ in range(_GRAPHED):
        x.add_(1)
    alone_s = (time.perf_counter() - started_s) / _GRAPHED
    return [_row("eager", max(0.0, passes_s / count - alone_s))]


def _row(what: str, time_s: float) -> dict[str, Any]:
    return {"what": what, "time_s": time_s, "low_s": time_s / _FASTER, "high_s": time_s * _SLOWER}


def _passes_s(
    calls: int, config: ModelConfig, context: int, device_type: str, *, compiled: bool = False
) -> tuple[float, float]:
    """Seconds of the host in forward and in backward of a small model."""
    device = torch.device(device_type)
    wait = torch.cuda.synchronize if device_type == "cuda" else _nothing
    with device:
        model = Transformer(config, attention=attention_named("sdpa", context, device), context=context)
        tokens = torch.zeros(1, context, dtype=torch.int64)
    if compiled:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, dynamic=False)  # type: ignore[assignment]
    forward, backward = [], []
    for _ in range(calls + 3):
        wait()
        started_s = time.perf_counter()
        loss = model(tokens, tokens)
        forward.append(time.perf_counter() - started_s)
        wait()
        started_s = time.perf_counter()
        loss.backward()
        backward.append(time.perf_counter() - started_s)
        model.zero_grad()
    return statistics.median(forward[3:]), statistics.median(backward[3:])


def _nothing() -> None:
    """A CPU has nothing to wait for."""


def _update_s(calls: int) -> float:
    parameters = [nn.Parameter(torch.zeros(16, device="cuda")) for _ in range(_TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return _host_s(torch.optim.AdamW(parameters, fused=True).step, calls)


def _graph_s(calls: int) -> tuple[float, float]:
    """Seconds by kernel of a graph: of its launch on the host, and between two kernels."""
    x = torch.zeros(256, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_GRAPHED):
            x.add_(1)
    launch_s = _host_s(graph.replay, calls)
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    graph.replay()
    ended.record()
    torch.cuda.synchronize()
    whole_s = started.elapsed_time(ended) / 1e3
    return launch_s / _GRAPHED, max(0.0, whole_s - device_busy_s(graph.replay)) / _GRAPHED


def _host_s(call: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls + 1):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    torch.cuda.synchronize()
    return statistics.median(times[1:])

"""The workload `tile_check`: one candidate tile compiled, run once on a small problem and held against fp64.

In a process of its own, because what does not compile may abort, and what reads beyond its memory takes the CUDA context with it.
The compiled kernel goes to Triton's cache on disk, where the process that times it finds it: the small problem is ragged in the
side that stays, and of the streamed side it keeps the length's remainder, so that the very same kernel is checked and timed.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainstep.config.attention_tiles import AttentionTilesConfig
from trainstep.measure.lone_kernel import LoneKernel, Operands, normal_tensors, reference_outputs
from trainstep.measure.workload import Findings, Stage
from trainstep.ops.accuracy import allowed_error, largest_error
from trainstep.ops.flash_attention.tiles import TileConfig
from trainstep.records.facts import Fact, facts_of
from trainstep.training.precision import float32_matmuls

_HEADS = 3
_SMALL = 512
_LARGEST_TILE = 256
_RAGGED = 5
"""Positions by which the side that stays ends before its tile does."""

_WRONG = 2.0
"""Of what the 2x rule allows: that is the tests' rule, and one unlucky rounding must not cost a tile."""


class TileCheckWorkload:
    """Cells share a process: what one compiles does not change the next."""

    shares_worker = True

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "TileCheck":
        """Compile and run. Config: `problem`, an AttentionTilesConfig, and `tile`, a TileConfig, both plain."""
        stage("build")
        problem = AttentionTilesConfig(**config["problem"])
        tensors = normal_tensors(problem, *_small_shapes(problem))
        truth = reference_outputs(problem, tensors, torch.float64)
        o, lse = truth["o"].to(tensors[0].dtype), truth["lse"].float()
        kernel = LoneKernel(problem, Operands(*tensors, o, lse))
        bound = kernel.bind(TileConfig(**config["tile"]))
        for output in kernel.outputs.values():
            output.fill_(float("nan"))  # what the kernel leaves out must not pass
        stage("compile")
        kernel.run(bound)
        stage("check")
        facts = _errors(problem, kernel.outputs, truth, tensors)
        return TileCheck(facts | _resources(bound.compiled))


class TileCheck:
    """Everything was seen in one run: there is nothing to time."""

    def __init__(self, facts: Mapping[str, Fact]) -> None:
        self._facts = facts

    def take(self, steps: int) -> None:
        pass

    def finish(self) -> Findings:
        return Findings(samples={}, facts=self._facts)


def _small_shapes(config: AttentionTilesConfig) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Of q and k."""
    _, _, positions = config.sizes
    streamed = positions if positions <= _SMALL else _SMALL + positions % _LARGEST_TILE
    staying = max(1, streamed - _RAGGED)
    queries, keys = (streamed, staying) if config.kernel == "key_gradients" else (staying, streamed)
    return (1, _HEADS, queries, config.head_dim), (1, _HEADS, keys, config.head_dim)


def _errors(
    config: AttentionTilesConfig,
    outputs: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
) -> dict[str, Fact]:
    """`error_ratio` is the error over what the 2x rule (ops/accuracy.py) allows."""
    with float32_matmuls("high" if config.arithmetic == "tf32" else "highest"):
        same_dtype = reference_outputs(config, tensors, tensors[0].dtype)
    times = 4 if config.arithmetic in ("tf32", "tf32x3", "fp16x3") else 2  # rounded otherwise than torch rounds
    error, ratio = 0.0, 0.0
    for name, output in outputs.items():
        if not output.isfinite().all():
            return facts_of(wrong=f"{name} is not finite")
        off = largest_error(output, truth[name])
        allowed = allowed_error(same_dtype[name], truth[name], output.dtype, times=times)
        error, ratio = max(error, off / truth[name].abs().max().item()), max(ratio, off / allowed)
    facts = facts_of(error=error, error_ratio=ratio)
    if ratio > _WRONG:
        facts |= facts_of(wrong=f"off by {ratio:.2g} times what is allowed")
    return facts


def _resources(compiled: Any) -> dict[str, Fact]:
    """What the compiled kernel takes; nothing of it in the interpreter, which compiles nothing."""
    if compiled is None:
        return {}
    spilled = getattr(compiled, "n_spills", None)  # in registers; both are set once the kernel is on the device
    return facts_of(
        registers=getattr(compiled, "n_regs", None),
        spilled_bytes=None if spilled is None else 4 * spilled,
        shared_bytes=compiled.metadata.shared,
    )


WORKLOAD = TileCheckWorkload()

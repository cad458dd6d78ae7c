"""Runs one attention kernel by itself with any tile: to time it, and to check one tile (the workload `tile_check`).

`kernel = LoneKernel(config, operands)`, `bound = kernel.bind(tile)`, `kernel.run(bound)`, then `kernel.outputs`.

[Note: the check] `tile_check` compiles one candidate tile, runs it once on a small problem and compares the result with fp64. It
runs in a process of its own, because a tile that does not compile may abort, and a read beyond the memory destroys the CUDA
context. The process that times the kernel finds it compiled in Triton's cache on disk. For this, the small problem is ragged in the
side that stays, and keeps the length's remainder in the side that is streamed, so that the very same kernel is checked and timed.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainstep.config.attention import AttentionTilesConfig
from trainstep.measure.harness.workload import Findings, Stage
from trainstep.ops import reference
from trainstep.ops.direct_launch import BoundKernel
from trainstep.ops.flash_attention.portable.tiles import (
    MOST_PART_ROWS,
    Arithmetic,
    KernelPass,
    TileConfig,
    TileProblem,
    choose_row,
)
from trainstep.ops.flash_attention.problem import CallMeta, Problem, tile_problem
from trainstep.ops.reference import allowed_error, largest_error
from trainstep.records.facts import Fact, facts_of
from trainstep.training.precision import DTYPES, float32_matmuls

try:
    from trainstep.ops.flash_attention.portable.backward import bind_backward
    from trainstep.ops.flash_attention.portable.forward import bind_forward, launch_forward
    from trainstep.ops.flash_attention.split.backward import bind_split_backward
    from trainstep.ops.flash_attention.split.forward import bind_split_forward, launch_split_forward
    from trainstep.ops.flash_attention.split.parts import Prologue, whole_tiles
except ImportError:  # there is no triton for this platform, and so no GPU that it could use
    bind_backward = bind_forward = launch_forward = launch_split_forward = None  # type: ignore[assignment]
Shape = tuple[int, int, int, int]
_HEADS = 3
_SMALL = 512
_LARGEST_TILE = 256
_RAGGED = 5
"""The length of the side that stays ends this many positions before a tile does."""
_WRONG = 2.0
"""A tile is wrong if its error is over this many times what the tests' rule allows, so that one rounding rejects no tile."""


class Operands(NamedTuple):
    """The tensors that kernels read; backward's kernels also read `o` and `lse`, the outputs of forward's."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    o: Tensor
    lse: Tensor


def arithmetic_of(config: AttentionTilesConfig) -> Arithmetic:
    return Arithmetic.HALF if config.arithmetic in DTYPES else Arithmetic(config.arithmetic)


def problem_of(config: AttentionTilesConfig) -> Problem:
    return Problem(config.head_dim**-0.5, config.mask == "causal", False, arithmetic_of(config))


def tile_problem_of(config: AttentionTilesConfig) -> TileProblem:
    """The problem that tiles are chosen for, on the config's device."""
    return tile_problem(KernelPass(config.kernel), config.head_dim, arithmetic_of(config), torch.device(config.device))


def normal_tensors(
    config: AttentionTilesConfig, q_shape: Shape, k_shape: Shape
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the output's gradient, random normal, in the config's dtype."""
    generator = torch.Generator(config.device).manual_seed(config.seed)
    dtype = DTYPES.get(config.arithmetic, torch.float32)
    q, k, v, do = (
        torch.randn(shape, device=config.device, generator=generator).to(dtype)
        for shape in (q_shape, k_shape, k_shape, q_shape)
    )
    return q, k, v, do


def operands_of(config: AttentionTilesConfig) -> Operands:
    """The whole problem's operands; `o` and `lse` are computed by the forward kernel with the table's tile."""
    batch, heads, positions = config.sizes
    shape = (batch, heads, positions, config.head_dim)
    q, k, v, do = normal_tensors(config, shape, shape)
    launch = launch_split_forward if arithmetic_of(config) is Arithmetic.FP16X3 else launch_forward
    return Operands(q, k, v, do, *launch(q, k, v, problem_of(config)))


def reference_outputs(
    config: AttentionTilesConfig, tensors: tuple[Tensor, Tensor, Tensor, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """o, lse, dq, dk and dv by ops/reference.py in this dtype."""
    q, k, v, do = (x.to(dtype) for x in tensors)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    causal = config.mask == "causal"
    o = reference.attention(*leaves, causal=causal)
    dq, dk, dv = torch.autograd.grad(o, leaves, do)
    lse = reference.attention_lse(q, k, causal=causal)
    return {"o": o.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}


class LoneKernel:
    """The config's kernel on these operands; `outputs` has its results by name."""

    def __init__(self, config: AttentionTilesConfig, operands: Operands) -> None:
        self._pass = KernelPass(config.kernel)
        self._problem = problem_of(config)
        self._operands = operands
        q, k, v, *_, lse = operands
        if self._pass is KernelPass.FORWARD:
            self.outputs: Mapping[str, Tensor] = {"o": torch.empty_like(q), "lse": torch.empty_like(lse)}
        else:
            inputs_of = {"dq": q} if self._pass is KernelPass.QUERY_GRADIENTS else {"dk": k, "dv": v}
            self.outputs = {name: torch.empty_like(tensor) for name, tensor in inputs_of.items()}
        inputs = self._parts() if self._problem.arithmetic is Arithmetic.FP16X3 else self._whole()
        self._arguments = (*inputs, *self.outputs.values())

    def bind(self, tile: TileConfig) -> BoundKernel:
        """The kernel compiled for this tile when it first runs."""
        if self._problem.arithmetic is Arithmetic.FP16X3:
            return self._bind_parts(self._pass, tile)
        q, k, v, do, o, _ = self._operands
        if self._pass is KernelPass.FORWARD:
            return bind_forward(CallMeta.forward(q, k, v), self._problem, tile)
        return bind_backward(CallMeta.backward(do, q, k, v, o), self._problem, tile, tile)[self._pass]

    def _whole(self) -> tuple[Tensor, ...]:
        """The inputs of kernels that read the tensors as they are."""
        q, k, v, do, o, lse = self._operands
        if self._pass is KernelPass.FORWARD:
            return q, k, v
        return q, k, v, do, lse, (o.float() * do.float()).sum(-1)

    def _prologue(self) -> "Prologue":
        """The prologue of kernels that read tensors split into parts, padded for tiles of any size."""
        q, k, v, do, o, _ = self._operands
        padded_rows = (whole_tiles(q.shape[2], MOST_PART_ROWS), whole_tiles(k.shape[2], MOST_PART_ROWS))
        forward = self._pass is KernelPass.FORWARD
        return Prologue(CallMeta.forward(q, k, v) if forward else CallMeta.backward(do, q, k, v, o), padded_rows)

    def _parts(self) -> tuple[Tensor, ...]:
        """The inputs of kernels that read tensors split into parts."""
        q, k, v, do, o, lse = self._operands
        if self._pass is KernelPass.FORWARD:
            parts = self._prologue()(q, k, v)
            return parts.queries, parts.keys, parts.peaks
        parts = self._prologue()(q, k, v, do, o)
        inputs = (parts.queries, parts.keys, parts.peaks, lse, parts.delta)
        if self._pass is KernelPass.KEY_GRADIENTS:  # this kernel scales by what the other pass writes into `peaks`
            where = tile_problem(KernelPass.QUERY_GRADIENTS, q.shape[-1], self._problem.arithmetic, q.device)
            other = self._bind_parts(KernelPass.QUERY_GRADIENTS, choose_row(where).config)
            other(*inputs, torch.empty_like(q))
        return inputs

    def _bind_parts(self, pass_: KernelPass, tile: TileConfig) -> BoundKernel:
        q, k, v, *_ = self._operands
        meta, prologue = CallMeta.forward(q, k, v), self._prologue()
        if pass_ is KernelPass.FORWARD:
            return bind_split_forward(meta, prologue, self._problem, tile)
        return bind_split_backward(meta, prologue, self._problem, tile, tile)[pass_]

    def run(self, bound: BoundKernel) -> None:
        """Launch the kernel; `outputs` are complete when the device is done."""
        bound(*self._arguments)


class TileCheckWorkload:
    shares_worker = True  # what one cell compiles does not change the next

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "TileCheck":
        """Compile and run the tile. Config: `problem`, an AttentionTilesConfig, and `tile`, a TileConfig, both as plain values."""
        stage("build")
        problem = AttentionTilesConfig(**config["problem"])
        tensors = normal_tensors(problem, *_small_shapes(problem))
        truth = reference_outputs(problem, tensors, torch.float64)
        o, lse = truth["o"].to(tensors[0].dtype), truth["lse"].float()
        kernel = LoneKernel(problem, Operands(*tensors, o, lse))
        bound = kernel.bind(TileConfig(**config["tile"]))
        for output in kernel.outputs.values():
            output.fill_(float("nan"))  # elements that the kernel does not write must not pass
        stage("compile")
        kernel.run(bound)
        stage("check")
        facts = _errors(problem, kernel.outputs, truth, tensors)
        return TileCheck(facts | _resources(bound.compiled))


class TileCheck:
    """The facts of one run; nothing is timed."""

    def __init__(self, facts: Mapping[str, Fact]) -> None:
        self._facts = facts

    def take(self, steps: int) -> None:
        pass

    def finish(self) -> Findings:
        return Findings(samples={}, facts=self._facts)


def _small_shapes(config: AttentionTilesConfig) -> tuple[Shape, Shape]:
    """The shapes of q and k."""
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
    """Facts: `error`, `error_ratio` (the error over what the rule in ops/reference.py allows), and `wrong` with a reason."""
    with float32_matmuls("high" if config.arithmetic == "tf32" else "highest"):
        same_dtype = reference_outputs(config, tensors, tensors[0].dtype)
    times = 4 if config.arithmetic in ("tf32", "tf32x3", "fp16x3") else 2  # the three round in another way than torch
    error, ratio = 0.0, 0.0
    for name, output in outputs.items():
        if not output.isfinite().all():
            return facts_of(wrong=f"{name} is not finite")
        difference = largest_error(output, truth[name])
        allowed = allowed_error(same_dtype[name], truth[name], output.dtype, times=times)
        error = max(error, difference / truth[name].abs().max().item())
        ratio = max(ratio, difference / allowed)
    facts = facts_of(error=error, error_ratio=ratio)
    if ratio > _WRONG:
        facts |= facts_of(wrong=f"off by {ratio:.2g} times what is allowed")
    return facts


def _resources(compiled: Any) -> dict[str, Fact]:
    """The registers and memory that the compiled kernel takes."""
    if compiled is None:  # Triton's interpreter compiles nothing
        return {}
    # A number of registers; like n_regs it is set once the kernel is on the device.
    spilled = getattr(compiled, "n_spills", None)
    return facts_of(
        registers=getattr(compiled, "n_regs", None),
        spilled_bytes=None if spilled is None else 4 * spilled,
        shared_bytes=compiled.metadata.shared,
    )


WORKLOAD = TileCheckWorkload()

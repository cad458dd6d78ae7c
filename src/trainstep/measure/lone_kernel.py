"""One attention kernel by itself, to be launched with any tile: the tensors it reads and writes, and what they should be.

`kernel = LoneKernel(config, problem_tensors)`, `bound = kernel.bind(tile)`, `kernel.run(bound)`, then `kernel.outputs`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trainstep.config.attention_tiles import AttentionTilesConfig
from trainstep.ops import reference
from trainstep.ops.flash_attention.launch import BoundKernel, CallMeta, Problem, tile_problem
from trainstep.ops.flash_attention.tiles import (
    MOST_PART_ROWS,
    Arithmetic,
    KernelPass,
    TileConfig,
    TileProblem,
    choose_row,
)
from trainstep.training.precision import DTYPES

try:
    from trainstep.ops.flash_attention.backward import bind_backward
    from trainstep.ops.flash_attention.forward import bind_forward, launch_forward
    from trainstep.ops.flash_attention.split_backward import bind_split_backward
    from trainstep.ops.flash_attention.split_forward import bind_split_forward, launch_split_forward
    from trainstep.ops.flash_attention.split_parts import whole_tiles
    from trainstep.ops.flash_attention.split_prologue import Prologue
except ImportError:  # no triton for this platform: no GPU it could drive either
    bind_backward = bind_forward = launch_forward = launch_split_forward = None  # type: ignore[assignment]

Shape = tuple[int, int, int, int]


class Operands(NamedTuple):
    """What kernels read: `o` and `lse` are the forward kernel's, which backward's read."""

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
    """What its tiles are chosen for, on the device that it names."""
    return tile_problem(KernelPass(config.kernel), config.head_dim, arithmetic_of(config), torch.device(config.device))


def normal_tensors(
    config: AttentionTilesConfig, q_shape: Shape, k_shape: Shape
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the output's gradient: random normal, in the config's dtype."""
    generator = torch.Generator(config.device).manual_seed(config.seed)
    dtype = DTYPES.get(config.arithmetic, torch.float32)
    q, k, v, do = (
        torch.randn(shape, device=config.device, generator=generator).to(dtype)
        for shape in (q_shape, k_shape, k_shape, q_shape)
    )
    return q, k, v, do


def operands_of(config: AttentionTilesConfig) -> Operands:
    """The whole problem's, with what the forward kernel makes of it by the table's tile."""
    batch, heads, positions = config.sizes
    shape = (batch, heads, positions, config.head_dim)
    q, k, v, do = normal_tensors(config, shape, shape)
    launch = launch_split_forward if arithmetic_of(config) is Arithmetic.FP16X3 else launch_forward
    return Operands(q, k, v, do, *launch(q, k, v, problem_of(config)))


def reference_outputs(
    config: AttentionTilesConfig, tensors: tuple[Tensor, Tensor, Tensor, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """o, lse, dq, dk and dv by ops/reference.py in a dtype."""
    q, k, v, do = (x.to(dtype) for x in tensors)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    causal = config.mask == "causal"
    o = reference.attention(*leaves, causal=causal)
    dq, dk, dv = torch.autograd.grad(o, leaves, do)
    lse = reference.attention_lse(q, k, causal=causal)
    return {"o": o.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}


class LoneKernel:
    """The config's kernel on these operands."""

    def __init__(self, config: AttentionTilesConfig, operands: Operands) -> None:
        self._pass = KernelPass(config.kernel)
        self._problem = problem_of(config)
        self._operands = operands
        q, k, v, *_, lse = operands
        if self._pass is KernelPass.FORWARD:
            self.outputs: Mapping[str, Tensor] = {"o": torch.empty_like(q), "lse": torch.empty_like(lse)}
        else:
            read = (q,) if self._pass is KernelPass.QUERY_GRADIENTS else (k, v)
            names = ("dq",) if self._pass is KernelPass.QUERY_GRADIENTS else ("dk", "dv")
            self.outputs = {name: torch.empty_like(like) for name, like in zip(names, read, strict=True)}
        inputs = self._parts() if self._problem.arithmetic is Arithmetic.FP16X3 else self._whole()
        self._arguments = (*inputs, *self.outputs.values())

    def bind(self, tile: TileConfig) -> BoundKernel:
        """The kernel with this tile."""
        if self._problem.arithmetic is Arithmetic.FP16X3:
            return self._bind_parts(self._pass, tile)
        q, k, v, do, o, _ = self._operands
        if self._pass is KernelPass.FORWARD:
            return bind_forward(CallMeta.forward(q, k, v), self._problem, tile)
        return bind_backward(CallMeta.backward(do, q, k, v, o), self._problem, tile, tile)[self._pass]

    def _whole(self) -> tuple[Tensor, ...]:
        """What the kernels read that take tensors as they are."""
        q, k, v, do, o, lse = self._operands
        if self._pass is KernelPass.FORWARD:
            return q, k, v
        return q, k, v, do, lse, (o.float() * do.float()).sum(-1)

    def _prologue(self) -> "Prologue":
        """Makes what the kernels read that take parts split beforehand; padded for tiles of any size."""
        q, k, v, do, o, _ = self._operands
        padded_rows = (whole_tiles(q.shape[2], MOST_PART_ROWS), whole_tiles(k.shape[2], MOST_PART_ROWS))
        forward = self._pass is KernelPass.FORWARD
        return Prologue(CallMeta.forward(q, k, v) if forward else CallMeta.backward(do, q, k, v, o), padded_rows)

    def _parts(self) -> tuple[Tensor, ...]:
        q, k, v, do, o, lse = self._operands
        if self._pass is KernelPass.FORWARD:
            parts = self._prologue()(q, k, v)
            return parts.queries, parts.keys, parts.peaks
        parts = self._prologue()(q, k, v, do, o)
        inputs = (parts.queries, parts.keys, parts.peaks, lse, parts.delta)
        if self._pass is KernelPass.KEY_GRADIENTS:  # scales by what the other pass leaves in `peaks`
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
        """Launch it; the outputs are there once the device is done."""
        bound(*self._arguments)

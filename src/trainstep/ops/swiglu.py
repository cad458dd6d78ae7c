"""`swiglu` and `swiglu_linear`: the activation of SwiGLU (Shazeer 2020) on a joint gate and up, alone or with the matmul behind it.

    y = gate sigmoid(gate) up        gate, up = the halves of one matmul's output
    z = y W^T                        W: the projection down

`swiglu_linear` keeps gate and up for backward and not y, which is a third of what the MLP would keep: backward computes y again in
the pass that computes the gradients of gate and up.
"""

import functools
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from trainstep.ops import reference
from trainstep.ops.operators import autocast_dtype, define, has_kernel, makes_a_graph
from trainstep.spans import span

with suppress(ImportError):  # there is no triton for this platform; has_kernel then says so
    from trainstep.ops.kernels.swiglu import launch_swiglu, launch_swiglu_backward


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) up, (..., F), of gate and up (..., F), or of one tensor (..., 2 F) with gate in front of up.

    fp32, bf16 or fp16, computed in fp32 and rounded once. On a CPU and in fp64 ops/reference.py runs. ValueError for shapes and
    dtypes that do not fit together.
    """
    if up is None:
        _check(gate)
        return _swiglu(gate) if has_kernel(gate) else reference.swiglu(*gate.chunk(2, dim=-1))
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"up: must have gate's shape and dtype, {tuple(gate.shape)} and {gate.dtype}, but has {tuple(up.shape)} and {up.dtype}"
        )
    return _swiglu_pair(gate, up) if gate.dim() and has_kernel(gate, up) else reference.swiglu(gate, up)


def swiglu_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """swiglu(gate_up) W^T, (..., C), with W (C, F); autocast applies. Backward recomputes swiglu(gate_up).

    ValueError for shapes that do not fit together.
    """
    _check(gate_up)
    if weight.dim() != 2 or 2 * weight.shape[1] != gate_up.shape[-1]:
        raise ValueError(
            f"weight: must be (C, {gate_up.shape[-1] // 2}) for gate and up of {gate_up.shape[-1]} together, but has the shape "
            f"{tuple(weight.shape)}"
        )
    dtype = autocast_dtype(gate_up)
    if dtype is not None:
        gate_up, weight = gate_up.to(dtype), weight.to(dtype)
    result: Tensor = _SwiGLULinear.apply(gate_up, weight)  # type: ignore[no-untyped-call]
    return result


class SwiGLU(nn.Module):
    """z = swiglu(x U^T) W^T with U = [gate; up] (2 F, C) and W (C, F), without biases.

    Loads the state_dict of a module with gate, up and down, as trainstep's Transformer has them.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        new = functools.partial(nn.Linear, bias=False, device=device, dtype=dtype)
        self.gate_up = nn.Linear(d_model, 2 * d_ff, bias=False, device="meta", dtype=dtype)
        parts = [new(d_model, d_ff).weight.data for _ in ("gate", "up")]  # drawn as two matrices
        self.gate_up.weight = nn.Parameter(torch.cat(parts))
        self.down = new(d_ff, d_model)
        self.register_load_state_dict_pre_hook(_join_gate_and_up)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        with span("mlp"):
            return swiglu_linear(self.gate_up(x), self.down.weight)


def _join_gate_and_up(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    names = [f"{prefix}{part}.weight" for part in ("gate", "up")]
    if all(name in state for name in names):
        state[f"{prefix}gate_up.weight"] = torch.cat([state.pop(name) for name in names])


class _SwiGLULinear(torch.autograd.Function):
    """Its matmuls are torch's, outside of our operators, so that FLOP counters, profilers and compilers see them."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return linear(swiglu(gate_up), weight)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate_up, weight = ctx.saved_tensors
        dgate_up, y = _gradients(dz @ weight, gate_up)
        if not ctx.needs_input_grad[1]:
            return dgate_up, None
        dz_rows, y_rows = (torch.atleast_2d(x).flatten(0, -2) for x in (dz, y))
        return dgate_up, dz_rows.T @ y_rows


def _check(gate_up: Tensor) -> None:
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: must be (..., 2 F), but has the shape {tuple(gate_up.shape)}")


def _gradients(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gate and up, and y once more."""
    if has_kernel(gate_up) and not makes_a_graph():
        dgate_up, y = _swiglu_backward(dy, gate_up, True)
        return dgate_up, y
    gate, up = gate_up.chunk(2, dim=-1)
    return _reference_backward(dy, gate_up), reference.swiglu(gate, up)


def _reference_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    return torch.cat(reference.swiglu_backward(dy, *gate_up.chunk(2, dim=-1)), dim=-1)


def _run(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.contiguous().chunk(2, dim=-1)
    return launch_swiglu(gate, up, row_stride=gate_up.shape[-1])


def _run_backward(dy: Tensor, gate_up: Tensor, write_y: bool) -> tuple[Tensor, Tensor]:
    dgate_up, y = gate_up.new_empty(gate_up.shape), dy.new_empty(dy.shape) if write_y else None
    (gate, up), (dgate, dup) = gate_up.contiguous().chunk(2, dim=-1), dgate_up.chunk(2, dim=-1)
    launch_swiglu_backward(dy.contiguous(), gate, up, dgate, dup, y, row_stride=gate_up.shape[-1])
    return dgate_up, dy.new_empty(0) if y is None else y


def _run_pair(gate: Tensor, up: Tensor) -> Tensor:
    return launch_swiglu(gate.contiguous(), up.contiguous(), row_stride=gate.shape[-1])


def _run_pair_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    launch_swiglu_backward(dy.contiguous(), gate.contiguous(), up.contiguous(), dgate, dup, None, gate.shape[-1])
    return dgate, dup


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _fake_backward(dy: Tensor, gate_up: Tensor, write_y: bool) -> tuple[Tensor, Tensor]:
    return gate_up.new_empty(gate_up.shape), dy.new_empty(dy.shape if write_y else 0)


def _fake_pair(gate: Tensor, _up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _fake_pair_backward(_dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    (gate_up,) = ctx.saved_tensors
    if makes_a_graph():
        return _reference_backward(dy, gate_up)
    dgate_up: Tensor = _swiglu_backward(dy, gate_up, False)[0]
    return dgate_up


def _backward_pair(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    backward = reference.swiglu_backward if makes_a_graph() else _swiglu_pair_backward
    dgate, dup = backward(dy, *ctx.saved_tensors)
    return dgate, dup


_swiglu = define("swiglu(Tensor gate_up) -> Tensor", _run, _fake, save=_save, backward=_backward)
_swiglu_backward = define(
    "swiglu_backward(Tensor dy, Tensor gate_up, bool write_y) -> (Tensor, Tensor)", _run_backward, _fake_backward
)
_swiglu_pair = define(
    "swiglu_pair(Tensor gate, Tensor up) -> Tensor", _run_pair, _fake_pair, save=_save, backward=_backward_pair
)
_swiglu_pair_backward = define(
    "swiglu_pair_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    _run_pair_backward,
    _fake_pair_backward,
)

"""The Hopper kernels' host side: which calls they take and why not, and launches that are paid once a shape.

What they do not take runs on the portable kernels (forward.py, backward.py), to the same rule of accuracy.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trainstep.ops.flash_attention.forward import LOG2_E
from trainstep.ops.flash_attention.hopper_backward import (
    hopper_cast_kernel,
    hopper_gradients_kernel,
    hopper_rows_kernel,
)
from trainstep.ops.flash_attention.hopper_forward import hopper_forward_kernel
from trainstep.ops.flash_attention.hopper_schedules import (
    BACKWARD,
    BACKWARD_KEYS,
    FORWARD,
    LEAST_HEAD_DIM,
    ROWS,
    SHARED_MEMORY_BYTES,
    WIDTHS,
    BackwardSchedule,
    ForwardSchedule,
    heads_together,
    tile_width,
)
from trainstep.ops.flash_attention.launch import (
    PROBLEMS_KEPT,
    BoundKernel,
    Problem,
    device_of,
    starter,
    strides,
)

ROWS_BLOCK_Q = 64
"""Queries a program of the two small kernels of backward."""
PADDED_TO = 128
"""Queries that rows of log-sum-exp and delta are padded to: a multiple of every tile."""

_GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


# Which calls -----------------------------------------------------------------------------------------------------------------


def why_not(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> str | None:
    """Why the Hopper kernels do not take these tensors, in a few words, or None."""
    tensors = (q_BHSD, k_BGSD, v_BGSD)
    reason = _why_not_ever(
        q_BHSD.device, q_BHSD.dtype, tuple(x.shape for x in tensors), tuple(x.stride() for x in tensors)
    )
    if reason is None and any(x.data_ptr() % 16 for x in tensors):
        return "a tensor's address is not a multiple of 16 bytes"
    return reason


@functools.lru_cache(maxsize=PROBLEMS_KEPT)
def _why_not_ever(
    device: torch.device, dtype: torch.dtype, shapes: tuple[torch.Size, ...], steps: tuple[tuple[int, ...], ...]
) -> str | None:
    """What no other address would change."""
    architecture, shared_memory_bytes = device_of(device)
    if architecture != "sm_90" or shared_memory_bytes < SHARED_MEMORY_BYTES:
        return f"the device is {architecture}, not sm_90"
    return why_not_shape(dtype, shapes, steps)


def why_not_shape(dtype: torch.dtype, shapes: tuple[torch.Size, ...], steps: tuple[tuple[int, ...], ...]) -> str | None:
    """The part that no device changes. Shapes and strides of q, k, v."""
    head_dim = shapes[0][-1]
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} is not a 16-bit dtype"
    if head_dim % 8 or not LEAST_HEAD_DIM <= head_dim <= WIDTHS[-1]:
        return f"heads are {head_dim} wide, not a multiple of 8 from {LEAST_HEAD_DIM} to {WIDTHS[-1]}"
    for shape, stride in zip(shapes, steps, strict=True):
        step_bytes = [step * dtype.itemsize for size, step in zip(shape, stride, strict=True) if size > 1]
        if any(step % 16 for step in step_bytes[:-1]):
            return "a stride is not a multiple of 16 bytes"
        if any(step <= 0 or step >= 2**40 for step in step_bytes):
            return "a tensor is expanded, or strides beyond 2^40 bytes"
    batch, heads, queries, _ = shapes[0]
    if batch * heads * queries * head_dim >= 2**40 or batch * heads * (queries + 128) >= 2**31:
        return "there are more than 2^31 rows"
    return None


# Launches --------------------------------------------------------------------------------------------------------------------


def padded_rows(queries: int) -> int:
    """Of log-sum-exp and delta, a head."""
    return -(-queries // PADDED_TO) * PADDED_TO


class Boxes(NamedTuple):
    """A tensor as TMA is told to see it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    layout: Any

    def of(self, tensor: Tensor) -> TensorDescriptor:
        return TensorDescriptor(tensor, self.shape, self.strides, self.box, self.layout)


def boxes(shape: Sequence[int], stride: Sequence[int], rows: int, columns: int, dtype: torch.dtype) -> Boxes:
    """Of `rows` positions of one head of a (batch, head, position, column) tensor. The stride of a size of 1 means nothing."""
    steps = tuple(step if size > 1 else shape[-1] for size, step in zip(shape[:-1], stride[:-1], strict=True))
    box = [1, 1, rows, columns]
    return Boxes(tuple(shape), (*steps, 1), tuple(box), gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[dtype]))


def row_boxes(length: int, rows: int) -> Boxes:
    """Of fp32 numbers in a row."""
    return Boxes((length,), (1,), (rows,), gl.NVMMASharedLayout.get_default_for([rows], gl.float32))


class BoxedKernel:
    """A kernel whose first arguments are TMA descriptors, then come tensors, then what a shape fixes."""

    def __init__(
        self,
        kernel: Any,
        programs: int,
        boxes: Sequence[Boxes],
        arguments: dict[str, Any],
        most_registers: int | None = None,
    ) -> None:
        names = kernel.arg_names
        self.kernel, self.programs = kernel, programs
        self._boxes = tuple(boxes)
        self._arguments = tuple(arguments[name] for name in names[len(names) - len(arguments) :])
        self.options = {"num_warps": 4} | ({} if most_registers is None else {"maxnreg": most_registers})
        self._start: Callable[..., None] | None = None
        self._fields: list[dict[str, Any]] = []
        """Of the descriptors, once a launch has checked them."""
        self.compiled: Any = None
        """Triton's compiled kernel, once it has run."""

    def arguments(self, *tensors: Tensor) -> list[Any]:
        """All of the kernel's."""
        descriptors = [form.of(tensor) for form, tensor in zip(self._boxes, tensors, strict=False)]
        return [*descriptors, *tensors[len(descriptors) :], *self._arguments]

    def __call__(self, *tensors: Tensor) -> None:
        described = len(self._boxes)
        if self._start is not None:  # descriptors that differ in their tensor alone need not be checked again
            descriptors = [_described(fields, x) for fields, x in zip(self._fields, tensors, strict=False)]
            self._start(*descriptors, *[x.data_ptr() for x in tensors[described:]], *self._arguments)
            return
        arguments = self.arguments(*tensors)
        grid = (self.programs, 1, 1)
        self.compiled = self.kernel[grid](*arguments, **self.options)
        self._fields = [{**vars(descriptor), "base": None} for descriptor in arguments[:described]]
        self._start = starter(self.compiled, grid, tensors[0].device)


def _described(fields: dict[str, Any], tensor: Tensor) -> TensorDescriptor:
    """A descriptor at a tenth of its constructor's cost."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(fields, base=tensor)
    return descriptor


def launch_hopper_forward(
    q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, problem: Problem, schedule: ForwardSchedule | None = None
) -> tuple[Tensor, Tensor]:
    """o, laid out as q is, and lse (B, H, S) in fp32, of tensors for which why_not is None."""
    o = torch.empty_like(q_BHSD)
    lse = torch.empty(q_BHSD.shape[:3], dtype=torch.float32, device=q_BHSD.device)
    bound = bind_hopper_forward(
        q_BHSD.shape, k_BGSD.shape, q_BHSD.stride(), k_BGSD.stride(), v_BGSD.stride(), o.stride(),
        q_BHSD.dtype, q_BHSD.device, problem, schedule,
    )  # fmt: skip
    bound(q_BHSD, k_BGSD, v_BGSD, o, lse)
    return o, lse


@functools.lru_cache(maxsize=PROBLEMS_KEPT)
def bind_hopper_forward(
    q_shape: torch.Size, k_shape: torch.Size, q_stride: tuple[int, ...], k_stride: tuple[int, ...],
    v_stride: tuple[int, ...], o_stride: tuple[int, ...], dtype: torch.dtype, device: torch.device,
    problem: Problem, schedule: ForwardSchedule | None,
) -> BoxedKernel:  # fmt: skip
    """The forward kernel of one problem."""
    batch, heads, queries, head_dim = q_shape
    key_heads, keys = k_shape[1], k_shape[2]
    width = tile_width(head_dim)
    schedule = schedule or FORWARD[width, problem.causal]
    tiles = triton.cdiv(queries, ROWS * schedule.warpgroups)
    at_a_time = multiprocessors(device) * schedule.programs_per_multiprocessor
    arguments = {
        "tiles": tiles,
        "batch_heads": batch * heads,
        "heads_together": heads_together(heads // key_heads, keys, head_dim, batch * heads),
        "heads": heads,
        "heads_per_key_head": heads // key_heads,
        "queries": queries,
        "keys": keys,
        "offset": problem.offset(queries, keys),
        "scale_log2": problem.scale * LOG2_E.value,
        "BLOCK_D": width,
        "BLOCK_K": schedule.block_k,
        "WARPGROUPS": schedule.warpgroups,
        "STAGES": schedule.stages,
        "CAUSAL": problem.causal,
        "RAGGED_K": keys % schedule.block_k != 0,
        "REGISTERS": schedule.registers,
    }
    forms = (
        boxes(q_shape, q_stride, ROWS, width, dtype),
        boxes(k_shape, k_stride, schedule.block_k, width, dtype),
        boxes(k_shape, v_stride, schedule.block_k, width, dtype),
        boxes(q_shape, o_stride, ROWS, width, dtype),
    )
    all_places = tiles * batch * heads
    programs = min(all_places, at_a_time) if at_a_time else all_places
    return BoxedKernel(hopper_forward_kernel, programs, forms, arguments, schedule.most_registers)


def launch_hopper_backward(
    do_BHSD: Tensor, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, o_BHSD: Tensor, lse_BHS: Tensor,
    problem: Problem, schedule: BackwardSchedule | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, laid out as q, k, v are, of tensors for which why_not is None. Bits of dq may differ from run to run."""
    dq, dk, dv = torch.empty_like(q_BHSD), torch.empty_like(k_BGSD), torch.empty_like(v_BGSD)
    if why_not_shape(do_BHSD.dtype, (do_BHSD.shape,), (do_BHSD.stride(),)) or do_BHSD.data_ptr() % 16:
        do_BHSD = do_BHSD.contiguous()
    bound = bind_hopper_backward(
        q_BHSD.shape, k_BGSD.shape, q_BHSD.stride(), k_BGSD.stride(), v_BGSD.stride(), o_BHSD.stride(),
        do_BHSD.stride(), dq.stride(), dk.stride(), dv.stride(), q_BHSD.dtype, q_BHSD.device, problem, schedule,
    )  # fmt: skip
    lse_log2, delta, dq_sum = backward_buffers(q_BHSD)
    bound.rows(o_BHSD, do_BHSD, lse_BHS, lse_log2, delta, dq_sum)
    bound.gradients(q_BHSD, k_BGSD, v_BGSD, do_BHSD, lse_log2, delta, dk, dv, dq_sum)
    bound.cast(dq_sum, dq)
    return dq, dk, dv


def backward_buffers(q_BHSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp base 2 and delta, rows padded, and dq in fp32 and of contiguous heads."""
    batch, heads, queries, _ = q_BHSD.shape
    rows = q_BHSD.new_empty(2, batch * heads * padded_rows(queries), dtype=torch.float32)
    return rows[0], rows[1], q_BHSD.new_empty(q_BHSD.shape, dtype=torch.float32)


class BackwardKernels(NamedTuple):
    """In the order they run."""

    rows: BoundKernel
    gradients: BoxedKernel
    cast: BoundKernel


@functools.lru_cache(maxsize=PROBLEMS_KEPT)
def bind_hopper_backward(
    q_shape: torch.Size, k_shape: torch.Size, q_stride: tuple[int, ...], k_stride: tuple[int, ...],
    v_stride: tuple[int, ...], o_stride: tuple[int, ...], do_stride: tuple[int, ...], dq_stride: tuple[int, ...],
    dk_stride: tuple[int, ...], dv_stride: tuple[int, ...], dtype: torch.dtype, device: torch.device,
    problem: Problem, schedule: BackwardSchedule | None,
) -> BackwardKernels:  # fmt: skip
    """The kernels of one problem."""
    batch, heads, queries, head_dim = q_shape
    key_heads, keys = k_shape[1], k_shape[2]
    width = tile_width(head_dim)
    schedule = schedule or BACKWARD[width, problem.causal]
    group = heads // key_heads
    tiles = triton.cdiv(keys, BACKWARD_KEYS)
    padded_queries = padded_rows(queries)
    arguments = {
        "tiles": tiles,
        "batch_key_heads": batch * key_heads,
        "heads_together": heads_together(1, queries * group, head_dim, batch * key_heads),
        "key_heads": key_heads,
        "heads_per_key_head": group,
        "queries": queries,
        "padded_queries": padded_queries,
        "keys": keys,
        "offset": problem.offset(queries, keys),
        "scale": problem.scale,
        "scale_log2": problem.scale * LOG2_E.value,
        "BLOCK_D": width,
        "BLOCK_Q": schedule.block_q,
        "STAGES": schedule.stages,
        "SPLIT_ROWS": schedule.split_rows,
        "SCORES_AHEAD": schedule.scores_ahead,
        "CAUSAL": problem.causal,
        "RAGGED_K": keys % BACKWARD_KEYS != 0,
    }
    row_form = row_boxes(batch * heads * padded_queries, schedule.block_q)
    sum_stride = (heads * queries * head_dim, queries * head_dim, head_dim, 1)
    forms = (
        boxes(q_shape, q_stride, schedule.block_q, width, dtype),
        boxes(k_shape, k_stride, BACKWARD_KEYS, width, dtype),
        boxes(k_shape, v_stride, BACKWARD_KEYS, width, dtype),
        boxes(q_shape, do_stride, schedule.block_q, width, dtype),
        row_form,
        row_form,
        boxes(k_shape, dk_stride, ROWS, width, dtype),
        boxes(k_shape, dv_stride, ROWS, width, dtype),
        boxes(q_shape, sum_stride, ROWS, width if schedule.split_rows else width // 2, torch.float32),
    )
    small = {"heads": heads, "queries": queries, "HEAD_DIM": head_dim, "BLOCK_D": width, "BLOCK_Q": ROWS_BLOCK_Q}
    row_tiles = padded_queries // ROWS_BLOCK_Q
    row_arguments = small | strides(o=o_stride, g=do_stride) | {"tiles": row_tiles, "padded_queries": padded_queries}
    cast_tiles = triton.cdiv(queries, ROWS_BLOCK_Q)
    cast_arguments = small | strides(dq=dq_stride) | {"tiles": cast_tiles, "scale": problem.scale}
    return BackwardKernels(
        rows=BoundKernel(hopper_rows_kernel, row_tiles * batch * heads, row_arguments, num_warps=4),
        gradients=BoxedKernel(hopper_gradients_kernel, tiles * batch * key_heads, forms, arguments),
        cast=BoundKernel(hopper_cast_kernel, cast_tiles * batch * heads, cast_arguments, num_warps=4),
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; of a CPU, whose tests want several tiles a program: 3."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count

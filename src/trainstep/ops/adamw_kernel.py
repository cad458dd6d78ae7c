"""The AdamW kernel, which updates many tensors in one launch, and its launcher.

A program updates a chunk of one tensor. It reads from two tables on the device which chunk, and where the tensor's parameter,
gradient and moments are:

    chunks     (tensor, number of the chunk in it)        made again when sizes change
    addresses  (parameter, gradient, exp_avg, exp_avg_sq, rounded, step, elements) of each tensor
                                                          made again when a tensor moves, as gradients do that are dropped each step

A new table costs a copy of at most 56 bytes per tensor and step, which the host does not wait for.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainstep.ops.direct_launch import FP_FUSION
from trainstep.ops.operators import on_device

CHUNK = 2048
"""Elements per program: it reads and writes 56 KiB in fp32. Twice as many reach 3.2 TB/s of an H200, where these reach 4.0
(docs/log.md)."""
WARPS = 8
_ADDRESSES: tl.constexpr = tl.constexpr(7)
"""Numbers in a row of the table of addresses."""
_ALIGNMENT_BYTES = 16
_VECTOR_BYTES = 16
"""The widest access of a thread. Every tensor is accessed with as many elements a thread as it holds of the widest dtype; with more
for 16-bit tensors, Triton would exchange values between threads through shared memory."""


@triton.jit
def _update(
    parameter_ptr, gradient_ptr, exp_avg_ptr, exp_avg_sq_ptr, rounded_ptr,
    first, elements, decay_rate, step_size, root_correction2, eps, scale,
    BETA1: tl.constexpr, BETA2: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr,
    ROUNDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Update one chunk, in fp32. `decay_rate`: lr weight_decay. `step_size`: lr / (1 - beta1^step). `scale`: the gradient's."""
    index = first + tl.max_contiguous(tl.arange(0, CHUNK), VECTOR)
    mask = index < elements if MASKED else None
    # Nothing is read again before all else has passed through the caches.
    g = tl.load(gradient_ptr + index, mask=mask, eviction_policy="evict_first").to(tl.float32) / scale
    m = tl.load(exp_avg_ptr + index, mask=mask, eviction_policy="evict_first").to(tl.float32)
    v = tl.load(exp_avg_sq_ptr + index, mask=mask, eviction_policy="evict_first").to(tl.float32)
    p = tl.load(parameter_ptr + index, mask=mask, eviction_policy="evict_first").to(tl.float32)
    m = m + (1 - BETA1) * (g - m)
    v = BETA2 * v + (1 - BETA2) * g * g
    denominator = tl.div_rn(tl.sqrt_rn(v), root_correction2) + eps
    p = p - (decay_rate * p + step_size * tl.div_rn(m, denominator))  # rounded once; p (1 - decay_rate) loses digits
    tl.store(parameter_ptr + index, p.to(parameter_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")
    if ROUNDED:
        tl.store(rounded_ptr + index, p.to(rounded_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")
    tl.store(exp_avg_ptr + index, m.to(exp_avg_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")
    tl.store(exp_avg_sq_ptr + index, v.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")


@triton.jit
def _pointer(address_ptr, like_ptr, ALIGNED: tl.constexpr):
    """The address in the table as a pointer of `like_ptr`'s type."""
    pointer = tl.load(address_ptr).to(like_ptr.dtype)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def adamw_kernel(
    addresses_ptr, chunks_ptr, parameter_ptr, gradient_ptr, moment_ptr, rounded_ptr, step_ptr, lr_ptr, scale_ptr, found_inf_ptr,
    lr, eps, weight_decay,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG2_BETA1: tl.constexpr, LOG2_BETA2: tl.constexpr,
    CHUNK: tl.constexpr, VECTOR: tl.constexpr,
    ROUNDED: tl.constexpr, ALIGNED: tl.constexpr, LR_ON_DEVICE: tl.constexpr, SCALED: tl.constexpr, MAY_SKIP: tl.constexpr,
):  # fmt: skip
    """The pointers from `parameter_ptr` to `step_ptr` only give their types to the addresses in the table."""
    tensor = tl.load(chunks_ptr + 2 * tl.program_id(0))
    first = tl.load(chunks_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    row = addresses_ptr + tensor * _ADDRESSES
    parameter = _pointer(row, parameter_ptr, ALIGNED)
    gradient = _pointer(row + 1, gradient_ptr, ALIGNED)
    exp_avg = _pointer(row + 2, moment_ptr, ALIGNED)
    exp_avg_sq = _pointer(row + 3, moment_ptr, ALIGNED)
    rounded = _pointer(row + 4, rounded_ptr, ALIGNED) if ROUNDED else parameter
    step = tl.load(_pointer(row + 5, step_ptr, False)).to(tl.float64)  # in fp32, 1 - 0.999^1 would keep four digits
    elements = tl.load(row + 6)
    if MAY_SKIP:
        elements = tl.where(tl.load(found_inf_ptr) == 0, elements, 0)
    if LR_ON_DEVICE:
        lr = tl.load(lr_ptr)
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr)
    correction1 = (1 - tl.exp2(step * LOG2_BETA1)).to(tl.float32)
    correction2 = (1 - tl.exp2(step * LOG2_BETA2)).to(tl.float32)
    decay_rate = lr * weight_decay
    step_size = lr / correction1
    root_correction2 = tl.sqrt_rn(correction2)
    if first + CHUNK <= elements:
        _update(
            parameter, gradient, exp_avg, exp_avg_sq, rounded, first, elements, decay_rate, step_size, root_correction2, eps, scale,
            BETA1, BETA2, CHUNK, VECTOR, ROUNDED, False,
        )  # fmt: skip
    else:
        _update(
            parameter, gradient, exp_avg, exp_avg_sq, rounded, first, elements, decay_rate, step_size, root_correction2, eps, scale,
            BETA1, BETA2, CHUNK, VECTOR, ROUNDED, True,
        )  # fmt: skip


class Operands(NamedTuple):
    """Tensors of one device, with one dtype per field (`exp_avgs` and `exp_avg_sqs` have the same).

    The parameter, gradient, moments and rounded copy of an update have the same memory layout.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    rounded: list[Tensor]
    """The tensors that receive the updated parameters in another dtype; the parameters themselves where there are none."""
    steps: list[Tensor]
    """Number of updates, with this update: fp32, ()."""


class Settings(NamedTuple):
    """The settings of an update. Tensors are on the device, in fp32."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: Tensor | None
    found_inf: Tensor | None


_MOST_CALLS_IN_A_GRAPH = 4
"""The number of optimizer steps with other addresses that one graph may hold."""


class Launch:
    """Launches the kernel and keeps its tables on the device, for tensors that rarely move."""

    def __init__(self) -> None:
        self._tables: _Tables | None = None
        """The tables of the last call outside a capture. Those of a captured call are not kept here, because nothing fills
        them before the graph is launched."""
        self._chunks: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        """Sizes of the tensors -> their chunks on the host and on the device, made outside a capture."""
        self._spares: dict[int, list[Tensor]] = {}
        """Number of tensors -> pinned tables for addresses that change while a CUDA graph is captured, when no pinned memory
        may be allocated."""
        self._captured: list[_Tables] = []
        """Tables that graphs read at every launch; each capture adds some. They stay, because pinned memory that is freed
        inside a capture breaks every later allocation of such memory."""

    def __call__(self, operands: Operands, settings: Settings) -> None:
        """Update each tensor once; nothing is written if `found_inf` is not 0."""
        device = operands.parameters[0].device
        capturing = device.type == "cuda" and torch.cuda.graphs.is_current_stream_capturing()
        tables = self._tables_of(operands, device, capturing)
        if capturing:
            self._captured.append(tables)
        else:
            self._tables = tables
        lr, scale, found_inf = settings.lr, settings.grad_scale, settings.found_inf
        unused = operands.steps[0]
        with on_device(device):
            adamw_kernel[(tables.chunks.shape[0],)](
                tables.addresses,
                tables.chunks,
                operands.parameters[0],
                operands.gradients[0],
                operands.exp_avgs[0],
                operands.rounded[0],
                operands.steps[0],
                lr if isinstance(lr, Tensor) else unused,
                unused if scale is None else scale,
                unused if found_inf is None else found_inf,
                0.0 if isinstance(lr, Tensor) else float(lr),
                float(settings.eps),
                float(settings.weight_decay),
                BETA1=settings.beta1,
                BETA2=settings.beta2,
                LOG2_BETA1=_log2(settings.beta1),
                LOG2_BETA2=_log2(settings.beta2),
                CHUNK=CHUNK,
                VECTOR=_VECTOR_BYTES // max(tensors[0].itemsize for tensors in operands[:5]),  # all but the step counts
                ROUNDED=operands.rounded[0] is not operands.parameters[0],
                ALIGNED=tables.aligned,
                LR_ON_DEVICE=isinstance(lr, Tensor),
                SCALED=scale is not None,
                MAY_SKIP=found_inf is not None,
                num_warps=WARPS,
                **FP_FUSION,
            )

    def _tables_of(self, operands: Operands, device: torch.device, capturing: bool) -> "_Tables":
        """The last tables if they still hold, or else new ones. RuntimeError if a capture needs memory that it may not make."""
        rows = [
            (*(tensor.data_ptr() for tensor in tensors), tensors[0].numel()) for tensors in zip(*operands, strict=True)
        ]
        if self._tables is not None and rows == self._tables.rows:
            return self._tables
        sizes = tuple(row[-1] for row in rows)
        spares = self._spares.setdefault(len(rows), [])
        if capturing and not (spares and sizes in self._chunks):
            raise RuntimeError(
                "AdamW: a graph that is captured updates other parameters than the steps before it, or updates them more than "
                f"{_MOST_CALLS_IN_A_GRAPH} times; run one such step uncaptured first"
            )
        host_addresses, addresses = _upload(
            torch.tensor(rows, dtype=torch.int64), device, spares.pop() if capturing else None
        )
        if sizes not in self._chunks:
            places = [(index, part) for index, size in enumerate(sizes) for part in range(-(-size // CHUNK))]
            self._chunks[sizes] = _upload(torch.tensor(places, dtype=torch.int32), device)
        if device.type == "cuda" and not capturing:
            missing = _MOST_CALLS_IN_A_GRAPH - len(spares)
            spares += [torch.empty_like(host_addresses, pin_memory=True) for _ in range(missing)]
        aligned = not any(address % _ALIGNMENT_BYTES for row in rows for address in row[:5])
        host_chunks, chunks = self._chunks[sizes]
        return _Tables(rows, addresses, chunks, host_addresses, host_chunks, aligned)


class _Tables(NamedTuple):
    """The kernel's tables on the device, and the pinned memory from which they were copied."""

    rows: list[tuple[int, ...]]
    """For each update the addresses of its tensors, and its number of elements."""
    addresses: Tensor
    chunks: Tensor
    host_addresses: Tensor
    host_chunks: Tensor
    aligned: bool


def _upload(table: Tensor, device: torch.device, spare: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The table on the host, pinned (in `spare` if there is one), and the table on the device."""
    if device.type != "cuda":
        return table, table
    pinned = table.pin_memory() if spare is None else spare.copy_(table)
    return pinned, pinned.to(device, non_blocking=True)


def _log2(beta: float) -> float:
    return math.log2(beta) if beta > 0 else -math.inf

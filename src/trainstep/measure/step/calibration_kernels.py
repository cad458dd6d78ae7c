"""The kernels that a calibration measures: matmuls, traffic of each kind, attention, updates. A point has its row of the table, and
makes its operands only when it is measured.

Sizes are those of training steps: on a GPU up to a gigabyte, on a CPU a thousandth.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

from trainstep.ops.adamw import AdamW
from trainstep.ops.swiglu import swiglu
from trainstep.plan.time.kernels import Kind
from trainstep.training.attention import attention_named, sdpa_on
from trainstep.training.precision import DTYPES

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A call to time. `row`: its columns beside time_s."""

    row: dict[str, Any]
    make: Callable[[], Call]


_GPU_MATMULS = (
    *(
        (tokens, n, k)
        for tokens in (512, 2048, 8192)
        for n, k in ((1024, 4096), (4096, 1024), (4096, 4096), (16384, 4096))
    ),
    (1024, 1024, 1024),
    (4096, 1024, 2048),
    (8192, 8192, 8192),
)
_CPU_MATMULS = ((64, 128, 128), (256, 256, 256), (256, 1024, 256), (512, 512, 1024), (1024, 1024, 1024))
_GPU_BATCHED = ((64, 256, 256, 64), (64, 1024, 1024, 64), (64, 1024, 64, 1024))
_GPU_ROWS, _CPU_ROWS = (2, 512, 4096, 32768), (2, 64, 512)
_GPU_ATTENTION = ((64, 256, 64), (64, 1024, 64), (32, 4096, 64), (64, 1024, 128), (32, 4096, 128))
"""Heads, context, head width."""
_CPU_ATTENTION = ((8, 64, 32), (8, 256, 32))
_CPU_BATCHED = ((8, 64, 64, 32), (8, 64, 32, 64))


def matmul_points(device: torch.device, seed: int) -> Iterator[Point]:
    """Products of weights and of batches, in each dtype."""
    gpu = device.type == "cuda"
    normal = _normal(device, seed)
    shapes = [(1, *shape) for shape in (_GPU_MATMULS if gpu else _CPU_MATMULS)]
    shapes += [(batch, m, n, k) for batch, m, n, k in (_GPU_BATCHED if gpu else _CPU_BATCHED)]
    for dtype in ("fp32", "tf32", "bf16", "fp16") if gpu else ("fp32", "bf16"):
        for batch, m, n, k in shapes:

            def make(dtype: str = dtype, batch: int = batch, m: int = m, n: int = n, k: int = k) -> Call:
                torch_dtype = DTYPES.get(dtype, torch.float32)
                if batch == 1:
                    left, right = normal(m, k, dtype=torch_dtype), normal(n, k, dtype=torch_dtype)
                    return lambda: left @ right.T
                left, right = normal(batch, m, k, dtype=torch_dtype), normal(batch, k, n, dtype=torch_dtype)
                return lambda: torch.bmm(left, right)

            yield Point(row={"dtype": dtype, "m": m, "n": n, "k": k, "batch": batch}, make=make)


def traffic_points(device: torch.device, seed: int) -> Iterator[Point]:
    """Kernels that move bytes, of each kind that plain PyTorch has; on a GPU also compiled and fused ones."""
    gpu = device.type == "cuda"
    sizes, width = (_GPU_ROWS, 4096) if gpu else (_CPU_ROWS, 512)
    kinds = _PLAIN_TRAFFIC | (_GPU_TRAFFIC if gpu else {})
    for kind, (element_bytes, make) in kinds.items():
        for rows in sizes:

            def made(make: Callable[..., Call] = make, rows: int = rows) -> Call:
                return make(_normal(device, seed), rows, width)

            yield Point(row={"kind": str(kind), "bytes": float(element_bytes * rows * width)}, make=made)


def _contiguous(normal: Callable[..., Tensor], rows: int, width: int) -> Call:
    left, right, out = normal(rows, width), normal(rows, width), normal(rows, width)
    return lambda: torch.add(left, right, out=out)


def _broadcast(normal: Callable[..., Tensor], rows: int, width: int) -> Call:
    x, factor, out = normal(rows, width), normal(rows, 1), normal(rows, width)
    return lambda: torch.mul(x, factor, out=out)


def _strided(normal: Callable[..., Tensor], rows: int, width: int) -> Call:
    x, angles, out = normal(rows, width), normal(1, width // 2), normal(rows, width // 2)
    return lambda: torch.mul(x[:, ::2], angles, out=out)


def _widened(normal: Callable[..., Tensor], rows: int, width: int) -> Call:
    x = normal(rows, width, dtype=torch.bfloat16)
    return lambda: x.float()


def _rows(normal: Callable[..., Tensor], rows: int, width: int) -> Call:
    x = normal(rows, width)
    return lambda: x.mean(dim=-1)


def _columns(normal: Callable[..., Tensor], rows: int, width: int) -> Call:
    x = normal(rows, width)
    return lambda: x.sum(dim=0)


def _softmax(normal: Callable[..., Tensor], rows: int, width: int) -> Call:
    x = normal(rows, width)
    return lambda: torch.softmax(x, dim=-1)


def _loss(normal: Callable[..., Tensor], rows: int, width: int) -> Call:
    logits, targets = normal(rows, width), torch.zeros(rows, dtype=torch.int64, device=normal(1).device)
    return lambda: cross_entropy(logits, targets)


def _loss_backward(normal: Callable[..., Tensor], rows: int, width: int) -> Call:
    logits = normal(rows, width).requires_grad_()
    loss = cross_entropy(logits, torch.zeros(rows, dtype=torch.int64, device=logits.device))
    return lambda: torch.autograd.grad(loss, logits, retain_graph=True)


def _embedding_backward(normal: Callable[..., Tensor], rows: int, width: int) -> Call:
    gradient = normal(rows, width)
    tokens = torch.arange(rows, device=gradient.device) * 17 % 10_000
    return lambda: torch.ops.aten.embedding_dense_backward(gradient, tokens, 10_000, -1, False)


def _compiled(normal: Callable[..., Tensor], rows: int, width: int) -> Call:
    gate, up = (normal(rows, width, dtype=torch.bfloat16) for _ in range(2))
    product = torch.compile(lambda gate, up: silu(gate) * up, dynamic=False)
    return lambda: product(gate, up)


def _fused(normal: Callable[..., Tensor], rows: int, width: int) -> Call:
    joined = normal(rows, 2 * width, dtype=torch.bfloat16)
    return lambda: swiglu(joined)


_PLAIN_TRAFFIC: dict[Kind, tuple[int, Callable[..., Call]]] = {
    Kind.CONTIGUOUS: (12, _contiguous),
    Kind.BROADCAST: (8, _broadcast),
    Kind.STRIDED: (4, _strided),
    Kind.WIDENED: (6, _widened),
    Kind.ROWS: (4, _rows),
    Kind.COLUMNS: (4, _columns),
    Kind.SOFTMAX: (8, _softmax),
    Kind.LOSS: (8, _loss),
    Kind.LOSS_BACKWARD: (16, _loss_backward),
    Kind.EMBEDDING_BACKWARD: (8, _embedding_backward),
}
"""Kind -> bytes of an element as plan/time/block_kernels.py counts them, and what makes the call."""
_GPU_TRAFFIC: dict[Kind, tuple[int, Callable[..., Call]]] = {Kind.COMPILED: (6, _compiled), Kind.FUSED: (6, _fused)}


def attention_points(device: torch.device, seed: int) -> Iterator[Point]:
    """Causal attention forward and backward. A backward's time is both passes' less forward's, which plan cannot tell apart."""
    gpu = device.type == "cuda"
    normal = _normal(device, seed)
    cases: Sequence[tuple[int, int, int]] = _GPU_ATTENTION if gpu else _CPU_ATTENTION
    names = (
        [("sdpa", "bf16"), ("sdpa_flash", "bf16"), ("sdpa_efficient", "fp32"), ("trainstep", "bf16")]
        if gpu
        else [("sdpa", "fp32"), ("sdpa", "bf16")]
    )
    for name, dtype in names:
        for heads, context, width in cases:
            for direction in ("forward", "backward"):

                def make(
                    name: str = name, dtype: str = dtype, heads: int = heads, context: int = context, width: int = width,
                    direction: str = direction,
                ) -> Call:  # fmt: skip
                    q, k, v = (normal(1, heads, context, width, dtype=DTYPES[dtype]).requires_grad_() for _ in range(3))
                    attend = sdpa_on(name) if name.startswith("sdpa_") else attention_named(name, context, device)
                    if direction == "forward":
                        return lambda: attend(q, k, v)
                    output = attend(q, k, v)
                    gradient = torch.ones_like(output)
                    return lambda: torch.autograd.grad(output, (q, k, v), gradient, retain_graph=True)

                yield Point(
                    row={
                        "implementation": name if gpu else _stored(name, dtype),
                        "dtype": dtype,
                        "direction": direction,
                        "batch_heads": heads,
                        "context": context,
                        "head_dim": width,
                    },
                    make=make,
                )


def _stored(name: str, dtype: str) -> str:
    """The name under which plan looks for a CPU's own choice."""
    return {"fp32": "sdpa_efficient", "bf16": "sdpa_flash"}[dtype] if name == "sdpa" else name


def optimizer_points(device: torch.device, seed: int) -> Iterator[Point]:
    """An update of one tensor by torch's fused AdamW, and on a GPU by ours."""
    gpu = device.type == "cuda"
    normal = _normal(device, seed)
    for name in ("fused", "trainstep") if gpu else ("fused",):
        for numel in (1024, 10**6, 10**8) if gpu else (1024, 10**6):

            def make(name: str = name, numel: int = numel) -> Call:
                parameter = torch.nn.Parameter(normal(numel))
                parameter.grad = normal(numel)
                if name == "fused":
                    return torch.optim.AdamW([parameter], fused=True).step
                return AdamW([parameter]).step

            yield Point(row={"name": name, "bytes": 28.0 * numel}, make=make)


def _normal(device: torch.device, seed: int) -> Callable[..., Tensor]:
    # Constant operands would switch fewer transistors and so allow a higher clock than real work.
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

    return normal

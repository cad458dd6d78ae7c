"""The kernels that a step launches, as formulas of the model's shape: what each computes, and how many bytes it moves.

A matmul's shape is `m / n / k`, or `m / n / k x batch`; of other kernels it is the elements that they go over. Symbols are those of
plan/model_ops.py, and D is the width of a head. Kinds of traffic differ in how well memory is used: a calibration has seconds by
bytes for each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod


class Kind(StrEnum):
    """What a kernel does."""

    MATMUL = "matmul"
    ATTENTION_FORWARD = "attention forward"
    ATTENTION_BACKWARD = "attention backward"
    CONTIGUOUS = "contiguous"
    """Element by element over contiguous tensors; copies too."""
    BROADCAST = "broadcast"
    """Element by element, where an operand is repeated along a dimension."""
    STRIDED = "strided"
    """Element by element over pairs, heads or transposed tensors."""
    WIDENED = "widened"
    """A cast from 16 bits to 32, which torch does not vectorise."""
    ROWS = "rows"
    """A reduction over the last dimension."""
    COLUMNS = "columns"
    """A reduction over all tokens."""
    SOFTMAX = "softmax"
    COMPILED = "compiled"
    """What Inductor fuses into a kernel, element by element."""
    COMPILED_PAIRS = "compiled pairs"
    """Inductor's kernel over pairs of a head: the backward of a rotation."""
    COMPILED_PERMUTED = "compiled permuted"
    """Inductor's kernel that also moves dimensions: a rotation, or the gradients of q, k and v put together."""
    COMPILED_COLUMNS = "compiled columns"
    """Inductor's reductions of a norm's backward."""
    FUSED = "fused"
    """Kernels of ops/, element by element."""
    FUSED_COLUMNS = "fused columns"
    """Kernels of ops/ that also add up over tokens: a norm's backward."""
    LOSS = "loss"
    """Log-softmax and the loss, forward, as plain PyTorch has them."""
    LOSS_BACKWARD = "loss backward"
    EMBEDDING_BACKWARD = "embedding backward"
    OPTIMIZER = "optimizer"
    """An update of parameters in one pass."""


CLASSES = ("matmul", "attention", "memory-bound", "optimizer")
"""The classes of device time."""
ATTENTION_KINDS = (Kind.ATTENTION_FORWARD, Kind.ATTENTION_BACKWARD)


def class_of(kind: Kind) -> str:
    if kind == Kind.MATMUL:
        return "matmul"
    if kind in ATTENTION_KINDS:
        return "attention"
    return "optimizer" if kind == Kind.OPTIMIZER else "memory-bound"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """`count` equal kernels. `element_bytes`: bytes read and written together for an element of `shape`; of attention an element's
    bytes, of matmuls unused. `dtype`: that of a matmul's operands."""

    op: str
    kind: Kind
    shape: str
    element_bytes: float = 0
    count: int = 1
    dtype: str = ""

    @property
    def formula(self) -> str:
        if self.kind == Kind.MATMUL:
            return f"2 x {self.shape.replace(' / ', ' x ')} FLOPs, {self.dtype}"
        if self.kind in ATTENTION_KINDS:
            return f"attention of {self.shape}"
        return f"{self.element_bytes:g} B x {self.shape}"

    def elements(self, symbols: Mapping[str, int]) -> int:
        return value(self.shape, symbols)

    def nbytes(self, symbols: Mapping[str, int]) -> float:
        return self.element_bytes * self.elements(symbols)

    def matrix(self, symbols: Mapping[str, int]) -> tuple[int, int, int, int]:
        """m, n, k and the batch of a matmul."""
        sides, _, batch = self.shape.partition(" x ")
        m, n, k = (value(side, symbols) for side in sides.split(" / "))
        return m, n, k, value(batch, symbols) if batch else 1


def value(words: str, symbols: Mapping[str, int]) -> int:
    """The value of a product, `3 N d` for example."""
    return prod(symbols[word] if word in symbols else int(word) for word in words.split())


def times(count: int, *kernels: Kernel) -> list[Kernel]:
    return [replace(kernel, count=count * kernel.count) for kernel in kernels]


def traffic(op: str, kind: Kind, element_bytes: float, shape: str, count: int = 1) -> Kernel:
    return Kernel(op=op, kind=kind, shape=shape, element_bytes=element_bytes, count=count)


def matmul(op: str, shape: str, dtype: str, count: int = 1) -> Kernel:
    return Kernel(op=op, kind=Kind.MATMUL, shape=shape, dtype=dtype, count=count)

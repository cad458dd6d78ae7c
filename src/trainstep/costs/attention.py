"""FLOPs and bytes of attention from its shape, for FlashAttention and for plain attention with its S x S matrix.

FlashAttention's convention: forward is two matmuls (scores, values) of 2 x queries x keys x head_dim FLOPs each; backward is five
(scores again, dP, dV, dK, dQ), which is 2.5 x forward. Under a causal mask the triangle's area counts, so with queries = keys
exactly half of everything.

Plain attention computes all S^2 pairs, including the masked pairs. A matmul reads or writes one S x S matrix and two S x D matrices
per head. Softmax counts as five operations per score forward (maximum, subtract, exponential, sum, divide) and four backward
(multiply, sum, subtract, multiply). It reads and writes the matrix forward, and reads two and writes one backward.
"""

from dataclasses import dataclass

FORWARD_MATMULS = 2
BACKWARD_MATMULS = 5
KERNEL_MATMULS = {"forward": FORWARD_MATMULS, "key_gradients": 4, "query_gradients": 3}
"""Matmuls that each FlashAttention kernel computes: both kernels of backward compute scores and dP."""
MATMULS = {"forward": 2, "backward": 4}
"""Matmuls of plain attention. Forward: scores, values. Backward: two gradients of each."""
_SOFTMAX_OPERATIONS = {"forward": 5, "backward": 4}
_SOFTMAX_MATRICES = {"forward": 2, "backward": 3}
_LSE_BYTES = 4


def attention_flops(
    batch_heads: int, queries: int, keys: int, head_dim: int, *, causal: bool, bottom_right: bool = False
) -> int:
    """FLOPs of scores and values: 2 x 2 x queries x keys x head_dim per head, halved when causal and square."""
    return FORWARD_MATMULS * batch_heads * head_dim * _twice_pairs(queries, keys, causal, bottom_right)


def attention_backward_flops(
    batch_heads: int, queries: int, keys: int, head_dim: int, *, causal: bool, bottom_right: bool = False
) -> int:
    """FLOPs of the backward pass. Two kernels that both compute scores and dP do 7 matmuls, but only these 5 count."""
    return BACKWARD_MATMULS * batch_heads * head_dim * _twice_pairs(queries, keys, causal, bottom_right)


def attention_kernel_flops(kernel: str, batch_heads: int, positions: int, head_dim: int, *, causal: bool) -> int:
    """FLOPs that one kernel computes, with as many keys as queries."""
    return KERNEL_MATMULS[kernel] * batch_heads * head_dim * _twice_pairs(positions, positions, causal, False)


def _twice_pairs(queries: int, keys: int, causal: bool, bottom_right: bool) -> int:
    """Twice the number of pairs that the mask keeps: a triangle, and a rectangle left of or below it with all its pairs."""
    if not causal:
        return 2 * queries * keys
    side = min(queries, keys)
    rectangle = (keys - side) * queries if bottom_right else (queries - side) * keys
    return side * side + 2 * rectangle


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """The shape of one attention. `key_heads` is less than `heads` where heads share keys and values."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class AttentionBytes:
    """A lower bound of the bytes that a pass has in memory at once; copies that an implementation makes are not included."""

    inputs: int
    """q, k and v."""
    scores: int
    """The matrix of scores, whose memory its gradient reuses in backward; 0 if it never exists as a whole."""
    softmax: int
    """The matrix of probabilities, kept for backward; 0 if it never exists as a whole."""
    lse: int
    """The log-sum-exp of each query in fp32, kept instead of the two matrices."""
    output: int
    gradients: int
    """Gradients of the output, q, k and v, and of the softmax if it is in memory; 0 in a forward pass."""

    @property
    def needed(self) -> int:
        """The sum of all parts."""
        return self.inputs + self.scores + self.softmax + self.lse + self.output + self.gradients


def attention_bytes(shape: AttentionSizes, *, element_bytes: int, written_out: bool, backward: bool) -> AttentionBytes:
    """Bytes of a pass, forward alone or with backward. `written_out`: whether the queries x keys matrix exists in memory."""
    rows = shape.batch * shape.heads * shape.queries
    query_bytes = rows * shape.head_dim * element_bytes
    key_bytes = shape.batch * shape.key_heads * shape.keys * shape.head_dim * element_bytes
    matrix_bytes = rows * shape.keys * element_bytes if written_out else 0
    inputs = query_bytes + 2 * key_bytes
    return AttentionBytes(
        inputs=inputs,
        scores=matrix_bytes,
        softmax=matrix_bytes,
        lse=0 if written_out else rows * _LSE_BYTES,
        output=query_bytes,
        gradients=query_bytes + inputs + matrix_bytes if backward else 0,
    )


def matmuls_flops(phase: str, batch_heads: int, positions: int, head_dim: int) -> int:
    """FLOPs of plain attention's matmuls in a phase."""
    return MATMULS[phase] * 2 * batch_heads * positions**2 * head_dim


def matmuls_bytes(phase: str, batch_heads: int, positions: int, head_dim: int, element_bytes: int) -> int:
    """The least bytes that plain attention's matmuls read and write in a phase."""
    return MATMULS[phase] * batch_heads * (positions**2 + 2 * positions * head_dim) * element_bytes


def softmax_flops(phase: str, batch_heads: int, positions: int) -> int:
    """FLOPs of plain attention's softmax in a phase."""
    return _SOFTMAX_OPERATIONS[phase] * batch_heads * positions**2


def softmax_bytes(phase: str, batch_heads: int, positions: int, element_bytes: int) -> int:
    """The least bytes that plain attention's softmax reads and writes in a phase."""
    return _SOFTMAX_MATRICES[phase] * batch_heads * positions**2 * element_bytes

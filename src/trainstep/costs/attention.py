"""FLOPs of attention from its shape, in FlashAttention's convention, and the bytes that it needs.

Forward is two matmuls, scores and values, of 2 x queries x keys x head_dim each; backward is five (scores again, dP, dV, dK, dQ),
2.5 x forward. Under a causal mask the triangle's area counts, so that queries = keys is exactly half of everything.
"""

from dataclasses import dataclass

BACKWARD_MATMULS = 5
FORWARD_MATMULS = 2
_LSE_BYTES = 4
KERNEL_MATMULS = {"forward": FORWARD_MATMULS, "key_gradients": 4, "query_gradients": 3}
"""What each kernel really multiplies: backward's two both compute scores and dP."""


def attention_flops(
    batch_heads: int, queries: int, keys: int, head_dim: int, *, causal: bool, bottom_right: bool = False
) -> int:
    """FLOPs of scores and values: 2 x 2 x queries x keys x head_dim a head, halved when causal and square."""
    return FORWARD_MATMULS * batch_heads * head_dim * _twice_pairs(queries, keys, causal, bottom_right)


def attention_backward_flops(
    batch_heads: int, queries: int, keys: int, head_dim: int, *, causal: bool, bottom_right: bool = False
) -> int:
    """FLOPs of the backward pass; a kernel pair that computes scores and dP twice does 7 matmuls and is credited with these 5."""
    return BACKWARD_MATMULS * batch_heads * head_dim * _twice_pairs(queries, keys, causal, bottom_right)


def attention_kernel_flops(kernel: str, batch_heads: int, positions: int, head_dim: int, *, causal: bool) -> int:
    """FLOPs that one kernel does, over as many keys as queries."""
    return KERNEL_MATMULS[kernel] * batch_heads * head_dim * _twice_pairs(positions, positions, causal, False)


def _twice_pairs(queries: int, keys: int, causal: bool, bottom_right: bool) -> int:
    """Twice the pairs a mask leaves: its triangle, and the rectangle right or below where every pair is left."""
    if not causal:
        return 2 * queries * keys
    side = min(queries, keys)
    rectangle = (keys - side) * queries if bottom_right else (queries - side) * keys
    return side * side + 2 * rectangle


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Of one attention; `key_heads` fewer than `heads` where heads share keys and values."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class AttentionBytes:
    """What a pass holds at once, from below: what an implementation copies beside comes on top."""

    inputs: int
    """q, k and v."""
    scores: int
    """The matrix of scores, whose place its gradient takes in backward; 0 where it never exists as a whole."""
    softmax: int
    """The matrix of probabilities, kept for backward; 0 where it never exists."""
    lse: int
    """The log-sum-exp of each query in fp32, kept in place of the two."""
    output: int
    gradients: int
    """Of the output, q, k, v, and of the softmax where it is written out; 0 in a forward pass."""

    @property
    def needed(self) -> int:
        """All of it together."""
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

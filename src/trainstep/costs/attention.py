"""FLOPs of attention from its shape, in FlashAttention's convention.

Forward is two matmuls, scores and values, of 2 x queries x keys x head_dim each; backward is five (scores again, dP, dV, dK, dQ),
2.5 x forward. Under a causal mask the triangle's area counts, so that queries = keys is exactly half of everything.
"""

BACKWARD_MATMULS = 5
FORWARD_MATMULS = 2


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


def _twice_pairs(queries: int, keys: int, causal: bool, bottom_right: bool) -> int:
    """Twice the pairs a mask leaves: its triangle, and the rectangle right or below where every pair is left."""
    if not causal:
        return 2 * queries * keys
    side = min(queries, keys)
    rectangle = (keys - side) * queries if bottom_right else (queries - side) * keys
    return side * side + 2 * rectangle

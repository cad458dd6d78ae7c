"""FLOPs and bytes of attention with its S x S matrix written out: what softmax and the matmuls around it each do.

All S^2 pairs are computed, the masked ones too. A matmul reads or writes one S x S matrix and two S x D ones a head. Softmax
is counted as five operations a score forward (maximum, subtract, exponential, sum, divide) and four backward (multiply, sum,
subtract, multiply); it reads and writes the matrix forward, reads two and writes one backward.
"""

MATMULS = {"forward": 2, "backward": 4}
"""Forward: scores, values. Backward: two gradients of each."""
_SOFTMAX_OPERATIONS = {"forward": 5, "backward": 4}
_SOFTMAX_MATRICES = {"forward": 2, "backward": 3}


def matmuls_flops(phase: str, batch_heads: int, positions: int, head_dim: int) -> int:
    """FLOPs of a phase's matmuls."""
    return MATMULS[phase] * 2 * batch_heads * positions**2 * head_dim


def matmuls_bytes(phase: str, batch_heads: int, positions: int, head_dim: int, element_bytes: int) -> int:
    """The least bytes they read and write."""
    return MATMULS[phase] * batch_heads * (positions**2 + 2 * positions * head_dim) * element_bytes


def softmax_flops(phase: str, batch_heads: int, positions: int) -> int:
    """FLOPs of a phase's softmax."""
    return _SOFTMAX_OPERATIONS[phase] * batch_heads * positions**2


def softmax_bytes(phase: str, batch_heads: int, positions: int, element_bytes: int) -> int:
    """The least bytes it reads and writes."""
    return _SOFTMAX_MATRICES[phase] * batch_heads * positions**2 * element_bytes

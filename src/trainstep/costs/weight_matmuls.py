"""The least bytes of the model's matmuls with weights: (m, k) by (k, n) reads m k + k n elements and writes m n.

Grouped by the span of the code each stands in. Backward is two matmuls for each, with the same three matrices. What caches
spare and what a small tile reads again is not counted.
"""


def forward_bytes(
    *, layers: int, d_model: int, d_ff: int, vocab_size: int, batch_size: int, context: int, element_bytes: int
) -> dict[str, int]:
    """Bytes of one forward pass: q, k and v in one matmul and one back; gate, up and down; the head."""
    tokens = batch_size * context

    def one(k: int, n: int) -> int:
        return (tokens * k + k * n + tokens * n) * element_bytes

    return {
        "attention_projections": layers * (one(d_model, 3 * d_model) + one(d_model, d_model)),
        "mlp": layers * (2 * one(d_model, d_ff) + one(d_ff, d_model)),
        "head": one(d_model, vocab_size),
    }

"""Model FLOPs of the decoder-only Transformer with SwiGLU, from its shape.

A matmul of (m, k) by (k, n) is 2 m k n FLOPs. Counted: every matmul with weights, the head included, the embedding look-up
(no arithmetic) not; attention's two matmuls over the S (S + 1) / 2 ~ S^2 / 2 pairs a causal mask leaves (PaLM's appendix B
counts all S^2; FlashAttention halves as here). Backward is twice forward. Recomputation, norms, softmax, RoPE and the
optimizer are not model FLOPs.
"""

from trainstep.costs.attention import attention_flops

CONVENTION = "matmuls only, head in, embedding out, causal attention halved, backward = 2 x forward, no recomputation"

PASSES = {"forward": 1, "forward_no_grad": 1, "forward_backward": 3, "step": 3}
"""Forward passes' worth of FLOPs a mode costs."""


def forward_flops(
    *, layers: int, d_model: int, d_ff: int, vocab_size: int, batch_size: int, context: int
) -> dict[str, int]:
    """FLOPs of one forward pass by group of matmuls."""
    tokens = batch_size * context
    return {
        "attention_projections": layers * 4 * 2 * tokens * d_model**2,
        "attention_scores_and_values": layers * batch_size * attention_flops(1, context, context, d_model, causal=True),
        "mlp": layers * 3 * 2 * tokens * d_model * d_ff,
        "head": 2 * tokens * d_model * vocab_size,
    }


def step_flops(mode: str, accumulation: int = 1, **shape: int) -> int:
    """Model FLOPs of one step in a mode of RunConfig; `shape` as `forward_flops` takes it."""
    return PASSES[mode] * accumulation * sum(forward_flops(**shape).values())

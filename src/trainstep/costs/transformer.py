"""FLOPs and bytes of the decoder-only Transformer with SwiGLU, of an AdamW update, and of the machine's ceilings.

Model FLOPs: a matmul of (m, k) by (k, n) is 2 m k n FLOPs. Every matmul with weights counts, including the head; the embedding
look-up (no arithmetic) does not. Attention's two matmuls count over the S (S + 1) / 2 ~ S^2 / 2 pairs that a causal mask keeps
(PaLM's appendix B counts all S^2; FlashAttention halves as we do). Backward is twice forward. Recomputation, norms, softmax, RoPE
and the optimizer are not model FLOPs.

Least bytes of the matmuls with weights: (m, k) by (k, n) reads m k + k n elements and writes m n. Bytes that caches save, and bytes
that small tiles read again, are not counted. Backward is two matmuls for each, with the same three matrices.

AdamW: a parameter costs 14 operations: decay (1), first moment (3), second moment (4), bias correction, root and epsilon (3), step
(3). It reads parameter, gradient and both moments, and writes parameter and both moments. Clipping is not counted.
"""

from trainstep.costs.attention import attention_flops

CONVENTION = "matmuls only, head in, embedding out, causal attention halved, backward = 2 x forward, no recomputation"
PASSES = {"forward": 1, "forward_no_grad": 1, "forward_backward": 3, "step": 3}
"""FLOPs of a mode, in forward passes."""
_ADAMW_OPERATIONS = 14
_ADAMW_READ_AND_WRITTEN = 3 + 3
"""Tensors read and written: parameter and moments. The gradient is only read."""
_COUNTED = {
    "matmul": "2 n^3: a multiplication and an addition for each of n^3 products",
    "copy": "bytes read plus bytes written, in one memory",
    "host_to_device": "bytes that cross the link, in one direction, from pinned memory",
    "device_to_host": "bytes that cross the link, in one direction, to pinned memory",
    "peer_copy": "bytes that cross the link, in one direction",
}


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


def forward_bytes(
    *, layers: int, d_model: int, d_ff: int, vocab_size: int, batch_size: int, context: int, element_bytes: int
) -> dict[str, int]:
    """The least bytes of one forward pass by span of the code: q, k, v in one matmul, output; gate, up, down; head."""
    tokens = batch_size * context

    def matmul_bytes(k: int, n: int) -> int:
        return (tokens * k + k * n + tokens * n) * element_bytes

    return {
        "attention_projections": layers * (matmul_bytes(d_model, 3 * d_model) + matmul_bytes(d_model, d_model)),
        "mlp": layers * (2 * matmul_bytes(d_model, d_ff) + matmul_bytes(d_ff, d_model)),
        "head": matmul_bytes(d_model, vocab_size),
    }


def adamw_flops(parameters: int) -> int:
    """FLOPs of one update of all parameters."""
    return _ADAMW_OPERATIONS * parameters


def adamw_bytes(parameters: int, element_bytes: int, gradient_bytes: int | None = None) -> int:
    """The least bytes of one update in one pass. `element_bytes`: bytes of an element of parameters and moments.

    `gradient_bytes`: bytes of an element of gradients, by default the same.
    """
    gradient_bytes = element_bytes if gradient_bytes is None else gradient_bytes
    return parameters * (_ADAMW_READ_AND_WRITTEN * element_bytes + gradient_bytes)


def matmul_flops(n: int) -> int:
    """FLOPs of the matmul ceiling: n x n times n x n."""
    return 2 * n**3


def copied_bytes(kind: str, mib: int) -> int:
    """Bytes that count when a copy ceiling copies `mib` MiB: a copy within one memory reads and writes them."""
    return mib * 2**20 * (2 if kind == "copy" else 1)


def counted(kind: str) -> str:
    """The FLOPs or bytes that count for a kind of ceiling, in words."""
    return _COUNTED[kind]

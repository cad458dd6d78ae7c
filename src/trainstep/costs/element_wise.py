"""The least bytes, and the FLOPs, of the ops beside attention and matmuls: each tensor is read once and written once.

`element_bytes`: bytes of an element of activations and of their gradients. Weights of one row and tables of angles are
not counted.
"""


def rms_norm_bytes(rows: int, width: int, element_bytes: int, *, residual: bool = False, backward: bool = False) -> int:
    """Forward: x in, y out; with a residual also the residual in and the sum out. Backward: dy and h in, dh out; also dsum in."""
    tensors = (3 if backward else 2) + (1 if backward and residual else 2 if residual else 0)
    return tensors * rows * width * element_bytes


def rotary_bytes(tokens: int, heads: int, key_heads: int, head_dim: int, element_bytes: int) -> int:
    """q, k and v in and out, in either direction."""
    return 2 * tokens * (heads + 2 * key_heads) * head_dim * element_bytes


def swiglu_bytes(rows: int, width: int, element_bytes: int, *, backward: bool = False, again: bool = False) -> int:
    """Forward: gate and up in, y out. Backward: dy, gate and up in, their gradients out; with `again` y too."""
    return (5 + again if backward else 3) * rows * width * element_bytes


def linear_cross_entropy_flops(tokens: int, width: int, vocabulary: int, *, backward: bool = True) -> int:
    """The matmuls: logits, and with backward the gradients of x and W. What a softmax adds is not counted."""
    return (3 if backward else 1) * 2 * tokens * width * vocabulary


def cross_entropy_bytes(tokens: int, vocabulary: int, element_bytes: int, *, gradient: bool = True) -> int:
    """Logits in, twice for their gradient (once where a row stays in the cache), and their gradient out."""
    return (3 if gradient else 1) * tokens * vocabulary * element_bytes


_LOGITS_BYTES, _MOST_LOGITS_BYTES = 2**28, 2**30
_FEWEST_TOKENS, _CHUNK_MULTIPLE = 2048, 256


def chunk_tokens(vocabulary: int, element_bytes: int) -> int:
    """Tokens whose logits the fused head (ops/linear_cross_entropy.py) has at a time, unless its caller chooses them.

    As many as have 256 MiB of logits, but up to 2,048 as far as these have at most 1 GiB; a multiple of 256, for full tiles in the
    matmuls. Each chunk reads and writes the sum of dW once more: with 151,936 words on an H200 and the sum in bf16, chunks of 768,
    2,048 and 8,192 tokens took 1.11, 1.04 and 1.02 of the three matmuls' time; in fp32 chunks of 768 took 1.215
    (results/h200/loss_bill.csv).
    """
    row_bytes = vocabulary * element_bytes
    tokens = max(_LOGITS_BYTES // row_bytes, min(_FEWEST_TOKENS, _MOST_LOGITS_BYTES // row_bytes))
    return max(1, tokens // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE

"""Lists, op by op, the tensors that forward of the built-in model keeps for backward, with their shapes.

    kept_bytes(run)                     # {"attention": ..., "mlp": ...}: bytes by op of the whole model
    for op, tensor, times in every_kept(run): tensor.formula, tensor.nbytes(symbols_of(run)), tensor.source

Symbols of shapes: B batch, S context, N = B S tokens, d d_model, f d_ff, H heads, V vocabulary. A tensor counts once, where it is
kept first. block_ops.py and model_ops.py say where each was read. Under autocast CUDA keeps a softmax in fp32 besides its rounding,
and a CPU does not.
"""

from collections.abc import Iterator

from trainstep.config.run import RunConfig
from trainstep.plan.block_ops import model_ops
from trainstep.plan.live_tensors import ACTIVATION, COPY, LOGITS
from trainstep.plan.model_ops import Block, Kept, symbols_of


def every_kept(run: RunConfig, *, on_gpu: bool = True) -> Iterator[tuple[str, Kept, int]]:
    """Op, tensor and how often the model keeps it from forward to backward. ValueError for what has no formulas."""
    ops = model_ops(run, on_gpu=on_gpu)
    counts: dict[tuple[str, Kept], int] = {}
    for block in (Block(ops=ops.before), *ops.blocks, Block(ops=ops.after)):
        for op in block.ops:
            tensors = [(tensor, True) for tensor in op.kept] + [(tensor, False) for tensor in op.forward]
            for tensor, of_kept in tensors:
                if block.keeps(tensor, of_kept=of_kept):
                    counts[op.name, tensor] = counts.get((op.name, tensor), 0) + 1
    yield from ((op, tensor, times) for (op, tensor), times in counts.items())


def kept_bytes(run: RunConfig, *, on_gpu: bool = True) -> dict[str, int]:
    """Bytes that forward keeps for backward, by op, without the batch and the rotary tables."""
    symbols, sums = symbols_of(run), dict[str, int]()
    for op, tensor, times in every_kept(run, on_gpu=on_gpu):
        sums[op] = sums.get(op, 0) + times * tensor.nbytes(symbols)
    return {op: nbytes for op, nbytes in sums.items() if nbytes}


def kept_by_category(run: RunConfig, *, on_gpu: bool = True) -> dict[str, int]:
    """The same bytes as activations, autocast weight copies, and logits and loss."""
    symbols, sums = symbols_of(run), dict.fromkeys((ACTIVATION, COPY, LOGITS), 0)
    for _, tensor, times in every_kept(run, on_gpu=on_gpu):
        sums[tensor.category] += times * tensor.nbytes(symbols)
    return sums

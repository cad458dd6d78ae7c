"""Lists, op by op, the tensors that forward of the built-in model keeps for backward, with their shapes.

    kept_bytes(run)                     # {"attention": ..., "mlp": ...}: bytes by op of the whole model
    for tensor in every_kept(run): tensor.formula, tensor.nbytes(symbols_of(run)), tensor.source

Symbols of shapes: B batch, S context, N = B S tokens, d d_model, f d_ff, H heads, V vocabulary. Element bytes: e of a matmul's
inputs, r of the residual stream.

A tensor counts once, where it is kept first. Eager ops were read from training/transformer.py and
ops/reference.py, and are compared with autograd's saved tensors, byte for byte (tests/plan/test_activations.py). Compiled
blocks are
what Inductor kept in results/h200 (ddp.jsonl, captured_ranks.jsonl: line activations of memory_points). Under autocast CUDA keeps a
softmax in fp32 besides its rounding, and a CPU does not. Fused ops were read from their save_for_backward; no record has them yet.
"""

from collections.abc import Iterator
from dataclasses import replace

from trainstep.config.model import ModelConfig
from trainstep.config.run import RunConfig
from trainstep.plan.model_ops import ACTIVATION, COPY, LOGITS, Kept, model_ops, symbols_of, widths_of


def every_kept(run: RunConfig, *, on_gpu: bool = True) -> Iterator[tuple[str, Kept, int]]:
    """Op, tensor and how often the model keeps it from forward to backward."""
    assert isinstance(run.model, ModelConfig)
    ops, layers = model_ops(run, on_gpu=on_gpu), run.model.layers
    for op in ops.before:
        yield from ((op.name, tensor, 1) for tensor in op.kept)
    if run.recompute == "block":
        yield from (("block input", tensor, layers) for tensor in block_inputs(run))
    else:
        yield from ((op.name, tensor, layers) for op in ops.block for tensor in op.kept)
    for op in ops.after:
        yield from ((op.name, tensor, 1) for tensor in op.kept)


def block_inputs(run: RunConfig) -> tuple[Kept, ...]:
    """What a recomputed block keeps: its inputs."""
    widths = widths_of(run)
    stream = Kept(
        name="stream", element_bytes=widths.stream, shape="N d", source="training/user_model.py recompute_blocks"
    )
    if run.ops != "fused":
        return (stream,)
    return (stream, replace(stream, name="added by the block before", element_bytes=widths.matmul))


def kept_bytes(run: RunConfig, *, on_gpu: bool = True) -> dict[str, int]:
    """Bytes that forward keeps for backward, by op, without the batch and the rotary tables."""
    symbols, sums = symbols_of(run), dict[str, int]()
    for op, tensor, times in every_kept(run, on_gpu=on_gpu):
        sums[op] = sums.get(op, 0) + times * tensor.nbytes(symbols)
    if run.recompute == "block" and run.ops == "fused":
        sums["block input"] -= Kept(name="", element_bytes=widths_of(run).matmul, shape="N d").nbytes(symbols)
    return {op: nbytes for op, nbytes in sums.items() if nbytes}


def kept_by_category(run: RunConfig, *, on_gpu: bool = True) -> dict[str, int]:
    """The same bytes as activations, autocast weight copies, and logits and loss."""
    symbols, sums = symbols_of(run), dict.fromkeys((ACTIVATION, COPY, LOGITS), 0)
    for _, tensor, times in every_kept(run, on_gpu=on_gpu):
        sums[tensor.category] += times * tensor.nbytes(symbols)
    return sums

"""The ops of a block of the built-in model, as plain PyTorch, fused or compiled, with what each recomputation keeps of them.

Plain ops were read from training/transformer.py and ops/reference.py, and are compared byte for byte with what autograd keeps
(tests/plan/test_activations.py). Compiled blocks are what Inductor kept in results/h200 (ddp.jsonl, captured_ranks.jsonl: line
activations of memory_points). Fused ops were read from their save_for_backward, and are compared with torch's fake tensors.

Recomputation keeps results of matmuls and of attention as training/kept_results.py chooses them. For compiled
blocks that recompute we assume that Inductor keeps these results and the input, and that backward computes the rest before using
any of it.
"""

from dataclasses import replace

from trainstep.config.run import RunConfig
from trainstep.plan.model_ops import (
    FUSED,
    INDUCTOR,
    RECOMPUTED,
    TILED,
    Block,
    Kept,
    ModelOps,
    Op,
    Widths,
    check_known,
    embedding_op,
    fused_norm_op,
    head_ops,
    linear_op,
    model_of,
    modes_of,
    norm_op,
    tensor,
    widths_of,
)

_PLAIN = "ops/reference.py attention"
_FLASH = "attention keeps q, k, v, o and the log-sum-exp"
_SWIGLU = "ops/reference.py swiglu"
_INPUT = "training/recompute.py: the block's input"
_RESULTS = ("selective", "narrow")
"""The modes that keep results of attention, and of matmuls that do not widen."""


def model_ops(run: RunConfig, *, on_gpu: bool = True) -> ModelOps:
    """The ops of this run's model. ValueError for what has no formulas. `on_gpu` False: as on a CPU, for tests."""
    check_known(run)
    widths, modes = widths_of(run), modes_of(run)
    make = _fused_block if run.ops == "fused" else _compiled_block if run.compile != "none" else _eager_block
    return ModelOps(
        before=(embedding_op(run, widths),),
        blocks=tuple(
            Block(ops=make(run, widths, modes, layer, on_gpu=on_gpu), mode=mode) for layer, mode in enumerate(modes)
        ),
        after=head_ops(run, widths),
    )


def _eager_block(run: RunConfig, widths: Widths, modes: list[str], layer: int, *, on_gpu: bool) -> tuple[Op, ...]:
    e, wide = widths.matmul, _wide_results(run)
    gate = replace(linear_op(widths, "mlp", "N d", "", "f d", widens=True), takes=("dgate",))
    # Under autocast gate and up each round their input for themselves.
    up = linear_op(widths, "mlp", "N d", "", "f d", keeps_input=widths.autocast, widens=True)
    silu = Op(
        name="mlp",
        kept=(tensor("gate", e, "N f", _SWIGLU, modes=wide),),
        takes=("dsilu",),
        backward=(tensor("dgate", e, "N f"),),
    )
    product = Op(
        name="mlp",
        kept=(tensor("up", e, "N f", _SWIGLU, modes=wide), tensor("silu(gate)", e, "N f", _SWIGLU)),
        backward=(tensor("dup", e, "N f"), tensor("dsilu", e, "N f")),
        gives=2,
    )
    # In fp32 the first norm keeps the block's input.
    block_input = (_block_input(widths),) if modes[layer] != "none" and widths.stream < 4 else ()
    rotary = Op(name="rotary", backward=(tensor("dqkv", e, "3 N d"), *[tensor("rotated in fp32", 4, "N d")] * 2))
    return (
        *block_input,
        norm_op(widths, "attention norm"),
        *_in_frame("attention", _projection(run, widths), rotary, *_attention(run, widths, on_gpu=on_gpu)),
        _output(run, widths, on_gpu=on_gpu),
        # The second norm's x is no input of the block.
        _recomputed(norm_op(widths, "mlp norm")),
        Op(name="mlp", backward=(tensor("sum of dx", 4 if widths.autocast else e, "N d"),)),
        *_in_frame("mlp", gate, replace(up, takes=("dup",)), silu, product),
        linear_op(widths, "mlp", "N f", "N d", "d f"),
    )


def _in_frame(frame: str, *ops: Op) -> tuple[Op, ...]:
    return tuple(replace(op, frame=frame) for op in ops)


def _compiled_block(run: RunConfig, widths: Widths, modes: list[str], layer: int, *, on_gpu: bool) -> tuple[Op, ...]:
    """A compiled block: norms and SwiGLU are recomputed in the kernels of backward, but inputs of matmuls are kept."""
    e, wide = widths.matmul, _wide_results(run)

    def norm(name: str) -> Op:
        kept = (tensor("1 / rms", 4, "N", INDUCTOR),)
        dx = tensor("dx", widths.stream, "N d")
        return Op(name=name, kept=kept, backward=(dx,), weights=("d",), joins=True)

    def stream(name: str, modes: tuple[str, ...] = ()) -> Op:
        return Op(name="residual stream", kept=(tensor(name, widths.stream, "N d", INDUCTOR, modes=modes),))

    attention = _attention(run, widths, on_gpu=on_gpu)
    if run.attention not in TILED:
        # The matrix is kept once more, from before its softmax. This was fitted to the peaks of results/h200/compile.jsonl.
        scores, softmax, values = attention
        matrix = tuple(tensor(name, e, "B H S S", INDUCTOR) for name in ("probabilities", "scores"))
        attention = (
            replace(scores, kept=tuple(kept for kept in scores.kept if kept.name != "mask")),
            replace(softmax, kept=matrix),
            replace(values, kept=tuple(kept for kept in values.kept if kept.shape != "B H S S")),
        )
    gate_up = tuple(tensor(name, e, "N f", INDUCTOR, modes=wide) for name in ("gate", "up"))
    silu = Op(name="mlp", kept=gate_up, backward=(tensor("dgate", e, "N f"), tensor("dup", e, "N f")))
    return (
        norm("attention norm"),
        _projection(run, widths),
        Op(name="rotary", backward=(tensor("dqkv", e, "3 N d"),)),
        *attention,
        _output(run, widths, on_gpu=on_gpu),
        stream("stream"),
        norm("mlp norm"),
        linear_op(widths, "mlp", "N d", "", "f d"),
        linear_op(widths, "mlp", "N d", "", "f d", keeps_input=False),
        silu,
        linear_op(widths, "mlp", "N f", "N d", "d f"),
        stream("stream, the next block's input", RECOMPUTED),
    )


def _fused_block(run: RunConfig, widths: Widths, modes: list[str], layer: int, *, on_gpu: bool) -> tuple[Op, ...]:
    e = widths.matmul
    gate_up = tensor("gate and up", e, "2 N f", FUSED, modes=_wide_results(run, "2 f"))
    gradients = (tensor("dgate and dup", e, "2 N f"), tensor("dy", e, "N f"), tensor("y", e, "N f"))
    # What is added to the stream is an input of the next block, and a matmul's result in this one.
    following = modes[layer + 1] if layer + 1 < len(modes) else "none"
    added = tensor("added by the MLP", e, "N d", _INPUT, modes=RECOMPUTED)
    widens = model_of(run).d_model > model_of(run).d_ff
    is_held = following != "none" or modes[layer] in (("selective",) if widens else _RESULTS)
    down = linear_op(widths, "mlp", "N f", "N d", "d f", keeps_input=False)
    down = replace(
        down,
        kept=(gate_up, *down.kept, *((added,) if is_held else ())),
        forward=() if is_held else down.forward,
        backward=gradients,
    )
    # The first block's input is what its norm keeps; a later block's was kept by the block before, if that is not recomputed.
    has_input = modes[layer] != "none" and layer > 0 and modes[layer - 1] != "none"
    projection = linear_op(widths, "attention projections", "N d", "3 N d", "3 d d", modes=_wide_results(run, "3 d"))
    return (
        *((_block_input(widths),) if has_input else ()),
        fused_norm_op(widths, "attention norm", x_is_kept=layer == 0),
        projection,
        Op(name="rotary", backward=(tensor("dqkv", e, "3 N d"),)),
        *_attention(run, widths, on_gpu=on_gpu, own_v=True),
        _output(run, widths, on_gpu=on_gpu),
        fused_norm_op(widths, "mlp norm"),
        linear_op(widths, "mlp", "N d", "", "2 f d"),
        down,
    )


def _block_input(widths: Widths) -> Op:
    return Op(name="block input", kept=(tensor("stream", widths.stream, "N d", _INPUT, modes=RECOMPUTED),))


def _recomputed(op: Op) -> Op:
    """The op with nothing that a recomputation keeps."""
    return replace(op, kept=tuple(replace(kept, modes=()) for kept in op.kept))


def _wide_results(run: RunConfig, width: str = "f") -> tuple[str, ...]:
    """The modes that keep the result of a matmul from d_model to this width."""
    model = model_of(run)
    widths = {"f": model.d_ff, "2 f": 2 * model.d_ff, "3 d": 3 * model.d_model}
    return _RESULTS if widths[width] <= model.d_model else ("selective",)


def _projection(run: RunConfig, widths: Widths) -> Op:
    """The joint projection to q, k and v, whose output tiled attention keeps for v."""
    output = "" if _keeps_joint(run) else "3 N d"
    widens = run.compile == "none"
    return linear_op(widths, "attention projections", "N d", output, "3 d d", modes=("selective",), widens=widens)


def _output(run: RunConfig, widths: Widths, *, on_gpu: bool) -> Op:
    """The projection of attention's output. It keeps that output itself where a kernel writes it as (B, S, H, D), else a copy.

    Kernels write the output in q's layout, which is (B, H, S, D) after the plain rotation. Memory-efficient attention and
    flash-attn-4 write (B, S, H, D) whatever q's layout is.
    """
    as_needed = run.ops == "fused" or run.attention == "flash_attn_4"
    as_needed = as_needed or (on_gpu and (run.compile != "none" or _is_efficient(run, widths)))
    shares = run.attention in TILED and (as_needed or _heads_are_rows(run))
    op = linear_op(widths, "attention projections", "N d", "N d", "d d", keeps_input=not shares, modes=_RESULTS)
    if run.attention not in TILED and _heads_are_rows(run):  # the input is the result of the batched product itself
        kept = tuple(replace(kept, modes=_RESULTS) if kept.name == "input" else kept for kept in op.kept)
        op = replace(op, kept=kept)
    return op


def _heads_are_rows(run: RunConfig) -> bool:
    """Whether (B, H, S, D) is (B, S, H D) as it lies in memory."""
    return model_of(run).heads == 1 or run.context == 1


def _keeps_joint(run: RunConfig) -> bool:
    """Whether attention keeps the joint projection, because v is a view of it; a bmm copies v unless it can take v's layout."""
    return run.attention in TILED or run.batch_size == 1 or model_of(run).heads == 1


def _attention(run: RunConfig, widths: Widths, *, on_gpu: bool, own_v: bool = False) -> tuple[Op, ...]:
    """Attention with q and k rotated. `own_v`: v is a tensor of its own, not a view of the joint projection."""
    e = widths.matmul
    v = tensor("v", e, "N d", _FLASH)
    if not own_v and _keeps_joint(run):
        v = tensor("v, a view of q, k, v", e, "3 N d", _FLASH, modes=("selective",))
    if run.attention in TILED:
        return (_tiled_attention(run, widths, v, on_gpu=on_gpu),)
    return _plain_attention(run, widths, v, on_gpu=on_gpu)


def _tiled_attention(run: RunConfig, widths: Widths, v: Kept, *, on_gpu: bool) -> Op:
    e = widths.matmul
    rows = "B H R" if on_gpu and _is_efficient(run, widths) else "B H S"
    seeds = []
    if on_gpu and run.attention.startswith("sdpa"):
        seeds.append(tensor("random state", 8, "2", _FLASH, modes=_RESULTS))
        if run.compile == "none" and not _is_efficient(run, widths):
            seeds.append(tensor("unused", 8, "1", _FLASH, modes=_RESULTS))
    return Op(
        name="attention",
        kept=(
            *(tensor(name, e, "N d", _FLASH) for name in ("q", "k")),
            v,
            tensor("output", e, "N d", _FLASH, modes=_RESULTS),
            tensor("log-sum-exp", 4, rows, _FLASH, modes=_RESULTS),
            *seeds,
        ),
        backward=(*(tensor(name, e, "N d") for name in ("dq", "dk", "dv")), tensor("dq in fp32", 4, "N d")),
    )


def _plain_attention(run: RunConfig, widths: Widths, v: Kept, *, on_gpu: bool) -> tuple[Op, ...]:
    e, matrix, both = widths.matmul, "B H S S", widths.autocast and on_gpu
    wide = 4 if both else e
    # A batched product is kept if it is no larger than its factors together.
    is_small = run.context <= 2 * model_of(run).head_dim
    products = [tensor("q k^T", e, matrix, _PLAIN, modes=_RESULTS)] if is_small and run.recompute != "none" else []
    own_output = run.recompute != "none" and not _heads_are_rows(run)
    output = [tensor("output", e, "N d", _PLAIN, modes=_RESULTS)] if own_output else []
    return (
        Op(
            name="attention scores",
            kept=(tensor("q", e, "N d", _PLAIN), tensor("k", e, "N d", _PLAIN), tensor("mask", 1, "S S", _PLAIN)),
            forward=(*products, tensor("masked scores", e, matrix)),
            backward=(tensor("dq", e, "N d"), tensor("dk", e, "N d")),
        ),
        Op(
            name="attention softmax",
            kept=(tensor("probabilities", wide, matrix, _PLAIN),),
            backward=(tensor("dscores", wide, matrix), tensor("product", wide, matrix)),
        ),
        Op(
            name="attention values",
            kept=(*([tensor("rounded probabilities", e, matrix, _PLAIN)] if both else []), v),
            forward=tuple(output),
            backward=(tensor("dprobabilities", wide, matrix), tensor("dv", e, "N d")),
        ),
    )


def _is_efficient(run: RunConfig, widths: Widths) -> bool:
    return run.attention == "sdpa_efficient" or (run.attention == "sdpa" and widths.matmul == 4)

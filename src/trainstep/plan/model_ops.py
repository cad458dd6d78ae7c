"""Writes down the ops of the built-in model: the tensors that each keeps for backward, and the temporary tensors of both passes.

Symbols of shapes: B batch, S context, N = B S tokens, d d_model, f d_ff, H heads, V vocabulary, R the context rounded up to 32.
activations.py adds up what is kept; step_memory.py replays a step. A tensor's source is the code that saves it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from trainstep.config.model import ModelConfig
from trainstep.config.run import RunConfig

_NORM = "ops/reference.py rms_norm"
_LINEAR = "torch.nn.Linear keeps its input and, under autocast, the rounded weight"
_PLAIN = "ops/reference.py attention"
_FLASH = "attention keeps q, k, v, o and the log-sum-exp"
_SWIGLU = "ops/reference.py swiglu"
_INDUCTOR = "Inductor's partition, results/h200/ddp.jsonl memory_points"
_COMPILED_LOSS = "assumed of Inductor; peaks of results/h200/compile.jsonl agree within 0.8 %"
_FUSED = "ops/rms_norm.py, rotary.py, swiglu.py: save_for_backward"
_LOSS = "torch.nn.functional.cross_entropy keeps the log-softmax in fp32"

_LSE_ROWS = 32
"""Memory-efficient attention pads the log-sum-exp of a head to a multiple of these rows."""
TILED = ("sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "trainstep")
"""Attentions that never have the S x S matrix in memory."""
ACTIVATION, COPY, LOGITS = "activations", "autocast weight copies", "logits and loss"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One tensor of `shape`, `3 N d` for example, which a pass keeps or makes."""

    name: str
    element_bytes: int
    shape: str
    source: str = ""
    category: str = ACTIVATION

    @property
    def formula(self) -> str:
        return f"{self.element_bytes} B x {self.shape}"

    def nbytes(self, symbols: Mapping[str, int]) -> int:
        factors = (symbols[word] if word in symbols else int(word) for word in self.shape.split())
        return self.element_bytes * prod(factors)


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op of the model: what it keeps, the temporary tensors of its passes, and the parameters whose gradients it makes.

    `backward`: its outgoing gradient first, then temporary tensors. `joins`: its outgoing gradient is added to that of the stream.
    `branches`: the gradient of the stream stays alive beside the ops before it. `weights`: shapes.
    """

    name: str
    kept: tuple[Kept, ...] = ()
    forward: tuple[Kept, ...] = ()
    backward: tuple[Kept, ...] = ()
    weights: tuple[str, ...] = ()
    joins: bool = False
    branches: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelOps:
    """The ops of the built-in model in forward's order. `block` repeats for every layer."""

    before: tuple[Op, ...]
    block: tuple[Op, ...]
    after: tuple[Op, ...]


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes of elements that a precision gives to the model's tensors."""

    matmul: int
    stream: int
    weight: int
    autocast: bool


def symbols_of(run: RunConfig) -> dict[str, int]:
    """The values of the symbols in shapes. ValueError for a model of the user's own."""
    model = run.model
    if not isinstance(model, ModelConfig):
        raise ValueError(f"model: formulas are of the built-in Transformer; {model.name} is not known to them")
    batch, context = run.batch_size, run.context
    return {
        "B": batch,
        "S": context,
        "N": batch * context,
        "d": model.d_model,
        "f": model.d_ff,
        "H": model.heads,
        "V": model.vocab_size,
        "R": -(-context // _LSE_ROWS) * _LSE_ROWS,
    }


def widths_of(run: RunConfig) -> Widths:
    """The element bytes of a precision."""
    if run.precision.endswith("_autocast"):
        return Widths(matmul=2, stream=4, weight=4, autocast=True)
    width = 2 if run.precision.startswith("bf16") else 4
    return Widths(matmul=width, stream=width, weight=width, autocast=False)


def chunk_tokens(vocabulary: int, element_bytes: int) -> int:
    """Tokens whose logits the fused head has at a time: 256 MiB of them, as ops/linear_cross_entropy.py."""
    return max(1, 2**28 // (vocabulary * element_bytes) // 256) * 256


def model_ops(run: RunConfig, *, on_gpu: bool = True) -> ModelOps:
    """The ops of this run's model. With recompute block, `block` is what a block keeps while its forward runs again."""
    _check(run)
    widths = widths_of(run)
    fused, compiled = run.ops == "fused", run.compile != "none"
    e = widths.matmul
    embedding = Op(name="embedding", weights=("V d",))
    if fused:
        block = _fused_block(run, widths, on_gpu=on_gpu)
    elif compiled:
        block = _compiled_block(run, widths, on_gpu=on_gpu)
    else:
        block = _eager_block(run, widths, on_gpu=on_gpu)
    if compiled and not fused:  # the input of the first block is a tensor of its own; the others are outputs of blocks
        embedding = replace(embedding, kept=(_of("stream", widths.stream, "N d", _INDUCTOR),))
    if fused:
        return ModelOps(before=(embedding,), block=block, after=(_fused_norm(widths, "norm"), _fused_head(run, widths)))
    if run.compile == "model":
        norm = Op(name="norm", kept=(_of("1 / rms", 4, "N", _INDUCTOR),), weights=("d",), joins=True)
        loss = Op(
            name="loss",
            kept=(_of("logits", e, "N V", _COMPILED_LOSS, LOGITS), _of("log-sum-exp", 4, "N", _COMPILED_LOSS, LOGITS)),
            backward=(_of("logits' gradient", e, "N V", category=LOGITS),),
        )
        return ModelOps(
            before=(embedding,), block=block, after=(norm, _linear(widths, "head", "N d", "N V", "V d"), loss)
        )
    loss = Op(
        name="loss",
        kept=(_of("log-softmax", 4, "N V", _LOSS, LOGITS), _of("weight", 4, "1", _LOSS, LOGITS)),
        forward=(_of("logits", e, "N V", category=LOGITS), *([_of("logits in fp32", 4, "N V", category=LOGITS)] if e < 4 else [])),
        backward=(_of("logits' gradient", 4, "N V", category=LOGITS), _of("loss's gradient", 4, "N V", category=LOGITS)),
    )  # fmt: skip
    narrowed = [_cast("logits", "N V", e)] if e < 4 else []
    return ModelOps(
        before=(embedding,),
        block=block,
        after=(
            _norm(widths, "norm", keeps_stream=not compiled),
            _linear(widths, "head", "N d", "N V", "V d"),
            *narrowed,
            loss,
        ),
    )


def _check(run: RunConfig) -> None:
    """ValueError for what these lists do not know yet, which would be predicted wrongly."""
    if run.recompute not in ("none", "block") or run.recompute_every != 1 or run.recompute_budget_gib is not None:
        raise ValueError(
            "recompute: only none, and block in every block, have formulas; measure the others with trainstep memory"
        )
    if run.recompute == "block" and run.compile != "none":
        raise ValueError(
            "recompute: with compile only none has formulas; take compile none, or measure with trainstep memory"
        )
    if run.updates_in_backward:
        raise ValueError(
            "update: in_backward has no formulas of each tensor; take after_backward, or measure with trainstep memory"
        )


def _of(name: str, element_bytes: int, shape: str, source: str = "", category: str = "activations") -> Kept:
    return Kept(name=name, element_bytes=element_bytes, shape=shape, source=source, category=category)


def _cast(name: str, shape: str, element_bytes: int) -> Op:
    """A rounding to the matmuls' dtype, whose backward widens the gradient; read in backward's direction it narrows it."""
    return Op(name=f"{name}: cast", backward=(_of("gradient", element_bytes, shape),))


def _norm(widths: Widths, name: str, *, keeps_stream: bool = True) -> Op:
    """The reference norm: x in fp32, 1 / rms, and x / rms, which the product with the weight keeps."""
    narrow_weight = [_of("weight in fp32", 4, "d", _NORM)] if widths.stream < 4 else []
    stream = [_of("x", 4, "N d", _NORM)] if keeps_stream else []
    return Op(
        name=name,
        kept=(*stream, _of("1 / rms", 4, "N", _NORM), _of("x / rms", 4, "N d", _NORM), *narrow_weight),
        forward=(_of("squares", 4, "N d"),),
        backward=(_of("dx", 4, "N d"), *[_of("temporary", 4, "N d")] * 3),
        weights=("d",),
        joins=True,
    )


def _linear(widths: Widths, name: str, x: str, y: str, weight: str, *, keeps_input: bool = True) -> Op:
    """y = x W^T. Without `y` the next op keeps the output."""
    e = widths.matmul
    copy = (_of("weight in the matmul's dtype", 2, weight, _LINEAR, COPY),) if widths.autocast else ()
    kept = (_of("input", e, x, _LINEAR),) if keeps_input else ()
    output = (_of("output", e, y),) if y else ()
    return Op(name=name, kept=(*kept, *copy), forward=output, backward=(_of("dx", e, x),), weights=(weight,))


def _eager_block(run: RunConfig, widths: Widths, *, on_gpu: bool) -> tuple[Op, ...]:
    e = widths.matmul
    silu = Op(
        name="mlp",
        kept=(_of("gate", e, "N f", _SWIGLU), _of("up", e, "N f", _SWIGLU), _of("silu(gate)", e, "N f", _SWIGLU)),
        backward=(_of("dgate", e, "N f"), _of("dup", e, "N f"), _of("dsilu", e, "N f")),
    )
    two_inputs = widths.autocast  # each linear rounds its input for itself
    return (
        replace(_norm(widths, "attention norm"), branches=True),
        _linear(widths, "attention projections", "N d", "3 N d" if run.attention not in TILED else "", "3 d d"),
        Op(name="rotary", backward=(_of("dqkv", e, "3 N d"), *[_of("rotated in fp32", 4, "N d")] * 2)),
        *_attention(run, widths, on_gpu=on_gpu),
        _linear(widths, "attention projections", "N d", "N d", "d d", keeps_input=not _shares_output(run, on_gpu)),
        replace(_norm(widths, "mlp norm"), branches=True),
        _linear(widths, "mlp", "N d", "", "f d"),
        _linear(widths, "mlp", "N d", "", "f d", keeps_input=two_inputs),
        silu,
        _linear(widths, "mlp", "N f", "N d", "d f"),
    )


def _shares_output(run: RunConfig, on_gpu: bool) -> bool:
    """Whether the projection keeps attention's output itself: a GPU's kernels write it as (B, S, H, D), else it is copied."""
    return run.attention in TILED and (on_gpu or getattr(run.model, "heads", 0) == 1 or run.context == 1)


def _attention(run: RunConfig, widths: Widths, *, on_gpu: bool, own_v: bool = False) -> tuple[Op, ...]:
    """Attention with q and k rotated. `own_v`: v is a tensor of its own, not a view of the joint projection."""
    e = widths.matmul
    if run.attention in TILED:
        rows = "B H R" if on_gpu and _is_efficient(run, widths) else "B H S"
        source = _FLASH
        seeds = [_of("random state", 8, "2", source)] if on_gpu and run.attention.startswith("sdpa") else []
        v = _of("v", e, "N d", source) if own_v else _of("v, a view of q, k, v", e, "3 N d", source)
        kept = (
            *(_of(name, e, "N d", source) for name in ("q", "k")),
            v,
            _of("output", e, "N d", source),
            _of("log-sum-exp", 4, rows, source),
            *seeds,
        )
        gradients = tuple(_of(name, e, "N d") for name in ("dq", "dk", "dv"))
        return (Op(name="attention", kept=kept, backward=(*gradients, _of("dq in fp32", 4, "N d"))),)
    matrix, both = "B H S S", widths.autocast and on_gpu
    view = not own_v and (run.batch_size == 1 or getattr(run.model, "heads", 0) == 1)  # bmm takes it as it lies
    v = _of("v, a view of q, k, v", e, "3 N d", _PLAIN) if view else _of("v", e, "N d", _PLAIN)
    wide = 4 if both else e
    return (
        Op(
            name="attention scores",
            kept=(_of("q", e, "N d", _PLAIN), _of("k", e, "N d", _PLAIN), _of("mask", 1, "S S", _PLAIN)),
            forward=(_of("masked scores", e, matrix),),
            backward=(_of("dq", e, "N d"), _of("dk", e, "N d")),
        ),
        Op(
            name="attention softmax",
            kept=(_of("probabilities", wide, matrix, _PLAIN),),
            backward=(_of("dscores", wide, matrix), _of("product", wide, matrix)),
        ),
        Op(
            name="attention values",
            kept=(*([_of("rounded probabilities", e, matrix, _PLAIN)] if both else []), v),
            backward=(_of("dprobabilities", wide, matrix), _of("dv", e, "N d")),
        ),
    )


def _is_efficient(run: RunConfig, widths: Widths) -> bool:
    return run.attention == "sdpa_efficient" or (run.attention == "sdpa" and widths.matmul == 4)


def _compiled_block(run: RunConfig, widths: Widths, *, on_gpu: bool) -> tuple[Op, ...]:
    """A compiled block: norms and SwiGLU are recomputed in the kernels of backward, but inputs of matmuls are kept."""
    e, r = widths.matmul, widths.stream

    def norm(name: str) -> Op:
        kept = (_of("1 / rms", 4, "N", _INDUCTOR),)
        return Op(name=name, kept=kept, backward=(_of("dx", r, "N d"),), weights=("d",), joins=True, branches=True)

    stream = _of("stream", r, "N d", _INDUCTOR)
    attention = _attention(run, widths, on_gpu=on_gpu)
    if run.attention not in TILED:
        # The matrix is kept once more before its softmax; results/h200/compile.jsonl, whose peaks this was fitted to.
        scores, softmax, values = attention
        kept = tuple(tensor for tensor in scores.kept if tensor.name != "mask")
        matrix = (_of("probabilities", e, "B H S S", _INDUCTOR), _of("scores", e, "B H S S", _INDUCTOR))
        attention = (
            replace(scores, kept=kept),
            replace(softmax, kept=matrix),
            replace(values, kept=tuple(tensor for tensor in values.kept if tensor.shape != "B H S S")),
        )
    silu = Op(
        name="mlp",
        kept=(_of("gate", e, "N f", _INDUCTOR), _of("up", e, "N f", _INDUCTOR)),
        backward=(_of("dgate", e, "N f"), _of("dup", e, "N f")),
    )
    return (
        norm("attention norm"),
        _linear(widths, "attention projections", "N d", "3 N d" if run.attention not in TILED else "", "3 d d"),
        Op(name="rotary", backward=(_of("dqkv", e, "3 N d"),)),
        *attention,
        _linear(widths, "attention projections", "N d", "N d", "d d", keeps_input=not _shares_output(run, on_gpu)),
        Op(name="residual stream", kept=(stream,)),
        norm("mlp norm"),
        _linear(widths, "mlp", "N d", "", "f d"),
        _linear(widths, "mlp", "N d", "", "f d", keeps_input=False),
        silu,
        _linear(widths, "mlp", "N f", "N d", "d f"),
        Op(name="residual stream", kept=(stream,)),
    )


def _fused_norm(widths: Widths, name: str) -> Op:
    return Op(
        name=name,
        kept=(_of("x", widths.stream, "N d", _FUSED), _of("1 / rms", 4, "N", _FUSED)),
        backward=(_of("dx", widths.stream, "N d"),),
        weights=("d",),
        joins=True,
    )


def _fused_block(run: RunConfig, widths: Widths, *, on_gpu: bool) -> tuple[Op, ...]:
    e = widths.matmul
    gate_up = _of("gate and up", e, "2 N f", _FUSED)
    down = _linear(widths, "mlp", "N f", "N d", "d f", keeps_input=False)
    gradients = (_of("dgate and dup", e, "2 N f"), _of("dy", e, "N f"), _of("y", e, "N f"))
    return (
        replace(_fused_norm(widths, "attention norm"), branches=True),
        _linear(widths, "attention projections", "N d", "3 N d" if run.attention not in TILED else "", "3 d d"),
        Op(name="rotary", backward=(_of("dqkv", e, "3 N d"),)),
        *_attention(run, widths, on_gpu=on_gpu, own_v=True),
        _linear(widths, "attention projections", "N d", "N d", "d d", keeps_input=not _shares_output(run, on_gpu)),
        replace(_fused_norm(widths, "mlp norm"), branches=True),
        _linear(widths, "mlp", "N d", "", "2 f d"),
        replace(down, kept=(gate_up, *down.kept), backward=gradients),
    )


def _fused_head(run: RunConfig, widths: Widths) -> Op:
    """The head with its loss: forward makes both gradients, and never has whole logits."""
    e = widths.matmul
    tokens = min(chunk_tokens(getattr(run.model, "vocab_size", 1), e), run.batch_size * run.context)
    source = "ops/linear_cross_entropy.py: gradients in forward"
    return Op(
        name="loss",
        kept=(_of("dx", e, "N d", source, LOGITS), _of("dW", e, "V d", source, LOGITS)),
        forward=(
            _of("chunk of logits", e, f"{tokens} V", category=LOGITS),
            _of("dW in fp32", 4, "V d", category=LOGITS),
            *([_of("weight in the matmul's dtype", 2, "V d", category=COPY)] if widths.autocast else []),
        ),
        weights=("V d",),
    )

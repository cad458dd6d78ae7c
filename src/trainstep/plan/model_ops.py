"""Writes down the ops of the built-in model: the tensors that each keeps for backward, and the temporary tensors of both passes.

Symbols of shapes: B batch, S context, N = B S tokens, d d_model, f d_ff, H heads, V vocabulary, R the context rounded up to 32.
activations.py adds up what is kept; step_memory.py replays a step; block_ops.py has the ops of a block. A tensor's source is the
code that saves it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from trainstep.config.model import ModelConfig
from trainstep.config.run import RunConfig
from trainstep.costs.element_wise import chunk_tokens
from trainstep.plan.live_tensors import ACTIVATION, COPY, LOGITS

INDUCTOR = "Inductor's partition, results/h200/ddp.jsonl memory_points"
FUSED = "ops/rms_norm.py, rotary.py, swiglu.py: save_for_backward"
_NORM = "ops/reference.py rms_norm"
_LINEAR = "torch.nn.Linear keeps its input and, under autocast, the rounded weight"
_COMPILED_LOSS = "assumed of Inductor; peaks of results/h200/compile.jsonl agree within 0.8 %"
_LOSS = "torch.nn.functional.cross_entropy keeps the log-softmax in fp32"

_LSE_ROWS = 32
"""Memory-efficient attention pads the log-sum-exp of a head to a multiple of these rows."""
TILED = ("sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "trainstep", "flash_attn_4")
"""Attentions that never have the S x S matrix in memory."""
RECOMPUTED = ("selective", "narrow", "block")
"""The modes of recomputation, all of which keep a block's input."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One tensor of `shape`, `3 N d` for example, which a pass keeps or makes. `modes`: recomputations that keep it too."""

    name: str
    element_bytes: int
    shape: str
    source: str = ""
    category: str = ACTIVATION
    modes: tuple[str, ...] = ()

    @property
    def formula(self) -> str:
        return f"{self.element_bytes} B x {self.shape}"

    def nbytes(self, symbols: Mapping[str, int]) -> int:
        factors = (symbols[word] if word in symbols else int(word) for word in self.shape.split())
        return self.element_bytes * prod(factors)


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op of the model: what it keeps, the temporary tensors of its passes, and the parameters whose gradients it makes.

    `backward`: its outgoing gradients first, of which there are `gives`, then temporary tensors. `takes`: names of the incoming
    gradients that it uses up, by default all there are but that of the stream. `joins`: its outgoing gradient is added to that of
    the stream. `weights`: shapes, in the order of the module. `frame`: the Python function whose variables hold its tensors until
    it returns, which matters where autograd holds none.
    """

    name: str
    kept: tuple[Kept, ...] = ()
    forward: tuple[Kept, ...] = ()
    backward: tuple[Kept, ...] = ()
    weights: tuple[str, ...] = ()
    gives: int = 1
    takes: tuple[str, ...] = ()
    joins: bool = False
    frame: str = ""


@dataclass(frozen=True, kw_only=True)
class Block:
    """The ops of a block in forward's order, and what of it is computed again (RecomputedForward.mode)."""

    ops: tuple[Op, ...]
    mode: str = "none"

    def keeps(self, tensor: Kept, *, of_kept: bool) -> bool:
        """Whether forward holds this tensor until the block's backward. `of_kept`: it is one of an op's `kept`."""
        return of_kept if self.mode == "none" else self.mode in tensor.modes


@dataclass(frozen=True, kw_only=True)
class ModelOps:
    """The ops of the built-in model in forward's order."""

    before: tuple[Op, ...]
    blocks: tuple[Block, ...]
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
    model = model_of(run)
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


def model_of(run: RunConfig) -> ModelConfig:
    """The built-in model of a run. ValueError for a model of the user's own."""
    if not isinstance(run.model, ModelConfig):
        raise ValueError(
            f"model: formulas are of the built-in Transformer, {run.model.name} is not known to them; take a size, or measure: "
            "trainstep memory"
        )
    return run.model


def widths_of(run: RunConfig) -> Widths:
    """The element bytes of a precision."""
    if run.precision.endswith("_autocast"):
        return Widths(matmul=2, stream=4, weight=4, autocast=True)
    width = 2 if run.precision.startswith("bf16") else 4
    return Widths(matmul=width, stream=width, weight=width, autocast=False)


def modes_of(run: RunConfig) -> list[str]:
    """The mode of each block's recomputation, as training/build.py sets it."""
    layers = range(run.narrow_blocks, model_of(run).layers)
    modes = [run.recompute if layer % run.recompute_every == 0 else "none" for layer in layers]
    return ["narrow"] * run.narrow_blocks + modes


def check_known(run: RunConfig) -> None:
    """ValueError for what has no formulas, which would be predicted wrongly."""
    model_of(run)
    if run.recompute_budget_gib is not None:
        raise ValueError(
            "recompute_budget_gib: is met by measuring the blocks on the GPU; plan a mode: recompute block, selective or narrow"
        )
    if run.attention == "sdpa_math":
        raise ValueError("attention: sdpa_math has no formulas; take plain, which has the same matrices, or sdpa")


def tensor(
    name: str,
    element_bytes: int,
    shape: str,
    source: str = "",
    *,
    category: str = ACTIVATION,
    modes: tuple[str, ...] = (),
) -> Kept:
    """A tensor of an op."""
    return Kept(name=name, element_bytes=element_bytes, shape=shape, source=source, category=category, modes=modes)


def norm_op(widths: Widths, name: str, *, keeps_stream: bool = True, temporaries: int = 1) -> Op:
    """The reference norm: x in fp32, 1 / rms, and x / rms, which the product with the weight keeps.

    `temporaries`: of backward; one less where the stream has a gradient, to which a part of dx is added at once.
    """
    narrow = widths.stream < 4
    # In fp32 x is the block's input itself, which every recomputation keeps; else it is a copy.
    x = [tensor("x", 4, "N d", _NORM, modes=() if narrow else RECOMPUTED)] if keeps_stream or narrow else []
    weight = [tensor("weight in fp32", 4, "d", _NORM)] if narrow else []
    return Op(
        name=name,
        kept=(*x, tensor("1 / rms", 4, "N", _NORM), tensor("x / rms", 4, "N d", _NORM), *weight),
        forward=(tensor("squares", 4, "N d"),),
        backward=(tensor("dx", 4, "N d"), *[tensor("temporary", 4, "N d")] * (temporaries + narrow)),
        weights=("d",),
        joins=True,
    )


def fused_norm_op(widths: Widths, name: str, *, x_is_kept: bool = False) -> Op:
    """The fused norm keeps the sum of stream and what is added to it. `x_is_kept`: nothing is added, and x is the block's input."""
    return Op(
        name=name,
        kept=(
            tensor("x", widths.stream, "N d", FUSED, modes=RECOMPUTED if x_is_kept else ()),
            tensor("1 / rms", 4, "N", FUSED),
        ),
        backward=(tensor("dx", widths.stream, "N d"),),
        weights=("d",),
        joins=True,
    )


def linear_op(
    widths: Widths, name: str, x: str, y: str, weight: str, *, keeps_input: bool = True, modes: tuple[str, ...] = (),
    widens: bool = False,
) -> Op:  # fmt: skip
    """y = x W^T. Without `y` the next op keeps the output. `modes`: recomputations that keep the output. `widens`: autocast rounds
    x for the matmul, so that backward widens its gradient."""
    e = widths.matmul
    copy = (tensor("weight in the matmul's dtype", 2, weight, _LINEAR, category=COPY),) if widths.autocast else ()
    kept = (tensor("input", e, x, _LINEAR),) if keeps_input else ()
    output = (tensor("output", e, y, modes=modes),) if y else ()
    gradients = [tensor("dx in fp32", 4, x)] if widens and widths.autocast else []
    backward = (*gradients, tensor("dx", e, x))
    return Op(name=name, kept=(*kept, *copy), forward=output, backward=backward, weights=(weight,))


def embedding_op(run: RunConfig, widths: Widths) -> Op:
    """The embedding. A compiled model keeps its output, which is the first block's input, as a tensor of its own."""
    own = run.compile != "none" and run.ops != "fused"
    kept = (tensor("stream", widths.stream, "N d", INDUCTOR),) if own else ()
    return Op(name="embedding", kept=kept, weights=("V d",))


def head_ops(run: RunConfig, widths: Widths) -> tuple[Op, ...]:
    """The last norm, the head and the loss."""
    e = widths.matmul
    if run.ops == "fused":
        return fused_norm_op(widths, "norm"), _fused_head(run, widths)
    head = linear_op(widths, "head", "N d", "N V", "V d", widens=True)
    if run.compile == "model":
        norm = Op(name="norm", kept=(tensor("1 / rms", 4, "N", INDUCTOR),), weights=("d",), joins=True)
        loss = Op(
            name="loss",
            kept=(_logits("logits", e, "N V", _COMPILED_LOSS), _logits("log-sum-exp", 4, "N", _COMPILED_LOSS)),
            backward=(_logits("logits' gradient", e, "N V"),),
        )
        return norm, head, loss
    loss = Op(
        name="loss",
        kept=(_logits("log-softmax", 4, "N V", _LOSS), _logits("weight", 4, "1", _LOSS)),
        forward=(_logits("logits in fp32", 4, "N V"),) if e < 4 else (),
        backward=(_logits("logits' gradient", 4, "N V"), _logits("loss's gradient", 4, "N V")),
    )
    # The logits are widened for the loss, so that their gradient is narrowed for the head's matmuls.
    # Variables of the model's forward hold the logits, and the output of the norm, until the loss is computed.
    cast = []
    if e < 4:
        normed = (tensor("output of the norm", 4, "N d"),) if widths.autocast and run.compile == "none" else ()
        cast = [Op(name="logits: cast", forward=(*head.forward, *normed), backward=(tensor("gradient", e, "N V"),))]
        head = replace(head, forward=())
    norm = norm_op(widths, "norm", keeps_stream=run.compile == "none", temporaries=2)
    return norm, head, *cast, loss


def _fused_head(run: RunConfig, widths: Widths) -> Op:
    """The head with its loss: forward makes both gradients, and never has whole logits."""
    e = widths.matmul
    chunk, tokens = chunk_tokens(model_of(run).vocab_size, e), run.batch_size * run.context
    source = "ops/linear_cross_entropy.py: gradients in forward"
    return Op(
        name="loss",
        kept=(_logits("dx", e, "N d", source), _logits("dW", e, "V d", source)),
        forward=(
            _logits("chunk of logits", e, f"{min(chunk, tokens)} V"),
            # A single chunk's matmul sums all of dW, and a sum in its own dtype is the kept tensor.
            *([_logits("dW in fp32", 4, "V d")] if tokens > chunk and e < 4 and run.loss_sum_dtype == "fp32" else []),
            *([tensor("weight in the matmul's dtype", 2, "V d", category=COPY)] if widths.autocast else []),
        ),
        weights=("V d",),
    )


def _logits(name: str, element_bytes: int, shape: str, source: str = "") -> Kept:
    return tensor(name, element_bytes, shape, source, category=LOGITS)

"""`linear_cross_entropy`: the head's matmul and the cross-entropy behind it, by chunks of tokens, so that logits never exist whole.

    z = x W^T;  lse = log(sum(exp(z)));  per token  lse - (1 - smoothing) z[target] - smoothing mean(z) + z_loss lse^2

With gradients in forward, each chunk's logits are replaced by their gradient dz and give dx = dz W and their part of dW = dz^T x at
once: three matmuls in all, and one chunk of logits in memory. Backward then only multiplies by the loss's gradient, and does
nothing where that is 1. Without, forward keeps lse, 4 bytes a token, and backward computes the logits again: a fourth matmul, but
no dW is held between forward and backward.

dW is summed over chunks in `sum_dtype`: in fp32, which needs 4 bytes per element of W while it runs, or in W's dtype, which rounds
after each chunk. With a single chunk the matmul sums all of it.

[Note: odd vocabularies] For 16-bit sizes that are no multiple of 8 cuBLAS has only slow kernels, even where rows are aligned. With
GPT-2's 50,257 words the three matmuls of 8,192 tokens, 4,096 wide, take an H200 66 ms, and 14 in two parts each: the words up to a
multiple of 16, and the rest (results/h200/odd_vocabulary.csv).
"""

import inspect
import math
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from trainstep.costs.element_wise import chunk_tokens as usual_chunk_tokens
from trainstep.costs.element_wise import linear_cross_entropy_flops
from trainstep.ops import reference
from trainstep.ops.operators import autocast_dtype, define, gradients_by, has_kernel, makes_a_graph, rows_of
from trainstep.spans import span

with suppress(ImportError):  # there is no triton for this platform; has_kernel then says so
    from trainstep.ops.kernels.cross_entropy import launch_cross_entropy, launch_scale


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    gradients_in_forward: bool = True,
    chunk_tokens: int | None = None,
    sum_dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    """The mean or sum of the loss over tokens whose target is not `ignore_index`: a scalar in fp32.

    hidden (..., C) and weight (V, C) in one dtype of fp32, bf16 and fp16, or of different ones under autocast, which applies;
    targets (...) of int64. `sum_dtype`: torch.float32, or None for the weight's, which is faster and needs less memory, but rounds
    once a chunk: in bf16 the error of dW is 6.2e-3 to 7.8e-3 of its largest entry with 8, 11 and 16 chunks, where the 2x rule
    allows 1.31e-2 (results/h200/loss_bill_kernel.csv, loss_bill_again.csv); more were not checked. `chunk_tokens`: by default as
    many as have 256 MiB of logits, but up to 2,048 as far as these have at most 1 GiB. A target out of range makes the loss, the
    gradient of weight and its token's gradient of hidden NaN. Where no token counts, the mean is NaN, as torch's.

    On a CPU and in fp64 ops/reference.py runs, with whole logits; a target out of range is an error of torch's there. ValueError
    for shapes and settings that do not fit; RuntimeError for a second backward pass with gradients in forward, whose memory the
    first has reused, and for create_graph=True with them.
    """
    _check_shapes(hidden, weight, targets)
    _check_settings(label_smoothing, z_loss, reduction, chunk_tokens, sum_dtype)
    dtype = autocast_dtype(hidden)
    if dtype is not None:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"weight: must have the dtype {hidden.dtype} of hidden outside autocast, but has {weight.dtype}"
        )
    with span("head"):
        if not has_kernel(hidden, weight):
            return reference.linear_cross_entropy(
                hidden,
                weight,
                targets,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                z_loss=z_loss,
                reduction=reduction,
            )
        tokens = chunk_tokens or usual_chunk_tokens(weight.shape[0], hidden.element_size())
        wanted = [torch.is_grad_enabled() and x.requires_grad and gradients_in_forward for x in (hidden, weight)]
        loss: Tensor = _linear_cross_entropy(
            hidden, weight, targets, ignore_index, label_smoothing, z_loss, reduction == "mean", tokens, sum_dtype or weight.dtype,
            *wanted,
        )[0]  # fmt: skip
        return loss


class LinearCrossEntropy(nn.Module):
    """`linear_cross_entropy` with its weight: `head(hidden, targets)` gives the loss; `head.logits(hidden)` the logits.

    Options are those of the function. Loads the state_dict of a torch.nn.Linear without bias. ValueError for settings that do not
    fit, TypeError for an option that the function does not have.
    """

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        call = inspect.signature(linear_cross_entropy).bind(None, None, None, **options)
        call.apply_defaults()
        _check_settings(*(call.arguments[name] for name in inspect.signature(_check_settings).parameters))
        self.weight = nn.Linear(d_model, vocab_size, bias=False, device=device, dtype=dtype).weight
        self.options = options

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, self.weight, targets, **self.options)

    def logits(self, hidden: Tensor) -> Tensor:
        """x W^T, (..., V), whole."""
        return nn.functional.linear(hidden, self.weight)


def _check_shapes(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight: must be (V, {hidden.shape[-1]}) for hidden states of that width, but has the shape {tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets: must be int64 of the shape {tuple(hidden.shape[:-1])}, but are {targets.dtype} of {tuple(targets.shape)}"
        )
    if weight.device != hidden.device:
        raise ValueError(f"weight: must be on {hidden.device} with hidden, but is on {weight.device}")
    if targets.device != hidden.device:  # a kernel that is started directly would read an address of the other device
        raise ValueError(f"targets: must be on {hidden.device} with hidden, but are on {targets.device}")


def _check_settings(
    label_smoothing: float, z_loss: float, reduction: str, chunk_tokens: int | None, sum_dtype: torch.dtype | None
) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: {reduction!r} is not known; known: mean, sum")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: must be from 0 to 1, but is {label_smoothing}")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss: must be finite and not negative, but is {z_loss}")
    if chunk_tokens is not None and (not isinstance(chunk_tokens, int) or chunk_tokens < 1):
        raise ValueError(f"chunk_tokens: must be at least 1 and a whole number, but is {chunk_tokens}")
    if sum_dtype not in (None, torch.float32):
        raise ValueError(f"sum_dtype: must be torch.float32, or None for the weight's, but is {sum_dtype}")


_ALIGNED = 16
"""Rows of logits are padded to a multiple of this: only of such a stride does Triton know that all rows are aligned. Matmuls of a
vocabulary that is no multiple of `_FAST` are split behind its last multiple of this. [Note: odd vocabularies]"""
_FAST = 8


class _Work(NamedTuple):
    """The arguments of both operators that describe the loss and how it is computed."""

    ignore_index: int
    smoothing: float
    z_loss: float
    mean: bool
    chunk: int
    sum_dtype: torch.dtype


_SETTINGS = "int ignore_index, float smoothing, float z_loss, bool mean, int chunk, ScalarType sum_dtype"


def _run(hidden: Tensor, weight: Tensor, targets: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *work, wants_hidden, wants_weight = settings
    rows, labels = rows_of(hidden), targets.flatten().contiguous()
    losses, lse = (rows.new_empty(len(rows), dtype=torch.float32) for _ in range(2))
    scale = _scale(labels, _Work(*work))
    dhidden, dweight = _by_chunks(
        rows, weight, labels, losses, lse, scale, _Work(*work), wants_hidden, wants_weight, has_lse=False
    )
    return losses.sum() * scale, lse, dhidden.view(hidden.shape if wants_hidden else 0), dweight


def _run_backward(
    dloss: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, *settings: Any
) -> tuple[Tensor, Tensor]:
    *work, wants_hidden, wants_weight = settings
    labels = targets.flatten().contiguous()
    scale = _scale(labels, _Work(*work)) * dloss
    dhidden, dweight = _by_chunks(
        rows_of(hidden), weight, labels, lse, lse, scale, _Work(*work), wants_hidden, wants_weight, has_lse=True
    )
    return dhidden.view(hidden.shape if wants_hidden else 0), dweight


def _scale(labels: Tensor, work: _Work) -> Tensor:
    """1 / the number of tokens that count, or 1 for a sum: fp32 (), on the device."""
    if not work.mean:
        return torch.ones((), dtype=torch.float32, device=labels.device)
    return (labels != work.ignore_index).sum().float().reciprocal()


def _by_chunks(
    rows: Tensor, weight: Tensor, labels: Tensor, losses: Tensor, lse: Tensor, scale: Tensor, work: _Work,
    wants_hidden: bool, wants_weight: bool, *, has_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill in losses and lse, and return dx and dW; those that are not wanted have no element."""
    gradient = wants_hidden or wants_weight
    dhidden = torch.empty_like(rows) if wants_hidden else rows.new_empty(0)
    total_dtype = weight.dtype if len(rows) <= work.chunk else work.sum_dtype
    dweight = weight.new_zeros(weight.shape if wants_weight else 0, dtype=total_dtype)
    logits = _new_logits(rows, min(work.chunk, len(rows)), weight.shape[0])
    splits = _splits(weight.shape[0])
    for first in range(0, len(rows), work.chunk):
        part = slice(first, first + work.chunk)
        x = rows[part]
        z = logits[: len(x)]
        for words in splits:
            torch.mm(x, weight[words].T, out=z[:, words])
        launch_cross_entropy(
            z, labels[part], losses[part], lse[part], scale, ignore_index=work.ignore_index, smoothing=work.smoothing,
            z_loss=work.z_loss, has_lse=has_lse, gradient=gradient,
        )  # fmt: skip
        for words in splits:
            if wants_hidden:  # the rest first: of the two parts of dx, that of few words is rounded before the sum
                dhidden[part].addmm_(z[:, words], weight[words], beta=0 if words is splits[0] else 1)
            if wants_weight:
                _add_product(dweight[words], z[:, words].T, x)
    return dhidden, dweight.to(weight.dtype)


def _new_logits(rows: Tensor, tokens: int, vocabulary: int) -> Tensor:
    """(tokens, vocabulary), rows padded to a multiple of 16 elements: matmuls and the kernel read aligned rows in larger pieces."""
    padded = -(-vocabulary // _ALIGNED) * _ALIGNED
    return rows.new_empty(tokens, padded)[:, :vocabulary]


def _splits(vocabulary: int) -> list[slice]:
    """The words of each matmul: the rest behind the last multiple of 16, then all before it; all at once if 8 divides them."""
    whole = vocabulary // _ALIGNED * _ALIGNED
    if vocabulary % _FAST == 0 or not whole:
        return [slice(0, vocabulary)]
    return [slice(whole, vocabulary), slice(0, whole)]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, multiplied in their dtype and summed in the total's."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # torch has no such product on a CPU
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _fake(hidden: Tensor, weight: Tensor, targets: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, wants_hidden, wants_weight = settings
    loss, lse = (hidden.new_empty(shape, dtype=torch.float32) for shape in ((), targets.shape.numel()))
    return loss, lse, *_fake_gradients(hidden, weight, wants_hidden, wants_weight)


def _fake_backward(
    _dloss: Tensor, hidden: Tensor, weight: Tensor, _targets: Tensor, _lse: Tensor, *settings: Any
) -> tuple[Tensor, Tensor]:
    return _fake_gradients(hidden, weight, *settings[-2:])


def _fake_gradients(hidden: Tensor, weight: Tensor, wants_hidden: bool, wants_weight: bool) -> tuple[Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if wants_hidden else 0),
        weight.new_empty(weight.shape if wants_weight else 0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, *settings = inputs
    _, lse, dhidden, dweight = output
    ctx.mark_non_differentiable(lse, dhidden, dweight)
    ctx.set_materialize_grads(False)  # autograd would fill zeros of the gradients' size
    *ctx.settings, ctx.wants_hidden, ctx.wants_weight = settings
    ctx.in_forward = ctx.wants_hidden or ctx.wants_weight
    ctx.is_spent = False
    ctx.save_for_backward(*((dhidden, dweight) if ctx.in_forward else (hidden, weight, targets, lse)))


def _backward(ctx: Any, dloss: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    nothing = [None] * (1 + len(ctx.settings) + 2)
    if not ctx.in_forward:
        wanted = ctx.needs_input_grad[:2]
        if makes_a_graph():
            return *_gradients_with_graph(ctx, dloss), *nothing
        gradients = _linear_cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.settings, *wanted)
        return *(x if wants else None for x, wants in zip(gradients, wanted, strict=True)), *nothing
    if makes_a_graph():
        raise RuntimeError(
            "linear_cross_entropy: create_graph=True needs gradients_in_forward=False, because gradients of forward have no graph"
        )
    if ctx.is_spent:
        raise RuntimeError(
            "linear_cross_entropy: a second backward pass needs gradients_in_forward=False, because the first has changed the "
            "gradients in place"
        )
    factor, gradients = dloss.float(), ctx.saved_tensors
    # A graph that a compiler traces, with tensors of its own or in a mode, may not change what forward gave it.
    ctx.is_spent = type(dloss) is Tensor and not torch._C._len_torch_dispatch_stack()
    scaled = [_scaled(x, factor) if ctx.is_spent else (x * factor).to(x.dtype) for x in gradients]
    wanted = ctx.wants_hidden, ctx.wants_weight
    return *(x if wants else None for x, wants in zip(scaled, wanted, strict=True)), *nothing


def _gradients_with_graph(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of hidden and weight by the reference, with whole logits."""
    hidden, weight, targets, _ = ctx.saved_tensors
    work = _Work(*ctx.settings)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return reference.linear_cross_entropy(
            hidden,
            weight,
            targets,
            ignore_index=work.ignore_index,
            label_smoothing=work.smoothing,
            z_loss=work.z_loss,
            reduction="mean" if work.mean else "sum",
        )

    return gradients_by(loss, (hidden, weight), (dloss,))


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    launch_scale(x, factor)
    return x


_linear_cross_entropy = define(
    f"linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, {_SETTINGS}, bool hidden_gradient, bool weight_gradient) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    save=_save,
    backward=_backward,
)
_linear_cross_entropy_backward = define(
    f"linear_cross_entropy_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor targets, Tensor lse, {_SETTINGS}, "
    "bool hidden_gradient, bool weight_gradient) -> (Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)


@register_flop_formula(torch.ops.trainstep.linear_cross_entropy)
def _flops(hidden: torch.Size, weight: torch.Size, *rest: Any, **_: Any) -> int:
    logits = linear_cross_entropy_flops(hidden[:-1].numel(), hidden[-1], weight[0], backward=False)
    return logits * (1 + sum(map(bool, rest[-2:])))


@register_flop_formula(torch.ops.trainstep.linear_cross_entropy_backward)
def _backward_flops(_dloss: torch.Size, hidden: torch.Size, weight: torch.Size, *rest: Any, **_: Any) -> int:
    return _flops(hidden, weight, *rest)

"""The head with its loss is as accurate as the reference, in chunks. test_fused_ops.py runs this file in Triton's interpreter."""

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from numerics import assert_as_accurate_as
from op_check import DEVICES, DTYPES, INTERPRETED, check, interpret, normal
from trainstep.costs.element_wise import chunk_tokens
from trainstep.ops import linear_cross_entropy as module
from trainstep.ops import reference
from trainstep.ops.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy

CASES: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.2, "z_loss": 1e-3, "reduction": "sum"},
]
ONLY_KERNELS = pytest.mark.skipif(not INTERPRETED, reason="in the interpreter, or on a GPU")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, module)


def operands(tokens: int, vocabulary: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    hidden = normal(tokens, 24, dtype=dtype, device=device)
    weight = normal(vocabulary, 24, seed=1, dtype=dtype, device=device)
    targets = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(2)).to(device)
    targets[1::5] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(case) or "plain")
def test_loss_and_gradients_are_as_accurate_as_the_reference(
    case: dict[str, Any], dtype: torch.dtype, in_forward: bool, chunk: int, device: str
):
    hidden, weight, targets = operands(17, 50, dtype, device)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        options = {"gradients_in_forward": in_forward, "chunk_tokens": chunk}
        return linear_cross_entropy(hidden, weight, targets, **case, **options)

    check(
        ours, lambda hidden, weight: reference.linear_cross_entropy(hidden, weight, targets, **case), [hidden, weight]
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_vocabulary_of_several_tiles(device: str):
    hidden, weight, targets = operands(6, 20_001, torch.float32, device)
    hidden *= 0.1  # so that no single probability counts, whose logit a matmul rounds in one way or another
    targets[0] = 20_000
    check(
        lambda hidden, weight: linear_cross_entropy(hidden, weight, targets),
        lambda hidden, weight: reference.linear_cross_entropy(hidden, weight, targets),
        [hidden, weight],
    )


@pytest.mark.parametrize("vocabulary", [1, 8, 15, 17, 50, 10_000, 50_257, 50_264, 50_304])
def test_all_words_but_a_few_are_multiplied_in_sizes_for_which_fast_matmuls_exist(vocabulary: int):
    *few, most = module._splits(vocabulary)
    assert sorted(word for part in (*few, most) for word in range(part.start, part.stop)) == [*range(vocabulary)]
    assert (most.stop - most.start) % (16 if few else 8) == 0 or vocabulary < 16
    assert sum(part.stop - part.start for part in few) < 16
    assert bool(few) == (vocabulary > 16 and vocabulary % 8 != 0)
    assert most.start < most.stop


@ONLY_KERNELS
def test_each_of_the_three_matmuls_is_done_in_two_parts(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, int]] = []
    mm, addmm_ = torch.mm, Tensor.addmm_

    def seen_mm(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        seen.append(b.shape)
        return mm(a, b, **options)

    def seen_addmm_(total: Tensor, a: Tensor, b: Tensor, **options: Any) -> Tensor:
        seen.append(a.shape)
        return addmm_(total, a, b, **options)

    hidden, weight, targets = operands(6, 50, torch.float32, "cpu")
    monkeypatch.setattr(torch, "mm", seen_mm)
    monkeypatch.setattr(Tensor, "addmm_", seen_addmm_)
    linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets).backward()
    assert seen == [(24, 2), (24, 48), (6, 2), (2, 6), (6, 48), (48, 6)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of 16 logits; kernels are bound anew for them, and again behind the test."""
    kernels = importlib.import_module("trainstep.ops.kernels.cross_entropy")
    monkeypatch.setattr(kernels, "_tile", lambda _vocabulary: (16, 1))
    kernels._bound.cache_clear()
    yield
    kernels._bound.cache_clear()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=ONLY_KERNELS), DEVICES[1]])
@pytest.mark.parametrize("vocabulary", [48, 50], ids=["three blocks", "and a part"])
@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(case) or "plain")
def test_rows_of_several_blocks(case: dict[str, Any], in_forward: bool, vocabulary: int, device: str):
    hidden, weight, targets = operands(17, vocabulary, torch.float32, device)
    check(
        lambda *x: linear_cross_entropy(*x, targets, **case, gradients_in_forward=in_forward),
        lambda *x: reference.linear_cross_entropy(*x, targets, **case),
        [hidden, weight],
    )


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=ONLY_KERNELS), DEVICES[1]])
@pytest.mark.parametrize("has_lse", [False, True])
def test_ignored_rows_are_not_read_and_nothing_behind_a_row_is_written(has_lse: bool, device: str):
    """Whatever is in an ignored row its loss and gradient are 0, and what lies behind a row stays there."""
    whole = normal(3, 64, device=device)
    whole[1, ::3], whole[1, 1::3], whole[:, 50:] = math.inf, math.nan, 7.0
    plain = whole[[0, 2], :50].double().requires_grad_()
    targets = torch.tensor([49, -100, 3], device=device)
    expected = cross_entropy(plain, targets[[0, 2]], reduction="none", label_smoothing=0.1)
    (dz,) = torch.autograd.grad(expected.sum(), plain)
    loss, lse = torch.full((3,), 9.0, device=device), torch.full((3,), 9.0, device=device)
    lse[[0, 2]] = plain.logsumexp(-1).float().detach()
    options = {"ignore_index": -100, "smoothing": 0.1, "z_loss": 0.0, "has_lse": has_lse, "gradient": True}
    module.launch_cross_entropy(whole[:, :50], targets, loss, lse, torch.ones((), device=device), **options)
    torch.testing.assert_close(whole[[0, 2], :50].double(), dz, rtol=1e-4, atol=1e-6)
    assert not whole[1, :50].count_nonzero()
    assert (whole[:, 50:] == 7.0).all()
    if has_lse:
        assert (loss == 9.0).all(), "forward has written it"
    else:
        torch.testing.assert_close(loss[[0, 2]].double(), expected.detach(), rtol=1e-5, atol=1e-5)
        assert loss[1] == lse[1] == 0


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=ONLY_KERNELS), DEVICES[1]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eight_chunks_may_be_summed_in_16_bits(dtype: torch.dtype, device: str):
    hidden, weight, targets = operands(208, 30, dtype, device)
    check(
        lambda *x: linear_cross_entropy(*x, targets, chunk_tokens=26, sum_dtype=None),
        lambda *x: reference.linear_cross_entropy(*x, targets),
        [hidden, weight],
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_chunks_are_summed_without_their_rounding(dtype: torch.dtype, device: str):
    """By fp32 sums the gradient of W is rounded once, whatever the number of chunks."""
    hidden, weight, targets = operands(200, 30, dtype, device)
    ours, same, exact = (
        gradient_of_weight(loss, *(x.to(kind) for x in (hidden, weight)), targets)
        for loss, kind in (
            (lambda *x: linear_cross_entropy(*x, chunk_tokens=2), dtype),
            (reference.linear_cross_entropy, dtype),
            (reference.linear_cross_entropy, torch.float64),
        )
    )
    assert_as_accurate_as(ours, same, exact, "dW")


def gradient_of_weight(loss: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    weight = weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(hidden, weight, targets), weight)
    return gradient


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("layout", ["strided", "one for all", "transposed"])
def test_targets_in_any_layout(layout: str, in_forward: bool, device: str):
    hidden, weight, targets = operands(12, 30, torch.float32, device)
    if layout == "strided":
        targets = torch.stack((targets, 29 - targets), dim=-1)[:, 0]
    elif layout == "one for all":
        targets = targets[:1].expand(12)
    else:
        hidden, targets = hidden.view(4, 3, 24), targets.view(3, 4).T
    check(
        lambda hidden, weight: linear_cross_entropy(hidden, weight, targets, gradients_in_forward=in_forward),
        lambda hidden, weight: reference.linear_cross_entropy(hidden, weight, targets),
        [hidden, weight],
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_forward", [True, False])
def test_no_token_gives_gradients_of_zero(in_forward: bool, device: str):
    hidden, weight, targets = (x[:0] if i != 1 else x for i, x in enumerate(operands(1, 30, torch.float32, device)))
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy(*leaves, targets, reduction="sum", gradients_in_forward=in_forward)
    dhidden, dweight = torch.autograd.grad(loss, leaves)
    assert loss == 0
    assert dhidden.shape == (0, 24)
    torch.testing.assert_close(dweight, torch.zeros_like(weight), rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_torchs_cross_entropy_agrees(device: str):
    hidden, weight, targets = operands(17, 50, torch.float32, device)
    for options in ({}, {"label_smoothing": 0.1}):
        expected = cross_entropy(hidden @ weight.T, targets, **options)
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, **options), expected)
    targets[:] = -100
    assert linear_cross_entropy(hidden, weight, targets).isnan()
    assert linear_cross_entropy(hidden, weight, targets, reduction="sum") == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("trained", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("in_forward", [True, False])
def test_only_what_needs_a_gradient_gets_one(trained: tuple[bool, bool], in_forward: bool, device: str):
    hidden, weight, targets = operands(9, 30, torch.float32, device)
    leaves = [x.requires_grad_(needed) for x, needed in zip((hidden, weight), trained, strict=True)]
    loss = linear_cross_entropy(*leaves, targets, gradients_in_forward=in_forward, chunk_tokens=4)
    assert loss.requires_grad == any(trained)
    if any(trained):
        (3 * loss).backward()
        again = [x.detach().clone().requires_grad_(x.requires_grad) for x in leaves]
        (3 * reference.linear_cross_entropy(*again, targets)).backward()
        for leaf, other in zip(leaves, again, strict=True):
            assert (leaf.grad is None) == (other.grad is None)
            if other.grad is not None:
                torch.testing.assert_close(leaf.grad, other.grad)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=ONLY_KERNELS), DEVICES[1]])
def test_gradients_of_forward_are_spent_once(device: str):
    hidden, weight, targets = operands(9, 30, torch.float32, device)
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gradients_in_forward=False"):
        loss.backward()
    again = linear_cross_entropy(hidden, weight, targets, gradients_in_forward=False)
    first, second = (torch.autograd.grad(again, hidden, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=ONLY_KERNELS), DEVICES[1]])
@pytest.mark.parametrize("in_forward", [True, False])
def test_a_target_out_of_range_gives_nan(in_forward: bool, device: str):
    hidden, weight, targets = operands(9, 30, torch.float32, device)
    targets[3] = 50
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(*leaves, targets, gradients_in_forward=in_forward)
    dhidden, dweight = torch.autograd.grad(loss, leaves)
    assert loss.isnan()
    assert dweight.isnan().all()
    assert dhidden[3].isnan().all()
    assert dhidden[[0, 1, 2, *range(4, 9)]].isfinite().all()


@pytest.mark.skipif(INTERPRETED, reason="the reference runs on a CPU")
def test_a_target_out_of_range_is_an_error_of_the_reference():
    hidden, weight, targets = operands(9, 30, torch.float32, "cpu")
    targets[3] = 50
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(hidden, weight, targets)


@pytest.mark.parametrize("device", DEVICES)
def test_logits_of_minus_infinity_are_allowed(device: str):
    hidden, weight, targets = operands(9, 30, torch.float32, device)
    weight[7], targets[targets == 7] = float("-inf"), 8
    hidden = hidden.abs()
    expected = cross_entropy(hidden @ weight.T, targets)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets), expected)


def test_the_module_is_a_head_without_bias():
    head, linear = LinearCrossEntropy(24, 30, label_smoothing=0.1), torch.nn.Linear(24, 30, bias=False)
    head.load_state_dict(linear.state_dict())
    hidden, _, targets = operands(9, 30, torch.float32, "cpu")
    torch.testing.assert_close(head.logits(hidden), linear(hidden))
    torch.testing.assert_close(head(hidden, targets), cross_entropy(linear(hidden), targets, label_smoothing=0.1))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing: must be from 0 to 1"),
        ({"chunk_tokens": 1.5}, ValueError, "chunk_tokens: must be at least 1 and a whole number"),
        ({"lable_smoothing": 0.1}, TypeError, "unexpected keyword argument 'lable_smoothing'"),
    ],
)
def test_the_module_refuses_wrong_options_when_it_is_made(options: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        LinearCrossEntropy(24, 30, **options)


def test_the_module_has_a_device_and_a_dtype():
    head = LinearCrossEntropy(24, 30, device="meta", dtype=torch.bfloat16, z_loss=1e-4)
    assert (head.weight.device.type, head.weight.dtype) == ("meta", torch.bfloat16)


def test_chunks_have_256_mib_of_logits_and_full_tiles_or_2048_tokens_within_1_gib():
    assert chunk_tokens(10_000, 2) == 13_312
    assert chunk_tokens(50_304, 2) == 2_560
    assert chunk_tokens(151_936, 2) == 2_048
    assert chunk_tokens(151_936, 4) == 1_536
    assert chunk_tokens(10**9, 4) == 256, "at least one tile"
    assert math.isclose(2_048 * 151_936 * 2 / 2**30, 0.58, rel_tol=0.01)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": torch.ones(50, 23)}, r"weight: must be \(V, 24\)"),
        ({"targets": torch.ones(16, dtype=torch.int64)}, r"targets: must be int64 of the shape \(17,\)"),
        ({"targets": torch.ones(17, dtype=torch.int32)}, "targets: must be int64"),
        (
            {"targets": torch.ones(17, dtype=torch.int64, device="meta")},
            "targets: must be on cpu with hidden, but are on meta",
        ),
        ({"weight": torch.ones(50, 24, device="meta")}, "weight: must be on cpu with hidden, but is on meta"),
        (
            {"weight": torch.ones(50, 24).bfloat16()},
            "weight: must have the dtype torch.float32 of hidden outside autocast",
        ),
        ({"reduction": "none"}, "reduction: 'none' is not known"),
        ({"label_smoothing": 1.5}, "label_smoothing: must be from 0 to 1"),
        ({"z_loss": -1e-3}, "z_loss: must be finite and not negative, but is -0.001"),
        ({"z_loss": math.nan}, "z_loss: must be finite and not negative, but is nan"),
        ({"chunk_tokens": 0}, "chunk_tokens: must be at least 1"),
        ({"chunk_tokens": 1.5}, "chunk_tokens: must be at least 1 and a whole number, but is 1.5"),
        ({"sum_dtype": torch.float16}, "sum_dtype: must be torch.float32, or None"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], words: str):
    hidden, weight, targets = operands(17, 50, torch.float32, "cpu")
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "targets": targets, **changes})

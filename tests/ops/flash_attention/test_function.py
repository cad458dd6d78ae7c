"""The public function on the CPU: accuracy, layouts, what it refuses, and its operator in torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from attention_cases import Case, attend_by_itself, check, random_case
from trainstep.ops import flash_attention, flash_attention_backward
from trainstep.ops.flash_attention.function import _matmul_precision


def qkv(**changes: object) -> list[Tensor]:
    case = Case(**({"batch": 2, "heads": 4, "key_heads": 4, "queries": 20, "keys": 20, "head_dim": 16} | changes))  # type: ignore[arg-type]
    return [x.requires_grad_() for x in case.tensors()[:3]]


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes(seed: int):
    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, causal_alignment: str) -> tuple[Tensor, Tensor]:
        mask = {"is_causal": causal, "causal_alignment": causal_alignment}
        return flash_attention(q, k, v, **mask, enable_gqa=True, return_lse=True)  # type: ignore[return-value, arg-type]

    check(attend, random_case(1000 + seed, longest=200, dtypes=[torch.float32, torch.bfloat16], most_pairs=2e5))


@pytest.mark.parametrize("seed", range(10))
def test_the_backward_function(seed: int):
    check(
        attend_by_itself, random_case(2000 + seed, longest=200, dtypes=[torch.float32, torch.bfloat16], most_pairs=2e5)
    )


LAYOUTS = {
    "BHSD": ({"key_heads": 2}, lambda x: x, {"enable_gqa": True}),
    "BSHD": ({"strided": "fused"}, lambda x: x.transpose(1, 2), {"layout": "BSHD"}),
    "BSD": ({"heads": 1, "key_heads": 1, "queries": 9}, lambda x: x.squeeze(1), {"scale": 0.3}),
}
"""By layout: changes to the case, the view of its tensors that is given, and options of flash_attention."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_backward_function_in_every_layout(layout: str):
    """Gradients and their strides are autograd's to the bit, whether inputs are contiguous or not."""
    changes, view, options = LAYOUTS[layout]
    q, k, v = (view(x.detach()).requires_grad_() for x in qkv(**changes))
    o, lse = flash_attention(q, k, v, is_causal=True, return_lse=True, **options)
    assert lse.shape == (q.shape[:2] if layout == "BSD" else view(q).shape[:3])
    do = torch.randn(*o.shape, 2)[..., 0]
    with torch.no_grad():
        gradients = flash_attention_backward(do, q, k, v, o, lse.mT.clone().mT, True, **options)
    for dx, expected in zip(gradients, torch.autograd.grad(o, [q, k, v], do), strict=True):
        assert torch.equal(dx, expected)
        assert dx.stride() == expected.stride()


def test_the_backward_function_under_autocast():
    q, k, v = (x.detach() for x in qkv())
    with torch.autocast("cpu", torch.bfloat16):
        o, lse = flash_attention(q, k, v, return_lse=True)
        gradients = flash_attention_backward(torch.ones_like(q), q, k, v, o, lse)
    assert {dx.dtype for dx in gradients} == {torch.bfloat16}


def test_the_backward_function_compiles_as_one_graph():
    arguments = [x.detach() for x in qkv()]
    o, lse = flash_attention(*arguments, return_lse=True)
    arguments = [torch.ones_like(o), *arguments, o, lse]
    compiled = torch.compile(flash_attention_backward, fullgraph=True, backend="aot_eager")
    for gradient, expected in zip(compiled(*arguments), flash_attention_backward(*arguments), strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("do", lambda x: x[:, :, :5], "do .* must be q's"),
        ("do", lambda x: x.double(), "do .* must be q's"),
        ("o", lambda x: x[0], "o .* must be q's"),
        ("lse", lambda x: x[:, 0], "return_lse=True"),
        ("lse", lambda x: x.double(), "return_lse=True"),
        ("k", lambda x: x.half(), "make them alike"),
        ("q", lambda x: x[..., :4], "in batch and head width"),
    ],
)
def test_the_backward_function_refuses_tensors_that_do_not_fit(
    name: str, change: Callable[[Tensor], Tensor], word: str
):
    q, k, v = (x.detach() for x in qkv())
    o, lse = flash_attention(q, k, v, return_lse=True)
    tensors = {"do": o, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    with pytest.raises(ValueError, match=word):
        flash_attention_backward(**tensors | {name: change(tensors[name])})


def test_the_backward_function_refuses_missing_heads_and_bad_options():
    """A gradient without the dimension of its only head, and options that flash_attention refuses too."""
    q, k, v = (x.detach() for x in qkv(heads=1, key_heads=1))
    o, lse = flash_attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match="must be q's"):
        flash_attention_backward(o.squeeze(1), q, k, v, o, lse)
    for options, word in (({"layout": "SBHD"}, "'BSHD'"), ({"scale": -1.0}, "negate q")):
        with pytest.raises(ValueError, match=word):
            flash_attention_backward(o, q, k, v, o, lse, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["BHSD", "BSD"])
def test_saved_tensors_are_the_inputs_and_outputs(layout: str):
    """q, k, v and the output in their own shapes, and the log-sum-exp, the only tensor of its shape."""
    changes, view, options = LAYOUTS[layout]
    tensors = [view(x.detach()).requires_grad_() for x in qkv(**changes)]
    o, lse = flash_attention(*tensors, is_causal=True, return_lse=True, **options)
    saved = o.grad_fn.saved_tensors
    assert all(torch.equal(x, y) for x, y in zip(saved, (*tensors, o, lse), strict=True))
    assert [x.shape for x in saved].count(o.shape[:-1]) == 1
    o.add_(1.0)  # it is not a view


@pytest.mark.parametrize("causal", [True, False])
def test_calls_with_torchs_arguments_give_torchs_result(causal: bool):
    q, k, v = qkv(key_heads=2)
    output, expected = (
        attend(q, k, v, None, 0.0, causal, scale=0.2, enable_gqa=True)
        for attend in (flash_attention, scaled_dot_product_attention)
    )
    torch.testing.assert_close(output, expected)


def test_layouts_give_the_same_result():
    q, k, v = qkv(key_heads=2)
    o, lse = flash_attention(q, k, v, is_causal=True, enable_gqa=True, return_lse=True)
    moved = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    o_BSHD, lse_BSHD = flash_attention(*moved, is_causal=True, enable_gqa=True, return_lse=True, layout="BSHD")
    assert torch.equal(o_BSHD.transpose(1, 2), o)
    assert torch.equal(lse_BSHD, lse)
    assert o_BSHD.is_contiguous()
    o_BSD, lse_BSD = flash_attention(q[:, 1], k[:, 0], v[:, 0], is_causal=True, return_lse=True)
    torch.testing.assert_close(o_BSD, o[:, 1])
    torch.testing.assert_close(lse_BSD, lse[:, 1])


def test_cpu_tensors_have_one_arithmetic():
    q, k, v = qkv()
    assert torch.equal(flash_attention(q, k, v, fp32_precision="fp16x3"), flash_attention(q, k, v))


def test_a_last_stride_above_1_gives_the_same_result():
    q, k, v = qkv()
    strided = [torch.stack((x, x), dim=-1)[..., 0] for x in (q, k, v)]
    assert strided[0].stride(-1) == 2
    assert torch.equal(flash_attention(*strided), flash_attention(q, k, v))


def test_autocast_computes_in_its_dtype():
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        o = flash_attention(q, k, v)
    assert o.dtype == torch.bfloat16
    o.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_lse_carries_no_gradient():
    _, lse = flash_attention(*qkv(), return_lse=True)
    assert not lse.requires_grad


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"attn_mask": torch.ones(20, 20)}, "flex_attention"),
        ({"dropout_p": 0.1}, "no dropout"),
        ({"layout": "SBHD"}, "'BSHD'"),
        ({"causal_alignment": "bottom"}, "'bottom_right'"),
        ({"fp32_precision": "high"}, "'tf32x3'"),
        ({"scale": -1.0}, "negate q"),
    ],
)
def test_unsupported_options_are_refused(changes: dict[str, object], word: str):
    with pytest.raises(ValueError, match=word):
        flash_attention(*qkv(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shapes", "word"),
    [
        ([(2, 4, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16)], "enable_gqa"),
        ([(2, 4, 9, 16), (2, 4, 9, 16), (2, 4, 9, 32)], "another width"),
        ([(2, 4, 9, 16), (1, 4, 9, 16), (1, 4, 9, 16)], "in batch"),
        ([(2, 4, 9, 4)] * 3, "8 to 256"),
        ([(2, 4, 9, 512)] * 3, "8 to 256"),
        ([(2, 4, 0, 16)] * 3, "empty"),
        ([(9, 16)] * 3, "dimensions"),
        ([(2, 1, 9, 16), (2, 9, 16), (2, 9, 16)], "dimensions"),
    ],
)
def test_wrong_shapes_are_refused(shapes: list[tuple[int, ...]], word: str):
    with pytest.raises(ValueError, match=word):
        flash_attention(*(torch.randn(shape) for shape in shapes))


def test_mixed_dtypes_are_refused():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="make them alike"):
        flash_attention(q, k.half(), v)


def test_the_operator_passes_opcheck():
    for alignment in (False, True):
        arguments = (*qkv(key_heads=2, queries=9, strided="fused"), 0.25, True, alignment, None, None)
        torch.library.opcheck(torch.ops.trainstep.flash_attention.default, arguments)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_the_function_compiles_as_one_graph(layout: str):
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q.sin(), k, v, is_causal=True, enable_gqa=True, layout=layout).square().sum()

    q, k, v = qkv()
    eager_gradients = torch.autograd.grad(loss(q, k, v), [q, k, v])
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    gradients = torch.autograd.grad(compiled(q, k, v), [q, k, v])
    for gradient, expected in zip(gradients, eager_gradients, strict=True):
        torch.testing.assert_close(gradient, expected)


def test_double_backward_is_refused():
    q, k, v = qkv()
    (dq,) = torch.autograd.grad(flash_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


def test_checkpointing_gives_the_same_gradients():
    q, k, v = qkv()
    expected = torch.autograd.grad(flash_attention(q, k, v, is_causal=True).square().sum(), [q, k, v])
    o = checkpoint(lambda *x: flash_attention(*x, is_causal=True), q, k, v, use_reentrant=False)
    recomputed = torch.autograd.grad(o.square().sum(), [q, k, v])
    assert all(torch.equal(a, b) for a, b in zip(expected, recomputed, strict=True))


def test_torchs_flop_counter_counts_both_passes():
    q, k, v = qkv(key_heads=2)
    with FlopCounterMode(display=False) as counter:
        flash_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()
    forward = 2 * 2 * 4 * 20 * 20 * 16
    assert counter.get_total_flops() == forward + 2.5 * forward


def test_matmul_precision_follows_torchs_setting():
    """The precision that the kernels would be launched with."""
    before = torch.get_float32_matmul_precision()
    try:
        for setting, precision in (("high", "tf32"), ("medium", "tf32"), ("highest", "ieee")):
            torch.set_float32_matmul_precision(setting)
            assert _matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
def test_counters_and_profilers_see_the_operator(training: bool):
    """Eager calls skip the dispatcher, except under a FLOP counter or a profiler; the result is the same."""
    q, k, v = (x.detach().cuda().requires_grad_(training) for x in qkv())

    def step() -> list[Tensor]:
        o = flash_attention(q, k, v, is_causal=True)
        return [o, *torch.autograd.grad(o.square().sum(), [q, k, v])] if training else [o]  # type: ignore[list-item, union-attr]

    direct = step()
    with FlopCounterMode(display=False) as counter:
        counted = step()
    forward = 2 * 2 * 4 * 20 * 20 * 16
    assert counter.get_total_flops() == forward * (3.5 if training else 1)
    with torch.profiler.profile() as profile:
        profiled = step()
    names = {event.key for event in profile.key_averages()}
    assert "trainstep::flash_attention" in names
    assert not training or "trainstep::flash_attention_backward" in names
    for expected, from_counter, from_profiler in zip(direct, counted, profiled, strict=True):
        assert torch.equal(expected, from_counter)
        assert torch.equal(expected, from_profiler)


def test_meta_tensors_have_the_outputs_shape():
    q = torch.empty(2, 3, 5, 16, device="meta")
    assert flash_attention(q, q, q).shape == q.shape

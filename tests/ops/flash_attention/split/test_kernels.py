"""fp32_precision="fp16x3": the parts, and the kernels that multiply them, within 4 times fp32's error, as three TF32 products.

test_interpreter.py runs this file with TRITON_INTERPRET=1 in a process of its own; by itself, without a GPU, it skips.
"""

import pytest
import torch
from torch import Tensor

from attention_cases import Case, check, random_case
from trainstep.ops import flash_attention
from trainstep.ops.flash_attention import Tiles
from trainstep.ops.flash_attention.problem import CallMeta

pytest.importorskip("triton")
from attention_kernels import DEVICE, INTERPRETED, RUNNABLE, SMALL
from attention_kernels import attend as attend_by
from trainstep.ops.flash_attention.split.parts import Peak, Prologue

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="needs a CUDA GPU, or TRITON_INTERPRET=1")
NAN, INFINITY = float("nan"), float("inf")


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, causal_alignment: str = "top_left"
) -> tuple[Tensor, Tensor]:
    return attend_by(q, k, v, causal=causal, causal_alignment=causal_alignment, precision="fp16x3")


def inputs(**changes: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = {"heads": 2, "key_heads": 1, "queries": 77, "keys": 50, "head_dim": 24}
    return Case(**(shape | changes)).tensors(DEVICE)  # type: ignore[arg-type]


def outputs(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **mask: object) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = attend(*leaves, **{"causal": True, **mask})  # type: ignore[arg-type]
    dq, dk, dv = torch.autograd.grad(o, leaves, do)
    return {"o": o.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}


# Accuracy -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the larger shapes below")
@pytest.mark.parametrize("seed", range(10, 24))
def test_small_random_shapes(seed: int):
    check(attend, random_case(seed, longest=200, dtypes=[torch.float32], most_pairs=5e4), times=4)


@pytest.mark.parametrize("head_dim", [17, 80, 96])
def test_widths_between_powers_of_two(head_dim: int):
    case = Case(heads=2, key_heads=1, queries=70, keys=45, head_dim=head_dim, alignment="bottom_right", strided="fused")
    check(attend, case, device=DEVICE, times=4)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(80), ids=lambda seed: f"part{seed % 8}-{seed}")
def test_random_shapes(seed: int):
    case = random_case(7000 + seed, longest=3000, dtypes=[torch.float32], most_pairs=3e7)
    check(attend, case, device=DEVICE, times=4)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (80, True), (128, True), (128, False)])
def test_a_long_sequence(head_dim: int, causal: bool):
    """Sums over many tiles, which would be less accurate if tensor cores, which round towards zero, added tile to tile."""
    case = Case(heads=2, key_heads=1, queries=8192, keys=8192, head_dim=head_dim, causal=causal)
    check(attend, case, device=DEVICE, times=4)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_sum_to_one(causal: bool):
    q, k, v, _ = inputs()
    o, _ = attend(q, k, torch.ones_like(v), causal=causal)
    assert (o - 1).abs().max() <= 4 * torch.finfo(torch.float32).eps


def test_queries_that_see_nothing():
    results = outputs(*inputs(keys=13), causal_alignment="bottom_right")
    assert not results["o"][:, :, :64].any()
    assert not results["dq"][:, :, :64].any()
    assert torch.equal(results["lse"] == -INFINITY, (torch.arange(77, device=DEVICE) < 64).expand_as(results["lse"]))
    assert results["dk"].isfinite().all()
    assert results["dv"].isfinite().all()


def test_every_bit_repeats():
    tensors = inputs(heads=4, queries=150, keys=150)
    first = outputs(*tensors)
    for _ in range(1 if INTERPRETED else 20):
        assert all(torch.equal(x, first[name]) for name, x in outputs(*tensors).items())


# Sizes --------------------------------------------------------------------------------------------------------------------------


def test_powers_of_two_change_no_bit():
    """Each tensor is scaled by a power of two, so a factor in the inputs is exactly a factor in the results."""
    q, k, v, do = inputs(heads=2, key_heads=2)
    unscaled = outputs(q, k, v, do)
    a, b, c = (2.0 ** torch.tensor(x, device=DEVICE).view(1, 2, 1, 1) for x in ([-60, 45], [100, -70], [-90, 80]))
    scaled = outputs(q * a, k / a, v * b, do * c)
    expected = {"o": b, "lse": torch.ones_like(b[..., 0]), "dq": b * c / a, "dk": b * c * a, "dv": c}
    for name, factor in expected.items():
        assert torch.equal(scaled[name], unscaled[name] * factor), name


@pytest.mark.parametrize("magnitude", [1e4, 1e10, 1e-30, 0.0])
def test_queries_of_any_size(magnitude: float):
    """Scores far above 1 choose one key; scores at or near 0 choose all keys equally."""
    q, k, v, do = inputs(queries=50)
    results = outputs(q * magnitude, k, v, do)
    assert all(x.isfinite().all() for x in results.values())
    if magnitude < 1:
        mean = v.cumsum(dim=2) / torch.arange(1, 51, device=DEVICE).view(-1, 1)
        torch.testing.assert_close(results["o"], mean.expand_as(results["o"]))
    else:
        assert results["lse"].abs().max() > magnitude


def test_heads_of_one_group_differ_in_size():
    """Heads of a group share a scale, which costs no accuracy down to 2^-16 of the largest."""
    q, k, v, do = inputs(heads=3, queries=60, keys=60)
    size = torch.tensor([1.0, 2.0**-10, 2.0**-8], device=DEVICE).view(1, 3, 1, 1)
    case = Case(heads=3, key_heads=1, queries=60, keys=60, head_dim=24)

    class Sized(Case):
        def tensors(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
            return (q * size).to(device), k.to(device), v.to(device), (do * size).to(device)

    check(attend, Sized(**vars(case)), device=DEVICE, times=4)


# Values that are not finite -----------------------------------------------------------------------------------------------------


def test_hidden_keys_are_not_read():
    q, k, v, _ = inputs(queries=64, keys=256)
    k[:, :, 128:], v[:, :, 128:] = NAN, NAN
    o, lse = attend(q, k, v, causal=True)
    assert o.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
def test_a_value_that_is_not_finite_reaches_only_its_own_rows(value: float):
    """A query's value reaches its own row and the keys that it sees; scales ignore it, so other rows do not change.

    But not dk's other rows: there 0 times NaN is NaN, as in every matrix product.
    """
    q, k, v, do = inputs(heads=1, queries=70, keys=70)
    finite = outputs(q, k, v, do)
    q[:, :, 20, 3] = value
    results = outputs(q, k, v, do)
    others = torch.arange(70, device=DEVICE) != 20
    assert results["o"][:, :, 20].isnan().all()
    assert results["dq"][:, :, 20].isnan().all()
    for name in ("o", "dq"):
        torch.testing.assert_close(results[name][:, :, others], finite[name][:, :, others])
    assert results["dk"][:, :, :21].isnan().all()
    assert results["dv"][:, :, :21].isnan().all()
    torch.testing.assert_close(results["dv"][:, :, 21:], finite["dv"][:, :, 21:])


# Parts --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strided", ["BHSD", "fused", "padded", "offset"])
def test_parts(strided: str):
    """The sum of parts is the scaled tensor within the bound of the note, and padding is 0, for q, k, v and do of any size."""
    q, k, v, do = inputs(batch=2, heads=4, key_heads=2, strided=strided)
    q, do = (x * torch.logspace(-9, 3, 77, base=2.0, device=DEVICE).view(-1, 1) for x in (q, do * 1000))
    k, v = k * 2.0**-20, v * torch.tensor([1.0, 2.0**40], device=DEVICE).view(1, 2, 1, 1)
    tensors = (q, k, v, do, q)
    backward = Prologue(CallMeta.backward(do, q, k, v, q), (96, 64))(*tensors)
    assert backward.queries.shape == (2, 2, 8, 96, 32)
    assert backward.keys.shape == (2, 2, 4, 64, 32)
    forward = Prologue(CallMeta.forward(q, k, v), (96, 64))(q, k, v)
    assert torch.equal(forward.queries, backward.queries[:1])
    assert torch.equal(forward.keys, backward.keys)
    for x, parts, peak in zip(
        (q, k, v, do), (backward.queries[0], *backward.keys, backward.queries[1]), Peak, strict=False
    ):
        largest = x.abs().unflatten(1, (2, -1)).amax(dim=(2, 3, 4))
        assert torch.equal(backward.peaks[peak].view(torch.float32), largest.flatten())
        scale = 2.0 ** (14 - largest.log2().floor()).repeat_interleave(x.shape[1] // 2, dim=1)[..., None, None]
        exact = (x * scale).double().flatten(0, 1)
        rows = x.shape[2]
        error = (parts[:, :, :rows, :24].double().sum(dim=0) - exact).abs()
        assert (error <= (2.0**-23 * exact.abs()).clamp(min=2.0**-25)).all()
        assert not parts[:, :, rows:].any()
        assert not parts[..., 24:].any()
    assert not backward.peaks[Peak.DS].any()


# On a GPU, within torch ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_given_tiles():
    q, k, v, do = inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    tiles = Tiles(forward=SMALL, key_gradients=SMALL, query_gradients=SMALL)
    o = flash_attention(*leaves, is_causal=True, enable_gqa=True, tiles=tiles, fp32_precision="fp16x3")
    expected, _ = attend(*leaves, causal=True)
    torch.testing.assert_close(o, expected)
    torch.autograd.grad(o, leaves, do)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """Scales are computed on the device, so a replay uses those of its own inputs."""
    q, k, v, do = inputs(queries=256, keys=256, head_dim=64)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        outputs(q, k, v, do)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outputs(q, k, v, do)
    for x in (q, v, do):
        x.mul_(1000)
    graph.replay()
    expected = outputs(q, k, v, do)
    assert all(torch.equal(x, expected[name]) for name, x in captured.items())


@pytest.mark.gpu
def test_compiled_by_inductor():
    q, k, v, do = inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q * 2, k, v, is_causal=True, enable_gqa=True, fp32_precision="fp16x3")  # type: ignore[return-value]

    compiled_gradients = torch.autograd.grad(torch.compile(run, fullgraph=True)(*leaves), leaves, do)
    for a, b in zip(compiled_gradients, torch.autograd.grad(run(*leaves), leaves, do), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_memory_is_linear_in_length():
    """Parts live only during the pass; none is kept for backward."""
    q, k, v, _ = inputs(heads=1, queries=4096, keys=4096, head_dim=64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    before = torch.cuda.memory_allocated()
    o, lse = attend(*leaves, causal=True)
    assert torch.cuda.memory_allocated() - before <= 1.05 * 4 * (o.numel() + lse.numel())

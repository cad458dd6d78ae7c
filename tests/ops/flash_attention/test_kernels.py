"""The Triton kernels: on a GPU through the public function, and in Triton's interpreter directly from their launchers.

test_interpreter.py runs this file with TRITON_INTERPRET=1 in a process of its own; by itself, without a GPU, it skips.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from attention_cases import Case, attend_by_itself, check, random_case
from trainstep.ops import flash_attention
from trainstep.ops.flash_attention import Tiles, function

pytest.importorskip("triton")
from attention_kernels import DEVICE, INTERPRETED, RUNNABLE, SMALL, attend

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="needs a CUDA GPU, or TRITON_INTERPRET=1")


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the larger shapes below")
@pytest.mark.parametrize("seed", range(60))
def test_small_random_shapes(seed: int):
    check(attend, random_case(seed, longest=200, dtypes=[torch.float32, torch.float16], most_pairs=2e5))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_backward_function(monkeypatch: pytest.MonkeyPatch, heads: int, dtype: torch.dtype):
    """The public functions with all code between them and the kernels, for one head (B, S, D) and for shared key heads."""
    if INTERPRETED:
        monkeypatch.setattr(function, "_forward_below_autograd", function._forward_cuda)
        monkeypatch.setattr(function, "_backward_below_autograd", function._backward_cuda)
        monkeypatch.setattr(function, "_current", lambda _device: nullcontext())
    tiles = Tiles(forward=SMALL, key_gradients=SMALL, query_gradients=SMALL)
    case = Case(batch=2, heads=heads, queries=70, keys=90, head_dim=24, dtype=dtype, alignment="bottom_right")
    check(lambda *x, **mask: attend_by_itself(*x, **mask, fp32_precision="ieee", tiles=tiles), case, device=DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(320), ids=lambda seed: f"part{seed % 8}-{seed}")
def test_random_shapes(seed: int):
    """Split over processes by `-k part0-` to `part7-`: most of the time is compiling."""
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    check(attend, random_case(seed, longest=3000, dtypes=dtypes, most_pairs=3e7), device=DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_three_tf32_products(seed: int):
    case = random_case(5000 + seed, longest=2000, dtypes=[torch.float32], most_pairs=3e7)
    check(lambda *x, **mask: attend(*x, **mask, precision="tf32x3"), case, device=DEVICE, times=4)


@pytest.mark.gpu
def test_a_long_sequence():
    """A usual shape: every tile but the diagonal's is full, and heads share keys."""
    for head_dim in (64, 80, 128):
        case = Case(heads=4, key_heads=2, queries=4096, keys=4096, head_dim=head_dim, dtype=torch.bfloat16)
        check(attend, case, device=DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("queries", "keys", "head_dim", "causal", "strict"),
    [
        (1, 4097, 64, False, ["o"]),
        (128, 8000, 64, False, ["o", "dq", "dk", "dv"]),
        (12289, 12289, 128, True, ["o", "dq", "dk", "dv"]),
        (16384, 17, 128, False, ["o", "dq", "dk", "dv"]),
    ],
)
def test_long_sums_in_fp32(queries: int, keys: int, head_dim: int, causal: bool, strict: list[str]):
    case = Case(queries=queries, keys=keys, head_dim=head_dim, causal=causal)
    check(attend, case, device=DEVICE, strict=strict)


def inputs(**changes: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = {"heads": 2, "key_heads": 1, "queries": 77, "keys": 50, "head_dim": 24, "dtype": torch.float16}
    return Case(**(shape | changes)).tensors(DEVICE)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [True, False])
def test_rows_sum_to_one(causal: bool):
    q, k, v, _ = inputs()
    o, _ = attend(q, k, torch.ones_like(v), causal=causal)
    assert (o - 1).abs().max() <= torch.finfo(torch.float16).eps


def test_large_logits_stay_finite():
    q, k, v, do = inputs(dtype=torch.float32, magnitude=1e4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = attend(*leaves, causal=True)
    assert lse.abs().max() > 1e4
    for x in (o, lse, *torch.autograd.grad(o, leaves, do)):
        assert x.isfinite().all()


def test_queries_that_see_nothing():
    q, k, v, do = inputs(queries=77, keys=13)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = attend(*leaves, causal=True, causal_alignment="bottom_right")
    dq, dk, dv = torch.autograd.grad(o, leaves, do)
    assert not o[:, :, :64].any()
    assert not dq[:, :, :64].any()
    assert torch.equal(lse == float("-inf"), (torch.arange(77, device=DEVICE) < 64).expand_as(lse))
    assert dk.isfinite().all()
    assert dv.isfinite().all()


def test_hidden_keys_are_not_read():
    q, k, v, _ = inputs(queries=64, keys=256)
    k[:, :, 128:], v[:, :, 128:] = float("nan"), float("nan")
    o, lse = attend(q, k, v, causal=True)
    assert o.isfinite().all()
    assert lse.isfinite().all()


def test_every_bit_repeats():
    q, k, v, do = inputs(heads=4, queries=150, keys=150)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    runs = []
    for _ in range(2 if INTERPRETED else 20):
        o, lse = attend(*leaves, causal=True)
        runs.append((o, lse, *torch.autograd.grad(o, leaves, do)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.gpu
def test_kernels_agree_with_the_tiled_algorithm():
    """Kernel and readable algorithm on the same problem differ only by rounding."""
    q, k, v, _ = inputs(dtype=torch.float32, queries=300, keys=300, head_dim=64)
    on_gpu, _ = attend(q, k, v, causal=True)
    on_cpu = flash_attention(q.cpu(), k.cpu(), v.cpu(), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(on_gpu.cpu(), on_cpu)


@pytest.mark.gpu
def test_given_tiles():
    q, k, v, do = inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    tiles = Tiles(forward=SMALL, key_gradients=SMALL, query_gradients=SMALL)
    o = flash_attention(*leaves, is_causal=True, enable_gqa=True, tiles=tiles)
    expected, _ = attend(*leaves, causal=True)
    torch.testing.assert_close(o, expected, atol=2e-3, rtol=2e-3)
    torch.autograd.grad(o, leaves, do)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    q, k, v, do = (x.bfloat16() for x in inputs(queries=256, keys=256, head_dim=64))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> tuple[Tensor, ...]:
        o, _ = attend(*leaves, causal=True)
        return (o, *torch.autograd.grad(o, leaves, do))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = [x.clone() for x in step()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x in captured:
        x.detach().zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.gpu
def test_on_another_stream():
    q, k, v, _ = inputs(queries=512, keys=512)
    expected, _ = attend(q, k, v, causal=True)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        late = q + 0  # a kernel on the default stream would read this too early
        o, _ = attend(late, k, v, causal=True)
    side.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.multigpu
def test_on_another_device():
    q, k, v, do = (x.to("cuda:1") for x in inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.cuda.current_device() == 0
    o, _ = attend(*leaves, causal=True)
    for x in (o, *torch.autograd.grad(o, leaves, do)):
        assert x.device == torch.device("cuda:1")
        assert x.isfinite().all()


@pytest.mark.gpu
def test_compiled_by_inductor():
    q, k, v, do = inputs(dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q * 2, k, v, is_causal=True, enable_gqa=True)  # type: ignore[return-value]

    compiled = torch.compile(run, fullgraph=True)
    compiled_gradients = torch.autograd.grad(compiled(*leaves), leaves, do)
    for a, b in zip(compiled_gradients, torch.autograd.grad(run(*leaves), leaves, do), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_autocast_on_a_gpu():
    q, k, v, _ = inputs(dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        assert flash_attention(q, k, v, enable_gqa=True).dtype == torch.bfloat16  # type: ignore[union-attr]


@pytest.mark.gpu
def test_memory_is_linear_in_length():
    memory_bytes = []
    for queries in (2048, 4096):
        q, k, v, _ = inputs(dtype=torch.bfloat16, queries=queries, keys=queries, head_dim=64)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        before = torch.cuda.memory_allocated()
        o, _ = attend(*leaves, causal=True)
        memory_bytes.append(torch.cuda.memory_allocated() - before)
        del o
    assert memory_bytes[1] <= 2.1 * memory_bytes[0]

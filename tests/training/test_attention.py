"""Every attention computes the outputs and gradients of plain attention."""

import sys
import types
import warnings

import pytest
import torch
from torch import Tensor

from numerics import assert_as_accurate_as
from trainstep.config.model import ModelConfig
from trainstep.config.run import ATTENTIONS, RunConfig
from trainstep.training.attention import attention_named
from trainstep.training.build import build_step

ON_CPU = ["sdpa", "sdpa_flash", "sdpa_math", "trainstep"]


def outputs_and_gradients(
    name: str, device: str, dtype: torch.dtype, shape: tuple[int, ...], *, backward: bool = True
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=generator).bfloat16().to(device, dtype) for _ in range(4)]
    q, k, v = (tensor.requires_grad_(backward) for tensor in inputs[:3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex warns that it is not compiled
        output = attention_named(name, shape[2], torch.device(device))(q, k, v)
    if not backward:
        return {"output": output}
    return {"output": output, **dict(zip("qkv", torch.autograd.grad(output, (q, k, v), inputs[3]), strict=True))}


def check(
    name: str, device: str, dtype: torch.dtype, shape: tuple[int, ...], *, backward: bool = True, times: int = 2
) -> None:
    results = outputs_and_gradients(name, device, dtype, shape, backward=backward)
    expected = outputs_and_gradients("plain", device, dtype, shape, backward=backward)
    truth = outputs_and_gradients("plain", device, torch.float64, shape, backward=backward)
    for key, result in results.items():
        assert_as_accurate_as(result, expected[key], truth[key], f"{name} {key}", times=times)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("positions", [1, 17, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_agrees_with_plain(name: str, positions: int, dtype: torch.dtype):
    check(name, "cpu", dtype, (2, 3, positions, 8))


@pytest.mark.parametrize("positions", [1, 17, 130])
def test_flex_forward_agrees_with_plain(positions: int):
    check("flex", "cpu", torch.float32, (2, 3, positions, 16), backward=False)


def test_a_named_backend_is_the_one_that_runs():
    q = torch.randn(1, 1, 4, 8)
    for name, op in (("sdpa_math", "softmax"), ("sdpa_flash", "flash_attention_for_cpu")):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            attention_named(name, 4, torch.device("cpu"))(q, q, q)
        names = {event.name for event in profiler.events()}
        assert any(op in event for event in names), name
        assert any("flash_attention_for_cpu" in event for event in names) == (name == "sdpa_flash")


def stand_in(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """flash_attn.cute's function: (B, S, H, D), 16 bits; the output and the log-sum-exp."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise AssertionError(f"inputs must be 16-bit, not {q.dtype}")
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    output = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal)
    return output.transpose(1, 2), q.new_zeros(q.shape[0], q.shape[2], q.shape[1])


@pytest.fixture
def flash_attn_4(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["flash_attn.cute"].flash_attn_func = stand_in  # type: ignore[attr-defined]


@pytest.mark.usefixtures("flash_attn_4")
@pytest.mark.parametrize("positions", [1, 17, 64])
def test_a_packages_attention_agrees_with_plain(positions: int):
    check("flash_attn_4", "cpu", torch.bfloat16, (2, 3, positions, 8))


@pytest.mark.usefixtures("flash_attn_4")
def test_a_packages_attention_is_given_autocasts_dtype_and_is_not_compiled():
    q = torch.randn(1, 2, 5, 8)
    attend = attention_named("flash_attn_4", 5, torch.device("cpu"))

    def step(q: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attend(q + 1, q, q) * 2

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager")
    assert torch.equal(compiled(q), step(q))
    assert compiled(q).dtype == torch.bfloat16
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(q)
    with pytest.raises(AssertionError, match="16-bit"):
        attend(q, q, q)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)  # an import of it fails
    with pytest.raises(ImportError, match="flash_attn_4 is not installed; pip install flash-attn-4"):
        attention_named("flash_attn_4", 4, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "plain"])
@pytest.mark.parametrize("positions", [128, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_it_agrees_with_plain(name: str, positions: int, dtype: torch.dtype):
    if name == "flash_attn_4":
        pytest.importorskip("flash_attn.cute")
    if dtype == torch.float32 and name in ("sdpa_flash", "sdpa_cudnn", "flash_attn_4"):
        pytest.skip("takes 16-bit inputs; the config refuses it")
    torch.set_float32_matmul_precision("highest")
    try:
        check(name, "cuda", dtype, (2, 4, positions, 64), times=4 if dtype == torch.float32 else 2)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        pytest.skip(f"{name} has no kernel for this GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("compile_", ["none", "block"])
def test_a_packages_attention_is_captured(compile_: str):
    pytest.importorskip("flash_attn.cute")
    model = ModelConfig(d_model=256, d_ff=704, layers=3, heads=4, vocab_size=1024)
    fields = {
        "model": model,
        "context": 256,
        "precision": "bf16",
        "device": "cuda",
        "compile": compile_,
        "adamw": "trainstep",
    }
    losses = []
    for attention, capture in (("trainstep", "none"), ("flash_attn_4", "step")):
        assembly = build_step(RunConfig(**fields, attention=attention, capture=capture))
        losses.append([float(assembly.take(assembly.micro_batches(step))) for step in range(8)])
    assert assembly.captured is not None
    assert assembly.captured.left_out is None
    assert losses[1] == pytest.approx(losses[0], rel=2**-7)

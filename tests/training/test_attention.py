"""Every attention computes the outputs and gradients of plain attention."""

import warnings

import pytest
import torch
from torch import Tensor

from numerics import assert_as_accurate_as
from trainstep.config.run import ATTENTIONS
from trainstep.training.attention import attention_named

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


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "plain"])
@pytest.mark.parametrize("positions", [128, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_it_agrees_with_plain(name: str, positions: int, dtype: torch.dtype):
    if dtype == torch.float32 and name in ("sdpa_flash", "sdpa_cudnn"):
        pytest.skip("takes 16-bit inputs; the config refuses it")
    torch.set_float32_matmul_precision("highest")
    try:
        check(name, "cuda", dtype, (2, 4, positions, 64), times=4 if dtype == torch.float32 else 2)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        pytest.skip(f"{name} has no kernel for this GPU")

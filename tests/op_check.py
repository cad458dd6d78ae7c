"""Compares an op and its gradients with its reference by the 2x rule, on a CPU, on a GPU and in Triton's interpreter."""

import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from numerics import assert_as_accurate_as

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Op = Callable[..., Any]


def interpret(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """In the interpreter, let the kernels of these ops take tensors on a CPU."""
    if INTERPRETED:
        for module in modules:
            monkeypatch.setattr(module, "has_kernel", lambda *tensors: all(x.dtype != torch.float64 for x in tensors))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def check(op: Op, reference: Op, inputs: Sequence[Tensor], *, times: int = 2) -> None:
    """Compare outputs, and the gradients of all inputs under random gradients of the outputs.

    `op` and `reference` take the inputs. The reference runs in the inputs' dtypes and, with the same values, in float64.
    """
    results = with_gradients(op, inputs)
    same_dtype = with_gradients(reference, inputs)
    exact = with_gradients(reference, [x.double() for x in inputs])
    assert len(results) == len(same_dtype) == len(exact)
    for index, (result, same, truth) in enumerate(zip(results, same_dtype, exact, strict=True)):
        assert_as_accurate_as(result, same, truth, f"tensor {index} of outputs and gradients", times=times)


def with_gradients(op: Op, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = op(*leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    seeds = [normal(*x.shape, seed=100 + index).to(x.device, x.dtype) for index, x in enumerate(outputs)]
    # Gradients that a 16-bit output can hold, for the run in float64 too.
    seeds = [seed.bfloat16().to(seed.dtype) for seed in seeds]
    gradients = torch.autograd.grad(outputs, leaves, seeds)
    return [*(x.detach() for x in outputs), *gradients]

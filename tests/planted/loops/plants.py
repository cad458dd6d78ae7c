"""The slowdowns that the loops of this folder can have planted in them, each a mistake that people make, with what it needs.

    plants = planted(["eager_attention", "slow_loader"])      # a frozenset; ValueError for an unknown name
    activation(plants), optimizer(parameters, plants, device), Samples(plants, device)

A loop asks `name in plants` where the mistake is made. Without any it is the clean loop, which waits for nothing.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn


class Plant(NamedTuple):
    """`causes`: the causes of trainstep explain that name it. `gpu`, `ranks`: what it needs to cost anything."""

    what: str
    causes: tuple[str, ...]
    gpu: bool = False
    ranks: int = 1


PLANTS = {
    "item": Plant("the loss is read by the host in each step", ("synchronisations",), gpu=True),
    "slow_loader": Plant("each batch takes 15 ms to make, in the training process", ("data",)),
    "fp32": Plant("matmuls in fp32, where bf16 would do", ("precision",), gpu=True),
    "eager_attention": Plant("attention with its scores in memory", ("attention_kernel",)),
    "adamw_loop": Plant("AdamW by a loop over parameters (foreach=False)", ("optimizer",)),
    "small_kernels": Plant("the activation in 25 slices, a kernel for each", ("small_kernels", "host_launches")),
    "unpinned": Plant("batches in pageable memory, copied while the host waits", ("host_copies",), gpu=True),
    "recompile": Plant("torch.compile with an argument that changes every fifth step", ("recompiles",)),
    "tiny_buckets": Plant("DDP with buckets of 2 kB", ("exposed_messages",), ranks=2),
    "accumulation_sync": Plant("gradients are sent after each of four micro-batches", ("accumulation_sync",), ranks=2),
    "fragmenting": Plant("a buffer for which there is no room, asked for in each step", ("allocator",), gpu=True),
    "second_process": Plant("another process computes on the same device", ("another_process",)),
    "odd_vocabulary": Plant(
        "a vocabulary that is no multiple of 8 (32,767 words on a GPU)", ("matmul_shapes",), gpu=True
    ),
}
"""Name -> what it is. results/cpu/planted.py runs them all."""
MICRO_BATCHES = 4
_LATE_S = 0.015
_SLICES = 25
_EVERY = 5
TINY_BUCKET_MB = 0.002
BURN = Path(__file__).with_name("burn.py")


def planted(names: Iterable[str]) -> frozenset[str]:
    """The names as a set. ValueError for one that is no plant."""
    names = frozenset(name for name in names if name)
    if unknown := names - PLANTS.keys():
        raise ValueError(f"plant: there is no {', '.join(sorted(unknown))}; there are {', '.join(PLANTS)}")
    return names


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random token sequences; on a GPU each with features of the size of a small video, which make copies matter."""

    def __init__(self, plants: frozenset[str], *, context: int, vocabulary: int, features: int, batch: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(vocabulary, (64, context), generator=generator)
        self._features = torch.randn(64, context, features, generator=generator) if features else None
        self._late_s = _LATE_S / batch if "slow_loader" in plants else 0.0

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self._late_s)
        tokens = self._tokens[index % 64]
        sample = {"input_ids": tokens, "labels": tokens}
        return sample if self._features is None else {**sample, "features": self._features[index % 64]}


class Sliced(nn.Module):
    """GELU in 25 slices of the features, which a careful author computes at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([nn.functional.gelu(part, approximate="tanh") for part in x.tensor_split(_SLICES, -1)], -1)


class Recompiled(nn.Module):
    """GELU under torch.compile with a word that changes every fifth step, which compiles it again."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
        self._compiled = torch.compile(_activate, backend="inductor" if device == "cuda" else "eager")
        self._calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        return self._compiled(x, str(self._calls // _EVERY))


def _activate(x: torch.Tensor, word: str) -> torch.Tensor:
    return nn.functional.gelu(x, approximate="tanh") if word else x


def activation(plants: frozenset[str], layer: int, device: str) -> nn.Module:
    """The activation of a layer's MLP."""
    if "small_kernels" in plants:
        return Sliced()
    return Recompiled(device) if "recompile" in plants and layer == 0 else nn.GELU(approximate="tanh")


def optimizer(
    parameters: Iterable[nn.Parameter], plants: frozenset[str], *, plain: bool = False
) -> torch.optim.Optimizer:
    """AdamW, fused unless planted otherwise; `plain`: as torch chooses."""
    how: dict[str, Any] = {"foreach": False, "fused": False} if "adamw_loop" in plants else {"fused": True}
    how = {} if plain else how
    return torch.optim.AdamW(parameters, lr=3e-4, **how)


class TooLarge:
    """Asks for more than the GPU has. Before it refuses, the allocator gives back all that it has cached, so that the next step
    asks the driver for everything again. The loop goes on without it, as loops do that try a larger batch first.

    (A buffer that fits would stay in the cache, and others would be cut out of it.)
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def ask(self) -> None:
        total_bytes = torch.cuda.get_device_properties(self._device).total_memory
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(total_bytes, dtype=torch.uint8, device=self._device)


def start_other_process(device: str) -> None:
    """Start a process that keeps the device busy until this one ends. It is no child of this one."""
    import os

    subprocess.run([sys.executable, str(BURN), str(os.getpid()), device], check=True, timeout=60)

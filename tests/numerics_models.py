"""Users' models for tests of numerics: unseeded, with dropout, without modules, with named logits."""

import secrets
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, Any]


class Line(nn.Module):
    """A linear layer and further modules behind it."""

    def __init__(self, *behind: nn.Module, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.behind = nn.Sequential(*behind)
        if generator is not None:
            nn.init.normal_(self.layer.weight, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.behind(self.layer(x))
        return output.square().mean()


class Bare(nn.Module):
    """A model whose parameter belongs to no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).square().mean()


class Naming(Line):
    """A model that returns an object with .loss and .logits, as those of transformers do."""

    def forward(self, x: Tensor) -> Any:
        logits = self.layer(x)
        return SimpleNamespace(loss=logits.square().mean(), logits=logits)


def unseeded(run: Any, device: torch.device) -> Built:
    generator = torch.Generator().manual_seed(secrets.randbits(60))
    return Line(generator=generator), lambda step: {"x": torch.randn(4, 8, generator=generator)}


def dropping(run: Any, device: torch.device) -> Built:
    return Line(nn.Dropout(0.5)), lambda step: {"x": torch.ones(4, 8)}


def bare(run: Any, device: torch.device) -> Built:
    return Bare(), lambda step: {"x": torch.ones(4, 8)}


def naming(run: Any, device: torch.device) -> Built:
    return Naming(), lambda step: {"x": torch.ones(4, 8)}


def endless(run: Any, device: torch.device) -> Built:
    class Endless(Line):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 0

    return Endless(), lambda step: {"x": torch.ones(4, 8)}


def frozen(run: Any, device: torch.device) -> Built:
    return Line().requires_grad_(False), lambda step: {"x": torch.ones(4, 8)}

"""A user's model whose blocks have LayerNorm, attention, GELU and dropout, for tests of recomputation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

WIDTH, HEADS, TOKENS = 16, 2, 12


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        o = scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + nn.functional.dropout(self.out(o.transpose(1, 2).flatten(-2)), self.dropout)
        return x + scale * self.down(nn.functional.dropout(gelu(self.up(self.mlp_norm(x))), self.dropout))


class Model(nn.Module):
    """`between` runs on the residual stream between two blocks."""

    def __init__(self, layers: int, dropout: float, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(block(x, scale=self.scale))
        return x.square().mean()


def model(layers: int = 4, dropout: float = 0.0, between: Callable[[Tensor], Tensor] = lambda x: x) -> Model:
    torch.manual_seed(0)
    return Model(layers, dropout, between)


def batch(number: int = 0) -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(number))


def build(_run: Any, device: torch.device) -> tuple[nn.Module, Callable[[int], dict[str, Tensor]]]:
    return model(), lambda step: {"x": batch(step).to(device)}


def build_with_dropout(_run: Any, device: torch.device) -> tuple[nn.Module, Callable[[int], dict[str, Tensor]]]:
    return model(dropout=0.25), lambda step: {"x": batch(step).to(device)}

"""A GPT in nanoGPT's manner, of the sizes that the loops train: `GPT(Sizes.of("cpu"), plants, "cpu")`."""

import dataclasses

import torch
from plants import activation
from torch import nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model's and batch's sizes. `features`: floats of each position that come with the tokens; 0: none."""

    layers: int = 6
    width: int = 128
    heads: int = 8
    context: int = 192
    batch: int = 2
    vocabulary: int = 512
    features: int = 0

    @classmethod
    def of(cls, device: str, plants: frozenset[str] = frozenset(), *, plain: bool = False) -> "Sizes":
        """Some tens of milliseconds a step on either, with a word less if the plants have it. `plain`: without features."""
        sizes = cls()
        if device == "cuda":
            features = 0 if plain else 1024
            sizes = cls(layers=12, width=1024, heads=16, context=1024, batch=16, vocabulary=32_768, features=features)
        return dataclasses.replace(sizes, vocabulary=sizes.vocabulary - 1) if "odd_vocabulary" in plants else sizes


class Block(nn.Module):
    def __init__(self, sizes: Sizes, plants: frozenset[str], layer: int, device: str) -> None:
        super().__init__()
        self.heads, self.eager = sizes.heads, "eager_attention" in plants
        self.before_attention, self.before_mlp = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.query_key_value = nn.Linear(sizes.width, 3 * sizes.width)
        self.projection = nn.Linear(sizes.width, sizes.width)
        self.up, self.down = nn.Linear(sizes.width, 4 * sizes.width), nn.Linear(4 * sizes.width, sizes.width)
        self.activation = activation(plants, layer, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.down(self.activation(self.up(self.before_mlp(x))))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        shape = batch, context, self.heads, width // self.heads
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.query_key_value(x).chunk(3, -1))
        if self.eager:
            scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
            hidden = torch.ones(context, context, dtype=torch.bool, device=x.device).triu(1)
            y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value
        else:
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(y.transpose(1, 2).reshape(batch, context, width))


class GPT(nn.Module):
    """Returns the loss."""

    def __init__(self, sizes: Sizes, plants: frozenset[str], device: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.features = nn.Linear(sizes.features, sizes.width) if sizes.features else None
        self.blocks = nn.ModuleList(Block(sizes, plants, layer, device) for layer in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, features: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        if self.features is not None and features is not None:
            x = x + self.features(features)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

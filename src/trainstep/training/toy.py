"""A toy model, on which autocast is often explained: two linear layers with a LayerNorm between them.

It is also an example of a user's own model: name it as `trainstep.training.toy:build`.

B batch, S positions, C channels in, K classes out.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainstep.config.run import RunConfig
from trainstep.training.batches import NextBatch
from trainstep.training.precision import precision_named

_CHANNELS, _WIDTH, _CLASSES = 20, 10, 5


class Toy(nn.Module):
    """fc1, relu, LayerNorm, fc2, without biases; `forward(x_BSC, targets_BS)` returns the mean cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(_CHANNELS, _WIDTH, bias=False)
        self.relu = nn.ReLU()
        self.norm = nn.LayerNorm(_WIDTH, bias=False)
        self.fc2 = nn.Linear(_WIDTH, _CLASSES, bias=False)

    def forward(self, x_BSC: Tensor, targets_BS: Tensor) -> Tensor:
        logits_BSK = self.fc2(self.norm(self.relu(self.fc1(x_BSC))))
        return cross_entropy(logits_BSK.flatten(0, 1), targets_BS.flatten())


def build(run: RunConfig, device: torch.device) -> tuple[nn.Module, NextBatch]:
    """The toy, and batches of normal vectors in the dtype of its weights, made from seed and step."""
    with device:
        toy = Toy()
    dtype = precision_named(run.precision).weights

    def next_batch(step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(run.seed * 1_000_003 + step)
        x_BSC = torch.randn(run.batch_size, run.context, _CHANNELS, generator=generator)
        targets_BS = torch.randint(_CLASSES, (run.batch_size, run.context), generator=generator)
        return {"x_BSC": x_BSC.to(device, dtype), "targets_BS": targets_BS.to(device)}

    return toy, next_batch

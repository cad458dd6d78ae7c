"""The loss of next-token prediction."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from trainstep.spans import span


def next_token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean of -log softmax(logits)[target] over all positions, in fp32 (fp64 for fp64 logits)."""
    with span("loss"):
        wide = torch.promote_types(logits_BSV.dtype, torch.float32)
        return cross_entropy(logits_BSV.to(wide).flatten(0, 1), targets_BS.flatten())

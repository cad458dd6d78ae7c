"""The loss of next-token prediction."""

from torch import Tensor
from torch.nn.functional import cross_entropy

from trainstep.spans import span


def next_token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean of -log softmax(logits)[target] over all positions, in fp32."""
    with span("loss"):
        return cross_entropy(logits_BSV.float().flatten(0, 1), targets_BS.flatten())

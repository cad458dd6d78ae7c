"""The next-token loss follows its formula, in fp32 for logits of any dtype."""

import math

import pytest
import torch

from trainstep.training.transformer import next_token_loss


def test_uniform_logits_give_the_log_of_the_vocabulary():
    loss = next_token_loss(torch.zeros(2, 3, 50), torch.zeros(2, 3, dtype=torch.long))
    assert loss.item() == pytest.approx(math.log(50))


def test_the_loss_is_the_mean_negative_log_likelihood():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([[0, 6, 2], [3, 3, 5]])
    by_hand = [
        -(logits[b, s].exp()[targets[b, s]] / logits[b, s].exp().sum()).log() for b in range(2) for s in range(3)
    ]
    torch.testing.assert_close(next_token_loss(logits, targets), sum(by_hand) / 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_loss_is_computed_in_fp32(dtype: torch.dtype):
    logits = torch.randn(1, 4, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.arange(4)[None]
    loss = next_token_loss(logits, targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, next_token_loss(logits.float(), targets))

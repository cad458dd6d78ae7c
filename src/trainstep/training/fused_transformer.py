"""The built-in model made of the fused ops of ops/: the same mathematics, weights under a seed, and module names.

The residual stream goes through the model as two tensors, the sum so far and what the last layer adds to it, because the addition
is part of the next norm. Norms round their result for the matmul that follows, as autocast would, and the head's logits never exist
whole.
"""

import torch
from torch import Tensor, nn

from trainstep.config.model import ModelConfig
from trainstep.ops.linear_cross_entropy import LinearCrossEntropy
from trainstep.ops.operators import autocast_dtype
from trainstep.ops.rms_norm import RMSNorm
from trainstep.ops.rotary import rotary_split
from trainstep.ops.swiglu import SwiGLU
from trainstep.spans import span
from trainstep.training.attention import Attention
from trainstep.training.transformer import INIT_STD, SelfAttention, register_rotary_tables


class FusedSelfAttention(SelfAttention):
    """SelfAttention whose rotation also splits the joint projection."""

    def forward(self, x_BSC: Tensor, cos_SD2: Tensor, sin_SD2: Tensor) -> Tensor:
        with span("attention projections"):
            qkv_BSN = self.qkv(x_BSC)
        o_BHSD = self.attention(*rotary_split(qkv_BSN, cos_SD2, sin_SD2, heads=self.heads))
        with span("attention projections"):
            output: Tensor = self.out(o_BHSD.transpose(1, 2).flatten(-2))
            return output


class FusedBlock(nn.Module):
    """Adds what the layer before gave, `added`, to the residual stream; returns the stream and what its own MLP adds to it."""

    def __init__(self, config: ModelConfig, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = FusedSelfAttention(config, attention)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = SwiGLU(config.d_model, config.d_ff)

    def forward(
        self, stream_BSC: Tensor, added_BSC: Tensor | None, cos_SD2: Tensor, sin_SD2: Tensor
    ) -> tuple[Tensor, Tensor]:
        x_BSC, stream_BSC = _add_and_normalise(self.attention_norm, stream_BSC, added_BSC)
        added_BSC = self.attention(x_BSC, cos_SD2, sin_SD2)
        x_BSC, stream_BSC = _add_and_normalise(self.mlp_norm, stream_BSC, added_BSC)
        return stream_BSC, self.mlp(x_BSC)


class FusedTransformer(nn.Module):
    """Transformer of transformer.py with fused ops; loads its state_dict. `forward(tokens, targets)` returns the mean loss.

    `loss_sum_dtype`: that of linear_cross_entropy.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        attention: Attention,
        context: int,
        loss_sum_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(FusedBlock(config, attention) for _ in range(config.layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = LinearCrossEntropy(config.d_model, config.vocab_size, sum_dtype=loss_sum_dtype)
        register_rotary_tables(self, config, context)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Gate and up are drawn one after the other, as the two matrices that they are in transformer.py.
                for part in parameter.chunk(2) if name.endswith("gate_up.weight") else (parameter,):
                    nn.init.normal_(part, std=INIT_STD)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with span("embedding"):
            stream_BSC, added_BSC = self.embedding(tokens), None
        cos_SD2, sin_SD2 = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for index, block in enumerate(self.blocks):
            with span(f"layer {index}"):
                stream_BSC, added_BSC = block(stream_BSC, added_BSC, cos_SD2, sin_SD2)
        x_BSC, _ = _add_and_normalise(self.norm, stream_BSC, added_BSC)
        loss: Tensor = self.head(x_BSC, targets)
        return loss


def _add_and_normalise(norm: nn.Module, stream_BSC: Tensor, added_BSC: Tensor | None) -> tuple[Tensor, Tensor]:
    """The normalised sum, in the dtype of the next matmul, and the sum."""
    dtype: torch.dtype | None = autocast_dtype(stream_BSC)
    if added_BSC is None:
        return norm(stream_BSC, dtype=dtype), stream_BSC
    x_BSC, stream_BSC = norm(added_BSC, stream_BSC, dtype=dtype)
    return x_BSC, stream_BSC

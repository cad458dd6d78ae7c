"""The built-in model: a pre-norm decoder with RMSNorm, RoPE, causal multi-head attention, SwiGLU and an untied head.

Shapes: B batch, S positions, C d_model, H heads, D head width, V vocabulary. No layer has a bias.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainstep.config.model import ModelConfig
from trainstep.ops import reference
from trainstep.spans import span
from trainstep.training.attention import Attention

INIT_STD = 0.02


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BSC: Tensor) -> Tensor:
        with span("norm"):
            return reference.rms_norm(x_BSC, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Causal multi-head attention with one projection to q, k and v, and one projection back."""

    def __init__(self, config: ModelConfig, attention: Attention) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention = attention
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x_BSC: Tensor, cos_SD2: Tensor, sin_SD2: Tensor) -> Tensor:
        with span("attention projections"):
            q_BHSD, k_BHSD, v_BHSD = self.qkv(x_BSC).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        with span("rotary"):
            q_BHSD = reference.rotary(q_BHSD, cos_SD2, sin_SD2)
            k_BHSD = reference.rotary(k_BHSD, cos_SD2, sin_SD2)
        o_BHSD = self.attention(q_BHSD, k_BHSD, v_BHSD)
        with span("attention projections"):
            output: Tensor = self.out(o_BHSD.transpose(1, 2).flatten(-2))
            return output


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x_BSC: Tensor) -> Tensor:
        with span("mlp"):
            output: Tensor = self.down(reference.swiglu(self.gate(x_BSC), self.up(x_BSC)))
            return output


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = SelfAttention(config, attention)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = SwiGLU(config.d_model, config.d_ff)

    def forward(self, x_BSC: Tensor, cos_SD2: Tensor, sin_SD2: Tensor) -> Tensor:
        x_BSC = x_BSC + self.attention(self.attention_norm(x_BSC), cos_SD2, sin_SD2)
        output: Tensor = x_BSC + self.mlp(self.mlp_norm(x_BSC))
        return output


class Transformer(nn.Module):
    """The model: `forward(tokens, targets)`, both (B, S) int64, returns the mean next-token loss, a scalar in fp32.

    Construct it under `with torch.device(...)`, where its weights are made: normal with standard deviation 0.02.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, *, attention: Attention, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        register_rotary_tables(self, config, context)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=INIT_STD)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with span("embedding"):
            x_BSC = self.embedding(tokens)
        cos_SD2, sin_SD2 = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for index, block in enumerate(self.blocks):
            with span(f"layer {index}"):
                x_BSC = block(x_BSC, cos_SD2, sin_SD2)
        x_BSC = self.norm(x_BSC)
        with span("head"):
            logits_BSV = self.head(x_BSC)
        return next_token_loss(logits_BSV, targets)


def register_rotary_tables(model: nn.Module, config: ModelConfig, context: int) -> None:
    """Give a model the buffers `cos` and `sin`, (S, D / 2) in fp32, on the device of its parameters."""
    device = next(model.parameters()).device
    cos, sin = reference.rotary_tables(context, config.head_dim, config.rope_theta, device)
    model.register_buffer("cos", cos, persistent=False)
    model.register_buffer("sin", sin, persistent=False)


def next_token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """The mean of -log softmax(logits)[target] over all positions, in fp32 (fp64 for fp64 logits)."""
    with span("loss"):
        wide = torch.promote_types(logits_BSV.dtype, torch.float32)
        return cross_entropy(logits_BSV.to(wide).flatten(0, 1), targets_BS.flatten())

"""Models of a user's own, for tests of traces: one like nanoGPT, Hugging Face's Llama, and some that cannot be traced.

Each function is a `build(run, device)` of `--model traced_models:NAME`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

VOCABULARY = 96
Built = tuple[nn.Module, Callable[[int], dict[str, Tensor]]]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        output: Tensor = self.out(y.transpose(1, 2).contiguous().flatten(-2))
        return output


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.norm_2, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.narrow(gelu(self.wide(self.norm_2(x)))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Learned positions, LayerNorm with biases, GELU, and a head tied to the embedding."""

    def __init__(self, context: int, *, width: int = 32, layers: int = 3, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(run: Any, device: torch.device) -> Built:
    return Gpt(run.context).to(device), _batches(run, device, "tokens", "targets")


def dropping(run: Any, device: torch.device) -> Built:
    return Gpt(run.context, dropout=0.1).to(device), _batches(run, device, "tokens", "targets")


def partly_frozen(run: Any, device: torch.device) -> Built:
    """Only the attention is trained."""
    model = Gpt(run.context)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attention" in name)
    return model.to(device), _batches(run, device, "tokens", "targets")


def llama(run: Any, device: torch.device) -> Built:
    """Hugging Face's Llama with shared key heads; a config built here, nothing is downloaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device), _batches(run, device, "input_ids", "labels")


class Looking(nn.Module):
    """Goes on as the value of its loss says."""

    def __init__(self, inner: nn.Module, look: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.look = inner, look

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.inner(**batch)
        return loss * 2 if self.look(loss) else loss


def branching(run: Any, device: torch.device) -> Built:
    module, next_batch = gpt(run, device)
    return Looking(module, lambda loss: loss > 3), next_batch


def reading(run: Any, device: torch.device) -> Built:
    module, next_batch = gpt(run, device)
    return Looking(module, lambda loss: loss.detach().numpy() > 3), next_batch


def misfed(run: Any, device: torch.device) -> Built:
    print("words that are no part of an answer")
    return Gpt(run.context).to(device), lambda _step: {"words": torch.ones(1)}


def lossless(run: Any, device: torch.device) -> Built:
    return nn.Linear(3, 2).to(device), lambda _step: {"input": torch.ones(4, 3)}


def ending(run: Any, device: torch.device) -> Built:
    raise SystemExit(3)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.factor = 2.0
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy * ctx.factor


class WithFunction(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Tensor) -> Tensor:
        return Doubled.apply(self.inner(**batch))  # type: ignore[no-untyped-call, no-any-return]


def with_function(run: Any, device: torch.device) -> Built:
    module, next_batch = gpt(run, device)
    return WithFunction(module), next_batch


def _batches(run: Any, device: torch.device, tokens: str, targets: str) -> Callable[[int], dict[str, Tensor]]:
    def next_batch(step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(run.seed + step)
        drawn = torch.randint(VOCABULARY, (run.batch_size, run.context + 1), generator=generator).to(device)
        return {tokens: drawn[:, :-1].contiguous(), targets: drawn[:, 1:].contiguous()}

    return next_batch

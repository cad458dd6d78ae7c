"""What a cell of the workload `attention` works on: its tensors, and what the pass costs by formula."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from trainstep.config.attention import AttentionConfig
from trainstep.costs.attention import AttentionSizes, attention_backward_flops, attention_bytes, attention_flops
from trainstep.records.facts import Fact, facts_of
from trainstep.training.precision import DTYPES

_WRITTEN_OUT = ("plain", "plain_compiled", "sdpa_math")
_PARTS = ("inputs", "scores", "softmax", "lse", "output", "gradients")


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Inputs and the output's gradient, laid out as the config says; q, k, v are leaves."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def random_tensors(config: AttentionConfig, device: torch.device) -> Tensors:
    """Random normal numbers: constant operands switch fewer transistors and flatter the clock."""
    generator = torch.Generator(device).manual_seed(config.seed)

    def normal(heads: int, positions: int) -> Tensor:
        shape = {
            "BHSD": (config.batch, heads, positions, config.head_dim),
            "BSHD": (config.batch, positions, heads, config.head_dim),
            "BSD": (config.batch, positions, config.head_dim),
        }[config.layout]
        return torch.randn(shape, dtype=DTYPES[config.dtype], device=device, generator=generator)

    q, do = (normal(config.heads, config.seq) for _ in range(2))
    k, v = (normal(config.group_heads, config.key_count).requires_grad_() for _ in range(2))
    return Tensors(q=q.requires_grad_(), k=k, v=v, do=do)


def counted_facts(config: AttentionConfig) -> dict[str, Fact]:
    """FLOPs and bytes by formula."""
    shape = AttentionSizes(
        batch=config.batch,
        heads=config.heads,
        key_heads=config.group_heads,
        queries=config.seq,
        keys=config.key_count,
        head_dim=config.head_dim,
    )
    counted = attention_bytes(
        shape,
        element_bytes=DTYPES[config.dtype].itemsize,
        written_out=config.implementation in _WRITTEN_OUT,
        backward=config.direction != "forward",
    )
    sizes = (config.batch * config.heads, config.seq, config.key_count, config.head_dim)
    forward = attention_flops(*sizes, causal=config.causal, bottom_right=config.bottom_right)
    backward = attention_backward_flops(*sizes, causal=config.causal, bottom_right=config.bottom_right)
    flops = {"forward": forward, "backward": backward, "both": forward + backward}[config.direction]
    parts = {f"{name}_bytes": count for name, count in asdict(counted).items()}
    return facts_of(flops=flops, **parts, needed_bytes=counted.needed)


def accounting_words(facts: dict[str, Fact]) -> str:
    """`the pass needs at least 1,234 bytes: inputs 34, scores 1,200`, for a failure's message."""
    counted = ((part, facts[f"{part}_bytes"].value) for part in _PARTS)
    parts = ", ".join(f"{part} {count:,}" for part, count in counted if count)
    return f"the pass needs at least {facts['needed_bytes'].value:,} bytes: {parts}"

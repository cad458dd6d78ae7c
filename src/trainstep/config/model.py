"""What model to run: the built-in Transformer's shape, or a function of the user's that builds one."""

import math
from dataclasses import dataclass

from trainstep.config.fields import check_integer, check_positive, described

_HEADS_SOUGHT = 10_000
"""How far off a number of heads is still worth suggesting."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the built-in decoder: pre-norm, RMSNorm, RoPE, causal multi-head attention, SwiGLU, untied head.

    Raises ValueError naming the field and the way out.
    """

    name: str = described("name of the size", "custom")
    d_model: int = described("width of the residual stream")
    d_ff: int = described("width inside the SwiGLU MLP")
    layers: int = described("number of blocks")
    heads: int = described("attention heads; must divide d_model into even widths")
    vocab_size: int = described("tokens in the vocabulary", 10_000)
    rope_theta: float = described("base of the rotary frequencies", 10_000.0)
    norm_eps: float = described("epsilon inside RMSNorm", 1e-5)

    def __post_init__(self) -> None:
        check_positive(self, "d_model", "d_ff", "layers", "heads")
        check_integer(self, "vocab_size", at_least=2)
        if self.d_model % 2:
            raise ValueError(f"d_model: RoPE turns pairs in each head, so it must be even, not {self.d_model}")
        if self.d_model % self.heads:
            raise ValueError(
                f"heads: {self.heads} does not divide d_model {self.d_model}; {self._nearest_heads()} would"
            )
        if self.head_dim % 2:
            raise ValueError(f"heads: d_model / heads is {self.head_dim}, and RoPE turns pairs: it must be even")
        for name in ("rope_theta", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must be positive, not {getattr(self, name)!r}")

    def _nearest_heads(self) -> int:
        """The closest number of heads of even width, sought outward; 1, which always does, where none is near."""
        start = min(self.heads, self.d_model // 2)
        outward = (heads for off in range(_HEADS_SOUGHT) for heads in (start - off, start + off) if heads > 0)
        return next((heads for heads in outward if self.d_model % (2 * heads) == 0), 1)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    def parameter_counts(self) -> dict[str, int]:
        """Parameters by group: embedding, attention (4 d^2 a layer), mlp (3 d d_ff a layer), norms, head."""
        return {
            "embedding": self.vocab_size * self.d_model,
            "attention": self.layers * 4 * self.d_model**2,
            "mlp": self.layers * 3 * self.d_model * self.d_ff,
            "norms": (2 * self.layers + 1) * self.d_model,
            "head": self.vocab_size * self.d_model,
        }

    @property
    def parameters(self) -> int:
        return sum(self.parameter_counts().values())


@dataclass(frozen=True, kw_only=True)
class UserModel:
    """Someone's own model: `function(run, device) -> (module, next_batch)`, named as package.module:function."""

    function: str

    def __post_init__(self) -> None:
        module, _, name = self.function.partition(":")
        if not module or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f"model: {self.function!r} must read package.module:function")

    @property
    def name(self) -> str:
        return self.function

"""The model to run: the built-in Transformer's shape, or the user's function that builds a model.

Sizes have names; a variant is `dataclasses.replace(size("small"), layers=6)`.
"""

import math
from dataclasses import dataclass

from trainstep.config.fields import check_integer, check_positive, described, nearest

# name: (d_model, d_ff, layers, heads, vocab_size)
_SIZES = {
    "tiny": (128, 512, 2, 4, 256),
    "mini": (256, 1024, 4, 4, 1_000),
    "small": (768, 3072, 12, 12, 10_000),
    "medium": (1024, 4096, 24, 16, 10_000),
    "large": (1280, 5120, 36, 20, 10_000),
    "xl": (1600, 6400, 48, 25, 10_000),
    "2.7B": (2560, 10240, 32, 32, 10_000),
    "8B": (4096, 11008, 34, 32, 151_936),
}
_HEADS_SEARCHED = 10_000
"""A suggested number of heads differs from the given number by less than this."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the built-in decoder: pre-norm, RMSNorm, RoPE, causal multi-head attention, SwiGLU, untied head.

    ValueError names the field and the remedy.
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
            raise ValueError(f"d_model: RoPE rotates pairs in each head, so it must be even, not {self.d_model}")
        if self.d_model % self.heads:
            raise ValueError(
                f"heads: {self.heads} does not divide d_model {self.d_model}; {self._nearest_heads()} would"
            )
        if self.head_dim % 2:
            raise ValueError(f"heads: d_model / heads is {self.head_dim}, but RoPE rotates pairs: it must be even")
        for name in ("rope_theta", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must be positive, not {getattr(self, name)!r}")

    def _nearest_heads(self) -> int:
        """The closest number of heads with even width; 1, which is always possible, if there is none within the searched range."""
        start = min(self.heads, self.d_model // 2)
        outward = (heads for step in range(_HEADS_SEARCHED) for heads in (start - step, start + step) if heads > 0)
        return next((heads for heads in outward if self.d_model % (2 * heads) == 0), 1)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    def parameter_counts(self) -> dict[str, int]:
        """Parameters by group: embedding, attention (4 d^2 per layer), mlp (3 d d_ff per layer), norms, head."""
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
    """The user's own model: `function(run, device) -> (module, next_batch)`, named as package.module:function."""

    function: str

    def __post_init__(self) -> None:
        module, _, name = self.function.partition(":")
        if not module or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f"model: {self.function!r} must read package.module:function")

    @property
    def name(self) -> str:
        return self.function


def size_names() -> tuple[str, ...]:
    """The known sizes, smallest first."""
    return tuple(_SIZES)


def size(name: str) -> ModelConfig:
    """The model of a named size. ValueError lists the known sizes."""
    if name not in _SIZES:
        known = ", ".join(_SIZES)
        raise ValueError(
            f"model: unknown size {name!r}{nearest(name, _SIZES)}; known: {known}, or package.module:function for your own"
        )
    d_model, d_ff, layers, heads, vocab_size = _SIZES[name]
    return ModelConfig(name=name, d_model=d_model, d_ff=d_ff, layers=layers, heads=heads, vocab_size=vocab_size)

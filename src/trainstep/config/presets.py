"""Named model sizes. A variant is `dataclasses.replace(size("small"), layers=6)`."""

from trainstep.config.fields import nearest
from trainstep.config.model import ModelConfig

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


def size_names() -> tuple[str, ...]:
    """The known sizes, smallest first."""
    return tuple(_SIZES)


def size(name: str) -> ModelConfig:
    """The model of that name. ValueError lists the known ones."""
    if name not in _SIZES:
        known = ", ".join(_SIZES)
        raise ValueError(
            f"model: unknown size {name!r}{nearest(name, _SIZES)}; known: {known}, or package.module:function for your own"
        )
    d_model, d_ff, layers, heads, vocab_size = _SIZES[name]
    return ModelConfig(name=name, d_model=d_model, d_ff=d_ff, layers=layers, heads=heads, vocab_size=vocab_size)

"""The changes that `trainstep run --apply` makes of somebody's own script from outside, by name, with the values that each takes.

    changes = changes_of_text("adamw=fused,workers=8")      # {"adamw": "fused", "workers": "8"}
    text_of_changes(changes)                                # the same text

measure/run/applied.py makes them, and explain/script_changes.py says which cause each removes.
"""

from collections.abc import Mapping
from typing import NamedTuple


class ChangeKind(NamedTuple):
    """`values`: those that it takes, by word; empty if it takes a positive whole number. `meaning`: what it does."""

    meaning: str
    values: tuple[str, ...] = ()


CHANGES: Mapping[str, ChangeKind] = {
    "adamw": ChangeKind("torch's Adam and AdamW fused, or AdamW by trainstep.ops", ("fused", "trainstep")),
    "workers": ChangeKind("processes of each DataLoader, which are kept"),
    "pin_memory": ChangeKind("each DataLoader gives batches in pinned memory", ("on",)),
    "compile": ChangeKind(
        "the outermost module is compiled; with reduce_overhead into CUDA graphs, also what the script compiles",
        ("module", "reduce_overhead"),
    ),
    "precision": ChangeKind(
        "fp32 matmuls in TF32, or the outermost module under autocast: the losses change", ("tf32", "bf16_autocast")
    ),
    "attention": ChangeKind(
        "scaled_dot_product_attention by trainstep's kernel, where it takes the call", ("trainstep",)
    ),
    "bucket_cap_mb": ChangeKind("MiB of a bucket of DistributedDataParallel"),
    "gc": ChangeKind("Python's garbage collector only after every 200 steps", ("off",)),
}
"""Name -> what it does."""
_LARGEST = 100_000


def changes_of_text(text: str) -> dict[str, str]:
    """Change -> value, in the order of the text `NAME=VALUE,NAME=VALUE`. ValueError names what is unknown, and what there is.

    A change that takes one value may be written without it: `pin_memory`.
    """
    changes: dict[str, str] = {}
    for word in text.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        kind = CHANGES.get(name)
        if kind is None:
            raise ValueError(f"apply: there is no change {name!r}; there are {known_changes()}")
        if name in changes:
            raise ValueError(f"apply: {name} is named twice; give it one value")
        if not value and len(kind.values) == 1:
            value = kind.values[0]
        is_number = value.isascii() and value.isdecimal() and 0 < int(value[:9]) <= _LARGEST and len(value) < 9
        if not (value in kind.values or (not kind.values and is_number)):
            raise ValueError(f"apply: {name} takes {_values(kind)}, not {value!r}")
        changes[name] = value if kind.values else str(int(value))
    return changes


def text_of_changes(changes: Mapping[str, object]) -> str:
    """The changes as `--apply` takes them."""
    return ",".join(f"{name}={value}" for name, value in changes.items())


def known_changes() -> str:
    """`adamw=fused|trainstep, workers=N, ...`"""
    return ", ".join(f"{name}={_values(kind, 'N', '|')}" for name, kind in CHANGES.items())


def _values(kind: ChangeKind, number: str = "a positive whole number", between: str = " or ") -> str:
    return between.join(kind.values) or number

"""The config of `trainstep run`: a window of consecutive steps of a user's training script, and what --apply changes of it.

    changes = changes_of_text("adamw=fused,workers=8")      # {"adamw": "fused", "workers": "8"}
    text_of_changes(changes)                                # the same text

measure/run/changed/applied.py makes the changes, and explain/script_changes.py says which cause each removes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from trainstep.config.fields import check_choices, check_integer, described
from trainstep.config.run import DEVICES, Phase


class Part(StrEnum):
    """What the thread that trains does at a moment, as its hooks see it. Together the parts are the whole time of a step.

    A part's `__doc__` says what it covers.
    """

    DATA = "data_wait", "Inside a DataLoader's iterator, which makes or waits for the next batch."
    FORWARD = Phase.FORWARD.value, "The outermost module, and what follows it until backward begins: the loss."
    BACKWARD = Phase.BACKWARD.value, "`loss.backward()`, with the messages that wrappers such as DDP send in it."
    OPTIMIZER = Phase.OPTIMIZER.value, "`optimizer.step()`, and what is between it and backward: unscaling, clipping."
    EVALUATION = "evaluation", "Forward passes without gradients: evaluation, generation, a teacher."
    OTHER = "other", "All other code of the script: preparing a batch, logging, saving."

    def __new__(cls, value: str, doc: str = "") -> "Part":
        part = str.__new__(cls, value)
        part._value_, part.__doc__ = value, doc
        return part

    __hash__ = str.__hash__  # an enum's own hash is written in Python, and hooks look parts up in every step


@dataclass(frozen=True, kw_only=True)
class ScriptConfig:
    """One record of a run: the steps from `first_step` on. ValueError names the field.

    A run writes records as it goes on, so that a kill loses seconds and not the run; all of its records have the same `run`.
    """

    script: str = described("path of the script, `-m module`, or the name of code in `trainstep.watch`")
    arguments: str = described("the script's arguments, as a shell would take them", "")
    run: str = described("name that the records of one run share, its ranks too")
    rank: int = described("rank of the process", 0)
    ranks: int = described("number of ranks", 1)
    first_step: int = described("number, from 1, of the first step in this record", 1)
    device: str = described("device of the parameters", "cpu", DEVICES)

    def __post_init__(self) -> None:
        check_choices(self)
        check_integer(self, "ranks", at_least=1)
        check_integer(self, "rank", at_least=0, at_most=self.ranks - 1)
        check_integer(self, "first_step", at_least=1)
        for name in ("script", "run"):
            if not getattr(self, name):
                raise ValueError(f"{name}: must not be empty")


CHANGES: Mapping[str, tuple[str, ...]] = {
    "adamw": ("fused", "trainstep"),
    "workers": (),
    "batch_size": (),
    "pin_memory": ("on",),
    "copies": ("non_blocking",),
    "compile": ("module", "reduce_overhead"),
    "precision": ("tf32", "bf16_autocast"),
    "attention": ("trainstep",),
    "ops": ("trainstep",),
    "mask": ("causal",),
    "bucket_cap_mb": (),
    "gc": ("off",),
}
"""Name -> the values that it takes; without any, a positive whole number. docs/guide/run.md says what each does."""
_LARGEST = 100_000


def changes_of_text(text: str) -> dict[str, str]:
    """Change -> value, in the order of the text `NAME=VALUE,NAME=VALUE`. ValueError names what is unknown, and what there is.

    A change that takes one value may be written without it: `pin_memory`.
    """
    changes: dict[str, str] = {}
    for word in text.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        values = CHANGES.get(name)
        if values is None:
            raise ValueError(f"apply: there is no change {name!r}; there are {known_changes()}")
        if name in changes:
            raise ValueError(f"apply: {name} is named twice; give it one value")
        if not value and len(values) == 1:
            value = values[0]
        is_number = value.isascii() and value.isdecimal() and 0 < int(value[:9]) <= _LARGEST and len(value) < 9
        if not (value in values or (not values and is_number)):
            raise ValueError(f"apply: {name} takes {_values(values)}, not {value!r}")
        changes[name] = value if values else str(int(value))
    return changes


def text_of_changes(changes: Mapping[str, object]) -> str:
    """The changes as `--apply` takes them."""
    return ",".join(f"{name}={value}" for name, value in changes.items())


def known_changes() -> str:
    """`adamw=fused|trainstep, workers=N, ...`"""
    return ", ".join(f"{name}={_values(values, 'N', '|')}" for name, values in CHANGES.items())


def _values(values: tuple[str, ...], number: str = "a positive whole number", between: str = " or ") -> str:
    return between.join(values) or number

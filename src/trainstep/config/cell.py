"""A cell: one point of a grid, to be measured on its own. What executors pass around, and what a record answers."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.config.parsing import config_hash


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`workload`: `train_step`, `attention`, `ceiling`, or package.module:object for one's own.

    `config`: plain JSON values, validated. `point`: the flat values the grid gave it, for progress lines
    and for finding the cells that differ along one axis.
    """

    workload: str
    config: Mapping[str, Any]
    point: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Identifies the cell in a store, whatever the sweep it came from."""
        return config_hash(self.workload, self.config)

    @property
    def label(self) -> str:
        """The grid's values, in its order: `small, context 256, bf16`. A name speaks for itself, a number does not."""
        return ", ".join(_in_words(name, value) for name, value in self.point.items()) or self.workload


def group_name(group: Sequence[Cell]) -> str:
    """The cell's key, or a hash of the keys of several, in any order: a cell alone and the same in company are different work."""
    if len(group) == 1:
        return group[0].key
    return hashlib.sha256(" ".join(sorted(cell.key for cell in group)).encode()).hexdigest()[:16]


def _in_words(name: str, value: Any) -> str:
    return value if isinstance(value, str) and value != "none" else f"{name} {value}"

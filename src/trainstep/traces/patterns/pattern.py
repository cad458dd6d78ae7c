"""A way of computing that was found in a step, with its cost and the least cost of another way: `Pattern`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trainstep.traces.patterns.step_ops import Cost, Shape

ATTENTION, OPTIMIZER, SLICES, PRECISION = "written-out attention", "optimizer by tensor", "slices", "fp32 matmuls"
MASK, FP32_ATTENTION, ODD_SIZES = "attention with a mask", "fp32 attention", "matmuls of odd sizes"
FUSED_ATTENTION, FUSED_CAUSAL_ATTENTION, FUSED_MASKED_ATTENTION = "attention", "causal attention", "masked attention"
FUSED_ADAMW = "AdamW"


class Instead(NamedTuple):
    """The other way, as one op of torch that can be timed alone.

    `shapes`: those of query, key and value as (batch, heads, positions, head_dim), or of the tensors that AdamW updates. `dtype`:
    that of all tensors, as a trace writes it. `forwards`, `backwards`: how often it ran in all steps of the trace.
    """

    op: str
    shapes: tuple[Shape, ...]
    dtype: str
    forwards: int
    backwards: int = 0


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A way of computing that was found. `costs`: phase -> cost of all steps. `what`: the finding in words.

    `least_ns`: the least time of the other way in all steps, by formula. `instead`: the other way as ops that can be timed.
    """

    name: str
    calls: int
    costs: Mapping[str, Cost]
    least_ns: float
    what: str
    instead: tuple[Instead, ...] = ()

    @property
    def time_ns(self) -> int:
        return sum(cost.time_ns for cost in self.costs.values())

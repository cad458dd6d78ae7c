"""A way of computing that was found in a step, with what it cost and what another would: `Pattern`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trainstep.traces.patterns.step_ops import Cost, Shape

ATTENTION, OPTIMIZER, SLICES, PRECISION = "written-out attention", "optimizer by tensor", "slices", "fp32 matmuls"
MASK, FP32_ATTENTION = "attention with a mask", "fp32 attention"
FUSED_ATTENTION, FUSED_CAUSAL_ATTENTION, FUSED_MASKED_ATTENTION = "attention", "causal attention", "masked attention"
FUSED_ADAMW = "AdamW"


class Instead(NamedTuple):
    """The other way, as one op of torch that can be timed alone.

    `shapes`: of query, key and value as (batch, heads, positions, head_dim), or of the tensors that AdamW updates. `dtype`: of all,
    as a trace writes it. `forwards`, `backwards`: how often all steps of the trace ran it.
    """

    op: str
    shapes: tuple[Shape, ...]
    dtype: str
    forwards: int
    backwards: int = 0


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """`costs`: phase -> time of all steps. `what`: the finding in words.

    `least_ns`: what the other way takes in all steps at least, by formula; `instead`: the other way as ops that can be timed.
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

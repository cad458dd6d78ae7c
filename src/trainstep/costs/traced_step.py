"""A forward and backward of any model as they were traced: tensors made and freed in order, and the work of each op.

    step.tensors[event.tensor].nbytes     # for event in step.forward: MADE and FREED
    kept(step)                            # numbers of the tensors that forward leaves behind
    step.work                             # ops by shape, with FLOPs and bytes

training/trace.py writes it, with torch, and plan/ reads it without. Sizes are of one micro-batch on one rank with whole parameters.
Parameters, their gradients, buffers and the batch are not among the tensors, but gradients begin as one (GRADIENT).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from trainstep.costs.exchange import ParameterSize


class EventKind(Enum):
    """What happens in a traced step."""

    MADE = "made"
    FREED = "freed"
    UNIT_BEGINS = "unit begins"
    """A unit's forward begins; `name` is the unit."""
    UNIT_ENDS = "unit ends"
    UNIT_BACKWARD = "unit backward"
    """The gradient of a unit's output is there, so that its backward begins."""
    GRADIENT = "gradient"
    """The gradient of the parameter `name` is complete; `tensor` is its number."""


class Event(NamedTuple):
    """One event. `tensor`: a number in `TracedStep.tensors`, or -1."""

    kind: EventKind
    tensor: int = -1
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedTensor:
    """A storage, described by the tensor that it was made for. `dtype` as torch writes it without its prefix.

    `module`: the module that was running, `*` for the numbers of blocks. `saved_in`: the module whose op autograd saved it for
    first, empty if it did not save it. `saves`: how often it was saved, views included.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    made_by: str
    module: str
    saved_in: str = ""
    saves: int = 0
    is_weight_copy: bool = False
    """A parameter rounded for a matmul, as autocast makes it."""
    is_logits: bool = False
    """Its last dimension is the vocabulary, or the loss made it."""

    @property
    def label(self) -> str:
        """The part of the model that it is kept for."""
        return self.saved_in or self.module or "model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One kind of call of an operator in a phase, `times` of them.

    `kind`: matmul, attention or element-wise (anything else that moves bytes). `shape`: (batch, m, n, k) of a matmul;
    (batch, heads, key heads, queries, keys, head dim) of attention; else that of the result. `read_bytes` and `written_bytes`: the
    least of one call.
    """

    phase: str
    module: str
    op: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    flops: int
    read_bytes: int
    written_bytes: int
    times: int = 1
    causal: bool = False
    access: str = "contiguous"
    """How the call goes through memory: `broadcast` where an operand is repeated, `strided` where one has gaps or is turned."""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A traced micro-batch. `unseen`: what the trace cannot know of this model, a sentence each."""

    model: str
    parameters: tuple[ParameterSize, ...]
    buffers_bytes: int
    batch_bytes: tuple[int, ...]
    """The bytes of each tensor of the batch."""
    tensors: tuple[TracedTensor, ...]
    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    work: tuple[Work, ...]
    unseen: tuple[str, ...] = ()


def kept(step: TracedStep) -> Iterator[int]:
    """The tensors that are there when forward is over, in the order in which they were made; the loss is one of them."""
    alive = dict[int, None]()
    for event in step.forward:
        if event.kind is EventKind.MADE:
            alive[event.tensor] = None
        elif event.kind is EventKind.FREED:
            alive.pop(event.tensor, None)
    yield from alive

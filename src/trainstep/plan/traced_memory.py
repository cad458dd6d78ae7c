"""Replays a step of a traced model: the tensors that it makes and frees, in their order, and what a strategy holds beside them.

A tensor that is there when forward is over is kept for backward. Its category follows from what it is: a parameter rounded for a
matmul, logits, or an activation of the part of the model that autograd saved it for. Everything else is temporary, or a gradient.
"""

from dataclasses import replace

from trainstep.costs.exchange import ROOT, ParameterSize
from trainstep.costs.traced_step import EventKind, TracedStep, TracedTensor, kept
from trainstep.plan.live_tensors import ACTIVATION, COPY, GRADIENTS, LOGITS, TEMPORARY, Tensor
from trainstep.plan.memory_terms import weight_bytes
from trainstep.plan.replicated_tensors import Setup
from trainstep.plan.step_replay import StepReplay

HELD = "kept by the model's own code"
"""Kept by the model's own code, not by autograd: the input of what is recomputed, for example."""


def stored_parameters(traced: TracedStep, precision: str) -> tuple[ParameterSize, ...]:
    """The parameters as a rank stores them; fsdp may gather them in fewer bits, in which the trace computes."""
    stored = weight_bytes(precision)
    return tuple(
        replace(parameter, element_bytes=stored) if parameter.element_bytes < stored else parameter
        for parameter in traced.parameters
    )


def category_of(tensor: TracedTensor) -> str:
    """The category of a tensor that forward keeps."""
    if tensor.is_weight_copy:
        return COPY
    return LOGITS if tensor.is_logits else ACTIVATION


def kept_by_label(traced: TracedStep) -> dict[str, list[TracedTensor]]:
    """What forward keeps, by the part of the model that it is kept for."""
    labels: dict[str, list[TracedTensor]] = {}
    for number in kept(traced):
        tensor = traced.tensors[number]
        labels.setdefault(label_of(tensor), []).append(tensor)
    return labels


def label_of(tensor: TracedTensor) -> str:
    """The part of the model that a tensor is kept for."""
    return tensor.label if tensor.saves else HELD


class TracedReplay(StepReplay):
    """Steps of a traced model."""

    def __init__(self, setup: Setup, traced: TracedStep) -> None:
        super().__init__(setup)
        self._traced = traced
        self._parameters = {parameter.name: parameter for parameter in setup.parameters}
        self._categories = [LOGITS if tensor.is_logits else TEMPORARY for tensor in traced.tensors]
        for number in kept(traced):
            self._categories[number] = category_of(traced.tensors[number])
        for event in traced.backward:
            if event.kind is EventKind.GRADIENT and event.tensor >= 0:
                self._categories[event.tensor] = GRADIENTS
        self._alive: dict[int, Tensor] = {}

    @property
    def batch_bytes(self) -> tuple[int, ...]:
        return self._traced.batch_bytes

    @property
    def buffers_bytes(self) -> tuple[int, ...]:
        return (self._traced.buffers_bytes,) if self._traced.buffers_bytes else ()

    def forward(self, *, keeps: bool) -> None:
        trains = self.run_config.mode in ("forward_backward", "step")
        self.ranks.before_forward(ROOT)
        self.workspace("forward")
        for event in self._traced.forward:
            if event.kind is EventKind.UNIT_BEGINS:
                self.ranks.before_forward(event.name)
            elif event.kind is EventKind.UNIT_ENDS:
                self.ranks.after_forward(event.name)
            else:
                self._tensor_event(event.kind, event.tensor)
        self.ranks.forward_over(trains=trains)

    def backward(self) -> None:
        self.workspace("backward")
        self.ranks.before_backward(ROOT)
        for event in self._traced.backward:
            if event.kind is EventKind.UNIT_BACKWARD:
                self.ranks.before_backward(event.name)
            elif event.kind is EventKind.GRADIENT:
                gradient = self._alive.pop(event.tensor, None)
                if gradient is not None:
                    self.ranks.gradient(self._parameters[event.name], gradient)
            else:
                self._tensor_event(event.kind, event.tensor)
        self.drop_kept()

    def drop_kept(self) -> None:
        self.live.drop(self._alive.values())
        self._alive.clear()

    def _tensor_event(self, kind: EventKind, number: int) -> None:
        if kind is EventKind.MADE:
            tensor, category = self._traced.tensors[number], self._categories[number]
            self._alive[number] = self.live.new(tensor.nbytes, category, label_of(tensor))
        elif number in self._alive:  # a gradient belongs to the strategy
            self.live.drop([self._alive.pop(number)])

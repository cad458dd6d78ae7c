"""Whose storages are whose at the marks of a recorded step: what a ledger cannot see in the allocator's history."""

from collections.abc import Iterable

from torch import Tensor

from trainstep.config.phases import Phase
from trainstep.measure.gradient_notes import GradientNotes
from trainstep.measure.held_storages import Storages, held_storages, state_tensors, storages_of
from trainstep.traces.ledger import Known
from trainstep.training.batches import Batch
from trainstep.training.build import Assembly


class StepHolders:
    """Of one assembly. `whole_gradients`: autograd's own, noted as they come."""

    def __init__(self, assembly: Assembly, whole_gradients: GradientNotes) -> None:
        self._assembly = assembly
        self._whole_gradients = whole_gradients
        self._inputs: frozenset[int] = frozenset()
        self._gradients: frozenset[int] = frozenset()
        self._communication: dict[str, frozenset[int]] = {}

    def note_inputs(self, batches: list[Batch]) -> None:
        """The batches, and what the model keeps as buffers."""
        tensors = [tensor for batch in batches for tensor in batch.values() if isinstance(tensor, Tensor)]
        self._inputs = self._addresses([*tensors, *self._assembly.module.buffers()])

    def note_phase(self, phase: Phase) -> None:
        """At the end of a phase."""
        gradients = frozenset(self.note_communication(phase)["gradients"])
        self._whole_gradients.addresses[phase] = gradients
        if phase in (Phase.BACKWARD, Phase.GRAD_SYNC):
            self._gradients = gradients

    def note_communication(self, name: str) -> dict[str, Storages]:
        """Note, under a mark's name, what the parallel strategy keeps now; all that is held by anybody."""
        held = held_storages(self._assembly, {})
        self._communication[name] = frozenset(held["communication"])
        return held

    def known(self, cast_bytes: tuple[int, ...]) -> Known:
        """All of it, for the ledger. `cast_bytes`: of autocast's copies of weights."""
        step = self._assembly.step
        scaled = vars(step.scaler).values() if step.scaler else ()
        states = [*state_tensors(step.optimizer), *(value for value in scaled if isinstance(value, Tensor))]
        return Known(
            parameters=self._addresses(self._assembly.module.parameters()),
            gradients=self._gradients,
            optimizer_state=self._addresses(states),
            inputs=self._inputs,
            cast_bytes=cast_bytes,
            communication=self._communication,
            whole_gradients=self._whole_gradients.addresses,
        )

    def _addresses(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        return frozenset(storages_of(tensors, self._assembly.device))

"""Where autograd's whole gradients were: noted as each is complete, since some parallel strategies let them go before
backward is over.

    notes.listen_to(module)        # before it is wrapped: hooks run in the order of their coming
    with notes.listening(): step()
    notes.addresses                # name of a mark in the allocator's history -> address of a storage
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainstep.measure.held_storages import storages_of
from trainstep.measure.memory_history import mark


class GradientNotes:
    """Holds no tensor: autograd keeps its hooks where Python's garbage collector does not look."""

    def __init__(self) -> None:
        self.addresses: dict[str, frozenset[int]] = {}
        self._listening = False

    def listen_to(self, module: nn.Module) -> None:
        """Hear of the gradient of each trained parameter."""
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, gradients are noted."""
        self._listening = True
        try:
            yield
        finally:
            self._listening = False

    def _note(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if not self._listening or gradient is None or gradient.layout != torch.strided:
            return
        name = f"gradient {len(self.addresses)}"
        mark(name)
        self.addresses[name] = frozenset(storages_of([gradient], gradient.device))

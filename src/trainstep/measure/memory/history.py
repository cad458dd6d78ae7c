"""Records the allocator's history of a step as a snapshot, on CUDA by its recorder, on a CPU by torch's profiler.

    history = history_of(device); history.start(); ...; mark("begin"); with history.spans(): ...; document, cpu = history.stop()

`torch.cuda.memory._record_memory_history` and `_snapshot` begin with an underscore, but torch documents them ("Understanding
CUDA Memory Usage"). Ranges (`record_function`) are put into the history with the allocator's clock; ours open only while a
profiler runs, so the recorded step runs under a profiler of the CPU alone.
"""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from trainstep.measure.harness.files import TemporaryFolder
from trainstep.measure.harness.gloo_threads import wait_for_gloo_threads
from trainstep.measure.parallel.memory import storages_of
from trainstep.traces.cpu_memory import CpuMemory, cpu_memory
from trainstep.traces.ledger import MARK

RING_ENTRIES = 1_000_000


class MemoryHistory(Protocol):
    """A recorder of what the allocator does from `start` to `stop`."""

    ring_entries: int | None

    def start(self) -> None: ...

    def spans(self) -> AbstractContextManager[Any]:
        """A context in which our named ranges enter the history."""

    def stop(self) -> tuple[dict[str, Any], CpuMemory | None]:
        """End the recording. Returns the snapshot in torch's form and, on a CPU, the allocator's own count."""

    def cancel(self) -> None:
        """End the recording of a step that failed."""


def history_of(device: torch.device) -> MemoryHistory:
    """The recorder for the allocator of this device."""
    return _CudaHistory() if device.type == "cuda" else _CpuHistory()


def mark(name: str) -> None:
    """Put a mark into the history: a moment of the ledger."""
    with record_function(MARK + name):
        pass


class _CudaHistory:
    ring_entries: int | None = RING_ENTRIES

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=RING_ENTRIES)

    @contextmanager
    def spans(self) -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU]):
            try:
                yield
            finally:
                wait_for_gloo_threads()

    def stop(self) -> tuple[dict[str, Any], None]:
        document: dict[str, Any] = torch.cuda.memory._snapshot()
        self.cancel()
        return document, None

    def cancel(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)


class _CpuHistory:
    ring_entries: int | None = None

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        self._profile.start()

    def spans(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def cancel(self) -> None:
        wait_for_gloo_threads()
        self._profile.stop()

    def stop(self) -> tuple[dict[str, Any], CpuMemory]:
        self.cancel()
        with TemporaryFolder() as folder:
            path = folder / "trace.json"
            self._profile.export_chrome_trace(str(path))
            cpu = cpu_memory(json.loads(path.read_text(encoding="utf-8", errors="replace")))
        return cpu.document, cpu


class GradientNotes:
    """Notes the addresses of autograd's whole gradients as each is complete.

    Some parallel strategies free them before backward is over, so they cannot all be found at its end.

        notes.listen_to(module)        # before the strategy wraps it: hooks run in the order of their registration
        with notes.listening(): step()
        notes.addresses                # name of a mark in the allocator's history -> addresses of storages
    """

    # It holds no tensor, because autograd keeps its hooks where Python's garbage collector does not see them.

    def __init__(self) -> None:
        self.addresses: dict[str, frozenset[int]] = {}
        self._listening = False

    def listen_to(self, module: nn.Module) -> None:
        """Register a hook on each trained parameter."""
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A context in which gradients are noted."""
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

"""The allocator's own history of a step: CUDA's by its recorder, a CPU's by torch's profiler, both as one kind of snapshot.

    history = history_of(device); history.start(); ...; mark("begin"); with history.spans(): ...; document, cpu = history.stop()

`torch.cuda.memory._record_memory_history` and `_snapshot` begin with an underscore, yet are torch's documented way
("Understanding CUDA Memory Usage"). Ranges (`record_function`) land in the history with the allocator's clock; ours open only
while a profiler runs, so the recorded step runs under one that looks at the CPU alone.
"""

import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trainstep.measure.temporary_folder import TemporaryFolder
from trainstep.traces.cpu_memory import CpuMemory, cpu_memory
from trainstep.traces.ledger import MARK

RING_ENTRIES = 1_000_000


class MemoryHistory(Protocol):
    """What the allocator does from `start` to `stop`."""

    ring_entries: int | None

    def start(self) -> None: ...

    def spans(self) -> AbstractContextManager[Any]:
        """Inside, our named ranges are in the history."""

    def stop(self) -> tuple[dict[str, Any], CpuMemory | None]:
        """The snapshot in torch's form, and a CPU's own count."""


def history_of(device: torch.device) -> MemoryHistory:
    """The recorder of that device's allocator."""
    return _CudaHistory() if device.type == "cuda" else _CpuHistory()


def mark(name: str) -> None:
    """Leave a mark in the history: a moment of the ledger."""
    with record_function(MARK + name):
        pass


class _CudaHistory:
    ring_entries: int | None = RING_ENTRIES

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=RING_ENTRIES)

    def spans(self) -> AbstractContextManager[Any]:
        return profile(activities=[ProfilerActivity.CPU])

    def stop(self) -> tuple[dict[str, Any], None]:
        document: dict[str, Any] = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        return document, None


class _CpuHistory:
    ring_entries: int | None = None

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        self._profile.start()

    def spans(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def stop(self) -> tuple[dict[str, Any], CpuMemory]:
        self._profile.stop()
        with TemporaryFolder() as folder:
            path = folder / "trace.json"
            self._profile.export_chrome_trace(str(path))
            cpu = cpu_memory(json.loads(path.read_text(encoding="utf-8", errors="replace")))
        return cpu.document, cpu

"""What a timed or watched step begins with: its device opened, its model built, each whole once it is there.

    opened = open_device(device, Stages(stage))
    built = opened.build(lambda: build_step(run))
    with built.names_out_of_memory(): built.assembly.step(...)

Memory running out in any of it raises CellFailed with the phase, the bytes and what held the rest.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from trainstep.measure.failures import CellFailed, out_of_memory_as
from trainstep.measure.memory import MemoryWatch
from trainstep.measure.nvml import GpuState
from trainstep.measure.workload import Stages
from trainstep.training.build import Assembly

_STEPPING = ("warmup", "steps")
"""Stages in which the phase at work says more."""


@dataclass(frozen=True, kw_only=True)
class OpenDevice:
    """A device that has its context. `gpu`, and the seconds that opening it took: of a GPU."""

    device: torch.device
    stages: Stages
    memory: MemoryWatch
    gpu: GpuState | None = None
    context_s: float | None = None

    def build(self, make: Callable[[], Assembly]) -> "BuiltStep":
        """The step, timed."""
        with self.names_out_of_memory():
            started_s = time.perf_counter()
            assembly = make()
            self.synchronize()
            return BuiltStep(opened=self, assembly=assembly, build_s=time.perf_counter() - started_s)

    def names_out_of_memory(self) -> AbstractContextManager[None]:
        """An out-of-memory error inside becomes CellFailed with phase and bytes; no model is there yet to be among the holders."""
        return _names_out_of_memory(self.memory, lambda: self.stages.current)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def open_device(device: torch.device, stages: Stages) -> OpenDevice:
    """Create the CUDA context here, timed, so that no step pays for it."""
    memory = MemoryWatch(device)
    if device.type != "cuda":
        return OpenDevice(device=device, stages=stages, memory=memory)
    with _names_out_of_memory(memory, lambda: stages.current):
        memory.before_context()
        started_s = time.perf_counter()
        if device.index is not None:
            torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
        context_s = time.perf_counter() - started_s
        gpu = GpuState(str(torch.cuda.get_device_properties(device).uuid))
        return OpenDevice(device=device, stages=stages, memory=memory, gpu=gpu, context_s=context_s)


@dataclass(frozen=True, kw_only=True)
class BuiltStep:
    """A step on its device, ready to run."""

    opened: OpenDevice
    assembly: Assembly
    build_s: float

    def names_out_of_memory(self) -> AbstractContextManager[None]:
        """An out-of-memory error inside becomes CellFailed with phase, bytes and holders."""
        return _names_out_of_memory(self.opened.memory, lambda: self._phase, self._holders)

    @property
    def _phase(self) -> str:
        """Where it is: the phase at work during steps, else the stage."""
        stage = self.opened.stages.current
        return str(self.assembly.step.running) if stage in _STEPPING else stage

    def _holders(self) -> Mapping[str, int]:
        return self.opened.memory.holders(self.assembly.module, self.assembly.step.optimizer)


def _names_out_of_memory(
    memory: MemoryWatch, phase: Callable[[], str], holders: Callable[[], Mapping[str, int]] = dict
) -> AbstractContextManager[None]:
    return out_of_memory_as(lambda error: CellFailed(memory.failure(error, phase(), holders())))

"""Opens a device and builds a training step on it, both timed.

    opened = open_device(device, Stages(stage))
    built = opened.build(lambda: build_step(run))
    with built.names_out_of_memory(): built.assembly.step(...)

If memory runs out in any of these, CellFailed is raised with the phase, the bytes and what held the rest.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from trainstep.capture.waits import NotCapturable
from trainstep.measure.harness.failures import CellFailed, out_of_memory_as
from trainstep.measure.harness.workload import Stages
from trainstep.measure.machine.nvml import GpuState
from trainstep.measure.step.memory_watch import MemoryWatch
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Failure
from trainstep.training.build import Assembly

_STEPPING = ("warmup", "steps")
"""Stages in which a failure is placed by the phase of the step."""


@dataclass(frozen=True, kw_only=True)
class OpenDevice:
    """A device with its CUDA context. `gpu` and `context_s`, the seconds that the context took, are None on a CPU."""

    device: torch.device
    stages: Stages
    memory: MemoryWatch
    gpu: GpuState | None = None
    context_s: float | None = None

    def build(self, make: Callable[[], Assembly]) -> "BuiltStep":
        """Build the step and time that."""
        with self.names_out_of_memory():
            started_s = time.perf_counter()
            assembly = make()
            self.synchronize()
            return BuiltStep(opened=self, assembly=assembly, build_s=time.perf_counter() - started_s)

    def names_out_of_memory(self) -> AbstractContextManager[None]:
        """Turn an out-of-memory error into CellFailed with the stage and the bytes; without holders, as no model exists yet."""
        return _names_out_of_memory(self.memory, lambda: self.stages.current)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def open_device(device: torch.device, stages: Stages) -> OpenDevice:
    """Open the device. On a GPU this creates the CUDA context and times it, so that no step pays for it."""
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
        """Turn an out-of-memory error into CellFailed with the phase or stage, the bytes and the holders."""

        def phase() -> str:
            stage = self.opened.stages.current
            return str(self.assembly.step.running) if stage in _STEPPING else stage

        def holders() -> Mapping[str, int]:
            return self.opened.memory.holders(self.assembly.module, self.assembly.step.optimizer)

        return _names_out_of_memory(self.opened.memory, phase, holders)

    @contextmanager
    def names_what_is_not_captured(self) -> Iterator[None]:
        """Turn the refusal of a step that should be captured into CellFailed with its reason."""
        try:
            yield
        except NotCapturable as error:
            raise CellFailed(Failure(kind="unsupported", phase="capture", message=str(error))) from None

    def capture_facts(self) -> dict[str, Fact]:
        """What was captured, why the rest was not, and what the capture took; none for a step that is not to be captured."""
        captured = self.assembly.captured
        if captured is None:
            return {}
        return facts_of(
            captured=captured.what,
            capture_left_out=captured.left_out,
            capture_s=captured.capture_s,
            capture_pool_bytes=None if captured.what == "nothing" else captured.pool_bytes(),
        )


def _names_out_of_memory(
    memory: MemoryWatch, phase: Callable[[], str], holders: Callable[[], Mapping[str, int]] = dict
) -> AbstractContextManager[None]:
    return out_of_memory_as(lambda error: CellFailed(memory.failure(error, phase(), holders())))

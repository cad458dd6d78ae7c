"""Measures the peak memory of a step: torch's allocator and the driver on a GPU, the resident set on a CPU."""

import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from trainstep.measure.harness.failures import out_of_memory
from trainstep.measure.machine.environment import memory_bytes
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Failure


class MemoryWatch:
    """Peak memory of one process on one device.

    Call `before_context`, then `start` where the timed steps begin, then `facts`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver_before: int | None = None

    def before_context(self) -> None:
        """Note the bytes that the driver sees in use by other processes."""
        self._driver_before = self._driver_bytes()

    def start(self) -> None:
        """Count peaks from here on a GPU, including bytes already held; a CPU's peak counts from the process's start."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def facts(self) -> dict[str, Fact]:
        """The peaks, in bytes."""
        if self._device.type == "cpu":
            return facts_of(peak_rss_bytes=_peak_resident_bytes())
        facts = facts_of(
            peak_allocated_bytes=torch.cuda.max_memory_allocated(),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(),
            allocation_retries=torch.cuda.memory_stats().get("num_alloc_retries", 0),
        )
        if (driver := self.driver_bytes()) is not None:
            facts |= facts_of(driver_bytes=driver)
        return facts

    def driver_bytes(self) -> int | None:
        """Bytes that the driver sees in use beyond those before this process's context; None if it gives no figure."""
        now = self._driver_bytes()
        return None if now is None or self._driver_before is None else now - self._driver_before

    def device_allocations(self) -> int:
        """Calls of cudaMalloc so far."""
        if self._device.type != "cuda":
            return 0
        # Read between timed steps: memory_stats(), the flat form of these figures, takes six times as long.
        return int(torch.cuda.memory_stats_as_nested_dict().get("num_device_alloc", 0))

    def allocated_bytes(self) -> int:
        """Bytes that torch's allocator holds now on a GPU; on a CPU, the bytes that count towards the process's limit."""
        return torch.cuda.memory_allocated() if self._device.type == "cuda" else _data_bytes()

    def capacity_bytes(self) -> int:
        """All memory of the GPU, or the host's memory that this process may use."""
        if self._device.type == "cuda":
            return int(torch.cuda.get_device_properties(self._device).total_memory)
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        return memory_bytes() if limit == resource.RLIM_INFINITY else limit

    def holders(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
        """Bytes of parameters, gradients, optimizer state and, on a GPU, of the rest: activations and temporaries."""
        parameters: list[Tensor] = list(module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        states = optimizer.state.values() if optimizer is not None else ()
        state_tensors = [item for state in states for item in state.values() if isinstance(item, Tensor)]
        sizes = {
            "parameters": held_bytes(parameters),
            "gradients": held_bytes(gradients),
            "optimizer state": held_bytes(state_tensors),
        }
        if self._device.type == "cuda":
            sizes["activations and temporaries"] = self.allocated_bytes() - sum(sizes.values())
        return sizes

    def failure(self, error: Exception, phase: str, holders: Mapping[str, int] | None = None) -> Failure:
        """The failure of memory that ran out in a phase; `holders`: name -> bytes of what held the rest."""
        return out_of_memory(
            error, phase, allocated_bytes=self.allocated_bytes(), capacity_bytes=self.capacity_bytes(), holders=holders
        )

    def _driver_bytes(self) -> int | None:
        if self._device.type != "cuda":
            return None
        try:
            return torch.cuda.device_memory_used(self._device)  # asks NVML, which creates no context
        except (RuntimeError, ModuleNotFoundError):
            return None


def _data_bytes() -> int:
    """VmData, which RLIMIT_DATA limits; without /proc, the peak resident set."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    data_kib = next((line.split()[1] for line in lines if line.startswith("VmData:")), None)
    return _peak_resident_bytes() if data_kib is None else int(data_kib) * 1024


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def held_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages of these tensors."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())

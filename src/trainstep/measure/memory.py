"""What a step holds at its peak: allocated and reserved by torch, seen by the driver; on a CPU, the process's resident set."""

import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from trainstep.measure.failures import out_of_memory
from trainstep.measure.host import memory_bytes
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Failure


class MemoryWatch:
    """Peaks of one process on one device. `before_context`, then `start` where the timed steps begin, then `facts`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver_before: int | None = None

    def before_context(self) -> None:
        """Note what the driver sees in use by others."""
        self._driver_before = self._driver_bytes()

    def start(self) -> None:
        """Peaks on a GPU count from here, with what is held already; a CPU's from the start of the process."""
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
        """What the driver sees in use over what it saw before this process's context; None where it cannot be asked."""
        now = self._driver_bytes()
        return None if now is None or self._driver_before is None else now - self._driver_before

    def device_allocations(self) -> int:
        """Calls of cudaMalloc so far. Read between steps: the flat form of these figures would cost six times as much."""
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats_as_nested_dict().get("num_device_alloc", 0))

    def allocated_bytes(self) -> int:
        """Held now by torch's allocator on a GPU; on a CPU, what counts towards the process's limit."""
        return torch.cuda.memory_allocated() if self._device.type == "cuda" else _data_bytes()

    def capacity_bytes(self) -> int:
        """All there is: the GPU's memory, or what this process may use of the host's."""
        if self._device.type == "cuda":
            return int(torch.cuda.get_device_properties(self._device).total_memory)
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        return memory_bytes() if limit == resource.RLIM_INFINITY else limit

    def holders(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state, and of the rest: activations and temporaries."""
        parameters = list(module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        states = optimizer.state.values() if optimizer is not None else ()
        held = {
            "parameters": held_bytes(list(parameters)),
            "gradients": held_bytes(gradients),
            "optimizer state": held_bytes(
                [item for state in states for item in state.values() if isinstance(item, Tensor)]
            ),
        }
        if self._device.type == "cuda":
            held["activations and temporaries"] = self.allocated_bytes() - sum(held.values())
        return held

    def failure(self, error: Exception, phase: str, holders: Mapping[str, int] | None = None) -> Failure:
        """Memory ran out in a phase; `holders`: name -> bytes of what held the rest."""
        held = {"allocated_bytes": self.allocated_bytes(), "capacity_bytes": self.capacity_bytes()}
        return out_of_memory(error, phase, **held, holders=holders)

    def _driver_bytes(self) -> int | None:
        if self._device.type != "cuda":
            return None
        try:
            return torch.cuda.device_memory_used(self._device)  # through NVML: creates no context
        except (RuntimeError, ModuleNotFoundError):
            return None


def _data_bytes() -> int:
    """VmData, which RLIMIT_DATA limits; where there is no /proc, the peak resident set."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = next((line.split()[1] for line in lines if line.startswith("VmData:")), None)
    return _peak_resident_bytes() if found is None else int(found) * 1024


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def held_bytes(tensors: list[Tensor]) -> int:
    """Bytes of distinct storages behind these tensors."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())

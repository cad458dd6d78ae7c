"""What allocator and driver say at the moments of a recorded step. A CPU's allocator keeps no count: its history tells later."""

from dataclasses import dataclass, replace

import torch

from trainstep.measure.built_step import OpenDevice
from trainstep.measure.empty_process import OutsideBytes
from trainstep.records.facts import Fact, facts_of
from trainstep.traces.cpu_memory import CpuMemory
from trainstep.traces.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What allocator and driver say at a moment, and the peaks since the reading before it."""

    allocated_bytes: int
    reserved_bytes: int | None = None
    fragmented_bytes: int | None = None
    """Free, in segments partly in use."""
    driver_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_requested_bytes: int | None = None
    peak_reserved_bytes: int | None = None

    def with_peaks_of(self, other: "Reading | None") -> "Reading":
        """This moment, with the higher of each peak: of several micro-batches a phase has several readings."""
        if other is None:
            return self
        names = ("peak_allocated_bytes", "peak_requested_bytes", "peak_reserved_bytes")
        return replace(self, **{name: max(getattr(self, name) or 0, getattr(other, name) or 0) for name in names})

    @classmethod
    def now(cls, device: torch.device, driver_bytes: int | None) -> "Reading":
        stats = torch.cuda.memory_stats(device)
        return cls(
            allocated_bytes=stats["allocated_bytes.all.current"],
            reserved_bytes=stats["reserved_bytes.all.current"],
            fragmented_bytes=stats["inactive_split_bytes.all.current"],
            driver_bytes=driver_bytes,
            peak_allocated_bytes=stats["allocated_bytes.all.peak"],
            peak_requested_bytes=stats["requested_bytes.all.peak"],
            peak_reserved_bytes=stats["reserved_bytes.all.peak"],
        )


class Readings:
    """`at`: moment -> what was read then; of a CPU, once its history is there."""

    def __init__(self, opened: OpenDevice) -> None:
        self.at: dict[str, Reading] = {}
        self._opened = opened
        self._data_bytes: dict[str, int] = {}

    def take(self, moment: str) -> None:
        """Note what allocator and driver say now, and the peaks since the last reading."""
        opened = self._opened
        if opened.device.type == "cuda":
            reading = Reading.now(opened.device, opened.memory.driver_bytes())
            self.at[moment] = reading.with_peaks_of(self.at.get(moment))
        else:
            self._data_bytes[moment] = opened.memory.allocated_bytes()
        self.reset_peaks()

    def reset_peaks(self) -> None:
        if self._opened.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def facts(self, outside: OutsideBytes | None) -> dict[str, Fact]:
        """The peaks of a GPU, and what the process takes beside the allocator."""
        if self._opened.device.type != "cuda":
            return {}
        readings = list(self.at.values())[1:]  # without the one before the step
        peaks = {
            "peak_allocated_bytes": max(one.peak_allocated_bytes or 0 for one in readings),
            "peak_requested_bytes": max(one.peak_requested_bytes or 0 for one in readings),
            "peak_reserved_bytes": max(one.peak_reserved_bytes or 0 for one in readings),
            "driver_bytes": max((one.driver_bytes or 0 for one in readings), default=0) or None,
            "context_bytes": outside and outside.context,
            "kernels_bytes": outside and outside.step,
        }
        return facts_of(**peaks)

    def add_cpu(self, cpu: CpuMemory, ledger: Ledger) -> dict[str, Fact]:
        """A CPU's allocator tells its count with each event; the moments' positions say which. What the process had at the
        peak: what was read when most was held, and as much as tensors then took more."""
        for moment, position in ledger.window.moments.items():
            since = cpu.allocated_bytes(ledger.timeline.time_us(position))
            self.at[moment] = Reading(allocated_bytes=since + ledger.timeline.held_before_bytes)
        peak = self.at["peak"].allocated_bytes
        read = self._data_bytes.keys() & self.at.keys()
        fullest = max(read, key=lambda moment: self.at[moment].allocated_bytes)
        data = self._data_bytes[fullest] + peak - self.at[fullest].allocated_bytes
        return facts_of(peak_allocated_bytes=peak, process_data_bytes=data)

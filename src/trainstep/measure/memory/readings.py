"""Reads the allocator's and the driver's figures at the moments of a recorded step, on a CPU from its history."""

from dataclasses import dataclass, replace

import torch

from trainstep.measure.memory.empty_process import OutsideBytes
from trainstep.measure.step.built_step import OpenDevice
from trainstep.records.facts import Fact, facts_of
from trainstep.traces.cpu_memory import CpuMemory
from trainstep.traces.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the allocator and the driver say at a moment, and the peaks since the reading before it."""

    allocated_bytes: int
    reserved_bytes: int | None = None
    fragmented_bytes: int | None = None
    """Free bytes in segments that are partly in use."""
    driver_bytes: int | None = None
    pool_unused_bytes: int | None = None
    """Bytes in a graph's pool that no tensor has."""
    peak_allocated_bytes: int | None = None
    peak_requested_bytes: int | None = None
    peak_reserved_bytes: int | None = None

    def with_peaks_of(self, other: "Reading | None") -> "Reading":
        """This reading with the higher of each peak."""
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
    """Takes the readings. `at`: moment -> reading; on a CPU it is filled by `add_cpu`."""

    def __init__(self, opened: OpenDevice) -> None:
        self.at: dict[str, Reading] = {}
        self._opened = opened
        self._data_bytes: dict[str, int] = {}

    def take(self, moment: str, *, pool_unused_bytes: int | None = None) -> None:
        """Note what the allocator and the driver say now, and the peaks since the last reading."""
        opened = self._opened
        if opened.device.type == "cuda":
            reading = Reading.now(opened.device, opened.memory.driver_bytes())
            reading = replace(reading, pool_unused_bytes=pool_unused_bytes)
            self.at[moment] = reading.with_peaks_of(self.at.get(moment))  # a phase is read in each micro-batch
        else:
            self._data_bytes[moment] = opened.memory.allocated_bytes()
        self.reset_peaks()

    def begin_step(self) -> None:
        """Drop the readings of a step that was recorded in vain, and count peaks anew."""
        self.at = {moment: reading for moment, reading in self.at.items() if moment == "init"}
        self._data_bytes = {moment: size for moment, size in self._data_bytes.items() if moment == "init"}
        self.reset_peaks()

    def reset_peaks(self) -> None:
        if self._opened.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def facts(self, outside: OutsideBytes | None) -> dict[str, Fact]:
        """On a GPU, the peaks of the step, and what the process takes beside the allocator."""
        if self._opened.device.type != "cuda":
            return {}
        readings = list(self.at.values())[1:]  # the first was taken before the step
        peaks = {
            "peak_allocated_bytes": max(reading.peak_allocated_bytes or 0 for reading in readings),
            "peak_requested_bytes": max(reading.peak_requested_bytes or 0 for reading in readings),
            "peak_reserved_bytes": max(reading.peak_reserved_bytes or 0 for reading in readings),
            "driver_bytes": max((reading.driver_bytes or 0 for reading in readings), default=0) or None,
            "context_bytes": outside and outside.context,
            "kernels_bytes": outside and outside.step,
        }
        return facts_of(**peaks)

    def add_cpu(self, cpu: CpuMemory, ledger: Ledger) -> dict[str, Fact]:
        """Fill `at` from a CPU's history, and return the facts of the peak."""
        # A CPU's allocator states its count with each event; the positions of the moments say which event to read.
        for moment, position in ledger.window.moments.items():
            since = cpu.allocated_bytes(ledger.timeline.time_us(position))
            self.at[moment] = Reading(allocated_bytes=since + ledger.timeline.held_before_bytes)
        # The process was read at some moments only. Its data at the peak is what it had at the fullest of them, plus what
        # tensors took more at the peak.
        peak_bytes = self.at["peak"].allocated_bytes
        fullest = max(self._data_bytes.keys() & self.at.keys(), key=lambda moment: self.at[moment].allocated_bytes)
        data_bytes = self._data_bytes[fullest] + peak_bytes - self.at[fullest].allocated_bytes
        return facts_of(peak_allocated_bytes=peak_bytes, process_data_bytes=data_bytes)

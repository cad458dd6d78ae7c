"""The ceilings over a device's kernels: measured ones where a record has them, else the data sheet's; unknown, none."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.config.machine import machine_spec
from trainstep.records.record import Record
from trainstep.report.device_work import CountedWork
from trainstep.report.rows import Row

_MEASURED = "measured here"


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """A rate, FLOP/s or bytes/s, and where it is from."""

    rate: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """`memory`: bytes/s of the device's own memory; `arithmetic`: FLOP/s by dtype of the operands."""

    memory: Ceiling
    arithmetic: dict[str, Ceiling]

    def ridge(self, dtype: str) -> float:
        """FLOP per byte below which memory is the limit, above which arithmetic is."""
        return self.arithmetic[dtype].rate / self.memory.rate

    def over(self, work: CountedWork) -> float | None:
        """The most FLOP/s that work of its intensity can reach; None where its dtype has no ceiling."""
        found = self.arithmetic.get(work.dtype)
        return None if found is None else min(found.rate, work.intensity * self.memory.rate)

    def share(self, work: CountedWork) -> float | None:
        """What it reached of that."""
        roof = self.over(work)
        return None if roof is None else work.flops_per_s / roof

    def is_memory_bound(self, work: CountedWork) -> bool:
        return work.dtype in self.arithmetic and work.intensity < self.ridge(work.dtype)


def ceilings_of(record: Record, rows: Sequence[Row]) -> Ceilings | None:
    """The ceilings of the machine that made a record, from ceiling records beside it or its GPU's data sheet."""
    measured = [row.record for row in rows if _is_ceiling_of(row.record, record)]
    arithmetic = _data_sheet(record) | {
        str(one.config["dtype"]): Ceiling(rate=one.fact("rate"), source=_MEASURED)
        for one in measured
        if one.config["kind"] == "matmul"
    }
    copies = [one.fact("rate") for one in measured if one.config["kind"] == "copy"]
    spec = machine_spec(record.environment.gpu) if record.config.get("device") == "cuda" else None
    if copies:
        memory = Ceiling(rate=max(copies), source=_MEASURED)
    elif spec is not None:
        memory = Ceiling(rate=spec.memory_bytes_per_s, source=spec.source)
    else:
        return None
    return Ceilings(memory=memory, arithmetic=arithmetic) if arithmetic else None


def _data_sheet(record: Record) -> dict[str, Ceiling]:
    spec = machine_spec(record.environment.gpu) if record.config.get("device") == "cuda" else None
    return {dtype: Ceiling(rate=rate, source=spec.source) for dtype, rate in spec.peak_flops.items()} if spec else {}


def _is_ceiling_of(ceiling: Record, record: Record) -> bool:
    """The same chip of the same kind of machine, whatever the host is called: the nodes of a cluster are alike."""
    on = (record.config.get("device"), record.environment.gpu, record.environment.cpu)
    return (
        ceiling.workload == "ceiling"
        and ceiling.fact("rate") is not None
        and (ceiling.config.get("device"), ceiling.environment.gpu, ceiling.environment.cpu) == on
    )

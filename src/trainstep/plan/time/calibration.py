"""How fast a machine is, as measured: matmuls by shape, attention by length, memory by kind of kernel, messages, the host.

    calibration = shipped("NVIDIA H200")            # or data_sheet(...), scaled_to(spec), stored.py: read_calibration(path)
    calibration.kernel_s(kernel, symbols)           # Estimate(time_s=..., spread=...)

A calibration is a record of the workload `calibration`, whose tables hold the measured points (records/tables.py); fits and curves
are made of them here when it is read. What was not measured is taken from the nearest that was, with a wider spread and its name
in `guesses`. `spread` is the relative standard deviation that is assumed of a time.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from trainstep.config.machine import MachineSpec, machine_spec
from trainstep.grouping import grouped
from trainstep.plan.time.attention_speed import AttentionSpeed, attention_speeds, seconds_of_attention
from trainstep.plan.time.fits import Curve, curve_of, nonnegative_fit
from trainstep.plan.time.kernels import ATTENTION_KINDS, Kernel, Kind
from trainstep.plan.time.matmul_work import matmul_work
from trainstep.plan.time.power import LIMITED
from trainstep.records.record import Record, record_from_plain
from trainstep.records.tables import table_lines

WORKLOAD = "calibration"
_GUESSED = 0.15
"""Spread of a time that is taken from another measurement."""
_SCALED = 0.12
"""Spread that another GPU's efficiency adds."""
_SAME_CHIP = 0.05
"""The same, where the chip is the measured one and only its memory differs. Predictions of 23 captured steps on H100s are off by
5.7 %, root mean square (results/h100/plan_grids.jsonl, plan_grids_ranks.jsonl)."""
_BUSY_CPU = 0.2
"""Spread that a CPU's other work adds."""
_INSTEAD: Mapping[Kind, Sequence[Kind]] = {
    Kind.BROADCAST: (Kind.CONTIGUOUS,),
    Kind.STRIDED: (Kind.BROADCAST, Kind.CONTIGUOUS),
    Kind.WIDENED: (Kind.BROADCAST, Kind.CONTIGUOUS),
    Kind.ROWS: (Kind.CONTIGUOUS,),
    Kind.COLUMNS: (Kind.ROWS, Kind.CONTIGUOUS),
    Kind.SOFTMAX: (Kind.ROWS, Kind.CONTIGUOUS),
    Kind.COMPILED: (Kind.CONTIGUOUS,),
    Kind.COMPILED_PAIRS: (Kind.STRIDED, Kind.COMPILED, Kind.CONTIGUOUS),
    Kind.COMPILED_PERMUTED: (Kind.STRIDED, Kind.COMPILED, Kind.CONTIGUOUS),
    Kind.COMPILED_COLUMNS: (Kind.COMPILED, Kind.COLUMNS, Kind.CONTIGUOUS),
    Kind.FUSED: (Kind.COMPILED, Kind.CONTIGUOUS),
    Kind.FUSED_COLUMNS: (Kind.COMPILED_COLUMNS, Kind.FUSED, Kind.COLUMNS, Kind.CONTIGUOUS),
    Kind.LOSS: (Kind.SOFTMAX, Kind.CONTIGUOUS),
    Kind.LOSS_BACKWARD: (Kind.SOFTMAX, Kind.CONTIGUOUS),
    Kind.EMBEDDING_BACKWARD: (Kind.STRIDED, Kind.CONTIGUOUS),
}
"""Kind of traffic -> the kinds whose curves are taken, in this order, where its own was not measured."""
_FP32_UPDATE = 28
"""Bytes that an update of an fp32 parameter reads and writes."""
_SAME_UNITS = {"fp16": "bf16", "bf16": "fp16"}
"""Matrix units multiply both equally fast."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A predicted time with its relative standard deviation, and what was guessed for it."""

    time_s: float
    spread: float
    guess: str = ""


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """Seconds that the host takes for one action, from a quiet machine's to a busy one's."""

    low_s: float
    middle_s: float
    high_s: float


@dataclass(frozen=True, kw_only=True)
class MatmulSpeed:
    """time = fixed_s + work / rate (matmul_work.py)."""

    fixed_s: float
    flops_per_s: float
    spread: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A machine's speeds. `units`: multiprocessors, 1 of a CPU."""

    name: str
    units: int
    matmuls: Mapping[str, MatmulSpeed]
    traffic: Mapping[Kind, tuple[Curve, float]]
    attention: Mapping[tuple[str, str, str, int], AttentionSpeed]
    """Implementation, dtype, direction and head width."""
    optimizers: Mapping[str, tuple[Curve, float]]
    host: Mapping[str, HostCost]
    gaps: Mapping[str, float]
    """Seconds for each kernel: `graph` and `eager` between two kernels, `graph launch` of the launch of their graph."""
    collectives: Mapping[tuple[str, int], tuple[Curve, float]]
    """Operation and ranks -> seconds by bytes."""
    extra_spread: float = 0.0
    """Spread of all times together: those of another GPU, or of a busy CPU."""
    origin: str = ""
    """Where the calibration came from, in words."""
    power_limited: bool = False
    """Whether power.py knows this chip."""
    peaks: Mapping[str, float] = field(default_factory=dict)
    """A data sheet's FLOP/s by dtype, for a dtype that was not measured."""
    used: frozenset[str] = frozenset()
    """Keys of the records that points come from; these records are not graded."""

    def kernel_s(self, kernel: Kernel, symbols: Mapping[str, int]) -> Estimate:
        """The time of one such kernel, without the gap before it. ValueError if nothing like it was measured."""
        if kernel.kind == Kind.MATMUL:
            estimate = self._matmul_s(kernel, symbols)
        elif kernel.kind in ATTENTION_KINDS:
            direction = "forward" if kernel.kind == Kind.ATTENTION_FORWARD else "backward"
            dtype = "fp32" if kernel.element_bytes == 4 else "bf16"
            time_s, spread, guess = seconds_of_attention(
                self.attention, kernel.op, dtype, direction, symbols, units=self.units, matmul=self._rate(dtype)
            )
            estimate = Estimate(time_s=time_s, spread=spread, guess=guess)
        elif kernel.kind == Kind.OPTIMIZER and kernel.op in self.optimizers:
            curve, spread = self.optimizers[kernel.op]
            guess = "AdamW's fused kernel on 16-bit weights by its bytes" if kernel.element_bytes < _FP32_UPDATE else ""
            guess = guess if kernel.op == "fused" else ""
            estimate = Estimate(
                time_s=curve.seconds(kernel.nbytes(symbols)), spread=0.25 if guess else spread, guess=guess
            )
        else:
            estimate = self._traffic_s(kernel.kind, kernel.nbytes(symbols))
        return estimate

    def _matmul_s(self, kernel: Kernel, symbols: Mapping[str, int]) -> Estimate:
        speed, guess = self._matmul_speed(kernel.dtype)
        m, n, k, batch = kernel.matrix(symbols)
        element_bytes = 2 if kernel.dtype in ("bf16", "fp16") else 4
        work = matmul_work(kernel.dtype, m, n, k, batch, self.units)
        moved = self._traffic_s(Kind.CONTIGUOUS, element_bytes * batch * (m * k + k * n + m * n))
        time_s = max(speed.fixed_s + work / speed.flops_per_s, moved.time_s)
        return Estimate(time_s=time_s, spread=_GUESSED if guess else speed.spread, guess=guess)

    def _matmul_speed(self, dtype: str) -> tuple[MatmulSpeed, str]:
        if dtype in self.matmuls:
            return self.matmuls[dtype], ""
        same = _SAME_UNITS.get(dtype, dtype)
        if same in self.matmuls:
            return self.matmuls[same], ""
        for other, speed in self.matmuls.items():
            if dtype in self.peaks and other in self.peaks and (other != "fp32" or dtype == "fp32"):
                rate = speed.flops_per_s * self.peaks[dtype] / self.peaks[other]
                return replace(speed, flops_per_s=rate), f"{dtype} matmuls as {other}'s share of their peak"
        raise ValueError(
            f"calibration: {self.name} has no matmuls in {dtype}; it has {', '.join(self.matmuls) or 'none'}: measure it with "
            "trainstep doctor --measure, or take another precision"
        )

    def _rate(self, dtype: str) -> float:
        try:
            return self._matmul_speed(dtype)[0].flops_per_s
        except ValueError:
            return next(iter(self.matmuls.values())).flops_per_s

    def _traffic_s(self, kind: Kind, nbytes: float) -> Estimate:
        for known in (kind, *_INSTEAD.get(kind, (Kind.CONTIGUOUS,))):
            if known in self.traffic:
                curve, spread = self.traffic[known]
                guess = "" if known == kind else f"{kind} kernels as {known} ones"
                return Estimate(time_s=curve.seconds(nbytes), spread=max(spread, _GUESSED if guess else 0), guess=guess)
        raise ValueError(
            f"calibration: {self.name} has no traffic of memory; measure it with trainstep doctor --measure"
        )


_HOST_COSTS = frozenset({"forward launch", "backward launch", "optimizer tensor", "eager", "graph"})


def calibration_of(record: Record, *, origin: str = "") -> Calibration:
    """The fits and curves of a record of the workload `calibration`. ValueError names what is missing."""
    tables = {name: table_lines(columns) for name, columns in record.tables.items()}
    units = record.fact("multiprocessors", 0)
    if units < 1:
        raise ValueError(
            "calibration: its record does not say how many multiprocessors were measured; measure it again"
        )
    name = record.environment.gpu or record.environment.cpu
    if not tables.get("matmuls") or not tables.get("traffic"):
        raise ValueError("calibration: its record has no table of matmuls, or none of traffic; measure it again")
    _check_points(tables)
    missing = sorted(_HOST_COSTS - {row["what"] for row in tables.get("host", [])}) if units > 1 else []
    if missing:  # without it a GPU would never seem to wait for its host
        raise ValueError(f"calibration: its record has no host's cost of {missing[0]}; measure it again")
    matmuls = {}
    for dtype, rows in grouped(tables["matmuls"], lambda row: row["dtype"]).items():
        matmuls[dtype] = _speed_of_matmuls(
            [matmul_work(dtype, row["m"], row["n"], row["k"], row["batch"], units) for row in rows],
            [row["time_s"] for row in rows],
        )
    traffic = {
        Kind(kind): curve_of([(row["bytes"], row["time_s"]) for row in rows])
        for kind, rows in grouped(tables["traffic"], lambda row: row["kind"]).items()
    }
    optimizers = {
        name: curve_of([(row["bytes"], row["time_s"]) for row in rows])
        for name, rows in grouped(tables.get("optimizers", []), lambda row: row["name"]).items()
    }
    collectives = {
        key: curve_of([(row["bytes"], row["time_s"]) for row in rows])
        for key, rows in grouped(tables.get("collectives", []), lambda row: (row["operation"], row["ranks"])).items()
    }
    host = {
        row["what"]: HostCost(low_s=row["low_s"], middle_s=row["time_s"], high_s=row["high_s"])
        for row in tables.get("host", [])
    }
    spec = machine_spec(record.environment.gpu)
    return Calibration(
        name=name,
        units=units,
        matmuls=matmuls,
        traffic=traffic,
        attention=attention_speeds(tables.get("attention", []), units=units),
        optimizers=optimizers,
        host={what: cost for what, cost in host.items() if what not in _GAPS},
        gaps={what: cost.middle_s for what, cost in host.items() if what in _GAPS},
        collectives=collectives,
        extra_spread=_BUSY_CPU if units == 1 else 0.0,
        origin=origin,
        power_limited=spec is not None and spec.name in LIMITED,
        peaks=spec.peak_flops if spec else {},
        used=frozenset(
            word for rows in tables.values() for row in rows for word in _KEY.findall(row.get("source", ""))
        ),
    )


def _speed_of_matmuls(works: Sequence[float], times_s: Sequence[float]) -> MatmulSpeed:
    """The fit of a dtype's matmuls. Without a rate, as other work slowed the small ones or there is only one, fixed_s is 0."""
    fit = nonnegative_fit([(1.0, work) for work in works], times_s)
    fixed_s, flop_s = fit.factors
    if flop_s == 0:
        fit = nonnegative_fit([(work,) for work in works], times_s)
        fixed_s, (flop_s,) = 0.0, fit.factors
    return MatmulSpeed(fixed_s=fixed_s, flops_per_s=1 / flop_s, spread=fit.spread)


_SIZES = ("m", "n", "k", "batch", "bytes", "batch_heads", "context", "head_dim", "ranks")


def _check_points(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """ValueError for a size or a time that is not positive, and for an unknown kind of kernel."""
    for name, rows in tables.items():
        for number, row in enumerate(rows, start=1):
            wrong = [size for size in _SIZES if size in row and not row[size] > 0]
            if not (row["time_s"] > 0 if name != "host" else 0 <= row["low_s"] <= row["time_s"] <= row["high_s"]):
                wrong.append("time_s")
            if wrong:
                raise ValueError(
                    f"calibration: row {number} of its table {name} has {wrong[0]} {row[wrong[0]]}, which cannot be; measure "
                    "it again"
                )
            if name == "traffic" and row["kind"] not in {str(kind) for kind in Kind}:
                raise ValueError(
                    f"calibration: {row['kind']!r} is not a kind of kernel that this version knows; update trainstep"
                )


_KEY = re.compile(r"\b[0-9a-f]{16}\b")
_GAPS = ("graph", "eager", "graph launch")


def shipped(gpu: str) -> Calibration | None:
    """The calibration that comes with trainstep for this GPU (the driver's name), or None."""
    name = _SHIPPED.get(gpu)
    if name is None:
        return None
    text = (files("trainstep.plan.time") / "calibrations" / name).read_text(encoding="utf-8")
    return calibration_of(record_from_plain(json.loads(text)), origin=f"shipped, {gpu} (results/h200)")


def calibration_for(spec: MachineSpec | None) -> Calibration | None:
    """The calibration that comes with trainstep for this data sheet's GPU, else H200's at its rates; None without a data sheet."""
    if spec is None:
        return None
    return next((shipped(gpu) for gpu in _SHIPPED if machine_spec(gpu) == spec), None) or scaled_to(spec)


_REFERENCE = "NVIDIA H200"
_SHIPPED = {_REFERENCE: "h200.json"}
_HOPPER = ("GH200", "H100", "H200")
"""How the names of Hopper's data sheets begin: there torch's own attention is cuDNN's, as measured on an H200."""


def scaled_to(spec: MachineSpec) -> Calibration:
    """H200's efficiencies at a data sheet's rates: matmuls and attention by FLOP/s, the rest by bandwidth; the host's as it is.

    A kernel that its multiprocessors limit on an H200, so that it is far from the bandwidth, takes longer on slower memory only
    where that becomes its limit: time x min(slower, max(FLOP/s in fp32, bytes / what contiguous kernels reach)).
    """
    base, reference = shipped(_REFERENCE), machine_spec(_REFERENCE)
    assert base is not None and reference is not None
    slower = reference.memory_bytes_per_s / spec.memory_bytes_per_s
    computes = reference.peak_flops["fp32"] / spec.peak_flops["fp32"]
    last_bytes, last_s = base.traffic[Kind.CONTIGUOUS][0].points[-1]
    reached = last_bytes / last_s / slower

    def by_peak(dtype: str) -> float:
        return spec.peak_flops[dtype] / reference.peak_flops[dtype]

    def stretched(curves: Mapping[Any, tuple[Curve, float]], factor: float) -> dict[Any, tuple[Curve, float]]:
        def curve(old: Curve) -> Curve:
            # What does not grow with bytes is a launch, which bandwidth does not change.
            floor = old.points[0][1]
            return Curve(points=tuple((nbytes, floor + (time_s - floor) * factor) for nbytes, time_s in old.points))

        return {kind: (curve(old), spread) for kind, (old, spread) in curves.items()}

    def traffic(old: Curve) -> Curve:
        floor = old.points[0][1]
        points = []
        for nbytes, time_s in old.points:
            moving_s = time_s - floor
            limited_s = max(computes * moving_s, nbytes / reached) if slower > 1 else slower * moving_s
            points.append((nbytes, floor + min(slower * moving_s, limited_s)))
        return Curve(points=tuple(points))

    link = 1.0
    if reference.link_bytes_per_s and spec.link_bytes_per_s:
        link = reference.link_bytes_per_s / spec.link_bytes_per_s
    return replace(
        base,
        name=spec.name,
        matmuls={
            dtype: replace(speed, flops_per_s=speed.flops_per_s * by_peak(dtype))
            for dtype, speed in base.matmuls.items()
        },
        traffic={kind: (traffic(old), spread) for kind, (old, spread) in base.traffic.items()},
        optimizers=stretched(base.optimizers, slower),
        attention={
            key: replace(speed, flops_per_s=speed.flops_per_s * by_peak(key[1]))
            for key, speed in base.attention.items()
            if key[0] != "sdpa" or spec.name.startswith(_HOPPER)
        },
        collectives=stretched(base.collectives, link) if spec.link_bytes_per_s else {},
        extra_spread=_SAME_CHIP if spec.name in LIMITED else _SCALED,
        origin=f"H200's efficiency at the data sheet's rates ({spec.source})",
        power_limited=spec.name in LIMITED,
        peaks=spec.peak_flops,
    )


def data_sheet(*, peak_tflops: float, memory_bytes_per_s: float) -> Calibration:
    """H200's efficiencies at a bandwidth and a peak of 16-bit matmuls; tf32 has half of the peak and fp32 a fifteenth."""
    peak = peak_tflops * 1e12
    peaks = {"bf16": peak, "fp16": peak, "tf32": peak / 2, "fp32": peak / 15}
    spec = MachineSpec(
        name=f"a GPU of {peak_tflops:g} TFLOP/s and {memory_bytes_per_s / 1e12:g} TB/s",
        peak_flops=peaks,
        memory_bytes_per_s=memory_bytes_per_s,
        source="as given",
        memory_bytes=0,
    )
    return replace(scaled_to(spec), extra_spread=1.5 * _SCALED)

"""Kinds of work of a profiled step whose FLOPs and bytes have a formula: matmuls by span, attention, softmax, the optimizer.

FLOPs and the least bytes come from costs/, times from the record's tables, all of a step. What has no formula here
(element-wise kernels, reductions, copies, norms) is left out, and so is what recomputation runs twice. Over the work stand
ceilings: measured ones where a record has them, else the data sheet's; unknown, none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.config.machine import machine_spec, matmul_dtype
from trainstep.costs.adamw import adamw_bytes, adamw_flops
from trainstep.costs.attention import AttentionSizes, attention_backward_flops, attention_bytes, attention_flops
from trainstep.costs.transformer import forward_flops
from trainstep.costs.weight_matmuls import forward_bytes
from trainstep.records.record import Record
from trainstep.report.rows import Row, of_workload, table_lines
from trainstep.traces.kernel_classes import ATTENTION, IDLE, MATMUL, OPTIMIZER, OVERHEAD, SOFTMAX

_SHAPE = ("layers", "d_model", "d_ff", "vocab_size")
_SPANS = {"attention_projections": "attention projections", "mlp": "mlp", "head": "head"}
_PASSES = {"forward": 1, "backward": 2}
_ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
_VECTOR_DTYPE = "fp32"
"""What softmax and the optimizer compute in, whatever the matmuls do: outside the matrix units."""
_KEPT = 0.99
"""A record keeps the longest kernels of a phase by name: spans are told apart where these hold so much of its matmuls' time."""
_MEASURED = "measured here"
Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class CountedWork:
    """One kind of work in one phase. `dtype`: of the arithmetic ceiling that stands over it."""

    name: str
    kind: str
    phase: str
    dtype: str
    calls: float
    time_s: float
    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.time_s

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.time_s

    @property
    def call_s(self) -> float:
        return self.time_s / self.calls


def work_of(record: Record) -> list[CountedWork]:
    """The work of a profiled step, in the order of phases; empty for a failure."""
    classes = record.tables.get("classes")
    if record.failure is not None or not classes:
        return []
    found = [*_matmuls(record), *_written_out(record), *_fused(record), *_optimizer(record)]
    order = list(dict.fromkeys(classes["phase"]))
    return sorted((one for one in found if one.time_s > 0 and one.calls > 0), key=lambda one: order.index(one.phase))


def device_time_s(record: Record) -> float:
    """All the device's work of a step; on a CPU, all time in ops and between them."""
    classes = record.tables.get("classes", {})
    return float(sum(one["time_s"] for one in table_lines(classes) if one["class"] != IDLE))


def _matmuls(record: Record) -> Iterator[CountedWork]:
    """Matmuls with weights: a kind a span where the record keeps enough kernels, else all together."""
    shape = _shape(record)
    if shape is None:
        return
    dtype, micro_batches = _dtype(record), int(record.config.get("accumulation", 1))
    flops = forward_flops(**shape)
    byte_counts = forward_bytes(**shape, element_bytes=_ELEMENT_BYTES[dtype])
    for phase, passes in _phases(record).items():
        total = _class_time(record, phase, MATMUL)
        inside = next((one for one in _attention_rows(record, phase) if one["part"] == "matmuls"), None)
        weights = (total[0] - inside["calls"], total[1] - inside["time_s"]) if inside else total
        for names, (calls, time_s) in _split(record, phase, total) or [(tuple(_SPANS), weights)]:
            yield CountedWork(
                name=_SPANS[names[0]] if len(names) == 1 else "matmuls with weights",
                kind=MATMUL,
                phase=phase,
                dtype=dtype,
                calls=calls,
                time_s=time_s,
                flops=passes * micro_batches * sum(flops[name] for name in names),
                bytes=passes * micro_batches * sum(byte_counts[name] for name in names),
            )


def _split(record: Record, phase: str, total: tuple[float, float]) -> list[tuple[tuple[str, ...], tuple[float, float]]]:
    """Calls and time of each span's matmuls, or nothing where spans are unknown or too many kernels went unnamed."""
    kernels = [
        one
        for one in table_lines(record.tables.get("kernels", {}))
        if one["phase"] == phase and one["class"] == MATMUL and one["span"]
    ]
    if sum(one["time_s"] for one in kernels) < _KEPT * total[1]:
        return []
    mine = {
        name: [one for one in kernels if one["span"] == span or one["span"].startswith(f"{span} ")]
        for name, span in _SPANS.items()
    }
    if not all(mine.values()):
        return []
    return [
        ((name,), (sum(one["calls"] for one in rows), sum(one["time_s"] for one in rows)))
        for name, rows in mine.items()
    ]


def _written_out(record: Record) -> Iterator[CountedWork]:
    """Attention's matmuls and softmax, where it is written out: the profile counted them already."""
    for phase in _phases(record):
        for one in _attention_rows(record, phase):
            if one["flops"] and one["bytes"]:
                is_matmul = one["part"] == "matmuls"
                yield CountedWork(
                    name=f"attention {one['part']}",
                    kind=MATMUL if is_matmul else SOFTMAX,
                    phase=phase,
                    dtype=_dtype(record) if is_matmul else _VECTOR_DTYPE,
                    **{name: one[name] for name in ("calls", "time_s", "flops", "bytes")},
                )


def _fused(record: Record) -> Iterator[CountedWork]:
    """Attention in one kernel a pass: FLOPs under the causal mask, no matrix of scores in memory."""
    shape, heads = _shape(record), record.config.get("model", {}).get("heads")
    if shape is None or not heads:
        return
    times = record.config.get("accumulation", 1) * shape["layers"]
    positions, head_dim = shape["context"], shape["d_model"] // heads
    sides = AttentionSizes(
        batch=shape["batch_size"], heads=heads, key_heads=heads, queries=positions, keys=positions, head_dim=head_dim
    )
    flops = {"forward": attention_flops, "backward": attention_backward_flops}
    for phase in _phases(record):
        calls, time_s = _class_time(record, phase, ATTENTION)
        moved = attention_bytes(
            sides, element_bytes=_ELEMENT_BYTES[_dtype(record)], written_out=False, backward=phase == "backward"
        )
        yield CountedWork(
            name="attention",
            kind=ATTENTION,
            phase=phase,
            dtype=_dtype(record),
            calls=calls,
            time_s=time_s,
            flops=times * flops[phase](sides.batch * heads, positions, positions, head_dim, causal=True),
            bytes=times * moved.needed,
        )


def _optimizer(record: Record) -> Iterator[CountedWork]:
    """AdamW, its whole phase; not with clipping, which reads every gradient once more."""
    parameters = record.fact("parameters")
    rows = [
        one
        for one in table_lines(record.tables["classes"])
        if one["phase"] == "optimizer" and one["class"] not in (IDLE, OVERHEAD)
    ]
    if not parameters or not rows or record.config.get("clip_grad_norm") is not None:
        return
    element_bytes = 2 if record.config.get("precision") == "bf16" else 4
    yield CountedWork(
        name="AdamW",
        kind=OPTIMIZER,
        phase="optimizer",
        dtype=_VECTOR_DTYPE,
        calls=sum(one["calls"] for one in rows),
        time_s=sum(one["time_s"] for one in rows),
        flops=adamw_flops(int(parameters)),
        bytes=adamw_bytes(int(parameters), element_bytes),
    )


def _shape(record: Record) -> dict[str, int] | None:
    """Of the built-in model; None for a user's own, whose matmuls are not known."""
    model = record.config.get("model", {})
    sizes = {name: model.get(name) for name in _SHAPE} | {
        name: record.config.get(name) for name in ("batch_size", "context")
    }
    return {name: int(size) for name, size in sizes.items()} if all(sizes.values()) else None


def _phases(record: Record) -> dict[str, int]:
    """Phase -> how many matmuls it runs for each of forward's, of the phases that were profiled."""
    present = set(record.tables["classes"]["phase"])
    recomputes = record.config.get("recompute", "none") != "none"
    return {
        name: passes for name, passes in _PASSES.items() if name in present and not (recomputes and name == "backward")
    }


def _dtype(record: Record) -> str:
    return matmul_dtype(str(record.config.get("precision", "fp32")))


def _class_time(record: Record, phase: str, kind: str) -> tuple[float, float]:
    """Calls and seconds."""
    mine = [one for one in table_lines(record.tables["classes"]) if one["phase"] == phase and one["class"] == kind]
    return sum(one["calls"] for one in mine), sum(one["time_s"] for one in mine)


def _attention_rows(record: Record, phase: str) -> list[dict[str, Any]]:
    return [one for one in table_lines(record.tables.get("attention", {})) if one["phase"] == phase]


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
    measured = [row.record for row in of_workload(rows, "ceiling") if _is_ceiling_of(row.record, record)]
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
        ceiling.fact("rate") is not None
        and (ceiling.config.get("device"), ceiling.environment.gpu, ceiling.environment.cpu) == on
    )


def roof_name(dtype: str, kind: str) -> str:
    """What computes there: on NVIDIA's GPUs fp32 has no matrix units."""
    if kind != "cuda":
        return f"{dtype} matmul"
    return f"{dtype}, CUDA cores" if dtype == "fp32" else f"{dtype}, tensor cores"

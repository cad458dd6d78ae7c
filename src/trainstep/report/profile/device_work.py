"""Counts the FLOPs and bytes of the kinds of work in a profiled step, and finds the device's ceilings.

FLOPs and the least bytes come from costs/, times from the record's tables, all for one step. Work without a formula (element-wise
kernels, reductions, copies, norms) is left out, and so is work that recomputation runs twice. Ceilings are measured if a record
has them, else from the data sheet of the GPU; for other devices there are none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.config.machine import machine_spec, matmul_dtype
from trainstep.costs.attention import AttentionSizes, attention_backward_flops, attention_bytes, attention_flops
from trainstep.costs.transformer import adamw_bytes, adamw_flops, forward_bytes, forward_flops
from trainstep.records.record import Record
from trainstep.records.tables import table_lines
from trainstep.report.kit.rows import Row, of_workload
from trainstep.traces.kernel_classes import ATTENTION, IDLE, MATMUL, OPTIMIZER, OVERHEAD, SOFTMAX

_SHAPE = ("layers", "d_model", "d_ff", "vocab_size")
_SPANS = {"attention_projections": "attention projections", "mlp": "mlp", "head": "head"}
_PASSES = {"forward": 1, "backward": 2}
_ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
_VECTOR_DTYPE = "fp32"
"""The dtype of softmax and the optimizer for any precision: they do not run on the matrix units."""
_KEPT = 0.99
"""The least share of a phase's matmul time in named kernels at which matmuls are split by span; a record names only the longest."""
_MEASURED = "measured here"


@dataclass(frozen=True, kw_only=True)
class CountedWork:
    """One kind of work in one phase. `dtype` chooses the arithmetic ceiling."""

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
    """The counted work of a profiled step, in the order of phases; empty for a failure."""
    classes = record.tables.get("classes")
    if record.failure is not None or not classes:
        return []
    work = [*_matmuls(record), *_plain_attention(record), *_fused_attention(record), *_optimizer(record)]
    order = list(dict.fromkeys(classes["phase"]))
    return sorted(
        (item for item in work if item.time_s > 0 and item.calls > 0), key=lambda item: order.index(item.phase)
    )


def device_time_s(record: Record) -> float:
    """The time of all of the device's work in a step; on a CPU, the time in and between ops."""
    return float(sum(line["time_s"] for line in table_lines(record.tables.get("classes")) if line["class"] != IDLE))


def _matmuls(record: Record) -> Iterator[CountedWork]:
    """Matmuls with weights, by span if the record names enough kernels, else as one kind of work."""
    shape = _shape(record)
    if shape is None:
        return
    dtype, micro_batches = _dtype(record), int(record.config.get("accumulation", 1))
    flops = forward_flops(**shape)
    byte_counts = forward_bytes(**shape, element_bytes=_ELEMENT_BYTES[dtype])
    for phase, passes in _phases(record).items():
        total = _total(_lines(record, "classes", phase, MATMUL))
        inside = _total(line for line in _lines(record, "attention", phase) if line["part"] == "matmuls")
        weights = (total[0] - inside[0], total[1] - inside[1])
        for names, (calls, time_s) in _split(record, phase, total[1]) or [(tuple(_SPANS), weights)]:
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


def _split(record: Record, phase: str, matmuls_s: float) -> list[tuple[tuple[str, ...], tuple[float, float]]]:
    """Calls and seconds of each span's matmuls; empty if spans are unknown or too many kernels are not named."""
    kernels = [line for line in _lines(record, "kernels", phase, MATMUL) if line["span"]]
    if _total(kernels)[1] < _KEPT * matmuls_s:
        return []
    by_span = {
        name: [line for line in kernels if line["span"] == span or line["span"].startswith(f"{span} ")]
        for name, span in _SPANS.items()
    }
    return [((name,), _total(lines)) for name, lines in by_span.items()] if all(by_span.values()) else []


def _plain_attention(record: Record) -> Iterator[CountedWork]:
    """The matmuls and softmax of plain attention, which the profile has already counted."""
    for phase in _phases(record):
        for line in _lines(record, "attention", phase):
            if line["flops"] and line["bytes"]:
                is_matmul = line["part"] == "matmuls"
                yield CountedWork(
                    name=f"attention {line['part']}",
                    kind=MATMUL if is_matmul else SOFTMAX,
                    phase=phase,
                    dtype=_dtype(record) if is_matmul else _VECTOR_DTYPE,
                    **{name: line[name] for name in ("calls", "time_s", "flops", "bytes")},
                )


def _fused_attention(record: Record) -> Iterator[CountedWork]:
    """Attention in one kernel per pass: FLOPs under the causal mask, and no matrix of scores in memory."""
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
        calls, time_s = _total(_lines(record, "classes", phase, ATTENTION))
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
    """AdamW: the whole phase of the optimizer."""
    parameters = record.fact("parameters")
    # Clipping reads every gradient once more, which the formula does not count; an update in backward is in another phase.
    config = record.config
    if not parameters or config.get("clip_grad_norm") is not None or config.get("update") == "in_backward":
        return
    lines = (line for line in _lines(record, "classes", "optimizer") if line["class"] not in (IDLE, OVERHEAD))
    calls, time_s = _total(lines)
    element_bytes = 2 if config.get("precision") == "bf16" else 4
    yield CountedWork(
        name="AdamW",
        kind=OPTIMIZER,
        phase="optimizer",
        dtype=_VECTOR_DTYPE,
        calls=calls,
        time_s=time_s,
        flops=adamw_flops(int(parameters)),
        bytes=adamw_bytes(int(parameters), element_bytes),
    )


def _shape(record: Record) -> dict[str, int] | None:
    """The sizes of the built-in model; None for a user's model, whose matmuls are unknown."""
    model = record.config.get("model", {})
    sizes = {name: model.get(name) for name in _SHAPE}
    sizes |= {name: record.config.get(name) for name in ("batch_size", "context")}
    return {name: int(size) for name, size in sizes.items()} if all(sizes.values()) else None


def _phases(record: Record) -> dict[str, int]:
    """Profiled phase -> the number of matmuls that it runs for each matmul of forward."""
    present = set(record.tables["classes"]["phase"])
    config = record.config
    recomputes = config.get("recompute", "none") != "none" or config.get("recompute_budget_gib") is not None
    return {
        name: passes for name, passes in _PASSES.items() if name in present and not (recomputes and name == "backward")
    }


def _dtype(record: Record) -> str:
    return matmul_dtype(str(record.config.get("precision", "fp32")))


def _lines(record: Record, table: str, phase: str, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a table for this phase and, if `kind` is given, this class of kernels."""
    lines = table_lines(record.tables.get(table))
    return [line for line in lines if line["phase"] == phase and kind in (None, line.get("class"))]


def _total(lines: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """The sums of calls and seconds."""
    totals = [(line["calls"], line["time_s"]) for line in lines]
    return sum(calls for calls, _ in totals), sum(time_s for _, time_s in totals)


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """A rate in FLOP/s or bytes/s, and its source."""

    rate: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The ceilings of a device. `memory`: bytes/s of its memory; `arithmetic`: FLOP/s by dtype of the operands."""

    memory: Ceiling
    arithmetic: dict[str, Ceiling]

    def ridge(self, dtype: str) -> float:
        """The FLOP per byte below which memory is the limit, and above which arithmetic is."""
        return self.arithmetic[dtype].rate / self.memory.rate

    def share(self, work: CountedWork) -> float | None:
        """The FLOP/s reached over the most that work of this intensity can reach; None if its dtype has no ceiling."""
        ceiling = self.arithmetic.get(work.dtype)
        return work.flops_per_s / min(ceiling.rate, work.intensity * self.memory.rate) if ceiling else None

    def is_memory_bound(self, work: CountedWork) -> bool:
        return work.dtype in self.arithmetic and work.intensity < self.ridge(work.dtype)


def ceilings_of(record: Record, rows: Sequence[Row]) -> Ceilings | None:
    """The ceilings of a record's machine, from records of ceilings in `rows`, else from its GPU's data sheet; None if unknown."""
    memory: Ceiling | None = None
    arithmetic: dict[str, Ceiling] = {}
    spec = machine_spec(record.environment.gpu) if record.config.get("device") == "cuda" else None
    if spec is not None:
        memory = Ceiling(rate=spec.memory_bytes_per_s, source=spec.source)
        arithmetic = {dtype: Ceiling(rate=rate, source=spec.source) for dtype, rate in spec.peak_flops.items()}
    measured = [row.record for row in of_workload(rows, "ceiling") if _chip(row.record) == _chip(record)]
    rates = [(ceiling.config, rate) for ceiling in measured if (rate := ceiling.fact("rate")) is not None]
    if copies := [rate for config, rate in rates if config["kind"] == "copy"]:
        memory = Ceiling(rate=max(copies), source=_MEASURED)
    arithmetic |= {
        config["dtype"]: Ceiling(rate=rate, source=_MEASURED) for config, rate in rates if config["kind"] == "matmul"
    }
    return Ceilings(memory=memory, arithmetic=arithmetic) if memory and arithmetic else None


def _chip(record: Record) -> tuple[str | None, ...]:
    # Not the host's name, because the nodes of a cluster are alike.
    return record.config.get("device"), record.environment.gpu, record.environment.cpu


def roof_name(dtype: str, kind: str) -> str:
    """The name of the units that compute a dtype; on NVIDIA's GPUs fp32 has no matrix units."""
    if kind != "cuda":
        return f"{dtype} matmul"
    return f"{dtype}, CUDA cores" if dtype == "fp32" else f"{dtype}, tensor cores"

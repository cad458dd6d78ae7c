"""The answer of a step's memory: its peak, what holds most of it, and what to cut first, by how much."""

from collections.abc import Mapping, Sequence

from trainstep.config.phases import Phase
from trainstep.records.record import Record
from trainstep.report.answers import Answer
from trainstep.report.forms import byte_words, percent
from trainstep.report.memory_tables import fit_sentences, ledger_of
from trainstep.report.rows import Row, needless, table_lines
from trainstep.traces.ledger import HELD

Ledger = Mapping[str, int]
_WORTH_SHARE = 0.05
"""A share of the peak: what is less is not worth a change."""
_ALONE_SHARE = 0.2
"""A share of the peak: a change on the same devices that saves so much goes before more devices."""


def memory_answer(rows: Sequence[Row]) -> Answer | None:
    """The fullest cell's peak and its largest part; what fits, where that was searched; what would cut most."""
    fits = fit_sentences(rows)
    sized = [(peak_bytes(row.record), row) for row in rows if row.record.failure is None and peak_bytes(row.record)]
    if not sized:
        return Answer(workload="memory", verdict=" ".join(fits))
    size, row = max(sized, key=lambda pair: pair[0])
    name = row.label(without=needless(rows))
    many = f", the most of {len(rows)} cells" if len(rows) > 1 else ""
    ledger = {line: held for line, held in ledger_of(row.record, "peak").items() if line in HELD and held}
    part, part_bytes = max(ledger.items(), key=lambda item: item[1], default=("", 0))
    parts = f": {percent(part_bytes / size)} % {part} ({byte_words(part_bytes)})" if part_bytes else ""
    peak = f"{name} holds {byte_words(size)} at the peak{many}{parts}."
    return Answer(workload="memory", verdict=" ".join([*fits, peak]), suggestion=_cut(row.record, ledger, size))


def peak_bytes(record: Record) -> float:
    """The most that tensors held; on a CPU what its ledger adds up to, else what was resident."""
    for name in ("peak_allocated_bytes", "timeline_peak_bytes", "peak_rss_bytes"):
        if size := record.fact(name):
            return float(size)
    return 0.0


def _cut(record: Record, ledger: Ledger, size: float) -> str:
    """The change that saves most by the ledger; none where none is worth it."""
    alone = [cut for suggest in (_recomputed, _narrower) if (cut := suggest(record, ledger))]
    saved, sentence = max(alone, default=(0.0, ""))
    if saved < _ALONE_SHARE * size and (cut := _sharded(record, ledger)):
        saved, sentence = max(cut, (saved, sentence))
    if saved < _WORTH_SHARE * size:
        return ""
    return f"{sentence} should save up to {byte_words(saved)}, {percent(saved / size)} % of the peak."


def _recomputed(record: Record, ledger: Ledger) -> tuple[float, str] | None:
    """Keep a block's input alone and compute the rest of its activations again."""
    layers, stream_bytes = _layers(record), record.fact("residual_stream_bytes")
    if (
        record.config.get("recompute") != "none"
        or record.config.get("compile") == "block"
        or not layers
        or not stream_bytes
    ):
        return None
    saved = ledger.get("activations", 0) * (1 - 1 / layers) - layers * stream_bytes
    # The optimizer's own peak stays, and is then the peak
    return min(saved, peak_bytes(record) - _optimizer_peak(record)), "`--recompute block` (a third more arithmetic)"


def _sharded(record: Record, ledger: Ledger) -> tuple[float, str] | None:
    """Divide parameters, gradients and optimizer state over ranks."""
    if record.config.get("sync") in ("fsdp", "torch_fsdp2") or record.config.get("mode") != "step":
        return None
    ranks = max(2, int(record.config.get("ranks", 1)))
    held = sum(ledger.get(name, 0) for name in ("parameters", "gradients", "optimizer state"))
    return held * (
        1 - 1 / ranks
    ), f"`--ranks {ranks} --sync fsdp` (each rank holds 1/{ranks} of parameters, gradients and state)"


def _narrower(record: Record, ledger: Ledger) -> tuple[float, str] | None:
    """Weights of 16 bits, where no optimizer updates them: no copies of them either."""
    precision = record.config.get("precision")
    if record.config.get("mode") != "forward_no_grad" or precision not in ("fp32", "tf32", "bf16_autocast"):
        return None
    return ledger.get("parameters", 0) / 2 + ledger.get("autocast weight copies", 0), "`--precision bf16` (weights too)"


def _optimizer_peak(record: Record) -> float:
    lines = table_lines(record.tables.get("peaks"))
    return max((line["allocated_bytes"] or 0.0 for line in lines if line["phase"] == Phase.OPTIMIZER), default=0.0)


def _layers(record: Record) -> int:
    model = record.config.get("model")
    return int(model.get("layers") or 0) if isinstance(model, Mapping) else 0

"""The answer for a step's memory: its peak, the largest part of it, and the change that saves most."""

from collections.abc import Mapping, Sequence

from trainstep.config.run import Phase
from trainstep.records.record import Record
from trainstep.records.tables import table_lines
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import byte_words, percent
from trainstep.report.kit.rows import Row, needless
from trainstep.report.memory.tables import fit_sentences, ledger_of
from trainstep.traces.ledger import HELD

Ledger = Mapping[str, int]
_TAPE = "On a CPU a tape stands in for the graph and keeps every result: only a GPU's record tells what a captured step holds."
_WORTH_SHARE = 0.05
"""The least share of the peak that a suggested change saves."""


def memory_answer(rows: Sequence[Row]) -> Answer | None:
    """What fits, if that was searched; the largest peak and its largest part; the change that saves most."""
    fits = fit_sentences(rows)
    sized = [(peak_bytes(row.record), row) for row in rows if row.record.failure is None and peak_bytes(row.record)]
    if not sized:
        return Answer(workload="memory", verdict=" ".join(fits))
    size, row = max(sized, key=lambda pair: pair[0])
    name = row.label(without=needless(rows))
    most = f", the most of {len(rows)} cells" if len(rows) > 1 else ""
    ledger = {
        line: held_bytes for line, held_bytes in ledger_of(row.record, "peak").items() if line in HELD and held_bytes
    }
    part, part_bytes = max(ledger.items(), key=lambda item: item[1], default=("", 0))
    parts = f": {percent(part_bytes / size)} % {part} ({byte_words(part_bytes)})" if part_bytes else ""
    driver_bytes = row.record.fact("driver_bytes")
    needed = f" The driver counts {byte_words(driver_bytes)}." if driver_bytes else ""
    if pool_bytes := row.record.fact("capture_pool_bytes"):
        graph = f"Of the {byte_words(driver_bytes)}, the graph" if driver_bytes else "The graph"
        needed += f" {graph} keeps {byte_words(pool_bytes)} between launches."
    peak = f"{name} holds {byte_words(size)} at the peak{most}{parts}.{needed}"
    if row.record.fact("captured") not in (None, "nothing") and row.record.config.get("device") == "cpu":
        return Answer(workload="memory", verdict=" ".join([*fits, peak, _TAPE]))
    return Answer(workload="memory", verdict=" ".join([*fits, peak]), suggestion=_saving(row.record, ledger, size))


def peak_bytes(record: Record) -> float:
    """The most bytes that tensors held; on a CPU the sum of the ledger, else the resident memory."""
    for name in ("peak_allocated_bytes", "timeline_peak_bytes", "peak_rss_bytes"):
        if size := record.fact(name):
            return float(size)
    return 0.0


def _saving(record: Record, ledger: Ledger, size: float) -> str:
    """The change that saves most of the peak on the same devices, and with more devices; empty if neither saves enough."""
    alone = max(filter(None, (_recompute(record, ledger), _narrow(record, ledger))), default=None)
    savings = [saving for saving in (alone, _shard(record, ledger)) if saving and saving[0] >= _WORTH_SHARE * size]
    return " ".join(
        f"{change} can save at most {byte_words(saved)}, {percent(saved / size)} % of the peak."
        for saved, change in savings
    )


def _recompute(record: Record, ledger: Ledger) -> tuple[float, str] | None:
    """The bytes saved if only the input of each block is kept and its other activations are computed again."""
    config, stream_bytes = record.config, record.fact("residual_stream_bytes")
    model = config.get("model")
    layers = int(model.get("layers") or 0) if isinstance(model, Mapping) else 0
    if config.get("recompute") != "none" or not layers or not stream_bytes:
        return None
    saved = ledger.get("activations", 0) * (1 - 1 / layers) - layers * stream_bytes
    # The peak cannot fall below the peak of the optimizer, which keeps no activations.
    phases = table_lines(record.tables.get("peaks"))
    optimizer = max(
        (line["allocated_bytes"] or 0.0 for line in phases if line["phase"] == Phase.OPTIMIZER), default=0.0
    )
    return min(saved, peak_bytes(record) - optimizer), "`--recompute block` (a third more arithmetic)"


def _shard(record: Record, ledger: Ledger) -> tuple[float, str] | None:
    """The bytes saved if parameters, gradients and optimizer state are divided over ranks."""
    if record.config.get("sync") in ("fsdp", "torch_fsdp2") or record.config.get("mode") != "step":
        return None
    ranks = max(2, int(record.config.get("ranks", 1)))
    state_bytes = sum(ledger.get(name, 0) for name in ("parameters", "gradients", "optimizer state"))
    change = f"Over {ranks} ranks, `--ranks {ranks} --sync fsdp` (each rank holds 1/{ranks} of parameters, gradients and state)"
    return state_bytes * (1 - 1 / ranks), change


def _narrow(record: Record, ledger: Ledger) -> tuple[float, str] | None:
    """The bytes saved by 16-bit weights if no optimizer updates them; autocast's copies of them are saved too."""
    precision = record.config.get("precision")
    if record.config.get("mode") != "forward_no_grad" or precision not in ("fp32", "tf32", "bf16_autocast"):
        return None
    return ledger.get("parameters", 0) / 2 + ledger.get("autocast weight copies", 0), "`--precision bf16` (weights too)"

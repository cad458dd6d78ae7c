"""The changes that a proof tries on a script: those that `--apply` of `trainstep run` makes, with the causes that they remove.

    script_candidates(budget, place, allowed=["tf32"])
    script_change("data", place)                                # {"workers": "8"}

The options of a script are its changes: {} is the script as it is, {"adamw": "fused"} the script under `--apply adamw=fused`. The
script's own precision is kept apart from them (`ScriptPlace.precision`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainstep.config.script import CHANGES
from trainstep.explain.budget import Budget
from trainstep.explain.proof import BATCH, BATCH_CAUSE, Candidate, in_order, precision_refusal
from trainstep.records.record import Record

_CHANGES: Mapping[str, Sequence[Mapping[str, str]]] = {
    "data": ({"workers": ""},),
    "synchronisations": ({"copies": "non_blocking"},),
    "host_copies": ({"pin_memory": "on"}, {"pin_memory": "on", "copies": "non_blocking"}),
    "optimizer": ({"adamw": "fused"}, {"adamw": "trainstep"}),
    "host_launches": ({"compile": "reduce_overhead"}, {"compile": "module"}),
    "small_kernels": ({"compile": "module"}, {"compile": "reduce_overhead"}, {"ops": "trainstep"}),
    "attention_kernel": ({"attention": "trainstep"}, {"compile": "module"}),
    "attention_mask": ({"mask": "causal"},),
    "casts": ({"compile": "module"},),
    "matmul_shapes": ({"compile": "module"},),
    "unfused": ({"compile": "module"}, {"ops": "trainstep"}),
    "precision": ({"precision": "bf16_autocast"}, {"precision": "tf32"}),
    "exposed_messages": ({"bucket_cap_mb": "25"}, {"bucket_cap_mb": "100"}),
    "garbage_collector": ({"gc": "off"},),
}
"""Cause -> the changes that remove it; they are tried in this order where their gains are equal."""
_IF_FOUND = ("data", "garbage_collector", "synchronisations", "attention_mask", "matmul_shapes")
"""Causes whose changes are tried only if the budget has the cause with a large enough gain: else they could save nothing. That of
matmul_shapes is tried for other causes in any case, and has this one's name only where it was found."""
_LEAST_SHARE = 0.01
"""Share of the step. A proof cannot show a smaller gain."""
_GPU_ONLY = ("copies", "pin_memory", "ops")
_GPU_ONLY_VALUES = ({"compile": "reduce_overhead"}, {"attention": "trainstep"}, {"adamw": "trainstep"})
_MOST_WORKERS = 8
PRECISIONS = CHANGES["precision"]
"""Precisions that can be applied from outside the script."""


@dataclass(frozen=True, kw_only=True)
class ScriptPlace:
    """Where the script runs, and what is known of it. `cores`: the number of cores that this process may use."""

    on_gpu: bool
    ranks: int
    cores: int
    precision: str | None
    """The script's precision as its first run noted it; None before that run."""
    batch_size: int | None = None
    """Batch size of the first loader that the original's first process read; 0 if no loader says it, None before that run."""
    fusable_parts: int | None = None
    """Number of modules that compute what one of our ops computes, as the original's first process counted; None before that."""
    compiles: bool = False
    """Whether something in the script is compiled already."""


def script_candidates(
    budget: Budget, place: ScriptPlace, allowed: Sequence[str], batch_sizes: Sequence[int] = ()
) -> list[Candidate]:
    """Each change once, with the first cause that it removes, in their order.

    `allowed`, `batch_sizes`: the precisions and batch sizes that the user allows.
    """
    gains = {finding.cause: finding.gain for finding in reversed(budget.findings)}
    by_fields: dict[str, Candidate] = {}
    for cause in sorted(_CHANGES, key=lambda cause: -gains[cause].time_s if cause in gains else 0.0):
        least_s = _LEAST_SHARE * budget.measured_s
        if cause in _IF_FOUND and (cause not in gains or gains[cause].high_s < least_s):
            continue
        for change in _CHANGES[cause]:
            fields = _filled(change, place)
            if _is_idle(cause, fields, place):
                continue
            why = _refusal(fields, place, allowed)
            by_fields.setdefault(str(fields), Candidate(fields=fields, cause=cause, gain=gains.get(cause), refusal=why))

    why = "no data loader of the script says how many sequences it reads" if place.batch_size == 0 else ""
    for batch in ({BATCH: size} for size in batch_sizes if size != place.batch_size):
        by_fields[str(batch)] = Candidate(fields=batch, cause=BATCH_CAUSE, refusal=why)
    return in_order(by_fields.values())


def script_change(cause: str, place: ScriptPlace) -> dict[str, str]:
    """The first change against the cause that has an effect here; empty where only words help."""
    for change in _CHANGES.get(cause, ()):
        fields = _filled(change, place)
        if not _is_idle(cause, fields, place) and not _refusal(fields, place, allowed=PRECISIONS):
            return fields
    return {}


def place_of(record: Record) -> ScriptPlace:
    """The place of a run, as far as its record knows it."""
    return ScriptPlace(
        on_gpu=record.config["device"] == "cuda",
        ranks=int(record.config.get("ranks", 1)),
        cores=record.environment.cores,
        precision=record.fact("script_precision"),
        fusable_parts=record.fact("fusable_parts"),
        compiles=bool(record.fact("compiled_graphs")),
    )


def workers_for(cores: int, *, ranks: int) -> int:
    """Workers to try of each rank's loader: as many as the rank has cores, but from 2 to 8."""
    return max(2, min(_MOST_WORKERS, cores // ranks))


def _filled(change: Mapping[str, str], place: ScriptPlace) -> dict[str, str]:
    """The change with its number of workers filled in."""
    workers = str(workers_for(place.cores, ranks=place.ranks))
    return {name: workers if name == "workers" else value for name, value in change.items()}


def _is_idle(cause: str, fields: Mapping[str, str], place: ScriptPlace) -> bool:
    """Whether the change cannot have any effect here."""
    if cause == "exposed_messages":
        return place.ranks == 1
    if "ops" in fields and place.fusable_parts == 0:
        return True
    if "precision" in fields:
        named = fields["precision"]
        is_higher = place.precision in ("fp32", None) or (place.precision == "tf32" and named == "bf16_autocast")
        return not is_higher or (named == "tf32" and not place.on_gpu)
    return not place.on_gpu and (fields in _GPU_ONLY_VALUES or not fields.keys().isdisjoint(_GPU_ONLY))


def _refusal(fields: Mapping[str, str], place: ScriptPlace, allowed: Sequence[str]) -> str:
    if fields.get("compile") == "module" and place.compiles:
        return "the script compiles already"
    return precision_refusal(fields, allowed)

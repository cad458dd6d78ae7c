"""Turns a ledger and the allocator's readings into tables and facts, and those of several ranks into one record.

With several ranks, every table has a first column `rank` and all ranks' rows, rank by rank; the table `expected` has the bytes by
formula (none for torch's strategies). The record's facts are those of the rank that held most, `fullest_rank`, because that rank
decides what fits; all ranks' facts are in the table `rank_facts`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainstep.config.parallel import RanksConfig
from trainstep.costs.exchange import ParameterSize
from trainstep.measure.harness.workload import Findings
from trainstep.measure.memory.empty_process import OutsideBytes
from trainstep.measure.memory.readings import Reading
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.ranks import Ranks
from trainstep.plan.peak_memory import expected_memory
from trainstep.records.facts import Fact, facts_of
from trainstep.records.tables import RANK_FACTS
from trainstep.traces.ledger import AFTER, CATEGORIES, MOMENTS, ROUNDING, SAVED_FOR_BACKWARD, Ledger

Columns = Mapping[str, Sequence[Any]]
POINTS = 2000
"""How many points of the timeline are kept, about what a chart can show."""
_MOST_LISTED = 40
_LINES = ("parameters", "gradients", "optimizer state", "communication", "activations")
_EXPECTED_MOMENTS = {
    "init": "after_init",
    "after forward": "after_forward",
    "after backward": "after_backward",
    "after step": "after_step",
}
"""The ledger's moments -> the formula's. The peak lies between them: there only the sums are compared."""


def ledger_tables(
    ledger: Ledger,
    readings: Mapping[str, Reading],
    *,
    min_share: float,
    outside: OutsideBytes | None,
    parameters: int,
    nccl_bytes: int | None = None,
) -> tuple[dict[str, Fact], dict[str, Columns]]:
    """Facts and tables of a recorded step.

    `readings` are by moment: `init`, `after` each phase, `after step`. `nccl_bytes`: what the driver gave while the ranks met.
    """
    peak = ledger.window.moments["peak"]
    readings = {**readings, **_at_peak(ledger, readings)}
    lines = _ledger_lines(ledger, _at_moments(ledger, readings), outside, nccl_bytes)
    facts = facts_of(
        timeline_peak_bytes=int(ledger.timeline.requested_bytes[peak]),
        timeline_peak_phase=ledger.window.phase_at(peak),
        **_residuals(lines),
        **_bytes_each(ledger, parameters),
    )
    by_layer = ledger.activations_at(ledger.window.moments.get("after forward", ledger.window.last))
    tables: dict[str, Columns] = {
        "ledger": {
            "line": list(lines),
            **{moment: [line.get(moment) for line in lines.values()] for moment in MOMENTS},
        },
        "peaks": _peaks(ledger, readings),
        "layers": {"layer": list(by_layer), "bytes": list(by_layer.values())},
        "timeline": _timeline(ledger),
        "allocations": _allocations(ledger, peak, min_share),
    }
    return facts, tables


def expected_tables(
    config: RanksConfig, sizes: Sequence[ParameterSize], rank: int, ledger: Columns
) -> tuple[dict[str, Fact], dict[str, Columns]]:
    """This rank's bytes by formula, beside its ledger; empty for torch's strategies.

    What forward saved for backward (the ledger's activations, logits and autocast copies) enters the formula as measured.
    """
    lines = dict(zip(ledger["line"], ledger["after forward"], strict=True))
    saved_bytes = sum(lines.get(line) or 0 for line in SAVED_FOR_BACKWARD)
    expected = expected_memory(config, sizes, rank=rank, activations_bytes=saved_bytes)
    if expected is None:
        return {}, {}
    facts = facts_of(
        expected_peak_bytes=expected.peak.total_bytes, expected_peak_point=expected.peak_point.replace("_", " ")
    )
    terms = {moment: getattr(expected, name) for moment, name in _EXPECTED_MOMENTS.items()}
    columns = {
        moment: [getattr(term, f"{line.replace(' ', '_')}_bytes") for line in _LINES] for moment, term in terms.items()
    }
    return facts, {"expected": {"line": list(_LINES), **columns}}


def together(ranks: Ranks, own_findings: Findings) -> Findings:
    """All ranks' findings as one, the same on every rank. Every rank must call this."""
    plain = {"facts": {name: asdict(fact) for name, fact in own_findings.facts.items()}, "tables": own_findings.tables}
    by_rank = [json.loads(text) for text in Collectives(ranks).gather_texts(json.dumps(plain))]
    facts = [{name: Fact(**fact) for name, fact in findings["facts"].items()} for findings in by_rank]
    fullest = max(range(len(facts)), key=lambda rank: _peak_bytes(facts[rank]))
    rows = [
        (rank, name, fact.value, fact.unit)
        for rank, rank_facts in enumerate(facts)
        for name, fact in rank_facts.items()
    ]
    names = list(dict.fromkeys(name for findings in by_rank for name in findings["tables"]))
    tables = {name: _stacked([findings["tables"].get(name, {}) for findings in by_rank]) for name in names}
    tables[RANK_FACTS] = {
        name: [row[place] for row in rows] for place, name in enumerate(("rank", "fact", "value", "unit"))
    }
    return Findings(samples={}, facts=facts[fullest] | facts_of(fullest_rank=fullest), tables=tables)


def _at_peak(ledger: Ledger, readings: Mapping[str, Reading]) -> dict[str, Reading]:
    """The allocator's own figures at the peak: its peaks during the phase of the peak."""
    reading = readings.get(f"after {ledger.window.phase_at(ledger.window.moments['peak'])}")
    if "peak" in readings or reading is None or reading.peak_allocated_bytes is None:  # a CPU's readings have the peak
        return {}
    return {"peak": Reading(allocated_bytes=reading.peak_allocated_bytes, reserved_bytes=reading.peak_reserved_bytes)}


def _at_moments(ledger: Ledger, readings: Mapping[str, Reading]) -> dict[str, Reading]:
    """Moment -> reading. Where several phases end at a moment, the last phase's reading counts."""
    at_phases = {moment: readings[f"after {phase}"] for phase, moment in AFTER.items() if f"after {phase}" in readings}
    return {**readings, **at_phases}


def _ledger_lines(
    ledger: Ledger, readings: Mapping[str, Reading], outside: OutsideBytes | None, nccl_bytes: int | None
) -> dict[str, dict[str, int | None]]:
    """Line -> moment -> bytes."""
    lines: dict[str, dict[str, int | None]] = {category: {} for category in CATEGORIES}
    for moment in MOMENTS:
        position = ledger.window.moments.get(moment)
        if position is None:
            continue
        category_bytes = ledger.bytes_at(position)
        for category, size in category_bytes.items():
            lines[category][moment] = size
        rounding = ledger.rounding_at(position)
        reading = readings.get(moment)
        rest = _allocator_lines(reading, sum(category_bytes.values()) + rounding) if reading else {}
        if reading and outside:
            kernels_bytes = outside.build if moment == "init" else outside.step
            rest |= _driver_lines(reading, outside.context, kernels_bytes, nccl_bytes)
        for name, value in {ROUNDING: rounding, **rest}.items():
            lines.setdefault(name, {})[moment] = value
    return {name: line for name, line in lines.items() if any(value is not None for value in line.values())}


def _allocator_lines(reading: Reading, accounted_bytes: int) -> dict[str, int | None]:
    """From what tensors asked for to what the allocator reserved, with what is left unexplained."""
    lines: dict[str, int | None] = {
        "allocated": reading.allocated_bytes,
        "allocated, unexplained": reading.allocated_bytes - accounted_bytes,
    }
    if reading.reserved_bytes is None:
        return lines
    unused = reading.reserved_bytes - reading.allocated_bytes
    lines |= {"cache and fragmentation": unused, "of that, fragmentation": reading.fragmented_bytes}
    if reading.pool_unused_bytes is not None:
        lines["of that, the graph's pool"] = reading.pool_unused_bytes
    lines["reserved"] = reading.reserved_bytes
    return lines


def _driver_lines(
    reading: Reading, context_bytes: int, kernels_bytes: int, nccl_bytes: int | None
) -> dict[str, int | None]:
    """From what the allocator reserved to what the driver sees of the process."""
    if reading.driver_bytes is None or reading.reserved_bytes is None:
        return {}
    lines: dict[str, int | None] = {"context": context_bytes, "loaded kernels": kernels_bytes}
    if nccl_bytes is not None:
        lines["NCCL"] = nccl_bytes
    explained = reading.reserved_bytes + sum(size or 0 for size in lines.values())
    return {**lines, "driver": reading.driver_bytes, "driver, unexplained": reading.driver_bytes - explained}


def _residuals(lines: Mapping[str, Mapping[str, int | None]]) -> dict[str, float]:
    """The largest unexplained part of `allocated` and of `driver` over the moments, in bytes and as a share of the whole."""
    facts: dict[str, float] = {}
    for whole in ("allocated", "driver"):
        unexplained = {
            moment: abs(size) for moment, size in lines.get(f"{whole}, unexplained", {}).items() if size is not None
        }
        shares = [size / total for moment, size in unexplained.items() if (total := lines[whole][moment])]
        if shares:
            facts[f"{whole}_residual_share"] = max(shares)
            facts[f"{whole}_residual_bytes"] = max(unexplained.values())
    return facts


def _bytes_each(ledger: Ledger, parameters: int) -> dict[str, float]:
    """Bytes per parameter of weights, gradients and optimizer state, as measured."""
    moments = ledger.window.moments
    after_backward = ledger.bytes_at(moments.get("after backward", moments["after step"]))
    after_step = ledger.bytes_at(moments["after step"])
    sizes = {
        "parameter_bytes_each": after_step["parameters"],
        "gradient_bytes_each": after_backward["gradients"],
        "optimizer_state_bytes_each": after_step["optimizer state"],
    }
    return {name: size / parameters for name, size in sizes.items()} if parameters else {}


def _peaks(ledger: Ledger, readings: Mapping[str, Reading]) -> Columns:
    """Each phase's peaks: of requested bytes by the timeline, and what the allocator and the driver said."""
    phases = list(dict.fromkeys(phase.phase for phase in ledger.window.phases))
    ends = [readings.get(f"after {phase}") for phase in phases]
    requested = [
        max(
            int(ledger.timeline.requested_bytes[window.first : window.last + 1].max())
            for window in ledger.window.phases
            if window.phase == phase
        )
        for phase in phases
    ]
    return {
        "phase": phases,
        "requested_bytes": requested,
        "allocated_bytes": [reading.peak_allocated_bytes if reading else None for reading in ends],
        "reserved_bytes": [reading.peak_reserved_bytes if reading else None for reading in ends],
        "driver_bytes": [reading.driver_bytes if reading else None for reading in ends],
    }


def _timeline(ledger: Ledger) -> Columns:
    """Bytes by category over the step, thinned to `POINTS`; the peak and the phases' first and last positions are kept."""
    window, timeline = ledger.window, ledger.timeline
    edges = [edge for phase in window.phases for edge in (phase.first, phase.last)]
    positions = timeline.thinned(window.first, window.last, points=POINTS, keep=[window.moments["peak"], *edges])
    series = ledger.series()
    return {
        "time_s": [max(0.0, (timeline.time_us(position) - window.began_us) / 1e6) for position in positions],
        "phase": [window.phase_at(position) for position in positions],
        **{category: [int(series[category][position]) for position in positions] for category in CATEGORIES},
        ROUNDING: [ledger.rounding_at(position) for position in positions],
    }


def _allocations(ledger: Ledger, position: int, min_share: float) -> Columns:
    """The largest allocations held at the peak; allocations of the same size, category, phase and stack share a row."""
    total = int(ledger.timeline.requested_bytes[position])
    groups: dict[tuple[Any, ...], list[str]] = {}
    allocations = zip(ledger.timeline.allocations, ledger.category_of, ledger.layer_of, strict=True)
    for allocation, category, layer in allocations:
        if allocation.held_at(position):
            phase = ledger.window.phase_at(allocation.born)
            group = (allocation.requested_bytes, category, phase, allocation.stack_words())
            groups.setdefault(group, []).append(layer)
    large = {group: layers for group, layers in groups.items() if group[0] * len(layers) >= min_share * total}
    ranked = sorted(large.items(), key=lambda item: -item[0][0] * len(item[1]))[:_MOST_LISTED]
    return {
        "bytes": [group[0] for group, _ in ranked],
        "count": [len(layers) for _, layers in ranked],
        "category": [group[1] for group, _ in ranked],
        "phase": [group[2] for group, _ in ranked],
        "layer": [_layer_words(layers) for _, layers in ranked],
        "stack": [group[3] for group, _ in ranked],
    }


def _layer_words(layers: Sequence[str]) -> str:
    distinct = set(layers)
    return layers[0] if len(distinct) == 1 else f"{len(distinct)} layers"


def _peak_bytes(facts: Mapping[str, Fact]) -> int:
    return int(facts["peak_allocated_bytes"].value) if "peak_allocated_bytes" in facts else 0


def _stacked(tables: Sequence[Columns]) -> Columns:
    """One table from each rank's, with a first column `rank`."""
    names = next(list(table) for table in tables if table)
    counts = [len(next(iter(table.values()))) if table else 0 for table in tables]
    ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
    return {"rank": ranks, **{name: [value for table in tables for value in table.get(name, ())] for name in names}}

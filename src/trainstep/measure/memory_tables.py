"""A ledger and the allocator's own readings as the tables and facts of a record."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.measure.empty_process import OutsideBytes
from trainstep.measure.memory_readings import Reading
from trainstep.records.facts import Fact, facts_of
from trainstep.traces.ledger import AFTER, CATEGORIES, MOMENTS, ROUNDING, Ledger

Columns = Mapping[str, Sequence[Any]]

POINTS = 2000
_MOST_LISTED = 40


def ledger_tables(
    ledger: Ledger,
    readings: Mapping[str, Reading],
    *,
    min_share: float,
    outside: OutsideBytes | None,
    parameters: int,
    nccl_bytes: int | None = None,
) -> tuple[dict[str, Fact], dict[str, Columns]]:
    """Facts and tables of a recorded step. `readings`: `init`, `after` a phase, `after step` -> what allocator and driver said.
    `nccl_bytes`: what the driver gave while ranks met."""
    peak = ledger.window.moments["peak"]
    readings = {**readings, **_at_peak(ledger, readings)}
    lines = _ledger(ledger, _at_moments(ledger, readings), outside, nccl_bytes)
    facts = facts_of(
        timeline_peak_bytes=int(ledger.timeline.requested_bytes[peak]),
        timeline_peak_phase=ledger.window.phase_at(peak),
        **_residuals(lines),
        **_bytes_each(ledger, parameters),
    )
    tables: dict[str, Columns] = {
        "ledger": {
            "line": list(lines),
            **{moment: [line.get(moment) for line in lines.values()] for moment in MOMENTS},
        },
        "peaks": _peaks(ledger, readings),
        "layers": _layers(ledger),
        "timeline": _timeline(ledger),
        "allocations": _allocations(ledger, peak, min_share),
    }
    return facts, tables


def _at_peak(ledger: Ledger, readings: Mapping[str, Reading]) -> dict[str, Reading]:
    """The allocator's own figures at the peak: its peaks of the phase in which that lies. Known already on a CPU."""
    phase = f"after {ledger.window.phase_at(ledger.window.moments['peak'])}"
    reading = readings.get(phase)
    if "peak" in readings or reading is None or reading.peak_allocated_bytes is None:
        return {}
    return {"peak": Reading(allocated_bytes=reading.peak_allocated_bytes, reserved_bytes=reading.peak_reserved_bytes)}


def _at_moments(ledger: Ledger, readings: Mapping[str, Reading]) -> dict[str, Reading]:
    """Moment -> reading: of the phases that end at a moment, the last one's."""
    at_phases = {moment: readings[f"after {phase}"] for phase, moment in AFTER.items() if f"after {phase}" in readings}
    return {**readings, **at_phases}


def _ledger(
    ledger: Ledger, readings: Mapping[str, Reading], outside: OutsideBytes | None, nccl_bytes: int | None
) -> dict[str, dict[str, int | None]]:
    """Line -> moment -> bytes."""
    lines: dict[str, dict[str, int | None]] = {category: {} for category in CATEGORIES}
    for moment in MOMENTS:
        position = ledger.window.moments.get(moment)
        if position is None:
            continue
        held = ledger.bytes_at(position)
        for category, size in held.items():
            lines[category][moment] = size
        rounding = ledger.rounding_at(position)
        reading = readings.get(moment)
        rest = _rest(reading, sum(held.values()) + rounding) if reading else {}
        if reading and outside:
            kernels_bytes = outside.build if moment == "init" else outside.step
            rest |= _driver(reading, outside.context, kernels_bytes, nccl_bytes)
        for name, value in {ROUNDING: rounding, **rest}.items():
            lines.setdefault(name, {})[moment] = value
    return {name: line for name, line in lines.items() if any(value is not None for value in line.values())}


def _rest(reading: Reading, accounted_bytes: int) -> dict[str, int | None]:
    """From what tensors asked for to what the allocator reserved, with what is left unexplained."""
    lines: dict[str, int | None] = {
        "allocated": reading.allocated_bytes,
        "allocated, unexplained": reading.allocated_bytes - accounted_bytes,
    }
    if reading.reserved_bytes is None:
        return lines
    unused = reading.reserved_bytes - reading.allocated_bytes
    lines |= {"cache and fragmentation": unused, "of that, fragmentation": reading.fragmented_bytes}
    lines["reserved"] = reading.reserved_bytes
    return lines


def _driver(reading: Reading, context_bytes: int, kernels_bytes: int, nccl_bytes: int | None) -> dict[str, int | None]:
    """From what the allocator reserved to what the driver sees of the process."""
    if reading.driver_bytes is None or reading.reserved_bytes is None:
        return {}
    lines: dict[str, int | None] = {"context": context_bytes, "loaded kernels": kernels_bytes}
    if nccl_bytes is not None:
        lines["NCCL"] = nccl_bytes
    explained = reading.reserved_bytes + sum(size or 0 for size in lines.values())
    return {**lines, "driver": reading.driver_bytes, "driver, unexplained": reading.driver_bytes - explained}


def _residuals(lines: Mapping[str, Mapping[str, int | None]]) -> dict[str, float]:
    """The largest of each residual over the moments, as a share of what it is a residual of."""
    found: dict[str, float] = {}
    for whole in ("allocated", "driver"):
        left = lines.get(f"{whole}, unexplained", {})
        shares = [abs(size) / of for moment, size in left.items() if size is not None and (of := lines[whole][moment])]
        if shares:
            found[f"{whole}_residual_share"] = max(shares)
            found[f"{whole}_residual_bytes"] = max(abs(size or 0) for size in left.values())
    return found


def _bytes_each(ledger: Ledger, parameters: int) -> dict[str, float]:
    """Bytes a parameter costs in weights, gradients and optimizer state, from what was held."""
    moments = ledger.window.moments
    after_backward = ledger.bytes_at(moments.get("after backward", moments["after step"]))
    after_step = ledger.bytes_at(moments["after step"])
    held = {
        "parameter_bytes_each": after_step["parameters"],
        "gradient_bytes_each": after_backward["gradients"],
        "optimizer_state_bytes_each": after_step["optimizer state"],
    }
    return {name: size / parameters for name, size in held.items()} if parameters else {}


def _peaks(ledger: Ledger, readings: Mapping[str, Reading]) -> Columns:
    """The highest of each phase: ours of requested bytes, and what the allocator and the driver said."""
    phases = list(dict.fromkeys(phase.phase for phase in ledger.window.phases))
    found = [readings.get(f"after {phase}") for phase in phases]
    requested = [
        max(
            int(ledger.timeline.requested_bytes[one.first : one.last + 1].max())
            for one in ledger.window.phases
            if one.phase == phase
        )
        for phase in phases
    ]
    return {
        "phase": phases,
        "requested_bytes": requested,
        "allocated_bytes": [one.peak_allocated_bytes if one else None for one in found],
        "reserved_bytes": [one.peak_reserved_bytes if one else None for one in found],
        "driver_bytes": [one.driver_bytes if one else None for one in found],
    }


def _layers(ledger: Ledger) -> Columns:
    """Activations by layer, after forward."""
    position = ledger.window.moments.get("after forward", ledger.window.last)
    held = ledger.activations_at(position)
    return {"layer": list(held), "bytes": list(held.values())}


def _timeline(ledger: Ledger) -> Columns:
    """Bytes by category over the step, thinned to what a chart can show, the peak and the phases' edges kept."""
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
    """The largest held at the peak; alike ones (same size, category and place in the code) are one line."""
    total = int(ledger.timeline.requested_bytes[position])
    groups: dict[tuple[Any, ...], list[str]] = {}
    for one, category, layer in zip(ledger.timeline.allocations, ledger.category_of, ledger.layer_of, strict=True):
        if one.held_at(position):
            group = (one.requested_bytes, category, ledger.window.phase_at(one.born), one.stack_words())
            groups.setdefault(group, []).append(layer)
    large = {group: layers for group, layers in groups.items() if group[0] * len(layers) >= min_share * total}
    ranked = sorted(large.items(), key=lambda item: -item[0][0] * len(item[1]))[:_MOST_LISTED]
    return {
        "bytes": [group[0] for group, _ in ranked],
        "count": [len(layers) for _, layers in ranked],
        "category": [group[1] for group, _ in ranked],
        "phase": [group[2] for group, _ in ranked],
        "layer": [_one_or_number(layers) for _, layers in ranked],
        "stack": [group[3] for group, _ in ranked],
    }


def _one_or_number(layers: Sequence[str]) -> str:
    distinct = set(layers)
    return layers[0] if len(distinct) == 1 else f"{len(distinct)} layers"

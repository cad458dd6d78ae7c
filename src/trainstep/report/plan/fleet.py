"""A fleet's step in words, tables and JSON: scaling against one node, messages by operation and level, and the links assumed."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.plan.fleet.fleet_time import FleetTime
from trainstep.plan.time.step_time import StepTime
from trainstep.report.kit.forms import COUNT, MS, PERCENT, SIZE, TEXT, WHOLE, listed, percent
from trainstep.report.kit.tables import Column, Table
from trainstep.report.plan.time import utilisation

_WORTH = 0.98
"""Groups of ranks are advised if the step would take at most this share of its time with them."""


def fleet_words(fleet: FleetTime | None) -> str:
    """` On 16 nodes of 8 GPUs a GPU is 97 % as fast as on one node.`; nothing on one node."""
    if fleet is None or fleet.one_node is None:
        return ""
    topology = fleet.topology
    return (
        f" On {topology.nodes:,} nodes of {topology.gpus_per_node} GPUs a GPU is {percent(fleet.efficiency)} % as fast as on one "
        f"node.{_groups_words(fleet)}"
    )


def _groups_words(fleet: FleetTime) -> str:
    """Whether averaging in groups of a node's ranks would be faster; empty if not, or if the step has groups already."""
    if fleet.in_groups is None:
        return ""
    share, of_node = fleet.in_groups.step.time_s / fleet.time.step.time_s, fleet.topology.gpus_per_node
    if share > _WORTH:
        return ""
    return f" With --shard-ranks {of_node}, averages across nodes in parts, the step would take {percent(share)} % of the time."


def fleet_tables(fleet: FleetTime | None) -> list[Table]:
    """The table of a rank's messages in a step, by operation and level."""
    if fleet is None or not fleet.sent.counts:
        return []
    sent = fleet.sent
    rows = [
        {
            "operation": operation,
            "count": count,
            "bytes": sent.payload_bytes[operation],
            "time": sent.seconds[operation],
        }
        for operation, count in sent.counts.items()
    ]
    columns = [
        Column("messages", TEXT, "operation", names=True),
        Column("in a step", COUNT, "count"),
        Column("payload ({unit})", SIZE, "bytes"),
        Column("time alone (ms)", MS, "time"),
    ]
    return [Table.of("Messages of a rank", rows, columns, note=_links(fleet))]


def _links(fleet: FleetTime) -> str:
    """The speeds that links are taken to have, and which of them were assumed."""
    topology = fleet.topology
    parts = [f"within a node {topology.nvlink.bytes_per_s / 1e9:.0f} GB/s of a GPU"]
    if topology.nodes > 1:
        parts.append(f"between nodes {topology.network.bytes_per_s / 1e9:.0f} GB/s of a node")
    words = (
        f"Collectives reach {listed(parts)}. Ranks' speeds differ by {percent(topology.spread)} % (standard deviation)."
    )
    return f"{words} Assumed: {listed(topology.assumed)}." if topology.assumed else words


def fleet_row(time: StepTime | None, fleet: FleetTime | None, tokens: float | None) -> dict[str, Any]:
    """A step's values in a comparison."""
    if time is None or fleet is None:
        return {}
    hours = None if tokens is None else time.gpu_hours(tokens).time_s
    return {"efficiency": fleet.efficiency, "mfu": utilisation(time), "hours": hours}


def fleet_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The columns that a comparison has for fleets."""
    columns = {"mfu": ("MFU (%)", PERCENT), "efficiency": ("of one node's (%)", PERCENT), "hours": ("GPU-hours", WHOLE)}
    return [
        Column(title, form, name)
        for name, (title, form) in columns.items()
        if any(row.get(name) is not None for row in rows)
    ]


def plain(fleet: FleetTime) -> dict[str, Any]:
    """The fleet for programs, in SI units."""
    topology = fleet.topology
    return {
        "nodes": topology.nodes,
        "gpus_per_node": topology.gpus_per_node,
        "efficiency": fleet.efficiency,
        "in_groups_step_s": None if fleet.in_groups is None else fleet.in_groups.step.time_s,
        "one_node_step_s": None if fleet.one_node is None else fleet.one_node.step.time_s,
        "nvlink_bytes_per_s": topology.nvlink.bytes_per_s,
        "network_bytes_per_s": topology.network.bytes_per_s if topology.nodes > 1 else None,
        "straggler_spread": topology.spread,
        "assumed": list(topology.assumed),
        "messages": {
            operation: {
                "count": count,
                "payload_bytes": fleet.sent.payload_bytes[operation],
                "seconds": fleet.sent.seconds[operation],
            }
            for operation, count in fleet.sent.counts.items()
        },
    }

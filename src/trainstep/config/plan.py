"""The config of `trainstep plan`: a training step on one GPU or on several ranks, which is predicted and not run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from trainstep.config.fields import check_choices, check_integer, described, part
from trainstep.config.nodes import check_nodes
from trainstep.config.parallel import RanksConfig, SyncConfig
from trainstep.config.run import DEVICES, RunConfig
from trainstep.costs.strategies import BASELINE

GPUS_PER_NODE = 8
"""The number of GPUs in most servers."""


@dataclass(frozen=True, kw_only=True)
class PlannedRunConfig(RunConfig):
    """The step of one rank."""

    has_messages = True

    batch_size: int = described("sequences in a rank's (micro-)batch", 1)
    device: str = described("device to run on", "cuda", DEVICES)


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """The nodes that ranks are on, and the links in and between them. ValueError names the field and the remedy."""

    nodes: int = described("nodes that the ranks are on, as many on each; without --ranks all GPUs of each node", 1)
    gpus_per_node: int | None = described(
        f"GPUs of a node; default: ranks / nodes, or {GPUS_PER_NODE} where ranks are not given", None
    )
    nvlink_gbs: float | None = described(
        "GB/s between the GPUs of a node, one way, of one GPU; default: the GPU's data sheet", None
    )
    network_gbs: float | None = described(
        "GB/s of one network card between nodes, one way: 50 of 400 Gb/s; default: as in the maker's own servers with this GPU",
        None,
    )
    rails: int | None = described("network cards of a node; default: one for each GPU", None)
    nvlink_latency_us: float = described("microseconds of a hop within a node", 3.4)
    network_latency_us: float = described("microseconds of a hop between nodes", 14.0)
    straggler_spread: float = described(
        "relative standard deviation of ranks' speeds; every rank waits for the slowest of all", 0.01
    )

    backend: str = described(
        "library of the messages; gloo, between CPUs, averages the whole tensor where a rank needs its shard alone",
        "nccl",
        ("nccl", "gloo"),
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_integer(self, "nodes", at_least=1, at_most=1024)
        for name in ("gpus_per_node", "rails"):
            if getattr(self, name) is not None:
                check_integer(self, name, at_least=1, at_most=1024)
        for name in ("nvlink_gbs", "network_gbs", "nvlink_latency_us", "network_latency_us"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or not 1e-3 <= value <= 1e6):
                raise ValueError(f"{name}: must be a number from 0.001 to 1,000,000, not {value!r}")
        if not _is_number(self.straggler_spread) or not 0 <= self.straggler_spread <= 1:
            raise ValueError(f"straggler_spread: must be a share from 0 to 1, not {self.straggler_spread!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class PlanConfig(RanksConfig):
    """The step that is planned. ValueError names the field and the remedy."""

    ranks: int = described("processes, each with a GPU of its own", 1)
    sync: SyncConfig = part(SyncConfig(name=BASELINE))
    run: PlannedRunConfig = part(
        without=(
            *("learning_rate", "data", "seed", "device", "warmups", "steps", "sync", "cold_compile", "nvtx"),
            "recompute_budget_gib",
        )
    )
    fleet: FleetConfig = part(FleetConfig())

    def __post_init__(self) -> None:
        super().__post_init__()
        nodes, own = self.fleet.nodes, self.fleet.gpus_per_node
        check_nodes(self.ranks, nodes)
        if own is not None and own * nodes != self.ranks:
            raise ValueError(
                f"gpus_per_node: {nodes} node{'s' * (nodes > 1)} of {own} have {own * nodes} GPUs, not {self.ranks}; leave out "
                "ranks or this"
            )
        shards, on_node = self.sync.shard_ranks, self.ranks // nodes
        if (
            nodes > 1
            and shards is not None
            and self.sync.strategy.communicates
            and on_node % shards
            and shards % on_node
        ):
            raise ValueError(
                f"shard_ranks: groups of {shards} would lie across the nodes' edges, which have {on_node} ranks each; take a "
                f"divisor or a multiple of {on_node}"
            )


def with_ranks(point: Mapping[str, Any]) -> dict[str, Any]:
    """The flat values of a step, with the ranks that its nodes have where they are not given: all GPUs of every node."""
    nodes, own = point.get("nodes"), point.get("gpus_per_node")
    if "ranks" in point or (nodes is None and own is None):
        return dict(point)
    nodes, own = (1 if nodes is None else nodes), (GPUS_PER_NODE if own is None else own)
    if not all(isinstance(number, int) and number > 0 for number in (nodes, own)):
        return dict(point)  # refused with its own sentence where the config is built
    return {**point, "ranks": nodes * own}


def planned_ranks(options: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Every number of ranks in a grid's options."""
    sizes = {name: options[name] for name in ("ranks", "nodes", "gpus_per_node") if name in options}
    points = [dict(zip(sizes, values, strict=True)) for values in product(*sizes.values())]
    return [with_ranks(point).get("ranks", 1) for point in points]


FLEET_FIELDS = frozenset(field.name for field in fields(FleetConfig))
"""Options of nodes and links. A step that has any of them is planned as a fleet's, also on one node."""

"""The nodes of a fleet and the links in and between them, as messages see them.

    topology = topology_of(fleet, ranks=128, calibration=calibration)      # fleet: config/plan.py FleetConfig
    topology.group(Level.IN_GROUPS, shard_ranks=8)                         # Group(ranks=8, per_node=8, at_once=1)

Ranks fill one node after another, as torchrun numbers them. A node's rails are its network cards. Messages do not reach what a
data sheet promises: within a node they reach the share of it that the calibration measured, and between nodes _NETWORK_SHARE,
which is assumed.
"""

from dataclasses import dataclass, field

from trainstep.config.machine import MachineSpec, machine_spec
from trainstep.config.plan import FleetConfig
from trainstep.costs.collectives import bus_factor
from trainstep.costs.rank_groups import Level
from trainstep.plan.time.calibration import Calibration

_NETWORKS = {
    "B200": (50.0, "DGX B200: 400 Gb/s a GPU"),
    "H200 SXM": (50.0, "DGX H200: 400 Gb/s a GPU"),
    "H100 SXM": (50.0, "DGX H100: 400 Gb/s a GPU"),
    "A100 SXM 80 GB": (25.0, "DGX A100: 200 Gb/s a GPU"),
    "A100 SXM 40 GB": (25.0, "DGX A100: 200 Gb/s a GPU"),
}
"""GB/s of a network card, one for each GPU, in the maker's own servers (their data sheets). Other servers differ."""
_NETWORK_SHARE = 0.85
"""The share of a network card's bandwidth that collectives reach; assumed."""
_NVLINK_SHARE = 0.7
"""The share of NVLink's bandwidth that collectives reach, where a calibration has no messages."""
_START_S = 20e-6
"""Seconds before a message begins, where a calibration has no messages."""
_HOPS_OF_LEAST = 3
"""Hops in the calibration's shortest message, which is among four ranks."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """`bytes_per_s`: one way; within a node of one GPU, between nodes of a whole node. `latency_s`: of one hop."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that share a message. `per_node`: how many of them are on a node. `at_once`: groups that share a node's rails."""

    ranks: int
    per_node: int
    at_once: int = 1

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node


@dataclass(frozen=True, kw_only=True)
class Topology:
    """`start_s`: seconds before a message begins. `spread`: relative standard deviation of ranks' speeds (stragglers.py)."""

    nodes: int
    gpus_per_node: int
    nvlink: Link
    network: Link
    start_s: float
    spread: float
    backend: str = "nccl"
    assumed: tuple[str, ...] = field(default=())
    """What was not given, and where it was taken from."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    def group(self, level: Level, shard_ranks: int | None) -> Group:
        """The ranks among which a message of this level goes, with groups of `shard_ranks` ranks."""
        if level is Level.ALL or shard_ranks is None:
            return Group(ranks=self.ranks, per_node=self.gpus_per_node)
        if level is Level.IN_GROUPS:
            per_node = min(shard_ranks, self.gpus_per_node)
            return Group(ranks=shard_ranks, per_node=per_node, at_once=self.gpus_per_node // per_node)
        # Replicas: the same place in every group, so as many groups as shards send at once.
        per_node = max(1, self.gpus_per_node // shard_ranks)
        return Group(ranks=self.ranks // shard_ranks, per_node=per_node, at_once=self.gpus_per_node // per_node)


def topology_of(
    fleet: FleetConfig, *, ranks: int, calibration: Calibration, spec: MachineSpec | None = None
) -> Topology:
    """The topology of so many ranks. `spec`: the GPU's data sheet. ValueError for a link of which nothing is known."""
    spec = spec or machine_spec(calibration.name)
    nodes = fleet.nodes
    assumed: list[str] = []
    nvlink_share, start_s = _measured(calibration, spec, fleet.nvlink_latency_us * 1e-6)
    gpus_per_node = ranks // nodes
    nvlink_gbs = fleet.nvlink_gbs
    if nvlink_gbs is None and gpus_per_node > 1:
        if spec is None or spec.link_bytes_per_s is None:
            name = calibration.name if spec is None else spec.name
            raise ValueError(
                f"nvlink_gbs: nothing is known of how {name} reaches others of its node; give --nvlink-gbs"
            )
        nvlink_gbs = spec.link_bytes_per_s / 1e9
        assumed.append(f"NVLink {nvlink_gbs:g} GB/s one way ({spec.source})")
    network_gbs = fleet.network_gbs
    if network_gbs is None and nodes > 1:
        if spec is None or spec.name not in _NETWORKS:
            name = calibration.name if spec is None else spec.name
            raise ValueError(
                f"network_gbs: nothing is known of the network between nodes with {name}; give --network-gbs, GB/s of a card"
            )
        network_gbs, source = _NETWORKS[spec.name]
        assumed.append(f"network {network_gbs:g} GB/s a card ({source})")
    rails = fleet.rails or gpus_per_node
    return Topology(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        nvlink=Link(bytes_per_s=nvlink_share * 1e9 * (nvlink_gbs or 1.0), latency_s=fleet.nvlink_latency_us * 1e-6),
        network=Link(
            bytes_per_s=_NETWORK_SHARE * 1e9 * rails * (network_gbs or 1.0), latency_s=fleet.network_latency_us * 1e-6
        ),
        start_s=start_s,
        spread=fleet.straggler_spread,
        backend=fleet.backend,
        assumed=tuple(assumed),
    )


def _measured(calibration: Calibration, spec: MachineSpec | None, latency_s: float) -> tuple[float, float]:
    """The share of NVLink's bandwidth that messages reached, and what they take before they begin."""
    rates = [
        nbytes * float(bus_factor(operation, ranks)) / time_s
        for (operation, ranks), (curve, _) in calibration.collectives.items()
        for nbytes, time_s in curve.points
    ]
    if not rates or spec is None or spec.link_bytes_per_s is None:
        return _NVLINK_SHARE, _START_S
    least_s = min(time_s for curve, _ in calibration.collectives.values() for _, time_s in curve.points)
    return max(rates) / spec.link_bytes_per_s, max(0.0, least_s - _HOPS_OF_LEAST * latency_s)

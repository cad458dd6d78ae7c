"""Seconds of a collective among ranks of one node or of several, as NCCL or gloo sends it: around a ring, or up and down a tree.

S: bytes of the whole tensor, n: ranks, N: nodes that they are on, a: a link's latency of a hop, w: bandwidth.

    ring    start + hops + S f / w      f: bus_factor (costs/collectives.py), 2 (n - 1) / n for an all-reduce
            hops = r ((n - N) a_nvlink + (N - 1) a_network)            r = 2 for an all-reduce, else 1
            w = the slower of NVLink and the rails of a node, which every ring crosses once
    tree    start + 2 ((n / N - 1) a_nvlink + log2(N) a_network) + 2 S / (0.92 w)               all-reduces alone

NCCL takes the faster of both for a size (NVIDIA/nccl, src/graph/tuning.cc, which also has the latencies 3.4 and 14 us of a hop in
its protocol for large messages, and the 0.92).

gloo has rings alone, and torch's reduce-scatter on gloo is an all-reduce of which each rank keeps its part (the bytes that a link
between two nodes counts say so: tests/parallel/test_slow_link.py).
"""

import math

from trainstep.costs.collectives import bus_factor
from trainstep.plan.fleet.topology import Group, Topology

_TREE_SHARE = 0.92
"""The share of a ring's bandwidth that a tree reaches (NVIDIA/nccl, src/graph/tuning.cc)."""


def collective_s(topology: Topology, operation: str, nbytes: float, group: Group) -> float:
    """The time of `all_reduce`, `all_gather`, `reduce_scatter` or `broadcast` of a tensor of `nbytes`. 0 for a single rank."""
    if group.ranks == 1:
        return 0.0
    if topology.backend == "gloo" and operation == "reduce_scatter":
        operation = "all_reduce"
    rate = bus_bytes_per_s(topology, group)
    rounds = 2 if operation == "all_reduce" else 1
    hops_s = (group.ranks - group.nodes) * topology.nvlink.latency_s + (group.nodes - 1) * topology.network.latency_s
    ring_s = rounds * hops_s + nbytes * float(bus_factor(operation, group.ranks)) / rate
    if operation != "all_reduce" or topology.backend == "gloo":
        return topology.start_s + ring_s
    levels_s = (group.per_node - 1) * topology.nvlink.latency_s + math.log2(group.nodes) * topology.network.latency_s
    tree_s = 2 * levels_s + 2 * nbytes / (_TREE_SHARE * rate)
    return topology.start_s + min(ring_s, tree_s)


def bus_bytes_per_s(topology: Topology, group: Group) -> float:
    """The slowest part of a ring: NVLink within a node, and this group's share of the node's rails between nodes."""
    rates = []
    if group.per_node > 1:
        rates.append(topology.nvlink.bytes_per_s)
    if group.nodes > 1:
        rates.append(topology.network.bytes_per_s / group.at_once)
    return min(rates)

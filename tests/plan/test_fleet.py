"""A fleet's step: collectives by level against hand-made sums, simulated streams, schedules, the slowest rank, refusals."""

import time
from dataclasses import replace
from typing import Any

import pytest

from trainstep.config.machine import gpu_named
from trainstep.config.parsing import build
from trainstep.config.plan import FleetConfig, PlanConfig, planned_ranks, with_ranks
from trainstep.costs.rank_groups import Level
from trainstep.plan.fleet.collective_time import bus_bytes_per_s, collective_s
from trainstep.plan.fleet.fleet_time import FleetTime, fleet_time, planned_fleet
from trainstep.plan.fleet.stragglers import slowest, waiting_share
from trainstep.plan.fleet.streams import Ran, Task, simulate
from trainstep.plan.fleet.topology import Group, Link, Topology, topology_of
from trainstep.plan.time.calibration import calibration_for, data_sheet
from trainstep.plan.time.step_time import STRAGGLERS, step_time
from trainstep.report.plan.fleet import fleet_words

H100 = gpu_named("h100")
SPEEDS = calibration_for(H100)
TWO_NODES = Topology(
    nodes=2,
    gpus_per_node=8,
    nvlink=Link(bytes_per_s=300e9, latency_s=3e-6),
    network=Link(bytes_per_s=400e9, latency_s=14e-6),
    start_s=20e-6,
    spread=0.01,
)
STEP = {
    "model": "8B",
    "context": 4096,
    "precision": "bf16_autocast",
    "compile": "block",
    "sync": "fsdp",
}


def planned(**options: Any) -> PlanConfig:
    config: PlanConfig = build(PlanConfig, with_ranks({**STEP, **options}), where="plan")
    return config


def fleet(**options: Any) -> FleetTime:
    assert SPEEDS is not None
    config = planned(**options)
    topology = topology_of(config.fleet, ranks=config.ranks, calibration=SPEEDS, spec=H100)
    return fleet_time(config, topology, SPEEDS)


def test_a_ring_over_two_nodes_term_by_term():
    everyone = TWO_NODES.group(Level.ALL, None)
    assert everyone == Group(ranks=16, per_node=8)
    gathered = collective_s(TWO_NODES, "all_gather", 1e9, everyone)
    assert gathered == pytest.approx(20e-6 + 14 * 3e-6 + 1 * 14e-6 + 1e9 * 15 / 16 / 300e9)
    large = collective_s(TWO_NODES, "all_reduce", 1e9, everyone)
    assert large == pytest.approx(20e-6 + 2 * (14 * 3e-6 + 14e-6) + 1e9 * 30 / 16 / 300e9)


def test_small_all_reduces_take_the_tree():
    many = replace(TWO_NODES, nodes=128)
    everyone = many.group(Level.ALL, None)
    small = collective_s(many, "all_reduce", 1e3, everyone)
    assert small == pytest.approx(20e-6 + 2 * (7 * 3e-6 + 7 * 14e-6) + 2e3 / (0.92 * 300e9))
    assert small < collective_s(many, "all_gather", 1e3, everyone)


def test_replicas_share_the_rails_of_a_node():
    across = TWO_NODES.group(Level.ACROSS_GROUPS, 8)
    assert across == Group(ranks=2, per_node=1, at_once=8)
    assert bus_bytes_per_s(TWO_NODES, across) == 50e9
    inside = TWO_NODES.group(Level.IN_GROUPS, 4)
    assert inside == Group(ranks=4, per_node=4, at_once=2)
    assert bus_bytes_per_s(TWO_NODES, inside) == 300e9
    wide = replace(TWO_NODES, nodes=4).group(Level.IN_GROUPS, 16)
    assert (wide.ranks, wide.nodes) == (16, 2)
    assert collective_s(TWO_NODES, "all_gather", 1e9, Group(ranks=1, per_node=1)) == 0


def test_messages_share_a_link_and_slow_computation():
    compute = Task(stream="compute", work_s=2.0)
    one, other = (Task(stream=name, work_s=1.0, link="network") for name in ("gather", "reduce"))
    assert simulate([compute, one, other]) == [Ran(0.0, 2.0), Ran(0.0, 2.0), Ran(0.0, 2.0)]
    elsewhere = replace(other, link="NVLink")
    assert [ran.end_s for ran in simulate([compute, one, elsewhere])] == [2.0, 1.0, 1.0]
    slowed = simulate([compute, one], slowed=0.2)
    assert slowed[0].end_s == pytest.approx(2.2)


def test_a_stream_keeps_its_order_and_waits():
    tasks = [
        Task(stream="compute", work_s=1.0),
        Task(stream="gather", work_s=3.0, link="network", after=(0,)),
        Task(stream="compute", work_s=1.0, after=(1,)),
        Task(stream="compute", work_s=0.0),
    ]
    assert [(ran.start_s, ran.end_s) for ran in simulate(tasks)] == [(0, 1), (1, 4), (4, 5), (5, 5)]
    with pytest.raises(ValueError, match="in a circle"):
        simulate([Task(stream="compute", work_s=1.0, after=(1,)), Task(stream="gather", work_s=1.0, after=(0,))])


def test_the_slowest_rank():
    assert slowest(1) == 0
    assert slowest(8) == pytest.approx(1.4236, abs=0.02)  # expected maximum of eight normal values
    assert slowest(1024) == pytest.approx(3.24, abs=0.03)
    assert waiting_share(8, 0.02) == pytest.approx(2 * waiting_share(8, 0.01))


def test_one_node_agrees_with_the_time_of_a_node():
    """plan/time has a formula for eight ranks of one node, and plan/fleet a simulation, whose messages slow computation by less and
    whose gathered units cost nothing beside their messages."""
    assert SPEEDS is not None
    for sync in ("naive", "overlapped", "bucketed", "sharded", "sharded_flat", "fsdp"):
        simulated = fleet(nodes=1, sync=sync, straggler_spread=0).time.step.time_s
        assert simulated == pytest.approx(step_time(planned(ranks=8, sync=sync), SPEEDS).step.time_s, rel=0.12), sync


def test_groups_pay_where_the_network_is_slow():
    slow = {"nodes": 16, "network_gbs": 3.0}
    assert fleet(**slow, shard_ranks=8).time.step.time_s < 0.75 * fleet(**slow).time.step.time_s
    messages = fleet(nodes=2, shard_ranks=8).sent
    assert messages.counts["all_reduce across groups"] == messages.counts["reduce_scatter in groups"]
    whole = messages.payload_bytes["reduce_scatter in groups"]
    assert messages.payload_bytes["all_reduce across groups"] == pytest.approx(whole / 8)


def test_what_a_user_changes_changes_the_time():
    base = fleet(nodes=4).time.step.time_s
    assert fleet(nodes=4, network_gbs=5).time.step.time_s > base
    assert fleet(nodes=4, network_gbs=5, rails=1).time.step.time_s > fleet(nodes=4, network_gbs=5).time.step.time_s
    assert fleet(nodes=4, nvlink_gbs=20).time.step.time_s > base
    assert fleet(nodes=4, network_latency_us=1000).time.step.time_s > base
    patient = fleet(nodes=4, straggler_spread=0.05).time
    assert patient.step.time_s > base
    assert patient.classes[STRAGGLERS] > 0.05 * sum(part.time_s for part in patient.device.values())
    assert fleet(nodes=4, ahead=0).time.step.time_s > base, "a block that is gathered when it is needed is waited for"


def test_an_interval_holds_its_time_and_efficiency_falls():
    efficiencies = []
    for nodes in (1, 2, 16, 128):
        predicted = fleet(nodes=nodes)
        step = predicted.time.step
        assert step.low_s < step.time_s < step.high_s
        efficiencies.append(predicted.efficiency)
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert efficiencies[0] == 1.0


def test_every_strategy_on_a_thousand_gpus_in_seconds():
    started = time.perf_counter()
    for sync in ("naive", "flat", "overlapped", "bucketed", "sharded", "sharded_flat", "fsdp"):
        predicted = fleet(nodes=128, sync=sync, accumulation=2)
        assert predicted.time.tokens == 1024 * 2 * 4096
        assert predicted.sent.counts
    assert time.perf_counter() - started < 60  # seconds on any machine; 2 s where it was written


def test_updates_by_bucket_and_forward_alone():
    by_bucket = fleet(nodes=2, sync="bucketed", update="by_bucket", adamw="trainstep").time.step.time_s
    after = fleet(nodes=2, sync="bucketed", adamw="trainstep").time.step.time_s
    assert by_bucket < after * 1.01
    assert set(fleet(nodes=2, mode="forward").time.phases) == {"forward"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 3, "ranks": 16}, "nodes: 16 ranks cannot be spread evenly over 3 nodes"),
        ({"nodes": 2, "ranks": 12, "shard_ranks": 4}, "shard_ranks: groups of 4 would lie across"),
        ({"nodes": 2, "ranks": 16, "gpus_per_node": 4}, "gpus_per_node: 2 nodes of 4 have 8 GPUs, not 16"),
        ({"nodes": 0}, "nodes: must be a whole number of at least 1"),
        ({"nodes": 2, "network_gbs": -1}, "network_gbs: must be a number from 0.001"),
        ({"nodes": 2, "straggler_spread": 2}, "straggler_spread: must be a share from 0 to 1"),
        ({"nodes": 200}, "ranks: must be at most 1024"),
    ],
)
def test_impossible_fleets_are_sentences(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        planned(**options)


def test_unknown_links_are_asked_for():
    assert SPEEDS is not None
    games = gpu_named("rtx-4090")
    with pytest.raises(ValueError, match="nvlink_gbs: nothing is known of how RTX 4090"):
        topology_of(FleetConfig(nodes=2), ranks=16, calibration=SPEEDS, spec=games)
    with pytest.raises(ValueError, match="network_gbs: nothing is known of the network"):
        topology_of(FleetConfig(nodes=2, nvlink_gbs=32), ranks=16, calibration=SPEEDS, spec=games)
    given = FleetConfig(nodes=2, nvlink_gbs=32, network_gbs=3, rails=1)
    unnamed = data_sheet(peak_tflops=100, memory_bytes_per_s=1e12)
    topology = topology_of(given, ranks=16, calibration=unnamed)
    assert not topology.assumed
    assert topology.network.bytes_per_s == pytest.approx(0.85 * 3e9)
    copies = planned(nodes=2, transport="copies")
    with pytest.raises(ValueError, match="transport: copies work only between ranks of one node"):
        fleet_time(copies, topology_of(copies.fleet, ranks=16, calibration=SPEEDS, spec=H100), SPEEDS)
    torchs = planned(nodes=2, sync="torch_fsdp2")
    with pytest.raises(ValueError, match="take fsdp, ours of its kind"):
        planned_fleet(torchs, SPEEDS, H100, has_nodes=True)


def test_ranks_follow_from_nodes():
    assert with_ranks({"nodes": 2})["ranks"] == 16
    assert with_ranks({"nodes": 2, "gpus_per_node": 4})["ranks"] == 8
    assert with_ranks({"nodes": 2, "ranks": 4})["ranks"] == 4
    assert "ranks" not in with_ranks({"context": 128})
    assert planned_ranks({"nodes": [1, 2], "gpus_per_node": [1, 4]}) == [1, 4, 2, 8]
    assert planned_ranks({"context": [1]}) == [1]


def test_gloo_has_rings_and_reduces_the_whole_tensor():
    gloo = replace(TWO_NODES, backend="gloo")
    everyone = gloo.group(Level.ALL, None)
    assert collective_s(gloo, "reduce_scatter", 1e9, everyone) == collective_s(TWO_NODES, "all_reduce", 1e9, everyone)
    assert collective_s(gloo, "all_gather", 1e9, everyone) == collective_s(TWO_NODES, "all_gather", 1e9, everyone)
    many = replace(gloo, nodes=64)
    in_ring = collective_s(many, "all_reduce", 1e3, many.group(Level.ALL, None))
    assert in_ring > collective_s(replace(many, backend="nccl"), "all_reduce", 1e3, many.group(Level.ALL, None))


@pytest.mark.parametrize(
    ("options", "faster"),
    [
        ({"sync": "bucketed", "network_gbs": 5}, True),
        ({"sync": "fsdp", "network_gbs": 5}, True),
        ({"sync": "bucketed", "network_gbs": 100}, False),
        ({"sync": "fsdp", "network_gbs": 5, "shard_ranks": 8}, None),
        ({"sync": "naive", "network_gbs": 5}, None),
        ({"sync": "fsdp", "network_gbs": 5, "ranks": 4}, None),
    ],
)
def test_groups_are_advised_where_they_are_faster(options: dict[str, Any], faster: bool | None):
    assert SPEEDS is not None
    _, found = planned_fleet(planned(nodes=4, model="xl", **options), SPEEDS, H100, has_nodes=True)
    assert found is not None
    if faster is None:
        assert found.in_groups is None
        return
    assert found.in_groups is not None
    again, _ = planned_fleet(planned(nodes=4, model="xl", shard_ranks=8, **options), SPEEDS, H100, has_nodes=True)
    assert found.in_groups.step == again.step, "as if it had been planned with groups"
    assert found.in_groups.step.time_s < found.time.step.time_s or not faster
    assert ("With --shard-ranks 8, averages across nodes in parts" in fleet_words(found)) == faster

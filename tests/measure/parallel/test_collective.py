"""The workload `collective` on gloo, with its messages and bytes; processes that share a GPU; NCCL where there are GPUs."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from cell_maker import importable, silent
from ranks import run_ranks
from trainstep.config.collective import CollectiveConfig
from trainstep.config.grid import Cell
from trainstep.config.parsing import build_config, to_plain
from trainstep.costs.collectives import ring_bytes
from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.harness.local import run_groups
from trainstep.measure.harness.runner import Limits
from trainstep.measure.parallel.collective import (
    WORKLOAD,
    CollectiveCall,
    CollectiveMeasurement,
    CollectiveWorkload,
    levels_of,
    link_ranks,
    transport_of,
)
from trainstep.measure.parallel.meeting import count_others
from trainstep.parallel.ranks import Ranks
from trainstep.records.derive import bandwidth
from trainstep.records.ranks import rank_values
from trainstep.records.record import Record

__all__ = ["importable"]


def measured(ranks: Ranks, config: dict[str, Any]) -> dict[str, Any]:
    """Run two warm-ups, a call that settles and three timed calls on this rank; its facts, and its tensors at the end."""
    cell = CollectiveConfig(**config)
    levels = levels_of(cell, ranks)
    levels["all"].send_by(transport_of(cell))
    call = CollectiveCall(cell, ranks, levels)
    warmups = call.times(call.config.warmups)
    call.collectives.traffic.clear()
    measurement = CollectiveMeasurement(call, lambda stage: None, {}, warmups)
    measurement.take(2)
    measurement.settle()
    measurement.take(1)
    tensors = [tensor.float().numpy().copy() for tensor in (call.source, call.whole, call.shard)]  # lists take seconds
    findings = measurement.finish()
    return {
        "facts": {name: fact.value for name, fact in findings.facts.items()},
        "timed": len(findings.samples["time"].values),
        "warmups": len(findings.samples["time"].warmups),
        "tensors": tensors,
    }


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_messages_bytes_and_values_are_those_of_the_operation(operation: str):
    config = {"operation": operation, "ranks": 3, "mib": 1e-9, "dtype": "fp32", "warmups": 2}
    results = run_ranks(3, measured, config)
    for result in results:
        assert (result["timed"], result["warmups"]) == (3, 2)
        assert result["facts"]["messages"] == 4  # the call that settles is sent too
        assert result["facts"]["message_bytes"] == 4 * 12  # three floats each
        assert result["facts"]["payload_bytes"] == 12
        assert result["facts"]["ring_bytes"] == ring_bytes(operation, 12, 3)
    sources, wholes, shards = (
        torch.tensor(np.array([result["tensors"][place] for result in results])) for place in range(3)
    )
    total = sources.sum(0)
    if operation == "all_reduce":
        torch.testing.assert_close(wholes, total.expand(3, 3))
    elif operation == "broadcast":
        assert torch.equal(wholes, sources[0].expand(3, 3))
    elif operation == "all_gather":
        assert torch.equal(wholes, sources.flatten().expand(3, 3))
    else:
        torch.testing.assert_close(shards.flatten(), total)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_copies_give_what_the_library_gives(operation: str, ranks: int):
    """A message larger than the inbox, in several chunks, and one of a few bytes."""
    for options in ({"mib": 0.7, "inbox_mib": 1}, {"mib": 1e-5}):
        config = {"operation": operation, "ranks": ranks, **options}
        library, copies = (
            run_ranks(ranks, measured, config | {"transport": transport}) for transport in ("library", "copies")
        )
        place = 2 if operation == "reduce_scatter" else 1
        for one, other in zip(library, copies, strict=True):
            assert one["facts"]["messages"] == other["facts"]["messages"] == 4
            torch.testing.assert_close(torch.tensor(one["tensors"][place]), torch.tensor(other["tensors"][place]))


def run(**config: Any) -> list[Record]:
    cell = Cell(workload="collective", config=to_plain(build_config("collective", config)), point={})
    return [record for records in run_groups([[cell]], Limits(timeout_s=100), silent) for record in records]


def test_one_rank_is_the_cost_of_the_call():
    measurement = CollectiveWorkload().prepare(to_plain(CollectiveConfig(ranks=1, mib=0.001)), lambda stage: None)
    measurement.take(3)
    findings = measurement.finish()
    assert len(findings.samples["time"].values) == 3
    assert findings.facts["ring_bytes"].value == findings.facts["messages"].value == 0


def test_more_ranks_than_gpus_is_unsupported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(CellFailed, match="2 ranks need a GPU each, and 1 is visible") as caught:
        WORKLOAD.prepare(to_plain(CollectiveConfig(backend="nccl", device="cuda")), lambda stage: None)
    assert caught.value.failure.kind == "unsupported"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_other_processes_on_a_gpu_are_counted():
    sibling_of_ours = os.getppid()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert count_others([]) == 0
        assert count_others([os.getpid()]) == 0
        assert count_others([4_000_000_001]) == 0  # this process, by a number that a container does not know
        assert count_others([os.getpid(), child.pid]) == 1
        assert count_others([os.getpid(), child.pid, sibling_of_ours]) == 2
    finally:
        child.kill()
        child.wait()


@pytest.mark.multigpu
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
@pytest.mark.usefixtures("importable")
def test_nccl_is_timed_by_events_on_every_rank(operation: str):
    config = {"backend": "nccl", "device": "cuda", "operation": operation, "mib": 64.0, "dtype": "bf16", "steps": 5}
    (record,) = run(**config)
    assert record.failure is None, record.failure
    assert record.fact("timing") == "cuda_events"
    assert set(rank_values(record, "time")) == set(rank_values(record, "host_time")) == {0, 1}
    speed = bandwidth(record)
    assert speed is not None
    assert speed.bus_bytes_per_s > 1e9
    assert record.fact("messages") == 5


def test_links_are_those_of_neighbours_in_each_ring():
    def pairs(level: str, ranks: int = 6, nodes: int = 3) -> list[tuple[int, int]]:
        return link_ranks(CollectiveConfig(ranks=ranks, nodes=nodes, level=level))

    assert pairs("across_nodes") == [(0, 4), (0, 2), (2, 4)]
    assert pairs("in_nodes") == [(0, 1), (2, 3), (4, 5)]
    assert pairs("in_nodes", ranks=8, nodes=2) == [(0, 3), (0, 1), (1, 2), (2, 3), (4, 7), (4, 5), (5, 6), (6, 7)]


@pytest.mark.parametrize(("level", "members"), [("in_nodes", 2), ("across_nodes", 2), ("all", 4)])
def test_a_level_goes_among_its_own_ranks(level: str, members: int):
    config = {"ranks": 4, "nodes": 2, "level": level, "mib": 1e-9, "warmups": 1}
    results = run_ranks(4, measured, config)
    sources = torch.tensor(np.array([result["tensors"][0] for result in results]))
    groups = {"in_nodes": [[0, 1], [2, 3]], "across_nodes": [[0, 2], [1, 3]], "all": [[0, 1, 2, 3]]}[level]
    for rank, result in enumerate(results):
        [own] = [group for group in groups if rank in group]
        torch.testing.assert_close(torch.tensor(result["tensors"][1]), sources[own].sum(0))
        facts = result["facts"]
        assert facts["ring_bytes"] == ring_bytes("all_reduce", facts["payload_bytes"], members)
        assert facts["messages"] == 4

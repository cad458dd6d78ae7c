"""Cells of several ranks: as many processes, one record; who failed is named, and nobody is left waiting."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from cell_maker import importable, is_alive, silent, wait_until
from trainstep.config.cell import Cell
from trainstep.measure.connection import CellLost
from trainstep.measure.executor_local import run_groups
from trainstep.measure.interleave import run_interleaved
from trainstep.measure.rank_connection import RankConnection, _End, _worst
from trainstep.measure.rank_findings import joined_ranks, merged_findings
from trainstep.measure.runner import CellRun, Limits, run_alone
from trainstep.parallel.listening import loopback_interface
from trainstep.parallel.watch import LEFT
from trainstep.records.ranks import rank_spread, rank_values
from trainstep.records.record import Failure, Record

__all__ = ["importable"]
pytestmark = [
    pytest.mark.usefixtures("importable"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]


def ranked(name: str = "RANKED", /, ranks: int = 3, **config: Any) -> Cell:
    config = {"device": "cpu", "ranks": ranks, "steps": 4, **config}
    return Cell(workload=f"rank_workloads:{name}", config=config, point={"workload": name})


def run(*cells: Cell, timeout_s: float = 60, **limits: Any) -> list[Record]:
    groups = run_groups([[cell] for cell in cells], Limits(timeout_s=timeout_s, **limits), silent)
    return [record for records in groups for record in records]


def pids_of(connection: RankConnection) -> list[int]:
    return [one._process.pid for one in connection._ranks]


def run_and_look(cell: Cell, timeout_s: float = 60) -> Record:
    """The record; all processes must be gone once it is closed."""
    connection = RankConnection(silent, cell.config["ranks"])
    try:
        record, again = run_alone(CellRun(cell, Limits(timeout_s=timeout_s), connection))
        assert not again
    finally:
        connection.close()
    assert wait_until(lambda: not any(map(is_alive, pids_of(connection))))
    return record


def test_one_record_of_all_ranks():
    (record,) = run(ranked(), memory_limit_bytes=3 * 2**30)
    assert record.failure is None
    assert record.samples["step"].values == (2.0, 1.0, 4.0, 3.0)  # per step, the slowest rank's
    assert record.samples["step"].warmups == (11.0,)
    assert record.samples["clock"].values == (100.0,)  # rank 0's
    assert record.samples["only_rank_0"].values == (1.0,)
    assert record.tables["own"] == {"rank": (0,)}
    assert rank_values(record, "step") == {0: (0, 1, 2, 3), 1: (1, 0, 3, 2), 2: (2, -1, 4, 1)}
    assert rank_values(record, "clock") == {0: (100,), 1: (101,), 2: (102,)}
    assert rank_values(record, "only_rank_0") == {}
    told = {name: record.fact(name) for name in ("rank", "local_rank", "world_size", "master_addr")}
    assert told == {"rank": "0", "local_rank": "0", "world_size": "3", "master_addr": "127.0.0.1"}
    assert record.fact("memory_limit_bytes") == 2**30


@pytest.mark.parametrize("where", ["prepare", "take", "finish"])
def test_an_error_of_one_rank(where: str):
    record = run_and_look(ranked(act="raise", victim=1, where=where, wait=where == "take"))
    assert record.failure is not None
    assert (record.failure.kind, record.failure.message) == ("crash", "rank 1: RuntimeError: this was planted")
    assert "RuntimeError: this was planted" in record.failure.last_lines


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        ("segfault", "crash", "rank 2: the process was killed by SIGSEGV in steps"),
        ("hard_exit", "crash", "rank 2: the process left with exit code 7 in steps"),
        ("run_out", "out_of_memory", "rank 2: ran out of memory in steps asking for 4,096 bytes"),
    ],
)
def test_a_death_of_one_rank(act: str, kind: str, message: str):
    record = run_and_look(ranked(act=act, victim=2, wait=True))
    assert record.failure is not None
    assert (record.failure.kind, record.failure.message) == (kind, message)


@pytest.mark.parametrize("others", ["raise", "leave"])
def test_a_death_comes_before_what_follows_from_it(others: str):
    record = run_and_look(ranked(act="segfault", victim=1, others=others))
    assert record.failure is not None
    assert record.failure.message == "rank 1: the process was killed by SIGSEGV in steps"


def test_a_hang_is_a_time_out_of_every_rank():
    record = run_and_look(ranked(wait=True), timeout_s=3)
    assert record.failure is not None
    assert record.failure.kind == "timeout"
    assert record.failure.message == "every rank: killed in steps after its 3 s were over"


def test_a_time_out_says_who_was_missing():
    record = run_and_look(ranked(wait=True, said="trainstep: rank 0 has waited; rank 2 is not there\n"), timeout_s=3)
    assert record.failure is not None
    assert record.failure.message.endswith(" were over; rank 0 has waited; rank 2 is not there")


def test_ranks_that_time_out_in_different_stages():
    ends = [
        _End(rank=rank, lost=Failure(kind="timeout", phase=stage, message=f"killed in {stage}"))
        for rank, stage in enumerate(("steps", "build", "steps"))
    ]
    with pytest.raises(CellLost, match=r"^ranks 0, 2: killed in steps; rank 1: killed in build$"):
        _worst(ends, 3)


def test_where_the_watch_ended_all_its_sentence_is_the_failure():
    sentence = "rank 1 has stopped after 10 steps and rank 0 is in barrier: give every rank the same number of batches"
    record = run_and_look(ranked(wait="out", said=f"trainstep: {sentence}; rank {{rank}} leaves\n"))
    assert record.failure is not None
    assert (record.failure.kind, record.failure.message) == ("crash", sentence)


def test_exit_codes_say_who_left_because_of_another_whatever_was_printed():
    words = ("trainstep: rank 1 (host, pid 7) died; rank 0 leaves",)
    ends = [
        _End(
            rank=rank,
            lost=Failure(kind="crash", phase="steps", message=f"left with exit code {code}", last_lines=words),
            exit_code=code,
        )
        for rank, code in enumerate((LEFT, 7, LEFT))
    ]
    with pytest.raises(CellLost, match=r"^rank 1: left with exit code 7$"):
        _worst(ends, 3)
    with pytest.raises(CellLost, match=r"^rank 1 \(host, pid 7\) died$"):
        _worst([ends[0], ends[2]], 3)


def test_cells_meet_where_nobody_else_comes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")  # the user's own
    first, second = run(ranked(ranks=2), ranked(ranks=2))
    assert first.fact("gloo_socket_ifname") == loopback_interface()
    assert first.fact("nccl_socket_ifname") == "eth7"
    assert len(str(first.fact("trainstep_token"))) >= 32
    assert first.fact("trainstep_token") != second.fact("trainstep_token")


def test_processes_shared_by_cells_of_as_many_ranks():
    cells = [ranked("SHARED", 2), ranked("SHARED", 2, steps=5), ranked("SHARED", 3), ranked("SHARED", 3, steps=5)]
    first, second, third, fourth = (record.fact("pid") for record in run(*cells))
    assert first == second
    assert third == fourth
    assert first != third


def test_what_no_rank_supports_spoils_nothing():
    refused, fine = run(ranked("SHARED", 2, unsupported=True), ranked("SHARED", 2))
    assert refused.failure is not None
    assert (refused.failure.kind, refused.failure.message) == ("unsupported", "not here")
    assert fine.failure is None


def test_variants_of_several_ranks_take_turns():
    [one], [other] = run_interleaved([ranked(ranks=2), ranked(ranks=2, index=1)], Limits(timeout_s=60), silent)
    for record in (one, other):
        assert record.failure is None
        assert record.fact("interleaving") == "live"
        assert len(record.samples["step"].values) == 4
        assert set(rank_values(record, "step")) == {0, 1}
    assert one.fact("master_port") != other.fact("master_port")


def plain(values: Sequence[float], unit: str = "s") -> dict[str, Any]:
    samples = {"time": {"unit": unit, "values": list(values), "warmups": []}}
    return {"samples": samples, "facts": {}, "tables": {}}


def test_ranks_that_took_unlike_samples_keep_the_first():
    merged = merged_findings([plain([1, 2]), plain([3])])
    assert merged["samples"]["time"]["values"] == [1, 2]
    assert merged["tables"]["ranks"]["values"] == []


def test_rounds_are_joined_rank_by_rank():
    rounds = [merged_findings([plain([1]), plain([2])]), merged_findings([plain([3]), plain([4])])]
    joined = joined_ranks([one["tables"]["ranks"] for one in rounds])
    assert joined["values"] == [[1, 3], [2, 4]]
    assert joined["rank"] == [0, 1]


def test_slowest_and_fastest():
    (record,) = run(ranked(ranks=2, steps=3))
    spread = rank_spread(record, "step")  # rank 0: 0 1 2, rank 1: 1 0 3
    assert spread is not None
    assert (spread.slowest_value, spread.fastest_value) == (1.0, 1.0)
    clock = rank_spread(record, "clock")
    assert clock is not None
    assert (clock.slowest, clock.slowest_value, clock.fastest, clock.fastest_value) == (1, 101.0, 0, 100.0)

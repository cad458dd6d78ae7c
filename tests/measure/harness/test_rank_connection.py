"""A cell of several ranks has as many processes and one record; the rank that failed is named, and no process is left."""

import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from cell_maker import importable, is_alive, silent, wait_until
from trainstep.config.grid import Cell
from trainstep.measure.harness import rank_connection
from trainstep.measure.harness.connection import CellLost
from trainstep.measure.harness.interleave import run_interleaved
from trainstep.measure.harness.local import run_groups
from trainstep.measure.harness.rank_connection import RankConnection, _End, _worst, joined_ranks, merged_findings
from trainstep.measure.harness.runner import CellRun, Limits, run_alone
from trainstep.parallel.liveness.link import loopback_interface
from trainstep.parallel.liveness.watch import LEFT
from trainstep.records.ranks import rank_spread, rank_values
from trainstep.records.record import Failure, Record

__all__ = ["importable"]
pytestmark = [
    pytest.mark.usefixtures("importable"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def ranked(name: str = "RANKED", /, ranks: int = 3, **config: Any) -> Cell:
    config = {"device": "cpu", "ranks": ranks, "steps": 4, **config}
    return Cell(workload=f"rank_workloads:{name}", config=config, point={"workload": name})


def run(*cells: Cell, timeout_s: float = 60, **limits: Any) -> list[Record]:
    groups = run_groups([[cell] for cell in cells], Limits(timeout_s=timeout_s, **limits), silent)
    return [record for records in groups for record in records]


def pids_of(connection: RankConnection) -> list[int]:
    return [rank._process.pid for rank in connection._ranks]


def run_and_close(cell: Cell, timeout_s: float = 60) -> Record:
    """Run a cell and check that its processes end when it is closed; the record."""
    connection = RankConnection(silent, cell.config["ranks"])
    try:
        record, again = run_alone(CellRun(cell, Limits(timeout_s=timeout_s), connection))
        assert not again
    finally:
        connection.close()
    assert wait_until(lambda: not any(map(is_alive, pids_of(connection))))
    return record


def test_all_ranks_have_one_record():
    (record,) = run(ranked(), memory_limit_bytes=3 * 2**30)
    assert record.failure is None
    assert record.samples["step"].values == (2.0, 1.0, 4.0, 3.0)  # per step, the slowest rank's
    assert record.samples["step"].warmups == (11.0,)
    assert record.samples["clock"].values == (100.0,)  # rank 0's
    assert record.samples["only_rank_0"].values == (1.0,)
    assert record.tables["own"] == {"rank": (0,)}
    assert rank_values(record, "step") == {0: (0, 1, 2, 3), 1: (1, 0, 3, 2), 2: (2, 1, 4, 1)}
    assert rank_values(record, "clock") == {0: (100,), 1: (101,), 2: (102,)}
    assert rank_values(record, "only_rank_0") == {}
    launch_facts = {name: record.fact(name) for name in ("rank", "local_rank", "world_size", "master_addr")}
    assert launch_facts == {"rank": "0", "local_rank": "0", "world_size": "3", "master_addr": "127.0.0.1"}
    assert record.fact("memory_limit_bytes") == 2**30


@pytest.mark.parametrize("where", ["prepare", "take", "finish"])
def test_an_error_of_one_rank_names_the_rank(where: str):
    record = run_and_close(ranked(act="raise", victim=1, where=where, wait=where == "take"))
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
def test_the_death_of_one_rank_names_the_rank(act: str, kind: str, message: str):
    record = run_and_close(ranked(act=act, victim=2, wait=True))
    assert record.failure is not None
    assert (record.failure.kind, record.failure.message) == (kind, message)


@pytest.mark.parametrize("others", ["raise", "leave"])
def test_a_death_comes_before_the_errors_that_follow_from_it(others: str):
    record = run_and_close(ranked(act="segfault", victim=1, others=others))
    assert record.failure is not None
    assert record.failure.message == "rank 1: the process was killed by SIGSEGV in steps"


def test_a_hang_is_a_time_out_of_every_rank():
    record = run_and_close(ranked(wait=True), timeout_s=3)
    assert record.failure is not None
    assert record.failure.kind == "timeout"
    assert record.failure.message == "every rank: killed in steps at its time limit of 3 s"


def test_a_time_out_names_the_missing_rank():
    record = run_and_close(ranked(wait=True, said="trainstep: rank 0 has waited; rank 2 is not there\n"), timeout_s=3)
    assert record.failure is not None
    assert record.failure.message.endswith(" at its time limit of 3 s; rank 0 has waited; rank 2 is not there")


def test_ranks_that_time_out_in_different_stages():
    ends = [
        _End(rank=rank, lost=Failure(kind="timeout", phase=stage, message=f"killed in {stage}"))
        for rank, stage in enumerate(("steps", "build", "steps"))
    ]
    with pytest.raises(CellLost, match=r"^ranks 0, 2: killed in steps; rank 1: killed in build$"):
        _worst(ends, 3)


class LostRank:
    """A rank's connection that is lost after some seconds."""

    alive = False

    def __init__(self, kind: str, after_s: float) -> None:
        self.kind, self.after_s = kind, after_s

    def ask(self, *_arguments: object, **_limits: object) -> NoReturn:
        time.sleep(self.after_s)
        raise CellLost(Failure(kind=self.kind, phase="steps", message=f"it was {self.kind}"))

    def close(self) -> None:
        pass

    kill = close


def test_the_loss_of_a_node_is_the_failure_also_if_it_is_noticed_late(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_connection, "_MOMENT_S", 0.05)
    connection = RankConnection(silent, 2)
    connection.kill()
    connection._ranks = [LostRank("crash", 0.0), LostRank("node_lost", 0.5)]
    with pytest.raises(CellLost, match=r"^rank 1: it was node_lost$") as caught:
        connection.ask(ranked(ranks=2), {}, timeout_s=5, limit_s=5)
    assert caught.value.failure.kind == "node_lost"
    connection.close()


def test_the_sentence_of_the_watch_is_the_failure_where_it_ended_all_ranks():
    sentence = "rank 1 has stopped after 10 steps and rank 0 is in barrier: give every rank the same number of batches"
    record = run_and_close(ranked(wait="out", said=f"trainstep: {sentence}; rank {{rank}} leaves\n"))
    assert record.failure is not None
    assert (record.failure.kind, record.failure.message) == ("crash", sentence)


def test_exit_codes_show_which_rank_left_because_of_another():
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


def test_cells_have_a_token_and_an_interface_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")  # the user's own
    first, second = run(ranked(ranks=2), ranked(ranks=2))
    assert first.fact("gloo_socket_ifname") == loopback_interface()
    assert first.fact("nccl_socket_ifname") == "eth7"
    assert len(str(first.fact("trainstep_token"))) >= 32
    assert first.fact("trainstep_token") != second.fact("trainstep_token")


def test_cells_of_as_many_ranks_share_processes():
    cells = [ranked("SHARED", 2), ranked("SHARED", 2, steps=5), ranked("SHARED", 3), ranked("SHARED", 3, steps=5)]
    first, second, third, fourth = (record.fact("pid") for record in run(*cells))
    assert first == second
    assert third == fourth
    assert first != third


def test_an_unsupported_cell_does_not_fail_the_next():
    refused, fine = run(ranked("SHARED", 2, unsupported=True), ranked("SHARED", 2))
    assert refused.failure is not None
    assert (refused.failure.kind, refused.failure.message) == ("unsupported", "not here")
    assert fine.failure is None


def test_variants_of_several_ranks_are_interleaved():
    [first], [second] = run_interleaved([ranked(ranks=2), ranked(ranks=2, index=1)], Limits(timeout_s=60), silent)
    for record in (first, second):
        assert record.failure is None
        assert record.fact("interleaving") == "live"
        assert len(record.samples["step"].values) == 4
        assert set(rank_values(record, "step")) == {0, 1}
    assert first.fact("master_port") != second.fact("master_port")


def findings_of(values: Sequence[float], unit: str = "s") -> dict[str, Any]:
    samples = {"time": {"unit": unit, "values": list(values), "warmups": []}}
    return {"samples": samples, "facts": {}, "tables": {}}


def test_ranks_that_took_unlike_samples_keep_the_first():
    merged = merged_findings([findings_of([1, 2]), findings_of([3])])
    assert merged["samples"]["time"]["values"] == [1, 2]
    assert merged["tables"]["ranks"]["values"] == []


def test_rounds_are_joined_rank_by_rank():
    rounds = [
        merged_findings([findings_of([1]), findings_of([2])]),
        merged_findings([findings_of([3]), findings_of([4])]),
    ]
    joined = joined_ranks([merged["tables"]["ranks"] for merged in rounds])
    assert joined["values"] == [[1, 3], [2, 4]]
    assert joined["rank"] == [0, 1]


def test_the_spread_names_the_slowest_and_the_fastest_rank():
    (record,) = run(ranked(ranks=2, steps=3))
    spread = rank_spread(record, "step")  # rank 0: 0 1 2, rank 1: 1 0 3
    assert spread is not None
    assert (spread.slowest_value, spread.fastest_value) == (1.0, 1.0)
    clock = rank_spread(record, "clock")
    assert clock is not None
    assert (clock.slowest, clock.slowest_value, clock.fastest, clock.fastest_value) == (1, 101.0, 0, 100.0)

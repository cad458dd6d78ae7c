"""A step that several processes took: the slowest is named with its interval, in answer, table and page, or it cannot be told."""

from collections.abc import Sequence
from typing import Any

import pytest

from record_maker import a_record, seconds
from trainstep.report.answers import answers
from trainstep.report.kit.rows import rows_of
from trainstep.report.page import page
from trainstep.report.step.ranks import step_tables


def a_step(steps_s: Sequence[Sequence[float]], nodes: Sequence[str] | None, **config: Any) -> Any:
    """A record with the steps of each rank, on these nodes."""
    ranks = len(steps_s)
    table = {
        "rank": list(range(ranks)),
        "quantity": ["step"] * ranks,
        "unit": ["s"] * ranks,
        "values": [list(values) for values in steps_s],
        **({} if nodes is None else {"node": list(nodes)}),
    }
    config = {"model": "tiny", "context": 16, "device": "cpu", "ranks": ranks, **config}
    return a_record(
        workload="train_step",
        key=str(config),
        config=config,
        samples={"step": seconds(steps_s[0])},
        tables={"ranks": table},
    )


def verdict(*records: Any) -> str:
    (answer,) = answers(rows_of([("r.jsonl", record) for record in records]))
    return answer.verdict


EVEN = [1.0, 1.001, 0.999, 1.0, 1.002, 0.998, 1.0, 1.001]


def times(factor: float) -> list[float]:
    return [factor * value for value in EVEN]


def test_a_slow_node_is_named_with_its_interval():
    said = verdict(a_step([EVEN, times(1.25)], ["n1", "n2"]))
    assert "n2 is the slowest of 2 nodes: its step takes 1.250 times as long as the others' (99 % interval 1.2" in said


def test_of_several_processes_of_a_node_rank_and_node_are_named():
    said = verdict(a_step([EVEN, EVEN, EVEN, times(1.5)], ["n1", "n1", "n2", "n2"]))
    assert "rank 3 (n2) is the slowest of 4 processes: its step takes 1.500 times as long" in said
    assert "rank 1 is the slowest of 2 processes: its step takes 1.500 times as long" in verdict(
        a_step([EVEN, times(1.5)], None)
    )


def test_nodes_that_are_alike_have_no_slowest():
    assert "The slowest of 2 nodes, n1, differs from the others by less than 2 %." in verdict(
        a_step([EVEN, EVEN], ["n1", "n2"])
    )


def test_few_steps_tell_nothing():
    said = verdict(a_step([EVEN[:2], times(1.5)[:2]], ["n1", "n2"]))
    assert "The slowest of 2 nodes is n2; whether the others are faster cannot be told: too few values: 2" in said


def test_every_process_has_a_line_and_the_page_a_section():
    record = a_step([EVEN, times(1.25)], ["n1", "n2"])
    rows = rows_of([("r.jsonl", record)])
    [table] = step_tables(rows)
    assert table.title == "Step on each node"
    lines = [[entry.text for entry in line] for line in table.entries]
    assert [line[-5:-2] for line in lines] == [["n1", "0", "1,000 ± 1"], ["n2", "1", "1,250 ± 1"]]
    assert [line[-1] for line in lines] == ["faster", "slower"]
    assert [raw["ratio"] for raw in table.raw] == pytest.approx([0.8, 1.25])
    assert "Each node" in page(rows)


def test_one_process_has_none_of_it():
    rows = rows_of([("r.jsonl", a_record(config={"model": "tiny", "context": 16, "device": "cpu"}))])
    assert step_tables(rows) == []
    assert "slowest" not in verdict(rows[0].record)


def test_records_from_before_and_after_have_the_same_columns():
    old, new = (
        a_record(config={"model": "tiny", "context": 16}),
        a_record(config={"model": "tiny", "context": 32, "ranks": 1, "nodes": 1}),
    )
    rows = rows_of([("r.jsonl", old), ("r.jsonl", new)])
    assert [list(row.point) for row in rows] == [["model", "context"]] * 2

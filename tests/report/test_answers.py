"""A workload's cells in one sentence."""

from typing import Any

import pytest

from record_maker import a_record, seconds
from trainstep.records.facts import facts_of
from trainstep.records.record import Failure
from trainstep.report.answers import answers
from trainstep.report.rows import rows_of

FAILED = Failure(kind="crash", phase="build", message="no")


def rows(*records: Any) -> Any:
    return rows_of([("r.jsonl", record) for record in records])


def a_cell(workload: str, seq: int, **changes: Any) -> Any:
    return a_record(workload=workload, key=str(seq), config={"seq": seq}, **changes)


@pytest.mark.parametrize(
    ("workload", "cells", "answer"),
    [
        (
            "train_step",
            [{"samples": {"step": seconds([2, 2, 2])}}, {"samples": {"step": seconds([1, 1, 9])}}],
            "Quickest: 1, 1.00 s a step, 2.00 times as fast as 0.",
        ),
        ("parallel", [{"samples": {"step": seconds([0.5])}}], "Quickest: 0, 500.0 ms a step."),
        ("attention", [{"samples": {"time_s": seconds([1])}}, {"failure": FAILED}], "1.00 s a call; 1 of 2 failed."),
        ("collective", [{"samples": {"time": seconds([1])}}], "Quickest: 0, 1.00 s a call."),
        (
            "memory",
            [{"facts": facts_of(peak_allocated_bytes=2**31)}, {"facts": facts_of(peak_allocated_bytes=2**30)}],
            "Fullest: 0, 2.00 GiB at the peak.",
        ),
        ("numerics", [{"facts": facts_of(error_loss=1e-3, error_logits=0.02)}], "Largest error: 2.0e-02 in logits, 0."),
        (
            "profile",
            [{"facts": facts_of(verdict="launch-bound")}] * 2 + [{"facts": facts_of(verdict="compute-bound")}],
            "2 launch-bound, 1 compute-bound.",
        ),
        (
            "attention_tiles",
            [{"facts": facts_of(best="a", in_use="a")}, {"facts": facts_of(best="a", in_use="b")}],
            "The tiles in use are the fastest in 1 of 2 cells.",
        ),
    ],
)
def test_what_a_reader_asks_first(workload: str, cells: list[dict[str, Any]], answer: str):
    (found,) = answers(rows(*(a_cell(workload, seq, **one) for seq, one in enumerate(cells))))
    assert found.workload == workload
    assert found.text.endswith(answer)


@pytest.mark.parametrize("workload", ["train_step", "memory", "numerics", "profile", "attention_tiles", "ceiling"])
def test_no_answer_where_no_cell_is_done(workload: str):
    assert answers(rows(a_cell(workload, 0, failure=FAILED))) == []


def test_a_workload_of_ones_own_has_none():
    assert answers(rows(a_cell("mine:W", 0))) == []

"""The answer for parallel strategies: ratios of few pairs, the rank that is quoted, and bounds that are none."""

from collections.abc import Sequence
from typing import Any

from record_maker import COMMUNICATION_BY_RANK, a_record, seconds
from trainstep.records.facts import facts_of
from trainstep.report.answers import answers
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.rows import rows_of
from trainstep.report.parallel.tables import parallel_tables


def a_strategy(sync: str, times: Sequence[float], **tables: Any) -> Any:
    facts = facts_of(device_busy_s=0.25, interleaving="live", interleaving_group="g", peak_allocated_bytes=2**30)
    samples = {"step": seconds(times), "enqueue": seconds([0.97 * time for time in times])}
    config = {
        "sync": sync,
        "ranks": 2,
        "reduce_dtype": "own",
        "precision": "fp32",
        "compile": "none",
        "capture": "none",
    }
    return a_record(workload="parallel", key=sync, config=config, samples=samples, facts=facts, tables=tables)


def answer_of(*records: Any) -> Answer:
    (answer,) = answers(rows_of([("r.jsonl", record) for record in records]))
    return answer


def test_every_strategy_without_a_verdict_has_its_ratio_in_each_pair_and_the_next_step():
    answer = answer_of(
        a_strategy("bucketed", [1.0, 1.0]), a_strategy("torch_ddp", [1.6, 2.8]), a_strategy("torch_zero", [1.1, 1.2])
    )
    assert answer.verdict.startswith(
        "Cannot tell which is fastest: bucketed takes 1.00 s a step; no verdict from 2 pairs (at least 5 are needed): torch_zero "
        "took 1.10 and 1.20 times as long, torch_ddp 1.60 and 2.80."
    )
    assert answer.suggestion.startswith("Repeat with `--rounds 5` for a verdict.")
    enough = answer_of(a_strategy("bucketed", [1.0] * 5), a_strategy("torch_ddp", [1.6] * 5))
    assert "--rounds" not in enough.text


def test_the_rank_whose_communication_is_quoted_is_named():
    verdict = answer_of(a_strategy("bucketed", [1.0] * 5, communication=COMMUNICATION_BY_RANK)).verdict
    assert (
        "In one profiled step of bucketed on rank 1, which waits least, messages were in flight for 300.0 ms" in verdict
    )


def test_a_rank_without_messages_bounds_only_strategies_that_update_as_many_parameters():
    def suggestion(sync: str) -> str:
        return answer_of(a_strategy("none", [1.0] * 5), a_strategy(sync, [1.0] * 5)).suggestion

    assert "`--capture auto` can make it at most 4.00 times as fast" in suggestion("bucketed")
    assert "`--capture auto` can make it about 4.00 times as fast" in suggestion("sharded_flat")


def test_a_negative_cost_is_explained_where_there_is_one():
    def note(times: Sequence[float]) -> str:
        rows = rows_of(
            [("r.jsonl", record) for record in (a_strategy("none", [1.0] * 5), a_strategy("bucketed", times))]
        )
        [table] = [table for table in parallel_tables(rows) if table.title == "Communication of a step"]
        return table.note

    assert note([0.99] * 5).endswith("Below 0: within the noise, unless the interval of the ratio excludes 1.")
    assert "Below 0" not in note([1.1] * 5)


def test_a_note_about_a_column_that_is_not_shown_is_not_shown():
    [table, *_] = parallel_tables(rows_of([("r.jsonl", a_strategy("bucketed", [1.0] * 5))]))
    assert "Window: several steps" in table.note
    assert "Window: several steps" not in table.brief().note
    assert table.brief().note.endswith("of rank 0.")

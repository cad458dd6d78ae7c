"""The answer for timed steps: slower cells that the host limits, the largest gain of a capture, and words for one state."""

from collections.abc import Sequence
from typing import Any

from record_maker import a_record, seconds
from trainstep.records.facts import facts_of
from trainstep.report.answers import answers
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import ms_words
from trainstep.report.kit.rows import doubts, rows_of
from trainstep.report.step.comparison import comparison_tables


def a_step(context: int, step_ms: float, *, busy: float, enqueue: float, steps: int = 10, **config: Any) -> Any:
    """An interleaved cell whose step takes these milliseconds; `steps`: how many pairs there are."""
    config = {"model": "small", "context": context, "device": "cuda", **config}
    facts = facts_of(device_busy_s=busy / 1e3, interleaving="live", interleaving_group="g", **config.pop("facts", {}))
    samples = {"step": seconds([step_ms / 1e3] * steps), "enqueue": seconds([enqueue / 1e3] * steps)}
    return a_record(workload="train_step", key=str(config), config=config, samples=samples, facts=facts)


def answer_of(records: Sequence[Any]) -> Answer:
    (answer,) = answers(rows_of([("r.jsonl", record) for record in records]))
    return answer


def precisions(context: int, fp32: float, bf16: float, bf16_busy: float, **changes: Any) -> list[Any]:
    """fp32, which the GPU limits, and bf16, which the host limits."""
    return [
        a_step(context, fp32, busy=0.95 * fp32, enqueue=fp32 / 2, precision="fp32", **changes),
        a_step(context, bf16, busy=bf16_busy, enqueue=0.97 * bf16, precision="bf16", **changes),
    ]


def test_a_cell_that_the_host_makes_slower_is_said_to_be_so():
    verdict = answer_of([*precisions(128, 20, 22, 6.6), *precisions(256, 40, 24, 9)]).verdict
    assert (
        "slower in 1 of 2 cells (1.10 of the time; limited by the host there: the GPU works for 30.0 % of the step)"
        in verdict
    )
    assert verdict.count("limited by the host there") == 1, "a faster cell needs no excuse"
    assert "the GPU works for 30.0 to 37.5 % of each)" in verdict


def test_a_single_slower_cell_is_said_to_be_limited_by_the_host():
    verdict = answer_of(precisions(128, 20, 22, 6.6)).verdict
    assert "of the time; limited by the host there: the GPU works for 30.0 % of the step." in verdict


def test_the_largest_gain_of_a_capture_is_named_also_of_a_variant_that_is_slower_now():
    suggestion = answer_of([*precisions(128, 20, 22, 6.6), *precisions(256, 40, 24, 9)]).suggestion
    assert suggestion == (
        "`--capture auto` can make small 128 bf16 at most 3.33 times as fast: from 22.00 ms to the 6.600 ms that the GPU works. "
        "1 more can become at most 2.67 times as fast."
    )


def test_of_variants_of_one_work_the_one_that_a_graph_makes_fastest_is_advised():
    cells = [
        a_step(128, 30, busy=9, enqueue=29.5, compile="none"),
        a_step(128, 12, busy=4.5, enqueue=11.8, compile="model"),
    ]
    assert answer_of(cells).suggestion.startswith(
        "`--capture auto` can make small 128 model at most 2.67 times as fast"
    )
    assert "more can" not in answer_of(cells).suggestion


def test_a_captured_variant_is_named_by_its_option_and_leaves_no_advice_to_capture():
    cells = [
        a_step(128, 24, busy=5, enqueue=23.8, capture="none"),
        a_step(
            128,
            5,
            busy=4.63,
            enqueue=1,
            capture="step",
            facts={"model_flops": 0.15 * 0.005 * 67e12, "flops_dtype": "fp32"},
        ),
    ]
    answer = answer_of(cells)
    assert answer.verdict.startswith("Against capture none: `--capture step` is faster: it takes ")
    assert "small 128 --capture none: the GPU works" in answer.verdict
    assert "--capture auto" not in answer.text


def test_work_beside_matmuls_is_stated_of_the_gpus_work():
    facts = {"model_flops": 0.15 * 0.005 * 67e12, "flops_dtype": "fp32"}
    cells = [a_step(length, 5, busy=4.63, enqueue=1, precision="tf32", facts=facts) for length in (128,)]
    assert answer_of(cells).suggestion.startswith(
        "Of 4.630 ms of GPU work in small 128 the matmuls need at least 0.7500 ms: "
    )


def test_few_pairs_and_a_wide_interval_are_told_apart():
    verdict = answer_of([*precisions(128, 20, 10, 9), *precisions(256, 20, 10, 9, steps=3)]).verdict
    assert "has no verdict in 1 (0.500 of the time; too few pairs: 3, and at least 5 are needed)" in verdict
    assert "wide" not in verdict


def test_the_answer_and_the_table_have_one_word_for_a_difference_below_the_minimum():
    cells = [
        a_step(128, 200, busy=190, enqueue=100, capture="none"),
        a_step(128, 199, busy=190, enqueue=100, capture="step"),
    ]
    assert "`--capture step` differs by under 2 %: it takes 0.995" in answer_of(cells).verdict
    [table] = comparison_tables(rows_of([("r.jsonl", record) for record in cells]))
    place = [column.title for column in table.columns].index("verdict")
    assert [row[place].text for row in table.entries] == ["under 2 %"]


def test_times_beside_a_table_in_milliseconds_stay_in_milliseconds():
    assert (ms_words(1.353), ms_words(0.0621), ms_words(2e-5)) == ("1,353 ms", "62.10 ms", "20.0 µs")


def test_the_answer_counts_as_many_launch_bound_steps_as_the_table_marks():
    """The stored flags are older than the rule: they would mark one step."""
    stored = [{"launch_bound": False}, {"launch_bound": True}, {"launch_bound": False}, {"launch_bound": False}]
    times = [(15.1, 19.3), (4.6, 8.9), (14.5, 17.0), (19.0, 9.0)]
    cells = [
        a_step(length, 20, busy=busy, enqueue=enqueue, facts=flags)
        for length, (busy, enqueue), flags in zip((1, 2, 3, 4), times, stored, strict=True)
    ]
    assert "2 of 4 steps are launch-bound" in answer_of(cells).verdict
    rows = rows_of([("r.jsonl", record) for record in cells])
    assert [doubts(row.record) for row in rows] == [("launch-bound",), ("launch-bound",), ("near launch-bound",), ()]

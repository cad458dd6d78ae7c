"""The answer for several profiles: which the host limits, and advice for a training step first."""

from dataclasses import replace
from typing import Any

from record_maker import a_record, seconds
from trainstep.records.facts import facts_of
from trainstep.report.answers import answers
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.rows import rows_of
from trainstep.report.kit.tables import cell_tables
from trainstep.report.profile.answer import verdict_sentence

FP32 = {"precision": "fp32", "compile": "none", "adamw": "fused", "model": "small"}


def a_profile(context: int, mode: str, busy_s: float, enqueue_s: float = 0.5, step_s: float = 1.0) -> Any:
    limit = {"kind": "old", "on_device": True, "profiled_step": False, "step_s": step_s, "busy_s": busy_s}
    limit |= {"enqueue_s": enqueue_s, "exposed_share": 0.0, "matmul_share": 0.8, "overhead_share": 0.0}
    classes = {"phase": ["forward"], "class": ["matmul"], "calls": [1.0], "time_s": [busy_s * 0.8], "share": [0.8]}
    tables = {"verdict": {key: [value] for key, value in limit.items()}, "classes": classes}
    config = {**FP32, "context": context, "mode": mode}
    return a_record(workload="profile", key=f"{context}{mode}", config=config, tables=tables, facts=facts_of())


def answer_of(*records: Any) -> Answer:
    (answer,) = answers(rows_of([("r.jsonl", record) for record in records]))
    return answer


def grid() -> Answer:
    bound = [
        a_profile(128, mode, busy, 0.98)
        for mode, busy in (("forward_no_grad", 0.2), ("forward_backward", 0.3), ("step", 0.4))
    ]
    return answer_of(a_profile(1024, "step", 0.95), a_profile(1024, "forward_no_grad", 0.99), *bound)


def test_the_steps_that_wait_for_the_host_are_named_together():
    assert grid().verdict == (
        "Of 5 steps, 3 are launch-bound and 2 are compute-bound. The host limits small 128 (forward_no_grad, forward_backward "
        "and step): the GPU works for 20.0 to 40.0 % of each."
    )


def test_a_training_step_is_advised_before_a_pass_that_gains_more():
    assert (
        "small 128 step: `trainstep bench --capture auto` can make the step at most 2.50 times as fast"
        in grid().suggestion
    )
    assert "small 1024 step: `--precision bf16_autocast` can make it at most " in grid().suggestion


def test_a_bound_is_no_forecast():
    assert "should" not in grid().suggestion
    assert "up to" not in grid().suggestion


def test_a_step_with_an_idle_gpu_while_the_host_launches_nearly_all_the_time_is_near_the_line():
    limit = {
        "kind": "old",
        "on_device": True,
        "profiled_step": False,
        "step_s": 1.0,
        "busy_s": 0.805,
        "enqueue_s": 0.933,
    }
    limit |= {"exposed_share": 0.0, "matmul_share": 0.8, "overhead_share": 0.0}
    assert verdict_sentence(limit) == (
        "Near the line between launch-bound and compute-bound: the GPU works for 80.5 % of a step of 1,000 ms, the host launches "
        "for 93.3 % (from 95.0 % on the host is the limit)."
    )


def test_a_header_has_spaces_and_its_unit():
    samples = {"step": [0.1], "profiled_step": [0.2]}
    record = a_record(workload="mine:W", samples={name: seconds(values) for name, values in samples.items()})
    [table] = cell_tables(rows_of([("r.jsonl", record)]))
    assert "profiled step (ms)" in [column.title for column in table.columns]


def test_a_profiled_step_that_was_faster_than_the_timed_steps_is_doubted():
    """A busy machine had slowed the timed steps to 1,127 ms; the profiled one took 75 ms."""
    record = a_profile(128, "step", 0.9)
    disturbed = replace(record, facts=facts_of(profiler_slowdown=0.07))
    texts = [answer_of(one).verdict for one in (record, disturbed)]
    assert "quiet machine" not in texts[0]
    assert texts[1] == (
        f"{texts[0]} This is of the profiled step, which took 0.070 of the time of the timed steps: something else slowed those "
        "down. Profile again on a quiet machine."
    )


def test_a_verdict_of_shares_says_of_how_long_a_step():
    on_gpu = a_profile(128, "step", 0.99)
    limit = {**on_gpu.tables["verdict"], "on_device": [False]}
    on_cpu = replace(on_gpu, tables={**on_gpu.tables, "verdict": limit})
    texts = [answer_of(record).verdict for record in (on_gpu, on_cpu)]
    assert "of a step of 1,000 ms" in texts[0]
    assert texts[1].endswith(" A step takes 1,000 ms.")
    assert all(text.count("1,000 ms") == 1 for text in texts), texts

"""Attention's answer: both passes are weighed, and what else than the kernels makes a call longer is said."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from record_maker import a_record, seconds
from trainstep.records.facts import facts_of
from trainstep.report.answers import answers
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.rows import rows_of

TIMES = [1.0, 1.01, 1.02, 1.0, 1.01] * 4


def a_call(implementation: str, direction: str, factor: float, **changes: Any) -> Any:
    """A cell whose calls take about `factor` seconds; `busy_s`: of one call on the GPU; `group`: interleaved with others."""
    group = changes.pop("group", None)
    facts = facts_of(
        device_busy_s=changes.pop("busy_s", None),
        interleaving="live" if group else "none",
        interleaving_group=group,
        **changes.pop("facts", {}),
    )
    config = {"implementation": implementation, "direction": direction, "seq": 64, "head_dim": 64, **changes}
    return a_record(
        workload="attention",
        key=f"{implementation}{config}",
        config=config,
        samples={"time_s": seconds([factor * time for time in TIMES])},
        facts=facts,
    )


def answer_of(records: Sequence[Any]) -> Answer:
    (answer,) = answers(rows_of([("r.jsonl", record) for record in records]))
    return answer


def both_passes(forward: float, backward: float, **changes: Any) -> list[Any]:
    """Our calls beside a peer's, which take a second forward and two backward."""
    return [
        *(a_call("sdpa", direction, factor) for direction, factor in (("forward", 1.0), ("backward", 2.0))),
        *(a_call("trainstep", name, factor) for name, factor in (("forward", forward), ("backward", backward))),
    ]


def test_a_pass_that_the_other_makes_up_for_is_no_reason_to_take_a_peer():
    answer = answer_of(both_passes(1.1, 1.5))
    assert answer.suggestion.startswith(
        "At seq 64 head_dim 64 trainstep is slower in forward alone (1.100 of sdpa's time): forward and backward together take "
        "2.63 s for 3.03 s, a ratio of 0.867 (99 % interval "
    )
    assert answer.suggestion.endswith("so keep trainstep for training.")


def test_a_peer_is_advised_where_both_passes_together_are_slower():
    answer = answer_of(both_passes(1.5, 1.9))
    assert answer.suggestion == (
        "Take sdpa where trainstep is slower, at seq 64 head_dim 64 forward: sdpa is 1.50 times as fast there, and 1.13 times "
        "over forward and backward."
    )


def test_a_cell_of_both_passes_decides_before_their_sum():
    cells = [*both_passes(1.5, 1.9), a_call("sdpa", "both", 3.0), a_call("trainstep", "both", 2.5)]
    assert "slower in forward alone" in answer_of(cells).suggestion
    assert "together take 2.52 s for 3.03 s" in answer_of(cells).suggestion


def test_a_record_of_one_pass_is_judged_by_it():
    cells = [a_call("sdpa", "forward", 1.0), a_call("trainstep", "forward", 1.1)]
    assert answer_of(cells).suggestion == "Take sdpa where trainstep is slower: 1.10 times as fast."


def test_cells_of_separate_processes_are_said_to_be_so_once():
    assert answer_of(both_passes(1.1, 1.5)).verdict.count("Not interleaved: one process after the other.") == 1
    together = [a_call(name, "forward", 1.0, group="g") for name in ("sdpa", "trainstep")]
    assert "interleaved" not in answer_of(together).verdict
    some = [*together, a_call("sdpa", "both", 1.0), a_call("trainstep", "both", 1.0)]
    assert "Not interleaved in 1: one process after the other." in answer_of(some).verdict


def test_a_call_that_takes_longer_although_the_gpu_works_less_is_the_hosts():
    def answer(ours_s: float) -> str:
        cells = [a_call("sdpa", "forward", 1.0, busy_s=0.9), a_call("trainstep", "forward", 1.1, busy_s=ours_s)]
        return answer_of(cells).suggestion

    assert answer(0.8).endswith(
        "The GPU works less for trainstep there (800.0 ms of the call for 900.0 ms): the difference is the host's."
    )
    assert "host" not in answer(0.95)


def test_a_single_peer_is_named_and_each_state_has_the_word_of_the_tables():
    verdict = answer_of(both_passes(1.015, 2.005)).verdict
    assert verdict.startswith(
        "Against sdpa in 2 configurations, trainstep is apart by under 2 % in 1; cannot tell in 1; its time"
    )
    assert "of sdpa's in the geometric mean" in verdict
    alike = answer_of([a_call("sdpa", "forward", 1.0, group="g"), a_call("trainstep", "forward", 1.005, group="g")])
    assert alike.verdict.startswith("trainstep differs by under 2 % from sdpa: 1.005 (99 % interval")


WRONG = {"error_dq": 0.5, "error_same_dtype_dq": 0.001}


def test_a_wrong_or_nan_result_is_no_peer():
    ours = a_call("trainstep", "backward", 2.0)
    for facts in (WRONG, {"has_nan": 1}):
        verdict = answer_of([a_call("sdpa", "backward", 1.0, facts=facts), ours]).verdict
        assert "Results of sdpa are wrong in 1 and not compared there" in verdict
        assert "Fastest: sdpa" not in verdict
        assert "faster" not in verdict


def test_a_small_error_in_fp32_is_not_wrong():
    long_sum = {"error_dq": 4e-6, "error_same_dtype_dq": 3e-7}
    cells = [a_call("sdpa", "backward", 1.0, facts=long_sum), a_call("trainstep", "backward", 1.1)]
    assert "wrong" not in answer_of(cells).verdict


def test_a_peer_whose_other_pass_is_wrong_is_not_advised():
    cells = [a_call("sdpa", "forward", 1.0), a_call("sdpa", "backward", 1.0, facts=WRONG)]
    answer = answer_of([*cells, a_call("trainstep", "forward", 1.5), a_call("trainstep", "backward", 2.0)])
    assert "Take sdpa" not in answer.suggestion


def test_a_pass_without_a_verdict_makes_up_for_nothing():
    backward = [a_call(name, "backward", factor) for name, factor in (("sdpa", 1.0), ("trainstep", 1.4))]
    few = [replace(cell, samples={"time_s": seconds(cell.samples["time_s"].values[:3])}) for cell in backward]
    forward = [a_call(name, "forward", factor) for name, factor in (("sdpa", 1.0), ("trainstep", 1.4))]
    suggestion = answer_of([*forward, *few]).suggestion
    assert suggestion.startswith("Take sdpa where trainstep is slower")
    assert "alone" not in suggestion


def test_what_all_slower_configurations_share_is_named():
    records = [
        a_call(name, "forward", factor, dtype=dtype, seq=seq)
        for seq in (64, 128)
        for dtype, ours in (("fp32", 1.5), ("bf16", 0.5))
        for name, factor in (("sdpa", 1.0), ("trainstep", ours))
    ]
    assert (
        "trainstep is faster in 2 (all with dtype bf16) and slower in 2 (all with dtype fp32)"
        in answer_of(records).verdict
    )
    assert "(all with" not in answer_of(records[:4]).verdict, "of single configurations there is nothing to share"

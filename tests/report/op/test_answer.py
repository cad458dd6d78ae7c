"""The answer for ops: our kernels against the fastest right peer, or the rates where no peer ran."""

from collections.abc import Sequence

from op_records import TIMES, op
from trainstep.records.record import Record
from trainstep.report.answers import answers
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.rows import rows_of


def answer_of(records: Sequence[Record]) -> Answer:
    (answer,) = answers(rows_of([("r.jsonl", record) for record in records]), "implementation")
    return answer


def cells(**times_s: float) -> list[Record]:
    return [op(implementation=name, time_s=time_s) for name, time_s in times_s.items()]


def test_the_first_sentence_is_the_verdict_against_the_fastest_peer():
    answer = answer_of(cells(trainstep=1e-4, eager=4e-4, liger=1.2e-4))
    assert answer.verdict.startswith(
        "trainstep is faster than liger, the fastest peer: 0.833 (99 % interval 0.833 to 0.833) of its time. "
    )
    assert answer.verdict.endswith("Largest error against the reference: 3.0e-03; eager's is 3.0e-03.")
    assert answer.suggestion == ""


def test_a_faster_peer_is_advised():
    answer = answer_of(cells(trainstep=1.5e-4, quack=1e-4))
    assert answer.verdict.startswith("trainstep is slower than quack: 1.500 (99 % interval")
    assert answer.suggestion == "Take quack where trainstep is slower: 1.50 times as fast."


def test_a_wrong_peer_is_no_peer():
    wrong = op(implementation="liger", time_s=0.5e-4, facts={"error_dx": 0.9})
    answer = answer_of([*cells(trainstep=1e-4, eager=2e-4), wrong])
    assert answer.verdict.startswith("trainstep is faster than eager")
    assert "Results of liger are wrong in 1 and not compared there" in answer.verdict


def test_several_ops_are_several_configurations():
    records = [
        op(op=name, implementation=who, time_s=time_s)
        for name, ours in (("rms_norm", 1e-4), ("swiglu", 3e-4))
        for who, time_s in (("trainstep", ours), ("liger", 2e-4))
    ]
    answer = answer_of(records)
    assert answer.verdict.startswith(
        "Against liger in 2 configurations, trainstep is faster in 1 and slower in 1; its time"
    )
    assert "at swiglu 8192 x 11008 both bf16: liger is 1.50 times as fast there" in answer.suggestion


def test_without_a_peer_the_rate_is_the_verdict():
    least_bytes = 5 * 8192 * 4096 * 2
    alone = answer_of([op(implementation="trainstep", busy_s=1e-4)])
    assert alone.verdict.startswith(
        f"trainstep reaches {least_bytes / 1e-4 / 1e9:,.1f} GB/s in rms_norm 8192 x 4096 both bf16 (0.1010 ms a call)."
    )
    two = [op(implementation="trainstep", busy_s=1e-4, width=width) for width in (1024, 4096)]
    assert "in rms_norm 8192 x 4096 both bf16" in answer_of(two).verdict
    assert "and at least 838.9 GB/s in rms_norm 8192 x 1024 both bf16." in answer_of(two).verdict
    loss = answer_of([op(op="linear_cross_entropy", implementation="trainstep", busy_s=0.2, time_s=0.21)])
    assert loss.verdict.startswith(
        "trainstep reaches 611.8 TFLOP/s in linear_cross_entropy 32768 x 4096 x 151936 both bf16"
    )


def test_without_ours_the_others_are_ranked():
    verdict = answer_of(cells(eager=4e-4, liger=1e-4)).verdict
    assert verdict.startswith("Fastest: liger, ")
    assert "eager takes 4.000 times as long" in verdict


def test_launch_bound_cells_are_said_to_be_so():
    records = [
        op(implementation=name, time_s=1e-4, busy_s=1e-5, facts={"launch_bound": True})
        for name in ("trainstep", "eager")
    ]
    assert answer_of(records).suggestion.startswith("2 of 2 cells are launch-bound")


def test_without_a_verdict_the_answer_says_what_may_decide_it():
    """An earlier version ended with `no verdict`."""
    few = [op(implementation=name, time_s=1e-4, times=TIMES[:3], group=None) for name in ("trainstep", "eager")]
    answer = answer_of(few)
    assert answer.verdict.startswith("No verdict on trainstep against eager")
    assert answer.suggestion == "`--compare implementation` interleaves the implementations, which may decide it."

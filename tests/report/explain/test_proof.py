"""What a person reads of a proof: the verdict in each outcome, and the file of options of a step on several ranks."""

import tomllib
from typing import Any

import pytest

from record_maker import ENVIRONMENT, a_record
from trainstep.config.parsing import build_config, to_plain
from trainstep.explain.budget import Budget
from trainstep.explain.proof import TOGETHER, Candidate, Proof, Tried
from trainstep.plan.time.interval import Interval
from trainstep.plan.trials import ANOTHER_LOSS, Step
from trainstep.records.compare import Comparison
from trainstep.report.explain.budgets import Explained
from trainstep.report.explain.proof import option_lines, proof_answer, proof_table, proof_toml
from trainstep.report.kit.frames import json_text
from trainstep.report.kit.rows import rows_of
from trainstep.report.kit.terminal import plain

START = {"model": "tiny", "batch_size": 4, "steps": 5, "sync": "phase"}


def tried(verdict: str, ratio: float, gain: Interval | None = None, /, **fields: Any) -> Tried:
    comparison = Comparison(verdict=verdict, reason="r", ratio=ratio, low=ratio - 0.1, high=ratio + 0.1, n=6)
    step = Step(change="c", kept=verdict == "faster", comparison=comparison, word=verdict, reason="r")
    return Tried(candidate=Candidate(fields=fields, cause="unfused", gain=gain), step=step)


def cut_off(ratio: float, /, **fields: Any) -> Tried:
    comparison = Comparison(
        verdict="cannot tell", reason="2 of 6 rounds", ratio=ratio, each=(ratio, ratio), n=2, is_cut_off=True
    )
    step = Step(change="c", comparison=comparison, word="cannot tell", reason="2 of 6 rounds")
    return Tried(candidate=Candidate(fields=fields, cause="unfused"), step=step)


PREDICTED = Interval(time_s=0.4, low_s=0.35, high_s=0.6)
BLOCK = tried("faster", 0.5, PREDICTED, compile="block")
FUSED = tried("slower", 1.5, PREDICTED, ops="fused")
HOPELESS = Tried(candidate=Candidate(fields={"gc": "off"}), step=Step(change="c", word="slower", reason="twice"))
ANOTHER = Tried(
    candidate=Candidate(fields={"workers": "2"}), step=Step(change="c", word=ANOTHER_LOSS, reason="not kept: apart")
)


def a_proof(*singles: Tried, **values: Any) -> Proof:
    return Proof(start=START, measured_s=1.0, start_s=1.0, spread=0.0, singles=list(singles), **values)


def explained() -> Explained:
    record = a_record(config=to_plain(build_config("train_step", {"model": "tiny", "device": "cpu"})))
    [row] = rows_of([("a.jsonl", record)])
    return Explained(row=row, label="tiny", budget=Budget(measured_s=1.0, floor={}, findings=(), unexplained_s=0.0))


def test_the_answer_says_what_became_of_all_together_where_one_alone_is_taken():
    whole, alone = tried("slower", 1.2, compile="block", capture="step"), tried("faster", 0.8, capture="step")
    proof = a_proof(BLOCK, alone, together=whole, again=[tried("faster", 0.55, compile="block")])
    answer = proof_answer("tiny", proof, None)
    assert "with compile=block a step takes 0.550" in answer.verdict, "the second comparison, which nothing has chosen"
    assert "compile=block,capture=step, together: slower." in answer.verdict
    assert proof_table(explained(), proof).raw[-1]["name"] == "compile=block, a second time"
    proof = a_proof(BLOCK, alone, together=whole, untried=["compile=block, a second time"])
    assert "Not yet compared a second time." in proof_answer("tiny", proof, None).verdict
    proof = a_proof(BLOCK, together=tried("cannot tell", 1.0, compile="block"))
    assert (
        "compile=block seemed faster, and no second comparison confirmed it"
        in proof_answer("tiny", proof, None).verdict
    )


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        (
            Proof(start=START, measured_s=1.0, trouble="OOM"),
            "nothing was proved, because the original cannot be used: OOM",
        ),
        (
            Proof(start=START, measured_s=1.0, untried=["compile=block"]),
            "nothing was tried yet. The budget leaves no room for the rest",
        ),
        (
            a_proof(FUSED),
            "of 1 change that was decided, none is faster. Of 1 predicted gain that was measured, 0 held.",
        ),
        (a_proof(), "no change could be compared."),
        (
            a_proof(ANOTHER, untried=["compile=block"]),
            "no change could be compared. workers=2 is refused: another loss. The budget leaves no room for the rest; the "
            "same command goes on. Not tried: compile=block.",
        ),
        (a_proof(HOPELESS, FUSED), "of 2 changes that were decided, none is faster."),
        (a_proof(FUSED, cut_off(1.2, adamw="fused")), "of 1 change that was decided, none is faster."),
        (
            a_proof(cut_off(1.2, workers="2"), untried=["compile=block", "adamw=fused"], unfinished=["workers=2"]),
            "no comparison was finished. The budget leaves no room for the rest; the same command goes on. Not tried: "
            "compile=block and adamw=fused. Not finished: workers=2.",
        ),
        (
            a_proof(BLOCK, together=tried("cannot tell", 1.0, compile="block")),
            "compile=block seemed faster, and no second comparison confirmed it.",
        ),
        (
            a_proof(BLOCK, FUSED, untried=[TOGETHER]),
            "with compile=block a step takes 0.500 (99 % interval 0.400 to 0.600) of the original's time: 500.0 ms less (400.0 ms "
            "to 600.0 ms) of 1,000 ms, predicted 400.0 ms. Not yet compared together. Of 2 predicted gains that were measured, 1 "
            f"held. The budget leaves no room for the rest; the same command goes on. Not tried: {TOGETHER}.",
        ),
        (
            a_proof(cut_off(0.6, compile="block"), untried=["compile=block, a second time"]),
            "compile=block seemed faster, without a verdict so far, and nothing else was. The budget leaves no room for the rest",
        ),
        (
            a_proof(
                cut_off(0.3, compile="block"),
                cut_off(0.7, ops="fused"),
                together=tried("faster", 0.6, compile="block", ops="fused"),
                untried=["compile=block, a second time"],
            ),
            "with compile=block and ops=fused a step takes 0.600 (99 % interval 0.500 to 0.700) of the original's time: 400.0 ms "
            "less (300.0 ms to 500.0 ms) of 1,000 ms. compile=block alone seemed faster still.",
        ),
        (
            a_proof(BLOCK, together=tried("faster", 0.5, compile="block", batch_size=8)),
            "with compile=block and batch_size=8 a step takes 0.500 (99 % interval 0.400 to 0.600) of the original's time per to",
        ),
    ],
)
def test_the_verdict_says_what_was_proved(proof: Proof, words: str):
    assert f"tiny: {words}" in proof_answer("tiny", proof).text


def test_the_suggestion_is_options_or_the_file_of_the_verb():
    proof = a_proof(BLOCK, together=BLOCK)
    assert proof_answer("tiny", proof).suggestion == "Take `--compile block`."
    assert proof_answer("tiny", proof, "a.toml").suggestion == "`trainstep bench --config a.toml` takes these options."
    proof.start = {**START, "workload": "parallel"}
    assert "`trainstep parallel --config a.toml`" in proof_answer("tiny", proof, "a.toml").suggestion


def test_how_a_step_is_timed_is_no_option_but_a_strategy_is():
    proof = a_proof(BLOCK, together=BLOCK)
    assert option_lines(proof) == ['model = "tiny"', "batch_size = 4", 'compile = "block"']
    proof.start = {"workload": "parallel", "model": "tiny", "ranks": 2, "sync": "naive", "window_steps": 3, "steps": 4}
    proof.singles = [tried("faster", 0.5, sync="bucketed", bucket_mib=25.0)]
    proof.together = None
    text = proof_toml(
        "a\nlabel", proof, command="c", records="p.jsonl", here=ENVIRONMENT, answer=proof_answer("a", proof)
    )
    options = {"model": "tiny", "ranks": 2, "sync": "bucketed", "bucket_mib": 25.0}
    assert tomllib.loads(text) == options
    assert "# sync=bucketed,bucket_mib=25.0: faster: gain 500.0 ms (400.0 ms to 600.0 ms)" in text


def test_the_table_has_both_gains_and_json_their_seconds():
    refused = Tried(
        candidate=Candidate(fields={"capture": "step"}, refusal="no"),
        step=Step(change="c", reason="no", word="not run"),
    )
    proof = a_proof(BLOCK, FUSED, refused, left_out=[("adamw=loop", "adamw=foreach is faster")], together=BLOCK)
    table = proof_table(explained(), proof)
    text = plain([table])
    assert "Left out of all together: adamw=loop, because adamw=foreach is faster." in text
    [line] = [line for line in text.splitlines() if line.startswith("compile=block")]
    assert line.split()[1:8] == ["400.0", "350.0", "600.0", "500.0", "400.0", "600.0", "faster"]
    assert line.split()[8] == "yes"
    assert "capture=step" in text
    assert '"measured_gain_s": 0.5' in json_text([table])


def test_a_gain_of_two_pairs_has_no_interval_and_its_row_says_why():
    [row] = proof_table(explained(), a_proof(cut_off(0.6, compile="block"))).raw
    assert row["measured_gain_s"] == pytest.approx(0.4)
    assert (row["measured_gain_low_s"], row["measured_gain_high_s"], row["why"]) == (None, None, "2 of 6 rounds")

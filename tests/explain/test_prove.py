"""The proof on made-up measurements: what is tried and in which order, what is joined, what the budget leaves, what held."""

from dataclasses import replace
from typing import Any

import pytest

from trainstep.config.parallel import RanksConfig, SyncConfig
from trainstep.config.parsing import build_config, build_run, to_plain
from trainstep.explain.budget import Budget, Finding
from trainstep.explain.proof import TOGETHER, Candidate, Proof, Tried
from trainstep.explain.prove import candidates, predictor, prove, start_of
from trainstep.plan import prediction
from trainstep.plan.step_memory import alone
from trainstep.plan.time.calibration import shipped
from trainstep.plan.time.interval import Interval
from trainstep.plan.time.step_time import step_time
from trainstep.plan.trials import Options, Step, Trial, calm_steps
from trainstep.records.compare import Comparison

START = {"model": "tiny", "batch_size": 4}
LOSSES = (2.0, 1.9, 1.8)
GAIN = Interval(time_s=0.4, low_s=0.3, high_s=0.5)
CAPTURE = Candidate(fields={"capture": "step"}, gain=Interval(time_s=0.4, low_s=0.3, high_s=0.6))
BLOCK = Candidate(fields={"compile": "block"}, gain=Interval(time_s=0.1, low_s=0.0, high_s=0.2))
LOOP, FOREACH = (Candidate(fields={"adamw": name}) for name in ("loop", "foreach"))
BATCH = Candidate(fields={"batch_size": 8})


class Lab:
    """Answers from `speeds`: option value -> factor of the original's time, per token. Notes what was measured."""

    def __init__(
        self,
        speeds: dict[Any, float],
        *,
        budget: int = 99,
        together: float | None = None,
        again: dict[Any, float] | None = None,
    ):
        """`together`: the factor of several changes. `again`: option value -> its factor in a second comparison."""
        self.speeds, self.budget, self.together, self.again = speeds, budget, together, again or {}
        self.tried: list[Options] = []
        self.compared: list[tuple[Options, int]] = []
        self.refused: tuple[str, ...] = ()
        """Two values that a config refuses beside each other."""
        self.losses: dict[Any, tuple[float, ...]] = {}
        self.reserved: list[int] = []
        self.cut_off: tuple[Any, ...] = ()
        """Values whose comparison the budget ends behind two pairs."""

    def key_of(self, options: Options) -> str:
        if self.refused and set(self.refused) <= set(options.values()):
            raise ValueError(f"{self.refused[0]} and {self.refused[1]} refuse each other")
        return str(sorted(options.items()))

    def trial(self, options: Options, _repeat: int) -> Trial | None:
        if len(self.tried) + len(self.compared) >= self.budget:
            return None
        self.tried.append(options)
        losses = next((losses for value, losses in self.losses.items() if value in options.values()), LOSSES)
        return Trial(losses=losses, step_s=1.0)

    def compare(self, before: Options, after: Options, repeat: int) -> Comparison | None:
        if len(self.tried) + len(self.compared) >= self.budget:
            return None
        changed = {name: value for name, value in after.items() if before.get(name) != value}
        self.compared.append((changed, repeat))
        ratio = 1.0
        for value in changed.values():
            ratio *= (self.again if repeat and value in self.again else self.speeds).get(value, 1.0)
        if self.together is not None and len(changed) > 1:
            ratio = self.together
        if not repeat and set(changed.values()) & set(self.cut_off) and len(changed) == 1:
            each = (ratio, ratio + 0.01)
            return Comparison(verdict="cannot tell", reason="2 of 5", ratio=ratio, each=each, n=2, is_cut_off=True)
        verdict = "faster" if ratio < 0.98 else "slower" if ratio > 1.02 else "cannot tell"
        return Comparison(verdict=verdict, reason="made up", ratio=ratio, low=ratio - 0.05, high=ratio + 0.05, n=6)

    def run(self, *tried: Candidate) -> Proof:
        return prove(
            START,
            tried,
            1.0,
            lambda fields: None,
            key_of=self.key_of,
            trial=self.trial,
            compare=self.compare,
            reserve=self.reserved.append,
        )


def test_each_change_is_compared_with_the_original_and_then_what_helped_together():
    lab = Lab({"step": 0.5, "block": 0.8, "loop": 1.5})
    proof = lab.run(CAPTURE, BLOCK, LOOP)
    assert lab.compared == [
        ({"capture": "step"}, 0),
        ({"compile": "block"}, 0),
        ({"adamw": "loop"}, 0),
        ({"capture": "step", "compile": "block"}, 0),
    ]
    assert [tried.step.word for tried in proof.singles] == ["faster", "faster", "slower"]
    assert proof.chosen == {**START, "capture": "step", "compile": "block"}
    assert proof.together is proof.best
    assert proof.spread == 0.0


def test_the_measured_gain_is_of_the_explained_step_and_says_whether_the_prediction_held():
    proof = Lab({"step": 0.5, "block": 0.5}).run(CAPTURE, BLOCK, LOOP)
    capture, block, loop = proof.singles
    gain = capture.measured(2.0)
    assert gain is not None
    assert (gain.time_s, gain.low_s, gain.high_s) == pytest.approx((1.0, 0.9, 1.1))
    assert [capture.held(1.0), block.held(1.0), loop.held(1.0)] == ["yes", "no", ""]
    near = replace(block, candidate=replace(BLOCK, gain=Interval(time_s=0.4, low_s=0.3, high_s=0.46)))
    assert near.held(1.0) == "cannot tell"
    known = block.step.comparison
    assert known is not None
    two_pairs = replace(block.step, comparison=replace(known, low=None, high=None, n=2))
    assert replace(block, step=two_pairs).held(1.0) == "cannot tell", "without an interval nobody knows"


@pytest.mark.parametrize(("cut_off", "slower"), [(("step", "block", "loop"), "loop"), (("block", "loop"), "loop")])
def test_what_was_faster_until_the_budget_ended_it_is_measured_together_with_what_helped(
    cut_off: tuple[str, ...], slower: str
):
    lab = Lab({"step": 0.8, "block": 0.7, "loop": 0.995})
    lab.cut_off = cut_off
    proof = lab.run(CAPTURE, BLOCK, LOOP)
    assert lab.compared[-1] == ({"compile": "block", "capture": "step"}, 0), f"{slower} was slower in one of its pairs"
    assert [tried.candidate.name for tried in proof.promising] == ["compile=block", "capture=step"][: len(cut_off) - 1]
    assert proof.takes_all
    assert proof.chosen == {**START, "capture": "step", "compile": "block"}
    lab.together = 1.3
    slow = lab.run(CAPTURE, BLOCK, LOOP)
    assert not slow.takes_all


def cut_off_lab(speeds: dict[Any, float], together: float | None, **again: float) -> Lab:
    lab = Lab(speeds, together=together, again=again)
    lab.cut_off = ("step", "block", "loop")
    return lab


def test_where_all_together_are_not_faster_what_seemed_so_is_compared_alone():
    lab = cut_off_lab({"step": 0.8, "block": 0.7}, 1.3, block=1.0)
    proof = lab.run(CAPTURE, BLOCK)
    assert lab.compared[-2:] == [({"compile": "block"}, 1), ({"capture": "step"}, 1)]
    assert proof.best is not None
    assert proof.best.candidate is CAPTURE, "the first one that a comparison with all of its pairs confirms"
    lab = cut_off_lab({"step": 0.8, "block": 0.7}, 1.3, block=1.0, step=1.0)
    assert lab.run(CAPTURE, BLOCK).best is None
    # The start twice, two trials and comparisons, the trial of both, and at last their comparison
    for budget, untried in ((7, "all changes that helped, together"), (8, "compile=block, a second time")):
        lab = cut_off_lab({"step": 0.8, "block": 0.7}, 1.3)
        lab.budget = budget
        assert lab.run(CAPTURE, BLOCK).untried == [untried]


def test_what_seemed_clearly_faster_alone_than_all_together_is_compared_a_second_time():
    lab = cut_off_lab({"step": 0.5, "block": 0.9}, 0.9)
    proof = lab.run(CAPTURE, BLOCK)
    assert not proof.takes_all
    assert proof.chosen == {**START, "capture": "step"}
    lab = cut_off_lab({"step": 0.5, "block": 0.9}, 0.9, step=1.0, block=1.0)
    assert lab.run(CAPTURE, BLOCK).chosen == {**START, "capture": "step", "compile": "block"}, (
        "all together are confirmed"
    )


def test_one_pair_is_not_promising_and_a_small_gain_that_is_sure_joins():
    single = replace(CAPTURE, fields={"capture": "step"})
    known = Comparison(verdict="cannot tell", reason="", ratio=0.9, each=(0.9,), n=1, is_cut_off=True)
    small = Comparison(verdict="cannot tell", reason="", ratio=0.985, low=0.98, high=0.99, n=6, within=0.02)
    proofs = [Proof(start=START, measured_s=1.0) for _ in range(2)]
    for proof, comparison in zip(proofs, (known, small), strict=True):
        proof.singles.append(Tried(candidate=single, step=Step(change="c", comparison=comparison)))
    assert [len(proof.promising) for proof in proofs] == [0, 1]


def test_of_two_values_that_seem_faster_one_joins_and_the_reason_says_no_more_than_is_known():
    for budget, left_out in ((99, [("adamw=loop", "adamw=foreach seems faster")]), (6, [])):  # 6: nothing is joined
        lab = cut_off_lab({"loop": 0.9, "foreach": 0.7}, None)
        lab.cut_off, lab.budget = ("loop", "foreach"), budget
        assert lab.run(LOOP, FOREACH).left_out == left_out


def test_the_faster_of_two_values_of_a_field_is_taken():
    proof = Lab({"loop": 0.9, "foreach": 0.7}).run(LOOP, FOREACH)
    assert proof.chosen == {**START, "adamw": "foreach"}
    assert proof.left_out == [("adamw=loop", "adamw=foreach is faster")]


def test_strategies_with_their_options_are_one_choice():
    bucketed, larger = (Candidate(fields={"sync": "bucketed", **more}) for more in ({}, {"bucket_mib": 25.0}))
    proof = Lab({"bucketed": 0.5}).run(bucketed, larger)
    assert proof.chosen == {**START, "sync": "bucketed"}
    assert proof.left_out == [("sync=bucketed,bucket_mib=25.0", "sync=bucketed is faster")]


def test_what_a_config_refuses_beside_a_faster_change_is_left_out_with_the_reason():
    lab = Lab({"step": 0.9, "block": 0.5})
    lab.refused = ("step", "block")
    proof = lab.run(CAPTURE, BLOCK)
    assert proof.chosen == {**START, "compile": "block"}
    assert proof.left_out == [
        ("capture=step", "together with compile=block it is refused: step and block refuse each other")
    ]


def test_a_single_change_that_helped_is_measured_a_second_time_and_dropped_if_that_does_not_confirm_it():
    assert Lab({"step": 0.5}).run(CAPTURE).chosen == {**START, "capture": "step"}
    lab = Lab({"step": 0.5}, again={"step": 1.0})
    proof = lab.run(CAPTURE)
    assert [repeat for _, repeat in lab.compared] == [0, 1]
    assert (proof.best, proof.chosen) == (None, START)


@pytest.mark.parametrize("together", [0.9, 1.2])
def test_where_all_together_gain_less_the_fastest_alone_is_taken_if_a_second_comparison_confirms_it(together: float):
    lab = Lab({"step": 0.5, "block": 0.8}, together=together)
    proof = lab.run(CAPTURE, BLOCK)
    assert proof.chosen == {**START, "capture": "step"}
    assert lab.compared[-1] == ({"capture": "step"}, 1)
    assert proof.best is proof.again[0]


def test_where_neither_is_confirmed_nothing_is_taken():
    lab = Lab({"step": 0.5, "block": 0.8}, together=1.2, again={"step": 1.0, "block": 1.0})
    proof = lab.run(CAPTURE, BLOCK)
    assert [compared for compared in lab.compared if compared[1]] == [
        ({"capture": "step"}, 1),
        ({"compile": "block"}, 1),
    ]
    assert (proof.best, proof.chosen) == (None, START)


def test_of_rivals_the_next_is_taken_where_the_faster_one_is_not_confirmed():
    """Both set one field, so that what is joined is the faster one alone, with its prediction."""
    rivals = [replace(LOOP, gain=GAIN), replace(FOREACH, gain=GAIN)]
    lab = Lab({"loop": 0.5, "foreach": 0.8}, again={"loop": 1.0})
    proof = lab.run(*rivals)
    assert proof.chosen == {**START, "adamw": "foreach"}
    assert [changed for changed, repeat in lab.compared if repeat] == [{"adamw": "loop"}, {"adamw": "foreach"}]
    assert proof.together is not None
    assert proof.together.candidate.gain == GAIN


def test_a_second_comparison_that_the_budget_leaves_is_said():
    lab = Lab({"step": 0.5, "block": 0.8}, together=1.2)
    whole = len(lab.run(CAPTURE, BLOCK).again) + len(lab.tried) + len(lab.compared)
    proof = Lab({"step": 0.5, "block": 0.8}, together=1.2, budget=whole - 3).run(CAPTURE, BLOCK)
    assert proof.untried == ["capture=step, a second time"]
    assert proof.chosen == {**START, "capture": "step"}


def test_a_changed_loss_is_not_compared():
    lab = Lab({"step": 0.5})
    lab.losses["step"] = (2.0, 1.9, 1.81)
    proof = lab.run(CAPTURE)
    assert (proof.singles[0].step.word, lab.compared, proof.chosen) == ("another loss", [], START)
    assert proof.singles[0].step.apart == pytest.approx(3e-3, rel=0.1)


def test_what_looks_hopeless_is_judged_by_its_comparison_where_no_second_trial_is_left(monkeypatch: pytest.MonkeyPatch):
    lab = Lab({"step": 1.7, "block": 0.8})

    def trial(self: Lab, options: Options, repeat: int) -> Trial | None:
        if repeat and options != START:
            return None  # the budget is spent
        return Trial(losses=LOSSES, step_s=1.7 if "step" in options.values() else 1.0)

    monkeypatch.setattr(Lab, "trial", trial)
    proof = lab.run(CAPTURE, BLOCK)
    assert [tried.step.word for tried in proof.singles] == ["slower", "faster"]
    assert proof.untried == []


def test_losses_are_held_to_the_nearest_of_the_starts_runs(monkeypatch: pytest.MonkeyPatch):
    """Runs of a step that adds in no fixed order may be further apart than is allowed; a wrong loss is far from all."""
    far, near = (tuple(loss * (1 + share) for loss in LOSSES) for share in (3e-4, 3.005e-4))
    wrong = tuple(loss * 1.05 for loss in LOSSES)
    lab = Lab({"step": 0.5})
    lab.losses = {"step": near}
    assert not lab.run(CAPTURE).helped, "the other run is not known"
    alone = Lab.trial
    monkeypatch.setattr(
        Lab, "trial", lambda self, options, repeat: replace(alone(self, options, repeat), others=(far,))
    )
    assert lab.run(CAPTURE).helped
    lab.losses = {"step": wrong}
    assert lab.run(CAPTURE).singles[0].step.word == "another loss"


def test_losses_are_held_to_the_steps_over_which_the_starts_runs_agree(monkeypatch: pytest.MonkeyPatch):
    """Where training is unstable, rounding grows: the first steps tell, the later ones nothing."""
    before = (2.5, 2.4, 2.3, 2.2, 2.1)
    others = ((*before, 2.01, 1.95), (*before, 1.99, 1.8))
    lab = Lab({"step": 0.5})
    alone = Lab.trial
    monkeypatch.setattr(
        Lab, "trial", lambda self, options, repeat: replace(alone(self, options, repeat), others=others)
    )
    lab.losses = {"step": (*before, 2.06, 2.0), "tiny": (*before, 2.0, 1.9)}
    assert lab.run(CAPTURE).helped
    for wrong_step in range(5):
        wrong = tuple(loss + 0.01 * (step >= wrong_step) for step, loss in enumerate(before))
        lab.losses["step"] = (*wrong, 2.0, 1.9)
        assert "the losses of 5 steps differ" in lab.run(CAPTURE).singles[0].step.reason


def test_two_runs_are_enough_to_know_the_steps_that_count(monkeypatch: pytest.MonkeyPatch):
    before = (2.5, 2.4, 2.3, 2.2, 2.1)
    runs = [(*before, 2.0, 1.9), (*before, 2.001, 1.95)]
    lab = Lab({"step": 0.5})
    lab.losses = {"step": (*before, 2.002, 1.8)}
    alone = Lab.trial

    def trial(self: Lab, options: Options, repeat: int) -> Trial | None:
        found = alone(self, options, repeat)
        return replace(found, losses=runs[repeat]) if found and options == START else found

    monkeypatch.setattr(Lab, "trial", trial)
    proof = lab.run(CAPTURE)
    assert proof.helped
    assert proof.spread == 0.0, "over those steps"
    lab.losses = {"step": before[:3]}
    assert lab.run(CAPTURE).singles[0].step.reason == "not kept: it has the losses of 3 steps, of 5 that are compared"


def test_runs_that_differ_from_the_second_step_on_check_nothing():
    assert calm_steps([(2.0, 1.9, 1.8, 1.7, 1.6), (2.0, 1.8, 1.7, 1.6, 1.5)], 1e-4) == 4
    assert calm_steps([(2.0, 1.9, 1.8, 1.7, 1.6)] * 2, 1e-4) == 5
    assert calm_steps([(2.0, 1.9)], 1e-4) == 2
    assert calm_steps([(2.0, 1.9, 1.8, 1.7, 1.6), (), (2.0,)], 1e-4) == 1, "no more than all of them have"


def test_another_batch_has_other_losses_and_what_joins_it_is_held_to_these():
    lab = Lab({8: 0.5, "block": 0.8})
    lab.losses = {8: (3.0, 2.0, 1.0)}
    proof = lab.run(BATCH, BLOCK)
    assert proof.chosen == {**START, "batch_size": 8, "compile": "block"}
    wrong = Lab({8: 0.5, "block": 0.8})
    wrong.losses = {8: (3.0, 2.0, 1.0)}
    trial = wrong.trial

    def of_both(options: Options, repeat: int) -> Trial | None:
        tried = trial(options, repeat)
        both = options.get("batch_size") == 8 and options.get("compile") == "block"
        return replace(tried, losses=LOSSES) if tried and both else tried

    wrong.trial = of_both  # type: ignore[method-assign]
    proof = wrong.run(BATCH, BLOCK)
    [(name, why)] = proof.left_out
    assert (name, proof.chosen) == ("compile=block", {**START, "batch_size": 8})
    assert why.startswith("batch_size=8,compile=block, together: another loss: not kept: the losses of 3 steps")
    assert wrong.compared[-1] == ({"batch_size": 8}, 1), "what is left is compared a second time"


def test_where_all_together_do_not_run_the_faster_half_is_measured():
    lab = Lab({"step": 0.5, "block": 0.8, "loop": 0.9})
    trial = lab.trial

    def with_loop(options: Options, repeat: int) -> Trial | None:
        tried = trial(options, repeat)
        is_joined = options.get("adamw") == "loop" and "capture" in options
        return Trial(failure_kind="out_of_memory", phase="step", message="no room") if tried and is_joined else tried

    lab.trial = with_loop  # type: ignore[method-assign]
    proof = lab.run(CAPTURE, BLOCK, LOOP)
    whole = "capture=step,compile=block,adamw=loop"
    assert proof.left_out == [("adamw=loop", f"{whole}, together: out of memory: no room")]
    assert proof.chosen == {**START, "capture": "step", "compile": "block"}
    assert proof.takes_all


def test_a_larger_batch_leaves_little_of_what_is_saved_once_a_step():
    graphs = Candidate(fields={"compile": "reduce_overhead"})
    lab = Lab({32: 0.8, "loop": 0.94, "reduce_overhead": 0.975})
    proof = lab.run(replace(BATCH, fields={"batch_size": 32}), LOOP, graphs)
    assert proof.chosen == {**START, "batch_size": 32, "adamw": "loop"}, "0.75 and 0.3 % are left of 6 and 2.5"
    [(name, why)] = proof.left_out
    assert name == "compile=reduce_overhead"
    assert why == "it saves the same time in a step of any batch, less than 0.5 % with batch_size=32"
    assert lab.run(LOOP, graphs).chosen == {**START, "adamw": "loop", "compile": "reduce_overhead"}
    module = Candidate(fields={"compile": "module"})
    lab.speeds["module"] = 0.975
    refusing = Lab({32: 0.9, "module": 0.6, "loop": 0.97})
    refusing.refused = (32, "module")  # type: ignore[assignment]
    chosen = refusing.run(replace(BATCH, fields={"batch_size": 32}), LOOP, module).chosen
    assert chosen == {**START, "compile": "module", "adamw": "loop"}, (
        "the batch that would leave little is not among them"
    )
    assert "compile" in lab.run(replace(BATCH, fields={"batch_size": 32}), module).chosen, "it saves for each token"


@pytest.mark.parametrize("budget", range(8))
def test_the_budget_leaves_the_rest_and_says_so(budget: int):
    lab = Lab({"step": 0.5, "block": 0.8}, budget=budget)
    proof = lab.run(CAPTURE, replace(LOOP, refusal="not here"), BLOCK)
    names = {2: ["capture=step", "compile=block"], 4: ["compile=block", TOGETHER], 5: ["compile=block", TOGETHER]}
    expected = names[2] if budget < 4 else names.get(budget, [TOGETHER])
    assert proof.untried == expected
    assert [tried.step.reason for tried in proof.singles if tried.candidate.name == "adamw=loop"] == ["not here"]
    if budget >= 4:
        assert proof.chosen == {**START, "capture": "step"}, "one that is not yet confirmed, as the answer says"


def test_room_is_reserved_for_what_helped_so_far_together():
    lab = Lab({"step": 0.5})
    lab.run(CAPTURE, BLOCK)
    begin, capture, block, together = [0, 0], [1, 0], [2, 1], [1, 0]
    assert lab.reserved == begin + capture + block + together


def test_a_start_that_does_not_serve_ends_the_proof():
    lab = Lab({"step": 0.5})
    lab.losses["tiny"] = ()
    proof = lab.run(CAPTURE)
    assert proof.trouble == "its record has no losses"
    assert (lab.compared, proof.untried) == ([], [])


def a_config(**changes: Any) -> RanksConfig:
    return alone(build_run({"model": "small", "device": "cuda", "attention": "plain", **changes}))


def a_budget(*findings: Finding) -> Budget:
    return Budget(measured_s=1.0, floor={}, findings=findings, unexplained_s=0.0)


def finding(cause: str, time_s: float) -> Finding:
    gain = Interval(time_s=time_s, low_s=0.0, high_s=2 * time_s)
    return Finding(cause=cause, excess=gain, gain=gain, evidence="seen")


def test_candidates_are_the_changes_of_the_causes_the_largest_predicted_gain_first():
    budget = a_budget(finding("optimizer", 0.1), finding("attention_kernel", 0.3))
    found = candidates(budget, a_config(), lambda fields: None, precisions=["bf16_master"], batch_sizes=[8, 4])
    names = [candidate.name for candidate in found]
    assert names[:3] == ["attention=trainstep", "attention=sdpa", "adamw=trainstep"]
    assert names[-1] == "precision=bf16_autocast"
    assert "--allow-precision bf16_autocast" in found[-1].refusal
    assert all(candidate.refusal == "" for candidate in found[:-1])
    assert "precision=bf16_master" in names, "allowed"
    assert "batch_size=8" in names, "allowed"
    assert "batch_size=4" not in names, "is so already"
    assert len(names) == len(set(names))


def test_what_explain_advises_is_held_to_what_it_printed_and_the_rest_to_plan():
    advised = replace(finding("unfused", 0.2), change={"compile": "block"})
    plans = Interval(time_s=-0.3, low_s=-0.4, high_s=-0.2)
    found = {one.name: one.gain for one in candidates(a_budget(advised), a_config(), lambda fields: plans)}
    assert found["compile=block"] == advised.gain
    assert found["ops=fused"] == plans


def test_less_recomputation_is_tried_as_far_as_plan_says_that_the_step_fits():
    config = a_config(context=1024, recompute="block")
    needed = {
        mode: prediction.predict(a_config(context=1024, recompute=mode)).needed_bytes for mode in ("none", "selective")
    }
    advised = replace(finding("recomputation", 0.2), change={"recompute": "selective"})

    def found(memory: int | None) -> dict[str, Candidate]:
        every = candidates(a_budget(advised), config, lambda fields: None, gpu_memory_bytes=memory)
        return {one.name: one for one in every if "recompute" in one.fields}

    assert [*found(None)] == [*found(needed["none"] + 2**30)] == ["recompute=none"]
    [(name, less)] = found(needed["selective"]).items()
    assert (name, less.gain, less.refusal) == ("recompute=selective", advised.gain, "")
    [(name, none)] = found(2**30).items()
    assert (name, none.gain) == ("recompute=none", None)
    assert none.refusal == f"without recomputation the step would need {needed['none'] / 2**30:,.0f} GiB of the GPU's 1"


def test_on_a_cpu_capture_is_impossible_and_a_finding_predicts_what_plan_cannot():
    budget = a_budget(finding("host_launches", 0.2))
    config = a_config(device="cpu")
    found = {one.name: one for one in candidates(budget, config, predictor(config, None, 1.0))}
    assert "a CPU has no CUDA graphs" in found["capture=step"].refusal
    assert found["compile=block"].gain == budget.findings[0].gain
    assert found["adamw=trainstep"].gain is None


def test_a_model_of_the_users_own_keeps_its_ops():
    config = alone(build_run({"model": "package.module:build", "device": "cuda"}))
    refusals = {one.name: one.refusal for one in candidates(a_budget(), config, lambda fields: None)}
    assert "brings its own" in refusals["ops=fused"]
    assert refusals["compile=block"] == ""


def test_plan_predicts_the_changed_step_and_a_larger_batch_by_its_time_per_token():
    h200 = shipped("NVIDIA H200")
    assert h200 is not None
    config = a_config()
    predict = predictor(config, h200, 2.0)
    now = step_time(config, h200).step.time_s
    after = step_time(a_config(compile="block"), h200).step.time_s
    larger = step_time(a_config(batch_size=8), h200).step.time_s
    gain, batch = predict({"compile": "block"}), predict({"batch_size": 8})
    assert gain is not None
    assert batch is not None
    assert gain.time_s == pytest.approx(2.0 * (1 - after / now))
    assert gain.low_s < gain.time_s < gain.high_s
    assert batch.time_s == pytest.approx(2.0 * (1 - larger / now / 2))
    assert predictor(a_config(device="cpu"), h200, 2.0)({"compile": "block"}) is None


def test_several_ranks_try_strategies_and_bucket_sizes():
    config = RanksConfig(run=a_config().run, ranks=2, sync=SyncConfig(name="naive"))
    names = [one.name for one in candidates(a_budget(), config, lambda fields: None)]
    assert "sync=bucketed" in names
    assert "sync=bucketed,bucket_mib=100.0" in names
    bucketed = replace(config, sync=SyncConfig(name="bucketed"))
    names = [one.name for one in candidates(a_budget(), bucketed, lambda fields: None)]
    assert "bucket_mib=25.0" in names
    assert "sync=bucketed" not in names


@pytest.mark.parametrize(
    ("workload", "values"),
    [
        (
            "train_step",
            {"model": "tiny", "context": 16, "d_ff": 96, "adamw": "loop", "device": "cpu", "clip_grad_norm": 1.0},
        ),
        ("parallel", {"model": "tiny", "sync": "flat", "ranks": 2, "bucket_mib": 3.0, "device": "cpu"}),
        ("train_step", {"model": "package.module:build", "device": "cpu"}),
    ],
)
def test_the_start_is_the_explained_step_again(workload: str, values: dict[str, Any]):
    config = build_config(workload, values)
    start = start_of(workload, config if isinstance(config, RanksConfig) else alone(config))
    assert start.pop("workload", "train_step") == workload
    assert {**values, **start} == start, "it names all that was given"
    assert to_plain(build_config(workload, start)) == to_plain(config)


def test_a_profile_starts_with_its_own_attention():
    config = build_config("profile", {"model": "tiny", "device": "cpu", "profiled_steps": 5})
    start = start_of("profile", alone(config))
    assert start["attention"] == "plain"
    assert "profiled_steps" not in start

"""The search of a preset on made-up measurements: what is kept, skipped, left by the budget, and what a start without room gets."""

from collections.abc import Sequence
from typing import Any

import pytest

from trainstep.config.parsing import build_run
from trainstep.plan.preset import (
    ALWAYS,
    CHANGES,
    IF_LESS,
    IF_PRECISION,
    IF_TOO_LARGE,
    Change,
    Result,
    changes_within,
    search,
)
from trainstep.plan.trials import Options, Reference, Step, Trial, Trials, allowed_difference, difference_of, name_of
from trainstep.records.compare import Comparison

START = {"model": "tiny"}
DEFAULTS = {"capture": "none", "compile": "none", "precision": "fp32", "recompute": "none", "adamw": "fused"}
CAPTURE = Change(options={"capture": "auto"})
AGAIN = Change(options={"capture": "auto"}, when=IF_PRECISION)
BLOCK, MODEL = Change(options={"compile": "block"}), Change(options={"compile": "model"})
BF16 = Change(options={"precision": "bf16_autocast"})
SELECTIVE, WHOLE = (Change(options={"recompute": name}, when=IF_TOO_LARGE) for name in ("selective", "block"))
LOSSES = (2.0, 1.9, 1.8)


class Lab:
    """Answers from `speeds`: option value -> factor of the time. Notes what was tried and compared."""

    def __init__(self, speeds: dict[str, float], *, budget: int = 99, together: float = 0.0):
        self.speeds, self.budget, self.together = speeds, budget, together
        self.tried: list[Options] = []
        self.compared: list[tuple[Options, Options, int]] = []
        self.refused: dict[str, str] = {}
        """Option value -> the value that it cannot stand beside, or `always`."""
        self.trials: dict[str, Trial] = {}
        """Option value -> what its trial gives."""
        self.repeated = LOSSES
        self.fits = lambda options: True

    def key_of(self, options: Options) -> str:
        values = {**DEFAULTS, **options}
        for value, other in self.refused.items():
            if value in values.values() and (other == "always" or other in values.values()):
                raise ValueError(f"{value} is refused")
        return str(sorted(values.items()))

    def trial(self, options: Options, repeat: int) -> Trial | None:
        if len(self.tried) == self.budget:
            return None
        self.tried.append(options)
        if not self.fits(options):
            return Trial(failure_kind="out_of_memory", message="OOM")
        given = next((trial for value, trial in self.trials.items() if value in options.values()), None)
        return given or Trial(losses=self.repeated if repeat else LOSSES, step_s=1.0)

    def compare(self, before: Options, after: Options, repeat: int) -> Comparison | None:
        self.compared.append((before, after, repeat))
        ratio = 1.0
        for name, value in after.items():
            ratio *= self.speeds.get(str(value), 1.0) if before.get(name) != value else 1.0
        whole = len([name for name in after if before.get(name) != after[name]]) > 1 or repeat
        ratio = self.together if whole and self.together else ratio
        verdict = "faster" if ratio < 0.98 else "slower" if ratio > 1.02 else "cannot tell"
        return Comparison(verdict=verdict, reason="made up", ratio=ratio)

    def run(self, *changes: Change, start: Options = START) -> Result:
        return search(start, changes, key_of=self.key_of, trial=self.trial, compare=self.compare)


def test_each_change_is_tried_against_the_best_so_far_and_all_at_last_against_the_start():
    lab = Lab({"auto": 0.5, "block": 1.3, "model": 0.8})
    result = lab.run(CAPTURE, BLOCK, MODEL)
    assert [step.change for step in result.kept] == ["capture auto", "compile model"]
    captured, both = {**START, "capture": "auto"}, {**START, "capture": "auto", "compile": "model"}
    assert lab.compared == [
        (START, captured, 0),
        (captured, {**captured, "compile": "block"}, 0),
        (captured, both, 0),
        (START, both, 0),
    ]
    assert result.chosen == both
    assert result.whole is not None
    assert result.whole.comparison is not None
    assert result.whole.comparison.ratio == pytest.approx(0.4)


class WaitsInBf16(Lab):
    """A step that waits for the host in bf16 alone, so that a graph helps it there."""

    def compare(self, before: Options, after: Options, repeat: int) -> Comparison | None:
        self.speeds["auto"] = 0.5 if "precision" in after else 1.0
        return super().compare(before, after, repeat)


def test_capture_is_tried_once_more_behind_a_precision_that_was_kept():
    lab = WaitsInBf16({"bf16_autocast": 0.4, "fp16_autocast": 1.0, "block": 0.9})
    result = lab.run(CAPTURE, BF16, Change(options={"precision": "fp16_autocast"}), AGAIN, BLOCK)
    assert [(step.change, step.kept) for step in result.steps] == [
        ("capture auto", False),
        ("precision bf16_autocast", True),
        ("precision fp16_autocast", False),
        ("capture auto, once more", True),
        ("compile block", True),
    ]
    assert result.chosen == {**START, "precision": "bf16_autocast", "capture": "auto", "compile": "block"}


def test_capture_without_room_in_fp32_is_tried_once_more():
    lab = WaitsInBf16({"bf16_autocast": 0.5})
    lab.fits = lambda options: "capture" not in options or "precision" in options
    steps = lab.run(CAPTURE, BF16, AGAIN).steps
    assert [(step.change, step.word) for step in steps] == [
        ("capture auto", "out of memory"),
        ("precision bf16_autocast", "faster"),
        ("capture auto, once more", "faster"),
    ]


def test_capture_is_not_tried_once_more_behind_a_precision_that_was_not_kept():
    result = WaitsInBf16({"bf16_autocast": 1.0}).run(CAPTURE, BF16, AGAIN)
    assert [step.change for step in result.steps] == ["capture auto", "precision bf16_autocast"]


@pytest.mark.parametrize("capture", [0.5, 1.0], ids=["kept", "refused"])
def test_capture_is_not_tried_once_more_where_it_was_kept_or_refused(capture: float):
    lab = Lab({"auto": capture, "bf16_autocast": 0.4})
    lab.refused = {} if capture < 1 else {"auto": "always"}
    result = lab.run(CAPTURE, BF16, AGAIN)
    assert [step.change for step in result.steps] == ["capture auto", "precision bf16_autocast"]


def test_what_the_budget_leaves_of_a_second_capture_is_told():
    lab = WaitsInBf16({"bf16_autocast": 0.4}, budget=4)  # the start twice, and each change
    result = lab.run(CAPTURE, BF16, AGAIN)
    assert [step.change for step in result.steps] == ["capture auto", "precision bf16_autocast"]
    assert result.untried == ["capture auto, once more"]


def test_a_single_kept_change_is_measured_a_second_time():
    lab = Lab({"auto": 0.5})
    assert lab.run(CAPTURE).chosen == {**START, "capture": "auto"}
    assert [repeat for *_, repeat in lab.compared] == [0, 1]


def test_what_is_not_confirmed_is_not_chosen():
    result = Lab({"auto": 0.5}, together=1.0).run(CAPTURE)
    assert result.best != START
    assert result.chosen == START


def test_without_a_faster_change_the_start_is_chosen():
    lab = Lab({"auto": 1.0, "block": 1.5})
    result = lab.run(CAPTURE, BLOCK)
    assert (result.kept, result.whole, result.chosen) == ([], None, START)
    assert len(lab.compared) == 2


@pytest.mark.parametrize("start", [START, {**START, "capture": "none"}])
def test_a_change_to_a_default_is_not_compared_with_itself(start: Options):
    lab = Lab({})
    [step] = lab.run(Change(options={"capture": "none"}), start=start).steps
    assert (step.word, step.reason) == ("not run", "is already set")
    assert lab.compared == []


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (
            (2.0, 1.9, 1.8001),
            "the losses of 3 steps differ from those of the nearest of the start's 2 runs by 3e-05, and rounding explains 9.5e-07",
        ),
        ((2.0, None, 1.8), "its loss is not finite: 2, nan or inf"),
        ((), "its record has no losses"),
    ],
)
def test_a_change_with_another_loss_is_not_even_compared(losses: Any, words: str):
    lab = Lab({"auto": 0.5})
    lab.trials["auto"] = Trial(losses=losses, step_s=0.1)
    result = lab.run(CAPTURE)
    assert (result.chosen, lab.compared) == (START, [])
    assert words in result.steps[0].reason
    assert result.steps[0].word == "another loss"


def test_a_precision_may_move_the_loss_by_its_roundoff_and_later_changes_are_held_to_its_losses():
    moved = (2.004, 1.904, 1.804)
    lab = Lab({"bf16_autocast": 0.5, "auto": 0.5, "block": 0.5})
    lab.trials = {
        "auto": Trial(losses=moved, step_s=1.0),
        "block": Trial(losses=LOSSES, step_s=1.0),
        "bf16_autocast": Trial(losses=moved, step_s=1.0),
    }
    result = lab.run(BF16, CAPTURE, Change(options={"compile": "block", "capture": "none"}))
    assert [(step.kept, step.word) for step in result.steps] == [
        (True, "faster"),
        (True, "faster"),
        (False, "another loss"),
    ]


# Medium's losses on an H200, with the third step above the first (results/h200/preset_medium_flash_attn_4.jsonl).
UNSTABLE = {
    "fp32": (9.42647, 6.92088, 10.92018, 6.12516, 6.70045, 5.07628, 5.37710, 4.74256, 4.62186, 5.09575),
    "bf16_autocast": (9.42823, 6.92534, 10.94117, 6.14346, 6.73729, 5.09077, 5.38635, 4.74911, 4.62649, 5.10034),
    "block": (9.42829, 6.92623, 10.94475, 6.14727, 6.74491, 5.09378, 5.38798, 4.75036, 4.62748, 5.10143),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16_autocast"])
def test_where_training_amplifies_rounding_a_right_change_in_bf16_may_differ_by_more(precision: str):
    """The start is in fp32 and bf16 is found; or the start is in bf16, and one trial in fp32 shows how rounding grows."""

    def searched(block: Sequence[float]) -> Step:
        lab = Lab({"bf16_autocast": 0.5, "block": 0.5})
        lab.trials = {"block": Trial(losses=tuple(block), step_s=1.0)}
        lab.trials |= {name: Trial(losses=UNSTABLE[name], step_s=1.0) for name in ("bf16_autocast", "fp32")}
        start = {**START, "precision": precision}
        result = lab.run(*([BF16] if precision == "fp32" else []), Change(options={"compile": "block"}), start=start)
        assert len([options for options in lab.tried if options["precision"] == "fp32"]) == (
            2 if precision == "fp32" else 1
        )
        return result.steps[-1] if precision == "fp32" else result.steps[0]

    right = searched(UNSTABLE["block"])
    assert right.kept
    assert right.apart == pytest.approx(4.7e-4, rel=0.05)
    wrong = searched([(3 * a - 2 * b) for a, b in zip(UNSTABLE["block"], UNSTABLE["bf16_autocast"], strict=True)])
    assert (wrong.kept, wrong.word) == (False, "another loss")
    assert wrong.allowed == pytest.approx(7.66e-4, rel=0.01)


def _allowed_over(steps: int, of: Sequence[float], other: Sequence[float], most: float) -> float:
    """What is allowed over so many steps of losses whose other precision is `other`, as a share of `most`."""
    return Reference("bf16_autocast", of, other_precision=other).allowed("bf16_autocast", steps) / most


def test_what_is_allowed_grows_with_the_difference_of_two_precisions_to_half_of_it():
    losses, base = [4.0] * 6, allowed_difference("bf16_autocast", "bf16_autocast")
    calm, wild = [4.0 + 4e-4] * 6, [4.0 + 4e-8, *[4.0 + 4e-3] * 5]
    assert _allowed_over(6, losses, calm, base) == pytest.approx(1.0)
    assert _allowed_over(1, losses, wild, base) == 1.0
    half = difference_of(losses, wild) / 2
    assert _allowed_over(6, losses, wild, half) == pytest.approx(1.0), (
        "the growth alone would allow a thousand times as much"
    )
    assert _allowed_over(6, losses, [4.0, *calm[1:]], base) < 3, "a head of zeros has the same first loss"
    assert _allowed_over(6, losses, losses, base) == 1.0
    assert Reference("bf16", losses, other_precision=wild).allowed("bf16", 6) == base, "bf16 weights lose updates"


def test_one_blown_up_step_hides_no_difference_of_the_steps_before():
    fp32 = (4.0, 3.9, 3.8, 3.7, 12.0, 3.6)
    bf16 = (4.0004, 3.9006, 3.8008, 3.7010, 13.5, 3.61)
    trials = Trials(str, lambda *_: None, lambda *_: None)
    reference = Reference("bf16_autocast", bf16, other_precision=fp32)
    late = [*bf16[:4], 13.45, 3.612]
    assert not trials.check_losses(Trial(losses=tuple(late)), "bf16_autocast", reference).why
    early = trials.check_losses(
        Trial(losses=(*[loss * 1.002 for loss in bf16[:4]], *bf16[4:])), "bf16_autocast", reference
    )
    assert "differ" in early.why


def test_no_trial_in_fp32_without_room_or_for_losses_that_are_not_finite():
    def searched(losses: tuple[float | None, ...], budget: int) -> tuple[Result, Lab]:
        lab = Lab({"block": 0.5}, budget=budget)
        lab.trials = {"block": Trial(losses=losses, step_s=1.0), "fp32": Trial(losses=(None, 1.9, 1.8), step_s=1.0)}
        return lab.run(BLOCK, start={**START, "precision": "bf16_autocast"}), lab

    result, lab = searched((2.0, None, 1.8), 99)
    assert "fp32" not in [options["precision"] for options in lab.tried]
    result, lab = searched((2.01, 1.91, 1.81), 99)
    assert "fp32" in [options["precision"] for options in lab.tried]
    assert result.steps[0].word == "another loss", "fp32's losses are not finite, and tell nothing"
    result, lab = searched((2.01, 1.91, 1.81), 3)
    assert (result.steps, result.untried) == ([], ["compile block"]), "the budget ended before the trial in fp32"


def test_a_precision_with_a_wrong_loss_is_not_kept():
    lab = Lab({"bf16_autocast": 0.5})
    lab.trials["bf16_autocast"] = Trial(losses=(2.03, 1.93, 1.83), step_s=0.5)
    assert lab.run(BF16).chosen == START


def test_the_allowed_difference_is_between_what_right_and_wrong_variants_measure():
    right = {"fp32": 2e-7, "fp16_autocast": 4e-6, "bf16_autocast": 2.6e-5, "bf16": 2.6e-5}
    for precision, most in right.items():
        assert 1.5 * most < allowed_difference(precision, precision) < 1.3e-4 / 2, precision
    lawful = {"fp16_autocast": 6e-6, "bf16_autocast": 6e-5, "bf16_master": 1.3e-3, "bf16": 2.9e-3}
    for precision, moved in lawful.items():
        assert moved < allowed_difference(precision, "fp32") == allowed_difference("fp32", precision) < 1e-2, precision


def test_the_difference_of_losses_is_relative_and_over_the_common_steps():
    assert difference_of((2.0, 1.0), (2.0, 1.0, 7.0)) == 0.0
    assert difference_of((3.0, 4.0), (0.0, 0.0)) == float("inf")
    assert difference_of((0.0,), (0.0,)) == 0.0
    assert difference_of((3.3, 4.4), (3.0, 4.0)) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["out_of_memory", "unsupported", "timeout", "crash", "import_error"])
def test_a_change_that_fails_is_a_row_and_the_search_goes_on(kind: str):
    lab = Lab({"model": 0.5})
    lab.trials["auto"] = Trial(failure_kind=kind, message="why it failed")
    result = lab.run(CAPTURE, MODEL)
    assert (result.steps[0].word, result.steps[0].reason) == (kind.replace("_", " "), "why it failed")
    assert result.chosen == {**START, "compile": "model"}


def test_a_refused_change_is_a_row():
    lab = Lab({})
    lab.refused["block"] = "always"
    [step] = lab.run(BLOCK).steps
    assert (step.word, step.reason, lab.compared) == ("not run", "block is refused", [])


def test_a_change_that_the_best_so_far_hinders_is_tried_with_what_it_brings_along():
    lab = Lab({"auto": 0.9, "block": 0.5, "none": 1.0})
    lab.refused["block"] = "auto"
    result = lab.run(CAPTURE, Change(options={"compile": "block"}, otherwise={"capture": "none"}))
    assert result.steps[1].change == "compile block with capture none"
    assert result.chosen == {**START, "capture": "none", "compile": "block"}


def test_a_change_that_is_refused_with_what_it_brings_along_has_the_reason_that_holds_then():
    """A compiled model refuses updates in backward also with the AdamW that the first refusal asks for."""
    lab = Lab({})
    lab.key_of = lambda options: repr(build_run({**options, "device": "cuda"}))  # type: ignore[method-assign]
    [row] = [change for change in CHANGES if "update" in change.options]
    [step] = lab.run(row, start={**START, "compile": "model"}).steps
    assert (step.change, step.word) == ("update in_backward with adamw trainstep", "not run")
    assert "a model compiled whole completes all gradients at once; take compile block or none" in step.reason
    assert lab.compared == []


def test_options_that_were_tried_under_another_name_are_not_tried_again():
    lab = Lab({})
    result = lab.run(CAPTURE, Change(options={"capture": "auto", "compile": "none"}))
    assert result.steps[1].reason == "these are the options of capture auto, which was tried"
    assert len(lab.compared) == 1


def test_a_far_slower_trial_is_not_compared():
    lab = Lab({})
    lab.trials["auto"] = Trial(losses=LOSSES, step_s=3.0)
    [step] = lab.run(CAPTURE).steps
    assert (step.word, lab.compared) == ("slower", [])
    assert "took 3 times the best's" in step.reason


def attentions(lab: Lab, **alone_s: float) -> list[Change]:
    """A row for each attention, whose trial takes so long alone."""
    lab.trials |= {name: Trial(losses=LOSSES, step_s=time_s) for name, time_s in alone_s.items()}
    return [Change(options={"attention": name}) for name in alone_s]


def test_of_values_of_one_option_the_fastest_alone_is_compared_and_none_that_was_clearly_slower():
    lab = Lab({"flash": 0.8, "flex": 0.7})
    result = lab.run(*attentions(lab, sdpa=1.0, flex=0.97, flash=0.8, cudnn=0.82), CAPTURE)
    compared = [
        {name: value for name, value in after.items() if START.get(name) != value} for _, after, _ in lab.compared
    ]
    assert compared[:3] == [{"attention": "flash"}, {"attention": "cudnn"}, {"attention": "flash", "capture": "auto"}]
    assert [(step.change, step.word) for step in result.steps[2:4]] == [
        ("attention flex", "slower"),
        ("attention sdpa", "slower"),
    ]
    assert result.steps[2].reason == "alone it takes 1.21 times as long as attention flash, which was compared"
    assert result.steps[2].alone_s == 0.97
    assert result.chosen == {**START, "attention": "flash"}
    assert len([options for options in lab.tried if "attention" in options and "capture" not in options]) == 4, (
        "once each"
    )


def test_a_value_that_fails_is_told_first_and_hides_no_other():
    lab = Lab({"flash": 0.8})
    rows = attentions(lab, flash=0.8, flex=0.9)
    lab.trials["flex"] = Trial(failure_kind="crash", message="no triton")
    result = lab.run(*rows)
    assert [(step.change, step.kept) for step in result.steps] == [("attention flex", False), ("attention flash", True)]


def test_a_budget_without_room_for_all_trials_of_an_option_compares_those_that_ran():
    lab = Lab({"flash": 0.8, "flex": 0.8}, budget=3)
    result = lab.run(*attentions(lab, flash=0.9, flex=0.8))
    assert [step.change for step in result.kept] == ["attention flash"]
    assert result.untried == ["attention flex"]


def test_a_start_whose_losses_do_not_repeat_ends_the_search():
    lab = Lab({"auto": 0.5})
    lab.repeated = (2.1, 1.9, 1.8)
    result = lab.run(CAPTURE)
    assert "a second run of the start with the same seed has other losses" in result.trouble
    assert lab.compared == []


@pytest.mark.parametrize("budget", range(5))
def test_the_budget_leaves_the_rest_and_says_so(budget: int):
    result = Lab({"auto": 0.5}, budget=budget).run(CAPTURE, BLOCK, MODEL)
    names = ["capture auto", "compile block", "compile model"]
    assert result.untried == names[max(budget - 2, 0) :]
    assert result.whole is None


def test_the_last_comparison_may_be_what_the_budget_leaves():
    lab = Lab({"auto": 0.5})
    compare = lab.compare
    lab.compare = lambda before, after, repeat: None if repeat else compare(before, after, repeat)  # type: ignore[method-assign]
    result = lab.run(CAPTURE)
    assert result.untried == ["all kept changes against the start"]
    assert result.chosen == {**START, "capture": "auto"}


def test_recomputation_is_taken_only_where_memory_does_not_suffice():
    roomy = Lab({})
    assert "recompute" not in roomy.run(SELECTIVE, WHOLE, CAPTURE).chosen
    tight = Lab({"auto": 0.5})
    tight.fits = lambda options: options.get("recompute") == "block"
    result = tight.run(SELECTIVE, WHOLE, CAPTURE)
    assert [step.change for step in result.kept] == ["recompute block", "capture auto"]
    assert tight.compared[0][0] == {**START, "recompute": "block"}
    assert tight.compared[-1][0] == {**START, "recompute": "block"}, "the start itself cannot be compared with"


def test_less_recomputation_is_tried_at_the_end_where_something_made_room():
    lab = Lab({"bf16_autocast": 0.5, "none": 0.8})
    lab.fits = lambda options: options.get("recompute") == "block" or "precision" in options
    rows = [Change(options={"recompute": name}, when=IF_LESS) for name in ("none", "selective")]
    result = lab.run(WHOLE, BF16, *rows)
    assert [step.change for step in result.steps] == ["recompute block", "precision bf16_autocast", "recompute none"]
    assert result.chosen == {**START, "precision": "bf16_autocast", "recompute": "none"}


def test_weights_that_do_not_fit_are_not_tried_with_recomputation():
    lab = Lab({})
    lab.trials["tiny"] = Trial(failure_kind="out_of_memory", phase="build", message="OOM")
    result = lab.run(SELECTIVE, WHOLE, CAPTURE)
    assert (result.trouble, len(lab.tried)) == ("OOM", 1)


def test_a_start_that_never_fits_ends_the_search():
    lab = Lab({})
    lab.fits = lambda options: False
    result = lab.run(SELECTIVE, CAPTURE)
    assert (result.trouble, lab.compared) == ("OOM", [])


def test_precisions_are_tried_only_if_allowed_and_ops_only_in_our_model():
    always = [change.options for change in changes_within(["bf16_autocast"], built_in=True) if change.when == ALWAYS]
    assert always[:2] == [{"capture": "auto"}, {"precision": "bf16_autocast"}], "the device's time decides from then on"
    rows = changes_within(["bf16_autocast", "bf16"], built_in=True)
    place = rows.index(AGAIN)
    assert [change.options.get("precision") for change in rows[place - 2 : place]] == ["bf16_autocast", "bf16"]
    assert len(rows) == len(CHANGES) + 2
    assert not any("precision" in change.options for change in CHANGES)
    without = changes_within(["bf16_autocast"], built_in=True, is_installed=lambda package: package != "flash-attn-4")
    assert len(without) == len(CHANGES)
    assert all(change.options.get("attention") != "flash_attn_4" for change in without)
    own = [name for change in changes_within([], built_in=False) for name in change.options]
    assert "ops" not in own
    assert "attention" not in own
    assert "compile" in own


@pytest.mark.parametrize("built_in", [True, False])
def test_the_whole_model_is_compiled_behind_all_that_would_have_to_be_compiled_with_it(built_in: bool):
    rows = [change for change in changes_within([], built_in=built_in) if change.when == ALWAYS]
    assert rows[-1].options == {"compile": "model"}
    names = [name_of(change.options) for change in rows]
    assert not built_in or names.index("ops fused") < names.index("adamw trainstep"), "the larger gain first"

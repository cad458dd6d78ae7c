"""The search of a preset on made-up measurements: what is kept, skipped, left by the budget, and what a start without room gets."""

from typing import Any

import pytest

from trainstep.plan.preset import IF_TOO_LARGE, Change, Measured, Options, Probe, Result, changes_within, search
from trainstep.records.compare import Comparison

START = {"model": "tiny", "capture": "none"}
CAPTURE = Change(options={"capture": "auto"})
BLOCK, MODEL = Change(options={"compile": "block"}), Change(options={"compile": "model"})
SELECTIVE, WHOLE = (Change(options={"recompute": name}, when=IF_TOO_LARGE) for name in ("selective", "block"))
SAME = (2.0, 2.0)


class Lab:
    """Answers from `speeds`: option value -> factor of the time. Notes what was compared."""

    def __init__(self, speeds: dict[str, float], *, budget: int = 99, losses: Any = SAME, together: float = 0.0):
        self.speeds, self.budget, self.losses, self.together = speeds, budget, losses, together
        self.compared: list[tuple[Options, Options, int]] = []
        self.fits = lambda options: True

    def probe(self, options: Options) -> Probe | None:
        return Probe(spread=0.5) if self.fits(options) else Probe(failure_kind="out_of_memory", message="OOM")

    def compare(self, before: Options, after: Options, repeat: int) -> Measured | None:
        if len(self.compared) == self.budget:
            return None
        self.compared.append((before, after, repeat))
        ratio = 1.0
        for name, value in after.items():
            ratio *= self.speeds.get(str(value), 1.0) if before.get(name) != value else 1.0
        whole = len([name for name in after if before.get(name) != after[name]]) > 1 or repeat
        ratio = self.together if whole and self.together else ratio
        verdict = "faster" if ratio < 0.98 else "slower" if ratio > 1.02 else "cannot tell"
        return Measured(comparison=Comparison(verdict=verdict, reason="made up", ratio=ratio), losses=self.losses)

    def run(self, *changes: Change, refused: str = "") -> Result:
        def refusal(options: Options) -> str | None:
            return f"{refused} is refused" if refused in map(str, options.values()) else None

        return search(START, changes, refusal=refusal, probe=self.probe, compare=self.compare)


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


@pytest.mark.parametrize(
    ("losses", "words"),
    [((2.0, 2.6), "the loss differs by 0.6; seeds differ by 0.5"), ((2.0, None), "the loss is None and was 2.0")],
)
def test_a_faster_change_with_another_loss_is_not_kept(losses: Any, words: str):
    result = Lab({"auto": 0.5}, losses=losses).run(CAPTURE)
    assert result.chosen == START
    assert words in result.steps[0].reason
    assert result.steps[0].word == "faster"


def test_refused_and_needless_changes_are_skipped_with_the_reason():
    lab = Lab({"auto": 0.5})
    result = lab.run(BLOCK, Change(options={"capture": "none"}), refused="block")
    assert [(step.word, step.reason) for step in result.steps] == [
        ("not run", "block is refused"),
        ("not run", "is so already"),
    ]
    assert lab.compared == []


def test_the_budget_leaves_the_rest_and_says_so():
    result = Lab({"auto": 0.5}, budget=1).run(CAPTURE, BLOCK, MODEL)
    assert result.untried == ["compile block", "compile model", "all kept changes against the start"]
    assert result.whole is None
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


def test_a_start_that_never_fits_ends_the_search():
    lab = Lab({})
    lab.fits = lambda options: False
    result = lab.run(SELECTIVE, CAPTURE)
    assert (result.trouble, lab.compared) == ("OOM", [])


def test_precisions_are_tried_only_if_allowed_and_ops_only_in_our_model():
    names = [change.name for change in changes_within(["bf16_autocast"], built_in=True)]
    assert names[0] == "precision bf16_autocast"
    assert "ops fused" in names
    own = [change.name for change in changes_within([], built_in=False)]
    assert not any(name.startswith(("precision", "ops", "attention")) for name in own)
    assert "compile model" in own

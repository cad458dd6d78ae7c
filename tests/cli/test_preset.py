"""`trainstep bench --preset fastest`: bad input, and real searches on a CPU that stop, go on and write what other verbs read."""

import json
import os
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import trainstep.training.attention
from cell_maker import finish, start, wait_until
from record_maker import ENVIRONMENT
from trainstep.cli import app
from trainstep.cli.options import GridOptions, limits
from trainstep.cli.running.preset import lab_of
from trainstep.config.parsing import build_run
from trainstep.config.run import RunConfig
from trainstep.measure.harness.lab import TRIAL_STEPS
from trainstep.measure.harness.sets_plan import FEWEST_SETS
from trainstep.plan import preset as plan
from trainstep.plan import trials
from trainstep.plan.preset import CHANGES, Change, search
from trainstep.plan.trials import Reference, Trial, allowed_difference, difference_of, name_of
from trainstep.records.compare import Comparison
from trainstep.records.store import Store
from trainstep.report.kit.frames import markdown
from trainstep.report.step.preset import preset_answer, preset_table, preset_toml
from trainstep.training.build import build_step

TIMING = ["--steps", "5", "--warmups", "1"]
SMALL = ["--device", "cpu", "--context", "16", "--batch-size", "1", *TIMING, "--processes", "5"]
COMMAND = ["bench", "--preset", "fastest", "--model", "tiny", *SMALL]
FEW = (
    Change(options={"adamw": "fused"}),
    Change(options={"attention": "sdpa_cudnn"}),
    Change(options={"adamw": "loop"}),
    Change(options={"adamw": "foreach"}),
)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--preset quickest", "preset: 'quickest' is not known; known: fastest"),
        ("--preset fastest --compare context", "compare: --preset chooses itself what is compared"),
        ("--preset fastest --allow-precision bf17", "allow_precision: 'bf17' is not known; known: fp32"),
        ("--preset fastest --allow-precision bf16,", "allow_precision: '' is not known; known: fp32"),
        ("--allow-precision bf16", "allow_precision: has no effect without --preset fastest"),
        ("--preset fastest --page p.html", "page: a preset writes TOML and Markdown"),
        ("--preset fastest --out mine.jsonl", "out: mine.toml does not look like a preset that this version"),
        ("--preset fastest --model tiny,tiny", "preset: two cells of the grid are the same"),
        ("--preset fastest --ranks 2", "ranks: --preset searches in one process; leave ranks out"),
        (
            "--preset fastest --processes 4 --dry-run",
            "processes: a preset keeps a change by a verdict, which needs at least 5",
        ),
        ("--preset fastest --budget-minutes 0", "budget_minutes: must be a positive number"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, words: str
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("mine.toml").write_text("context = 3\n")
    assert app.run(["bench", "--device", "cpu", *options.split()]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert Path("mine.toml").read_text() == "context = 3\n"


@pytest.mark.parametrize(
    ("budget_minutes", "asked", "processes"), [(None, None, None), (5.0, None, FEWEST_SETS), (5.0, 20, 20)]
)
def test_under_a_budget_a_search_compares_by_the_fewest_processes(
    tmp_path: Path, budget_minutes: float | None, asked: int | None, processes: int | None
):
    how = GridOptions(budget_minutes=budget_minutes)
    lab = lab_of(Store(tmp_path / "p.jsonl"), limits(9.0, None, processes=asked), how, "cpu")
    assert lab._limits.processes == processes


def test_every_change_is_an_option_that_exists():
    for change in CHANGES:
        for name, value in {**change.options, **change.otherwise}.items():
            field = RunConfig.__dataclass_fields__[name]
            assert value in field.metadata["choices"] or isinstance(value, field.type), change  # type: ignore[arg-type]


def test_the_files_name_each_change_with_its_interval_and_read_back():
    def compare(_before: object, after: dict[str, object], _repeat: int) -> Comparison:
        if after.get("compile"):
            return Comparison(verdict="slower", reason="a slow one", ratio=2.0, low=1.9, high=2.1)
        return Comparison(verdict="faster", reason="r", ratio=0.5, low=0.4, high=0.6)

    start_options = {"model": "my_💡:build", "context": 64, "clip_grad_norm": None, "steps": 7}
    result = search(
        start_options,
        [change for change in CHANGES if name_of(change.options) in ("capture auto", "compile block")],
        key_of=str,
        trial=lambda _options, _repeat: Trial(losses=(1.0,), step_s=0.25),
        compare=compare,  # type: ignore[arg-type]
    )
    text = preset_toml(
        "small", result, result.chosen, command="trainstep bench", record="a.jsonl, key k", here=ENVIRONMENT
    )
    assert tomllib.loads(text) == {**start_options, "clip_grad_norm": "none", "capture": "auto"}
    assert "# kept: capture auto: 0.500 (99 % interval 0.400 to 0.600) of the time before" in text
    assert "# not kept: compile block: slower: a slow one" in text
    assert "Records: a.jsonl, key k" in text
    answer = preset_answer("small", result, "a.toml")
    assert (
        answer.verdict
        == "small: with capture auto a step takes 0.500 (99 % interval 0.400 to 0.600) of the start's time."
    )
    assert "trainstep bench --config a.toml" in answer.suggestion
    page = markdown([preset_table("small", result)], [answer])
    assert page.startswith("**small: with capture auto a step takes 0.500")
    assert "| all kept changes" in page
    assert "The start's fastest step took 250 ms alone." in page


@pytest.fixture
def few_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(plan, "CHANGES", FEW)
    return


def _rows(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> dict[str, dict[str, object]]:
    assert app.run([*COMMAND, "--json", *options]) == code
    return {row["change"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


@pytest.mark.slow
def test_a_search_stops_at_its_budget_goes_on_and_then_answers_at_once(
    few_changes: None, capsys: pytest.CaptureFixture[str]
):
    assert _rows(capsys, "--out", "p.jsonl", "--budget-minutes", "0.0001", code=4) == {}
    first = Store(Path("p.jsonl")).read()
    assert len(first) == 1, "the first measurement always runs"
    assert not Path("p.toml").exists()

    assert app.run([*COMMAND, "--out", "p.jsonl", "--dry-run", "--json"]) == 0
    [plan_left] = json.loads(capsys.readouterr().out)["searches"]
    assert plan_left["to_try"] == ["adamw loop", "adamw foreach"], "neither the default nor what a CPU refuses"

    rows = _rows(capsys, "--out", "p.jsonl")
    assert rows["adamw fused"]["reason"] == "is already set"
    assert "CUDA only" in str(rows["attention sdpa_cudnn"]["reason"])
    assert rows["adamw loop"]["step_alone_s"]
    records = Store(Path("p.jsonl")).read()
    assert records[:1] == first
    trial = records[1]
    assert trial.key == first[0].key, "the start runs twice"
    assert (trial.config["data"], len(trial.tables["losses"]["loss"])) == ("stdlib", TRIAL_STEPS)
    assert trial.tables["losses"] == first[0].tables["losses"]

    assert _rows(capsys, "--out", "p.jsonl") == rows
    assert Store(Path("p.jsonl")).read() == records, "nothing ran again"
    assert app.run([*COMMAND, "--out", "p.jsonl", "--dry-run"]) == 0
    assert "tiny: the search is finished" in capsys.readouterr().out
    assert Path("p.md").read_text().startswith("**")


@pytest.mark.slow
def test_the_toml_makes_bench_run_the_chosen_cell_and_parallel_reads_it(
    few_changes: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(plan._Search, "judged", _always_kept)
    monkeypatch.setattr(trials, "HOPELESS", 1e9)  # whatever else this machine does meanwhile
    monkeypatch.setattr(plan, "_CLEARLY", 1e9)
    monkeypatch.setattr(plan._Search, "_alone_s", lambda *_: 0.0)  # in their order
    assert app.run([*COMMAND, "--json", "--clip-grad-norm", "none"]) == 0
    capsys.readouterr()
    [path] = Path("runs").glob("*.toml")
    assert path.name == "preset-fastest-tiny-batch_size-1-context-16-clip_grad_norm-none.toml"
    options = tomllib.loads(path.read_text())
    assert options["adamw"] == "foreach"
    assert "steps" not in options
    expected = {"model": "tiny", "context": 16, "batch_size": 1, "adamw": "foreach", "steps": 5, "warmups": 1}
    key = app_key(["bench", *(f"--{name.replace('_', '-')}={value}" for name, value in expected.items())], capsys)
    assert app_key(["bench", "--config", str(path), *TIMING], capsys) == key
    assert app.run(["parallel", "--config", str(path), "--ranks", "2", "--dry-run"]) == 0


def app_key(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The key of the only cell that this command line would run."""
    assert app.run([*words, "--dry-run", "--json"]) == 0
    [cell] = json.loads(capsys.readouterr().out)["cells"]
    return str(cell["key"])


def _always_kept(_search: object, name: str, *_: object) -> trials.Step:
    return trials.Step(change=name, kept=True, word="faster", comparison=Comparison(verdict="faster", reason="made up"))


@pytest.mark.slow
def test_several_models_have_an_answer_each_and_one_that_cannot_run_does_not_end_the_others(
    few_changes: None, capsys: pytest.CaptureFixture[str]
):
    Path("broken.py").write_text("def build(run, device):\n    raise RuntimeError('this one breaks')\n")
    assert app.run([*COMMAND[:3], "--model", "broken:build,tiny", *SMALL, "--json"]) == 3
    answers = json.loads(capsys.readouterr().out)["answer"]
    assert "broken:build: nothing was tried, because the start cannot be used" in answers[0]["verdict"]
    assert "this one breaks" in answers[0]["verdict"]
    assert answers[1]["verdict"].startswith("tiny: ")
    assert len(list(Path("runs").glob("*.toml"))) == 1


@pytest.mark.slow
def test_a_killed_search_goes_on_where_it_stopped(tmp_path: Path):
    records = tmp_path / "p.jsonl"
    killed = start(*COMMAND, "--out", "p.jsonl", folder=tmp_path)
    assert wait_until(lambda: records.exists() and records.read_text().count("\n") >= 2, timeout_s=100)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    before = Store(records).read()
    code, out, err = finish(
        start(*COMMAND, "--out", "p.jsonl", "--json", "--budget-minutes", 0.0001, folder=tmp_path), timeout_s=100
    )
    assert code == 4, err
    after = Store(records).read()
    assert after[: len(before)] == before
    assert len(after) > len(before), "one more measurement, and not the start again"
    assert {record.key for record in after[len(before) :]} - {record.key for record in before}
    assert "The budget leaves no room for the rest" in json.loads(out)["answer"][0]["verdict"]


def _trial_losses(**options: object) -> list[float]:
    # Of 128 tokens rounding on a CPU with bf16 instructions is as large as a missing gradient; of 512 a tenth of it.
    run = build_run({"model": "tiny", "batch_size": 4, "context": 128, "data": app.__file__, **options})
    step = build_step(run)
    return [step.step(step.micro_batches(index)).item() for index in range(TRIAL_STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16_autocast", "bf16"])
@pytest.mark.parametrize("wrong", ["no mask", "no gradient"])
def test_losses_tell_a_wrong_attention_from_another_right_one(
    monkeypatch: pytest.MonkeyPatch, precision: str, wrong: str
):
    before, exact = (_trial_losses(precision=name) for name in (precision, "fp32"))
    allowed = Reference(precision, before, other_precision=exact).allowed(precision, TRIAL_STEPS)
    assert allowed == allowed_difference(precision, precision), "training is calm"
    assert difference_of(_trial_losses(precision=precision, attention="plain"), before) <= allowed

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if wrong == "no mask":
            return scaled_dot_product_attention(q, k, v)
        return scaled_dot_product_attention(q.detach(), k, v, is_causal=True)

    monkeypatch.setattr(trainstep.training.attention, "_sdpa", attend)
    assert difference_of(_trial_losses(precision=precision), before) > allowed

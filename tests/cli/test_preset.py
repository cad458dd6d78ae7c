"""`trainstep bench --preset fastest`: bad input, and real searches on a CPU that stop, go on and write what other verbs read."""

import json
import tomllib
from pathlib import Path

import pytest

from cell_maker import finish, start
from record_maker import ENVIRONMENT
from trainstep.cli import app
from trainstep.cli.preset import SEEDS
from trainstep.config.parsing import build_config
from trainstep.config.run import RunConfig
from trainstep.plan.preset import CHANGES, Measured, Probe, search
from trainstep.records.compare import Comparison
from trainstep.records.store import Store
from trainstep.report.kit.frames import markdown
from trainstep.report.step.preset import preset_answer, preset_table, preset_toml

SMALL = [
    "--device",
    "cpu",
    "--model",
    "tiny",
    "--context",
    16,
    "--batch-size",
    1,
    "--steps",
    5,
    "--warmups",
    1,
    "--processes",
    1,
]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--preset quickest", "preset: 'quickest' is not known; known: fastest"),
        ("--preset fastest --compare context", "compare: --preset chooses itself what is compared"),
        ("--preset fastest --allow-precision bf17", "allow_precision: 'bf17' is not known; known: fp32"),
        ("--allow-precision bf16", "allow_precision: has no effect without --preset fastest"),
        ("--preset fastest --page p.html", "page: a preset writes TOML and Markdown"),
        ("--preset fastest --out mine.jsonl", "out: mine.toml is not a preset of trainstep and would be replaced"),
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


def test_every_change_is_an_option_that_exists():
    for change in CHANGES:
        for name, value in change.options.items():
            choices = RunConfig.__dataclass_fields__[name].metadata["choices"]
            assert value in choices, change.name


def test_the_files_name_each_change_with_its_interval_and_read_back():
    def compare(_before: object, after: dict[str, object], _repeat: int) -> Measured:
        known = Comparison(verdict="faster", reason="r", ratio=0.5, low=0.4, high=0.6)
        slow = Comparison(verdict="slower", reason="a slow one", ratio=2.0, low=1.9, high=2.1)
        return Measured(comparison=slow if after.get("compile") else known, losses=(2.0, 2.0))

    start_options = {"model": "small", "context": 64, "clip_grad_norm": None, "steps": 7}
    result = search(
        start_options,
        [change for change in CHANGES if change.name in ("capture auto", "compile block")],
        refusal=lambda _: None,
        probe=lambda _: Probe(spread=1.0),
        compare=compare,  # type: ignore[arg-type]
    )
    text = preset_toml("small", result, command="trainstep bench", records="runs/a.jsonl", here=ENVIRONMENT)
    assert tomllib.loads(text) == {"model": "small", "context": 64, "clip_grad_norm": "none", "capture": "auto"}
    assert "# capture auto: 0.500 (99 % interval 0.400 to 0.600), the loss differs by 0; seeds differ by 1" in text
    assert "# not kept: compile block: a slow one" in text
    assert "Records: runs/a.jsonl" in text
    answer = preset_answer("small", result, "a.toml")
    assert answer.verdict == "small: capture auto take 0.500 (99 % interval 0.400 to 0.600) of the start's time."
    assert "trainstep bench --config a.toml" in answer.suggestion
    page = markdown([preset_table("small", result)], [answer])
    assert page.startswith("**small: capture auto take 0.500")
    assert "| all kept changes" in page


@pytest.mark.slow
def test_a_search_stops_at_its_budget_and_the_same_command_goes_on(tmp_path: Path):
    command = ["bench", "--preset", "fastest", *SMALL, "--out", "p.jsonl", "--json"]
    code, out, err = finish(start(*command, "--budget-minutes", 0.0001, folder=tmp_path), timeout_s=100)
    assert code == 4, err
    assert "The budget is spent; not tried: capture auto, " in json.loads(out)["answer"][0]["verdict"]
    first = Store(tmp_path / "p.jsonl").read()
    assert len(first) == 1, "the first measurement always runs"

    (tmp_path / "p.toml").unlink(missing_ok=True)
    code, out, err = finish(start(*command, folder=tmp_path), timeout_s=110)
    assert code == 0, err
    rows = {row["change"]: row for row in json.loads(out)["rows"]}
    assert (
        "compile none" in rows["attention sdpa_cudnn"]["reason"]
        or "CUDA only" in rows["attention sdpa_cudnn"]["reason"]
    )
    assert rows["attention sdpa"]["reason"] == "is so already"
    assert rows["capture auto"]["verdict"] != "not run"
    records = Store(tmp_path / "p.jsonl").read()
    assert records[: len(first)] == first
    assert [record.config["seed"] for record in records[:SEEDS]] == [0, 1, 2]

    again, repeated, _ = finish(start(*command, folder=tmp_path), timeout_s=60)
    assert (again, repeated) == (0, out)
    assert len(Store(tmp_path / "p.jsonl").read()) == len(records), "nothing ran again"

    options = tomllib.loads((tmp_path / "p.toml").read_text())
    assert build_config("train_step", options)
    assert options["context"] == 16
    for verb in ("bench", "parallel"):
        code, out, err = finish(start(verb, "--config", "p.toml", "--dry-run", folder=tmp_path), timeout_s=60)
        assert code == 0, err
        assert "to run" in out
    assert (tmp_path / "p.md").read_text().startswith("**")

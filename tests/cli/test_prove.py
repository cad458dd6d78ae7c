"""`trainstep explain --prove`: bad input, what it measures and writes, how it goes on; and a real proof on a CPU that is killed."""

import json
import os
import signal
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from cell_maker import finish, start, wait_until
from fake_groups import FakeGroups
from record_maker import ENVIRONMENT, a_record
from run_records import a_run
from sources import ROOT
from trainstep.cli import app
from trainstep.cli.options import GridOptions
from trainstep.cli.running import prove
from trainstep.config.script import Part
from trainstep.measure.harness import fork_client, lab, sweep
from trainstep.records.store import Store

PROFILES = str(ROOT / "results/h200/profile_again.jsonl")
TINY = ["--device", "cpu", "--model", "tiny", "--context", "32", "--steps", "2", "--warmups", "1"]
COMMAND = ["explain", *TINY, "--prove", "--out", "p.jsonl"]
SPEEDS = {"sdpa": 0.5, "block": 0.8, "fused": 1.0, "trainstep": 1.3}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGroups:
    groups = FakeGroups(SPEEDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(lab, "run_groups", groups)
    monkeypatch.setattr(prove, "run_groups", groups)
    monkeypatch.setattr(fork_client, "start_server", lambda: None)
    monkeypatch.setattr(sweep, "MUST_MATCH", ())
    return groups


def shown(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0, command: list[str] = COMMAND) -> str:
    assert app.run([*command, *options]) == code
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("workload", "here", "sentence"),
    [
        (
            "run",
            ("A", 1),
            "the step ran on 2 GPUs, and here 1 can be used; take a machine with 2, or a run of the script",
        ),
        (
            "run",
            ("B", 2),
            "measured on A, and here is B; take a run of the script on this machine, by `trainstep run`, or",
        ),
        ("parallel", ("B", 2), "measured on A, and here is B; take --model, which explains a step of this machine, or"),
    ],
)
def test_another_machine_is_refused_with_a_way_out(
    workload: str, here: tuple[str, int], sentence: str, monkeypatch: pytest.MonkeyPatch
):
    record = a_record(
        workload=workload, config={"device": "cuda", "ranks": 2}, environment=replace(ENVIRONMENT, gpu="A")
    )
    machine = replace(ENVIRONMENT, gpu=here[0], gpu_count=here[1])
    monkeypatch.setattr(prove, "this_machine", lambda *_, **__: (machine, "cuda"))
    with pytest.raises(ValueError, match=sentence):
        prove.same_machine(record, GridOptions())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--out-config", "a.toml"], "out_config: has no effect without --prove"),
        (["--processes", "6"], "processes: has no effect without --prove"),
        (["--allow-batch-size", "8"], "allow_batch_size: has no effect without --prove"),
        (["--prove", "--allow-precision", "bf17"], "allow_precision: 'bf17' is not known"),
        (["--prove", "--allow-batch-size", "8,x"], "allow_batch_size: 'x' is not a positive number"),
        (["--prove", "--allow-batch-size", "0"], "allow_batch_size: '0' is not a positive number"),
        (["--prove", "--processes", "0"], "processes: must be at least 1"),
        (["--prove", "--resume", "--out", "a.jsonl"], "resume: --prove always goes on"),
        (["--prove", "--context", "16,32"], "prove: takes one step, and these options are 2"),
        (["--prove", "--out-config", "mine.toml"], "out_config: mine.toml does not look like a file of proved options"),
        (["--prove", "--budget-minutes", "0"], "budget_minutes: must be a positive number"),
        (["--prove", "--page", "p.html", "--out-config", "./p.html"], "out_config: p.html is the file of --page too"),
        (["--prove", "--out", "new.toml", "--out-config", "new.toml"], "out_config: new.toml is the file of --out too"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    Path("mine.toml").write_text("context = 3\n")
    assert app.run(["explain", "--device", "cpu", "--model", "tiny", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert Path("mine.toml").read_text() == "context = 3\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([PROFILES, "--model", "small"], "model: the step is that of the records"),
        ([PROFILES, "--config", "a.toml"], "config: the step is that of the records"),
        ([PROFILES], "no NVIDIA GPU is visible"),
        ([str(ROOT / "results/h200/matmul_ceiling.jsonl")], "holds no time of a step"),
    ],
)
def test_a_record_that_cannot_be_proved_here_is_refused(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("a.toml").write_text("")
    assert app.run(["explain", *words, "--prove"]) == 2
    assert sentence in capsys.readouterr().err


def test_predicted_and_measured_gains_stand_side_by_side(fake: FakeGroups, capsys: pytest.CaptureFixture[str]):
    assert app.run([*COMMAND, "--out-config", "fast.toml", "--page", "page.html"]) == 0
    printed = capsys.readouterr()
    out = printed.out
    # 20 ms of the profile; attention=sdpa halves it, compile=block takes a fifth, ours is slower on a CPU.
    assert out.startswith(
        "tiny 32: with attention=sdpa and compile=block a step takes 0.400 (99 % interval 0.400 to 0.400)"
    )
    assert "12.00 ms less" in out.splitlines()[0]
    assert "`trainstep bench --config fast.toml` takes these options." in out.splitlines()[0]
    assert "a CPU has no CUDA graphs" in out
    assert "--allow-precision bf16_autocast allows it" in out
    assert "\nBudget of the step: tiny 32" in out
    assert "options: fast.toml" in out
    assert "[7/7] attention=sdpa,compile=block" in printed.err
    assert out.index("all changes that helped, together") < out.index("Losses of two runs of the original differ by 0")
    page = Path("page.html").read_text()
    assert "What the changes gained: tiny 32" in page

    text = Path("fast.toml").read_text()
    assert "# attention=sdpa: faster: gain 10.0" in text
    options = tomllib.loads(text)
    assert options == {
        "model": "tiny",
        "batch_size": 4,
        "context": 32,
        "device": "cpu",
        "attention": "sdpa",
        "compile": "block",
    }
    assert app.run(["bench", "--config", "fast.toml", "--dry-run", "--json"]) == 0
    [cell] = json.loads(capsys.readouterr().out)["cells"]
    words = ["--model", "tiny", "--context", "32", "--device", "cpu", "--compile", "block"]
    assert app.run(["bench", *words, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"][0]["key"] == cell["key"]
    assert app.run(["parallel", "--config", "fast.toml", "--ranks", "2", "--dry-run"]) == 0


def test_json_has_the_answer_first_and_seconds(fake: FakeGroups, capsys: pytest.CaptureFixture[str]):
    out = json.loads(shown(capsys, "--json"))
    assert next(iter(out)) == "answer"
    assert "a step takes 0.400" in out["answer"][0]["verdict"]
    rows = {row["name"]: row for row in out["rows"] if row["kind"] in ("change", "together")}
    sdpa, both = rows["attention=sdpa"], rows["all changes that helped, together"]
    assert sdpa["measured_gain_s"] == pytest.approx(0.01, rel=0.01)
    assert (sdpa["verdict"], sdpa["chosen"], both["chosen"]) == ("faster", False, True)
    assert both["fields"] == {"attention": "sdpa", "compile": "block"}
    assert rows["attention=trainstep"]["verdict"] == "slower"
    assert rows["capture=step"]["verdict"] == "not run"
    assert any(row["kind"] == "measured" for row in out["rows"]), "the budget follows"


def test_a_killed_proof_goes_on_and_a_finished_one_answers_at_once(
    fake: FakeGroups, capsys: pytest.CaptureFixture[str]
):
    fake.dies_after = 5  # the profile, two trials of the original, a trial and a comparison
    assert app.run(COMMAND) == 130
    assert "finished measurements are kept in p.jsonl; run it again" in capsys.readouterr().err
    before = list(fake.ran)
    assert len(before) == 5
    fake.dies_after = None
    first = shown(capsys)
    assert fake.ran[:5] == before
    assert not set(fake.ran[5:]) & set(before[3:]), "nothing finished ran again"
    count = len(fake.ran)
    assert shown(capsys) == first
    assert len(fake.ran) == count
    assert "nothing left to try" in shown(capsys, "--dry-run")


def test_the_budget_ends_it_and_the_answer_says_what_was_not_tried(
    fake: FakeGroups, capsys: pytest.CaptureFixture[str]
):
    out = shown(capsys, "--budget-minutes", "0.000001", code=4)
    assert "The budget leaves no room for the rest; the same command goes on. Not tried: " in out
    assert "attention=sdpa" in out
    assert len(Store(Path("p.jsonl")).read()) == 2, "the profile, and the first measurement"
    plan = json.loads(shown(capsys, "--dry-run", "--json"))
    assert "attention=sdpa" in plan["to_try"]
    shown(capsys)
    assert "nothing left to try" in shown(capsys, "--dry-run")


def test_a_dry_run_before_the_step_was_profiled_says_so(fake: FakeGroups, capsys: pytest.CaptureFixture[str]):
    out = shown(capsys, "--dry-run")
    assert "1 cell to run" in out
    assert "Then each change of its explanation is measured" in out
    assert fake.ran == []


def test_allowed_precisions_and_batch_sizes_are_tried(
    fake: FakeGroups, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    fake.speeds = {8: 1.2, "bf16_autocast": 0.9}  # 8 sequences in 1.2 times the time of 4: 0.6 of it per token
    options = ["--allow-precision", "bf16_autocast", "--allow-batch-size", "4,8", "--json"]
    out = json.loads(shown(capsys, *options))
    rows = {row["name"]: row for row in out["rows"] if row["kind"] == "change"}
    assert rows["batch_size=8"]["ratio"] == pytest.approx(0.6)
    assert "per token" in rows["batch_size=8"]["reason"]
    assert rows["precision=bf16_autocast"]["verdict"] == "faster"
    assert "of the original's time per token" in out["answer"][0]["verdict"]
    assert "a step takes 0.540" in out["answer"][0]["verdict"]


def test_nothing_faster_writes_no_file(fake: FakeGroups, capsys: pytest.CaptureFixture[str]):
    fake.speeds = {}
    out = shown(capsys, "--out-config", "fast.toml")
    assert "none is faster" in out.splitlines()[0]
    assert "no change is certainly faster, so fast.toml was not written" in out
    assert not Path("fast.toml").exists()


def test_a_record_of_another_verb_is_proved_too(fake: FakeGroups, capsys: pytest.CaptureFixture[str]):
    [record] = [record for records in fake([[cell_of(context=16)]], None, lambda *_: None) for record in records]
    Store(Path("bench.jsonl")).append(record)
    command = ["explain", "bench.jsonl", "--prove", "--out", "p.jsonl"]
    out = shown(capsys, command=command)
    assert "with compile=block a step takes 0.800" in out, "its attention is sdpa already"


def test_a_record_of_several_ranks_is_proved_by_their_strategies(fake: FakeGroups, capsys: pytest.CaptureFixture[str]):
    fake.speeds = {"bucketed": 0.5}
    cell = cell_of(workload="parallel", context=16, ranks=2, sync="naive")
    [[record]] = fake([[cell]], None, lambda *_: None)
    Store(Path("parallel.jsonl")).append(record)
    out = shown(
        capsys, "--out-config", "fast.toml", command=["explain", "parallel.jsonl", "--prove", "--out", "p.jsonl"]
    )
    assert "with sync=bucketed a step takes 0.500" in out
    assert "`trainstep parallel --config fast.toml` takes these options." in out
    options = tomllib.loads(Path("fast.toml").read_text())
    assert (options["sync"], options["ranks"]) == ("bucketed", 2)
    assert app.run(["parallel", "--config", "fast.toml", "--dry-run", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 1
    Store(Path("nodes.jsonl")).append(replace(record, config={**record.config, "nodes": 2}))
    assert app.run(["explain", "nodes.jsonl", "--prove"]) == 2
    assert "prove: the step ran on several nodes" in capsys.readouterr().err


def cell_of(**values: object) -> prove.Cell:
    from trainstep.config.grid import expand

    grid = {name: [value] for name, value in {"model": "tiny", **values}.items()}
    [cell] = expand(grid, {"device": "cpu"})
    return cell


def test_of_a_script_the_lines_and_a_patch_are_shown(capsys: pytest.CaptureFixture[str]):
    Path("train.py").write_text("loader = DataLoader(dataset, batch_size=4)\n")
    Store(Path("run.jsonl")).append(a_run(parts_ms={**dict.fromkeys(Part, 1.0), Part.DATA: 30.0}))
    command = ["explain", "run.jsonl", "--prove"]
    out = shown(capsys, command=command, code=3)
    assert out.startswith("train.py: nothing was measured: the record is of a watch in code")
    assert "DataLoader(..., num_workers=N, persistent_workers=True, prefetch_factor=4)" in out
    assert (
        "+loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True, prefetch_factor=4)" in out
    )
    rows = json.loads(shown(capsys, "--json", command=command, code=3))["rows"]
    assert [row["cause"] for row in rows if row["kind"] == "to write"] == ["data"]
    assert next(row["patch"] for row in rows if row["kind"] == "patch").startswith("--- a/train.py\n+++ b/train.py\n")
    Path("train.py").unlink()
    assert "write the lines below" in shown(capsys, command=command, code=3)
    assert app.run([*command, "--out-config", "a.toml"]) == 2
    assert "out_config: a script of your own has no options" in capsys.readouterr().err
    assert app.run([*command, "--allow-precision", "bf16"]) == 2
    assert "allow_precision: bf16 cannot be applied to a script" in capsys.readouterr().err
    assert app.run([*command, "--script-steps", "2"]) == 2
    assert "script_steps: must be at least 8" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_proof_is_killed_goes_on_and_its_options_are_read(folder: Path):
    command = [*COMMAND, "--processes", 1, "--out-config", "fast.toml"]
    records = folder / "p.jsonl"
    killed = start(*command, folder=folder)
    assert wait_until(lambda: records.exists() and records.read_text().count("\n") >= 4, timeout_s=300)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    before = Store(records).read()
    code, out, err = finish(start(*command, "--json", folder=folder), timeout_s=500)
    assert code == 0, err
    after = Store(records).read()
    assert after[: len(before)] == before
    keys = [record.key for record in before if record.fact("interleaving_group") is None]
    again = [record.key for record in after[len(before) :] if record.fact("interleaving_group") is None]
    assert keys.count(keys[1]) + again.count(keys[1]) <= 2, "the original alone, twice at most"
    assert keys[0] not in again, "the profile is kept"
    rows = {row["name"]: row for row in json.loads(out)["rows"] if row["kind"] == "change"}
    assert "a CPU has no CUDA graphs" in rows["capture=step"]["reason"]
    compared = [row for row in rows.values() if row["ratio"] is not None]
    for row in compared:
        assert row["verdict"] == "cannot tell", "one pair of processes gives no verdict"
        assert row["losses_apart"] <= row["losses_allowed"]
    assert all(
        row["verdict"] == "slower" for row in rows.values() if row["ratio"] is None and row["verdict"] != "not run"
    )
    assert not (folder / "fast.toml").exists()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_a_gpu_predicted_gains_are_measured_and_the_options_are_read(capsys: pytest.CaptureFixture[str]):
    words = ["explain", "--device", "cuda", "--model", "small", "--context", "256", "--steps", "20"]
    options = ["--prove", "--budget-minutes", "4", "--allow-precision", "bf16_autocast", "--out", "p.jsonl"]
    code = app.run([*words, *options, "--out-config", "fast.toml", "--json"])
    assert code in (0, 4), "the budget may leave changes"
    out = json.loads(capsys.readouterr().out)
    rows = [row for row in out["rows"] if row["kind"] == "change"]
    compared = [row for row in rows if row["ratio"] is not None]
    assert compared, out["answer"][0]["verdict"]
    for row in compared:
        assert row["predicted_gain_low_s"] <= row["predicted_gain_s"] <= row["predicted_gain_high_s"]
        assert row["held"] in ("yes", "no", "cannot tell")
        assert row["losses_apart"] <= row["losses_allowed"]
    gains = [row["predicted_gain_s"] for row in compared]
    assert gains == sorted(gains, reverse=True), "the largest predicted gain first"
    assert ("Not tried: " in out["answer"][0]["verdict"]) == (code == 4)
    if Path("fast.toml").exists():
        assert app.run(["bench", "--config", "fast.toml", "--dry-run"]) == 0

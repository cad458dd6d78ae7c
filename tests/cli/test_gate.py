"""`trainstep gate`: verdicts with their exit codes, checkouts that go again, failures by name, resuming, baselines, bad input.

Most commands write times that are given, so that a gate needs no second and its verdict is certain.
"""

import contextlib
import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pseudo_terminal import on_terminal
from record_maker import ENVIRONMENT, a_record, seconds
from trainstep.cli import app
from trainstep.measure.harness.files import remove_abandoned
from trainstep.records.gate_file import GateFile
from trainstep.records.record import Failure
from trainstep.records.store import Store

_SLOWLY = "sleep 0.01; cp times.json b.json"
COPY = ["--measure", "benchmark", "--", "sh", "-c", _SLOWLY, "--benchmark-json", "b.json"]
"""A command whose times are those of the file times.json in its checkout. Five blocks of it last until the first look."""


def times(seconds_each: dict[str, float]) -> str:
    entries = [{"fullname": name, "stats": {"median": value}} for name, value in seconds_each.items()]
    return json.dumps({"machine_info": {"python_version": "3.13"}, "benchmarks": entries})


def git(*words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture(autouse=True)
def _known_machine(monkeypatch: pytest.MonkeyPatch):
    """To look at the machine anew takes longer than such a gate."""
    module = importlib.import_module("trainstep.cli.gate")
    monkeypatch.setattr(module, "environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(module, "installed_packages", lambda: "the same")


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the tags base, slower (3 % more), faster, broken (its command fails)."""
    folder = tmp_path_factory.mktemp("repository")
    with contextlib.chdir(folder):
        make_repository()
    return folder


@pytest.fixture
def repository(made_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the current folder."""
    shutil.copytree(made_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_repository() -> None:
    git("init", "-q")
    for tag, second in (("base", 1.0), ("slower", 1.03), ("faster", 0.9), ("broken", None)):
        Path("times.json").write_text(times({"test_a": second})) if second else Path("times.json").unlink()
        Path("remark").write_text(tag)
        git("add", "-A")
        git("commit", "-qm", tag)
        git("tag", tag)
    git("checkout", "-q", "base")


def gate(*words: str) -> int:
    return app.run(["gate", *words])


def answer(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("head", "code", "verdict", "words"),
    [
        ("base", 0, "pass", "Pass: head is not slower by 2 %, its test_a is 1.000 of base's"),
        ("faster", 0, "pass", "0.900 of base's"),
        ("slower", 1, "fail", "Fail: head is slower, its test_a is 1.030 of base's"),
    ],
)
def test_a_verdict_has_its_exit_code(repository: Path, capsys, head: str, code: int, verdict: str, words: str):
    assert gate("base", head, "--json", *COPY) == code
    found = answer(capsys)
    assert (found["verdict"], found["exit_code"]) == (verdict, code)
    assert words in found["answer"][0]["verdict"]
    [cell] = found["cells"]
    assert 5 <= cell["blocks"] <= 8, "five decide; on a busy machine the next look comes after one or two more"
    assert git("worktree", "list").count("\n") == 1


def test_the_gates_own_file_is_no_file_of_records(repository: Path, capsys):
    """`trainstep report runs/` reads every .jsonl in the folder."""
    assert gate("base", "base", *COPY) == 0
    [path] = Path("runs").iterdir()
    assert path.suffix == ".gate"
    assert str(path) in capsys.readouterr().out


def test_a_limit_of_5_percent_lets_3_percent_pass(repository: Path, capsys):
    assert gate("base", "slower", "--fail-if-slower", "5%", *COPY) == 0
    out = capsys.readouterr().out
    assert "not slower by 5 %" in out
    assert "1.030 to 1.030" in out


def test_the_comment_has_verdict_table_and_provenance(repository: Path, capsys):
    assert gate("base", "slower", "--comment", "c.md", *COPY) == 1
    comment = Path("c.md").read_text()
    assert comment.startswith("<!-- trainstep gate -->\n\n### Performance gate: fails\n")
    assert "| test_a |" in comment.replace("\\", "")
    assert f"base: base at {git('rev-parse', 'base')[:12]}" in comment
    assert gate("base", "base", "--comment", "c.md", *COPY) == 0
    assert "### Performance gate: passes" in Path("c.md").read_text()
    Path("c.md").write_text("my own words")
    assert gate("base", "base", "--comment", "c.md", *COPY) == 2
    assert Path("c.md").read_text() == "my own words"


@pytest.mark.parametrize(
    ("base", "head", "code", "who"), [("base", "broken", 1, "head (broken"), ("broken", "base", 3, "base (broken")]
)
def test_a_failed_command_is_named_with_the_end_of_its_output(repository, capsys, base, head, code, who):
    assert gate(base, head, "--comment", "c.md", *COPY) == code
    out = capsys.readouterr().out
    assert who in out
    assert "the command ended with exit code 1" in out
    assert "cannot stat 'times.json'" in out
    assert "cannot stat 'times.json'" in Path("c.md").read_text()


def test_folders_are_taken_as_they_are(repository: Path, capsys):
    Path("times.json").write_text(times({"test_a": 1.5}))
    assert gate("base", ".", "--json", *COPY) == 1
    found = answer(capsys)
    assert found["cells"][0]["ratio"] == pytest.approx(1.5)
    assert " with changes " in found["head"]


def test_the_checkouts_own_code_is_imported_first(repository: Path, capsys, monkeypatch):
    Path("src").mkdir()
    Path("src/my_project.py").write_text("print(__file__)\nraise SystemExit(9)")
    git("add", "src")
    git("commit", "-qm", "with a package")
    assert gate("HEAD", "base", "--measure", "wall", "--", sys.executable, "-c", "import my_project") == 3
    assert "/base/src/my_project.py" in capsys.readouterr().out


def test_hooks_neither_run_nor_lead_astray(repository: Path, monkeypatch):
    Path(".git/hooks/post-checkout").write_text("#!/bin/sh\nexit 1\n")
    Path(".git/hooks/post-checkout").chmod(0o755)
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))  # as inside a hook of the user
    monkeypatch.setenv("GIT_INDEX_FILE", str(repository / ".git" / "index"))
    assert gate("base", "slower", *COPY) == 1
    assert Path("remark").read_text() == "base"


def test_a_gate_goes_on_from_its_file(repository: Path, capsys):
    assert gate("base", "slower", "--out", "g.jsonl", "--json", *COPY) == 1
    whole = answer(capsys)
    lines = Path("g.jsonl").read_text().splitlines(keepends=True)
    Path("g.jsonl").write_text("".join(lines[:14]) + lines[14][:20])  # killed in the third block
    assert gate("base", "slower", "--out", "g.jsonl", "--json", *COPY) == 1
    assert answer(capsys)["cells"] == whole["cells"]
    read = GateFile(Path("g.jsonl")).read()
    assert read is not None
    assert len(read[1]) == 2 + 11 + 2 + 12  # warm-ups, two blocks and three runs, warm-ups again, three blocks
    assert gate("base", "slower", "--out", "g.jsonl", "--json", *COPY) == 1, "it has ended: its verdict again"
    assert len(Path("g.jsonl").read_text().splitlines()) == 1 + 27 + 1
    capsys.readouterr()
    assert gate("base", "faster", "--out", "g.jsonl", *COPY) == 2
    assert "g.jsonl: holds another gate: its head is slower" in capsys.readouterr().err


def test_a_gate_is_not_prolonged_after_a_look_at_it(repository: Path, capsys):
    assert gate("base", "base", "--out", "g.jsonl", *COPY) == 0
    assert gate("base", "base", "--out", "g.jsonl", "--budget-minutes", "9", *COPY) == 2
    assert "its budget_s is 180.0 and not 540.0" in capsys.readouterr().err


def test_records_are_the_default_and_a_failed_cell_fails_head(repository: Path, capsys):
    for name, step_s in (("a", 0.01), ("b", 0.0104)):
        Path(name).mkdir()
        Store(Path(name, "given.jsonl")).append(a_record(samples={"step": seconds([step_s, step_s, 9.0])}))
    command = ["--json", "--", "sh", "-c", "mkdir -p runs; cat given.jsonl >> runs/all.jsonl"]
    assert gate("a", "b", *command) == 1
    [cell] = answer(capsys)["cells"]
    assert cell["cell"].startswith("train_step")
    assert cell["ratio"] == pytest.approx(1.04)
    failure = Failure(kind="out_of_memory", phase="forward", message="8 GiB were asked for")
    Path("b/given.jsonl").unlink()
    Store(Path("b/given.jsonl")).append(a_record(failure=failure))
    assert gate("a", "b", *command) == 1
    assert "failed: out_of_memory in forward" in answer(capsys)["reason"]


def test_without_records_the_wall_time_is_compared_until_the_time_is_over(repository: Path, capsys):
    assert gate("base", "base", "--budget-minutes", "0.02", "--json", "--", "sleep", "0.1") == 3
    found = answer(capsys)
    assert "of the 5 blocks of four runs that are needed" in found["reason"]
    assert "--budget-minutes" in found["reason"]
    assert gate("base", "base", "--measure", "records", "--", "true") == 3
    assert "wrote no records in runs; to compare how long the command takes: --measure wall" in capsys.readouterr().out


def test_cells_that_only_one_version_has_are_named(repository: Path, capsys):
    Path("times.json").write_text(times({"test_a": 1.0, "test_b": 1.0}))
    assert gate("base", ".", *COPY) == 1
    assert "it has a new test_b" in capsys.readouterr().out


@pytest.mark.slow
def test_unlike_environments_are_refused_or_noted(repository: Path, capsys):
    Path("times.json").write_text(times({"test_a": 1.0}).replace("3.13", "3.14"))
    assert gate("base", ".", *COPY) == 3
    assert "python_version 3.13 against 3.14" in capsys.readouterr().out
    assert gate("base", ".", "--allow-mixed", *COPY) == 0
    assert "Unlike environments: python_version 3.13 against 3.14." in capsys.readouterr().out


def test_a_stored_baseline_needs_its_environment(repository: Path, capsys):
    assert gate("base", "base", "--save", "b0.json", *COPY) == 0
    assert gate("b0.json", "slower", *COPY) == 1
    assert "Base is stored, and was not interleaved" in capsys.readouterr().out
    assert gate("b0.json", "base", *COPY) == 0
    stored = json.loads(Path("b0.json").read_text())
    stored["machine_info"]["trainstep"]["torch"] = "1.0"
    Path("b1.json").write_text(json.dumps(stored))
    del stored["machine_info"]["trainstep"]
    Path("b2.json").write_text(json.dumps(stored))
    capsys.readouterr()
    assert gate("b1.json", "base", *COPY) == 2
    assert "is of another environment: torch 1.0 against" in capsys.readouterr().err
    assert gate("b2.json", "base", *COPY) == 2
    assert "it is no baseline" in capsys.readouterr().err


@pytest.mark.slow
def test_setup_runs_once_in_each_checkout(repository: Path, capsys):
    word = f"pwd >> {shlex.quote(str(repository))}/set_up"
    assert gate("base", "faster", "--setup", word, *COPY) == 0
    assert [Path(line).name for line in Path("set_up").read_text().split()] == ["base", "head"]
    assert gate("base", "faster", "--setup", "echo no compiler; exit 3", *COPY) == 3
    assert "its setup ended with exit code 3" in (out := capsys.readouterr().out)
    assert "no compiler" in out


def test_a_program_that_head_lacks_is_a_failure_of_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for side in ("old", "new"):
        (tmp_path / side).mkdir()
    program = tmp_path / "old" / "tool"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert gate(str(tmp_path / "old"), str(tmp_path / "new"), "--measure", "wall", "--", "./tool") == 1
    assert "cannot be started: No such file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["base", "base"], "command: is missing"),
        (["base", "base", "--"], "command: is missing"),
        (["base", "nowhere", "--", "true"], "head: 'nowhere' is not a folder, or a revision"),
        (["", "base", "--", "true"], "base: must name"),
        (["base", "base", "--measure", "wall", "--quantity", "step", "--", "true"], "quantity: is one of records"),
        (["base", "base", "--quantity", "forward", "--", "no-such-program"], "command: no-such-program cannot be"),
        (["base", "base", "--", "no-such-program"], "command: no-such-program cannot be started: No such file"),
        (["base", "base", "--fail-if-slower", "-1", "--", "true"], "fail_if_slower"),
        (["base", "base", "--fail-if-slower", "nan", "--", "true"], "fail_if_slower"),
        (["base", "base", "--budget-minutes", "0", "--", "true"], "budget_minutes"),
        (["base", "base", "--measure", "gpu", "--", "true"], "measure"),
        (["base", "base", "--out", "remark", "--", "true"], "remark: is not the file of a gate"),
        (["base", "base", "--out", ".", "--", "true"], "not a regular file"),
        (["base", "base", "--save", "remark", "--", "true"], "save: remark: is not JSON of pytest-benchmark"),
    ],
)
def test_bad_input_is_a_sentence(repository: Path, capsys, words: list[str], named: str):
    assert gate(*words) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1
    assert not list(Path().glob("runs/*"))


@pytest.mark.slow
def test_outside_git_two_folders_can_be_compared(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in "ab":
        Path(name).mkdir()
        Path(name, "times.json").write_text(times({"test_a": 1.0}))
    assert gate("a", "b", *COPY) == 0
    assert gate("main", "b", *COPY) == 2
    assert "base: 'main' is not a folder" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_gate_leaves_no_checkout(repository: Path, number: int):
    command = [sys.executable, "-m", "trainstep", "gate", "base", "slower", "--out", "g.jsonl", "--measure", "wall"]
    process = subprocess.Popen([*command, "--", "sh", "-c", "sleep 0.2; echo $$ > ../../pid"], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (Path("g.jsonl").exists() and Path("g.jsonl").read_bytes().count(b"\n") > 4):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, number)
    _, error = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        while git("worktree", "list").count("\n") > 1:
            assert time.monotonic() < deadline
            remove_abandoned()  # another process may be at it, and have the folder's lock for a moment
            git("worktree", "prune")
    else:
        assert process.returncode == 130
        assert b"the runs are kept; to go on, add --out g.jsonl" in error
    assert git("worktree", "list").count("\n") == 1
    read = GateFile(Path("g.jsonl")).read()
    assert read is not None
    assert read[2] is None
    assert len(read[1]) >= 4


@pytest.mark.slow
def test_on_a_terminal_a_live_line_shows_the_interval_so_far(repository: Path):
    words = ["gate", "base", "slower", *COPY]
    script = f"import os; os.dup2(1, 2)\nfrom trainstep.cli.app import main\nmain({words!r})"
    code, text = on_terminal(["-c", script], 100, folder=repository)
    assert code == 1
    assert "\\x1b" not in text
    assert "3 blocks, " in text
    assert "test_a 1.030 (1.030 to 1.030) fail" in text

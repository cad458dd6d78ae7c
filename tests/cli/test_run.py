"""`trainstep run`: whose words are whose, what is refused, and that a script's output and exit code are its own."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cell_maker import import_path, run_python
from pseudo_terminal import on_terminal
from trainstep.cli.app import run
from trainstep.cli.run import split_words
from trainstep.records.record import Record
from trainstep.records.store import Store

TRAINING = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(4, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
"""


def watched(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_python(folder, "-m", "trainstep", "run", *words)


def records(folder: Path) -> list[Record]:
    """All records of the only run in a folder."""
    (file,) = (folder / "runs").glob("*.jsonl")
    return Store(file).read()


def test_a_script_is_stopped_with_its_losses_and_what_was_not_applied(tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAINING)
    words = ["--stop-after", "5", "--apply", "adamw=fused,gc=off", "--no-page", "--inspect-every", "0"]
    done = watched(tmp_path, *words, "train.py", "1000")
    assert done.returncode == 0, done.stderr
    assert "adamw was not applied: the script builds no Adam or AdamW" in done.stderr
    [*_, record] = records(tmp_path)
    assert record.fact("ending") == "stopped after 5 steps"
    assert (record.fact("stopped_after"), record.fact("timed_steps"), record.fact("timed_s") > 0) == (5, 3, True)
    assert record.fact("applied") == "adamw=fused,gc=off"
    assert record.fact("not_applied").startswith("adamw: ")
    assert record.fact("script_precision") == "fp32"
    printed = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(printed) == 4  # the fifth update does not return
    assert record.tables["losses"]["loss"][:4] == pytest.approx(printed)
    assert len(record.tables["losses"]["loss"]) == 5


def test_a_second_run_into_a_file_stays_a_run_of_its_own(tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAINING)
    out = tmp_path / "a.jsonl"
    for steps in (6, 8):
        done = watched(tmp_path, "--out", str(out), "--no-page", "--inspect-every", "0", "train.py", str(steps))
        assert done.returncode == 0, done.stderr
    seen = [(record.config["run"], record.fact("steps_seen")) for record in Store(out).read()]
    assert seen == [("a", 6), ("a-2", 8)]
    assert "The step of train.py 6 takes" in done.stderr
    assert "The step of train.py 8 takes" in done.stderr


@pytest.mark.slow
def test_who_has_nothing_to_change_ends_before_its_turn(tmp_path: Path):
    """In a proof's round: no one waits for it, and a script that survives its end is ended again after its next step."""
    loop = TRAINING.replace("    loss =", "  try:\n    loss =").replace(
        "loss.item())", "loss.item())\n  except SystemExit: pass"
    )
    (tmp_path / "train.py").write_text(loop)
    ours, theirs = socket.socketpair()
    words = [
        "--stop-after",
        "40",
        "--turn",
        str(theirs.fileno()),
        "--apply",
        "adamw=fused",
        "--no-page",
        "train.py",
        "6",
    ]
    environ = {**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainstep", "run", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, pass_fds=[theirs.fileno()], capture_output=True, timeout=110
    )
    theirs.close()
    with ours:
        assert ours.recv(1) == b"", "it never said that it was ready"
    assert done.returncode == 0, done.stderr
    assert [int(line.split()[0]) for line in done.stdout.splitlines()] == [0, 1], (
        "the third step and all later ones were ended"
    )
    [*_, record] = records(tmp_path)
    assert (record.fact("stopped_after"), record.fact("timed_s"), record.fact("timed_steps")) == (3, None, None)
    assert record.fact("not_applied").startswith("adamw: ")


HOLDS = """
import atexit
import multiprocessing
import torch

atexit.register(lambda: print("workers:", len(multiprocessing.active_children())))
data = torch.utils.data.TensorDataset(torch.randn(2000, 4))
batches = iter(torch.utils.data.DataLoader(data, batch_size=2, num_workers=2))  # held until Python ends
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (batch,) in batches:
    model(batch).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_the_workers_of_a_stopped_script_have_ended_before_python_ends(tmp_path: Path):
    (tmp_path / "train.py").write_text(HOLDS)
    done = watched(tmp_path, "--stop-after", "5", "--no-page", "--inspect-every", "0", "train.py")
    assert (done.returncode, done.stdout) == (0, "workers: 0\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "train.py", "--out", "x"], ["run", "--", "train.py", "--out", "x"]),
        (
            ["run", "--out", "a.jsonl", "--quiet", "train.py", "--quiet"],
            ["run", "--out", "a.jsonl", "--quiet", "--", "train.py", "--quiet"],
        ),
        (
            ["run", "--out=a.jsonl", "-m", "package.train", "-h"],
            ["run", "--out=a.jsonl", "--", "-m", "package.train", "-h"],
        ),
        (["run", "--help"], ["run", "--help"]),
        (["run", "--", "train.py"], ["run", "--", "train.py"]),
        (["run"], ["run"]),
    ],
)
def test_words_after_the_script_are_the_scripts(words: list[str], expected: list[str]):
    assert split_words(words) == expected


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("run -u train.py", "-u is an option of python and belongs before -m: python -u -m trainstep run train.py"),
        ("run --quiet -Werror train.py", "python -Werror -m trainstep run train.py"),
        ("run -X dev train.py", "python -X dev -m trainstep run train.py"),
        ("run -c print(1)", "-c gives python code that is in no file; write it into a file: trainstep run train.py"),
        ("run -", "- gives python code that is in no file"),
    ],
)
def test_words_of_python_are_refused_with_what_to_do(words: str, sentence: str, capsys: pytest.CaptureFixture[str]):
    assert run(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("trainstep: script: ")
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "script: name a script: trainstep run train.py"),
        (["gone.py"], "script: gone.py cannot be read"),
        (
            ["--apply", "speed=9", "train.py"],
            "apply: there is no change 'speed'; there are adamw=fused|trainstep, workers=N",
        ),
        (["--apply", "workers=0", "train.py"], "apply: workers takes a positive whole number, not '0'"),
        (["--apply", "compile=all", "train.py"], "apply: compile takes module or reduce_overhead, not 'all'"),
        (["--apply", "gc,gc=off", "train.py"], "apply: gc is named twice"),
        (["--stop-after", "0", "train.py"], "stop_after: must be a number of steps, at least 1, not 0"),
        (["--inspect-every", "-3", "train.py"], "inspect_every: must be a number of steps, or 0 for none, not -3"),
        (["--no-page", "--page", "x.html", "train.py"], "no_page: a page is named too"),
        (["--out", ".", "train.py"], "cannot be written: it is not a regular file"),
        (["--page", "train.py", "train.py"], "train.py does not look like a page"),
        (["--wrong", "train.py"], "--wrong"),
        (["torchrun", "train.py"], "torchrun --nproc-per-node 2 -m trainstep run train.py"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('ran')\n")
    assert run(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert err.count("\n") == 1
    assert out == ""
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


def test_the_help_is_ours_before_the_script_and_the_scripts_after_it(tmp_path: Path):
    (tmp_path / "train.py").write_text("import argparse\nargparse.ArgumentParser(description='mine').parse_args()\n")
    assert "mine" in watched(tmp_path, "train.py", "--help").stdout
    ours = watched(tmp_path, "--help").stdout
    assert "torchrun --nproc-per-node 2 -m trainstep run train.py" in ours
    assert "mine" not in ours


def test_a_script_without_torch_says_so_and_keeps_its_exit_code(tmp_path: Path):
    (tmp_path / "train.py").write_text("import sys\nprint('hello \\x1b[1m')\nsys.exit(7)\n")
    done = watched(tmp_path, "train.py")
    assert (done.returncode, done.stdout) == (7, "hello \x1b[1m\n"), "the script's output is not made visible"
    why = "the script never imported torch, so there is no step to time"
    assert done.stderr == f"trainstep: the script ended before a step was seen (exit code 7): {why}\n"
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


@pytest.mark.slow
def test_a_script_trains_as_ever_and_is_recorded(tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAINING + "import os; os.chdir('/')\n")
    done, alone = watched(tmp_path, "--inspect-every", "7", "train.py", "20"), run_python(tmp_path, "train.py", "20")
    assert (done.returncode, done.stdout) == (0, alone.stdout), "losses are the same to the last digit"
    assert "Your step takes " in done.stderr
    assert "print(step, loss.item())" in done.stderr, "the line that reads a value"
    assert "SyncActivityProfiler" not in done.stderr, "what torch's profiler prints of itself"
    assert "records: runs/" in done.stderr, "as seen from the folder of the start"
    written = records(tmp_path)
    assert written[-1].fact("steps_seen") == 20
    assert written[-1].fact("ending") == "finished"
    assert [record.fact("inspected_step") for record in written] == [7, 14, None]
    assert written[0].config["arguments"] == "20"
    (page,) = (tmp_path / "runs").glob("*.html")
    assert "Where the time of a step goes" in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "code", "ending"),
    [
        ("raise RuntimeError('boom')", 1, "RuntimeError: boom"),
        ("sys.exit(4)", 4, "exit code 4"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(9)",
            -signal.SIGINT,
            "interrupted",
        ),
        ("import os; os._exit(5)", 5, None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, None),
    ],
)
def test_what_was_recorded_stays_however_it_ends(last: str, code: int, ending: str | None, tmp_path: Path):
    (tmp_path / "train.py").write_text(f"{TRAINING}{last}\n")
    done = watched(tmp_path, "--inspect-every", "5", "train.py", "12")
    assert done.returncode == code
    written = records(tmp_path)
    assert written[-1].fact("ending") == ending
    assert written[-1].fact("steps_seen") == (12 if ending else 10)
    shown = run_python(tmp_path, "-m", "trainstep", "report", "runs").stdout
    assert (ending or "No record says how it ended: it was killed after step 10") in shown
    assert (ending is not None) == ("page: runs" in done.stderr)


@pytest.mark.slow
def test_every_rank_writes_and_rank_0_shows(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        TRAINING.replace(
            "optimizer =",
            "torch.distributed.init_process_group('gloo')\nmodel = torch.nn.parallel.DistributedDataParallel(model)\noptimizer =",
        )
        + "torch.distributed.destroy_process_group()\n"
    )
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = run_python(tmp_path, *launcher, "-m", "trainstep", "run", "--inspect-every", "6", "train.py", "15")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Your step takes") == 1
    files = sorted((tmp_path / "runs").glob("*.jsonl"), key=lambda file: len(file.name))
    assert files[1].name == files[0].name.replace(".jsonl", ".rank1.jsonl")
    ranks = [Store(file).read() for file in files]
    assert [records[-1].config["rank"] for records in ranks] == [0, 1]
    assert len({records[-1].config["run"] for records in ranks}) == 1
    inspected = [record.fact("communication_s") or 0 for record in ranks[0]]  # a slow machine may write a record before
    assert max(inspected) > 0
    assert not any(record.fact("inspected_step") for record in ranks[1])
    assert "(rank 1 of 2)" in done.stderr


@pytest.mark.slow
def test_the_report_of_a_run_is_json_too(tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAINING)
    watched(tmp_path, "--quiet", "--out", "r.jsonl", "--no-page", "train.py", "9")
    report = json.loads(run_python(tmp_path, "-m", "trainstep", "report", "r.jsonl", "--format", "json").stdout)
    assert report["answer"][0]["verdict"].startswith("Your step takes ")
    assert report["rows"][0]["steps_seen"] >= 4
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.slow
def test_the_answer_and_its_tables_fit_a_terminal(tmp_path: Path):
    """They are on standard error, which is the terminal; an earlier version printed lines of 200 characters there."""
    (tmp_path / "train.py").write_text(TRAINING)
    code, text = on_terminal(["-m", "trainstep", "run", "train.py", "12"], 80, folder=tmp_path, with_errors=True)
    assert code == 0
    answer = text[text.index("Your step takes ") :]
    assert max(map(len, answer.splitlines())) <= 80
    assert "where the time of a step goes: train.py 12" in answer.lower()
    assert "records: runs/run-" in answer

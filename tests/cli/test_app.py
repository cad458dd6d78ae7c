"""Every verb reports an error as one sentence on stderr with exit code 2 and no traceback; interrupts and full disks, too."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trainstep
from cell_maker import finish, import_path, start
from record_maker import a_record
from trainstep.cli import app
from trainstep.records.store import Store

SWEEP = '[grid]\nworkload = "workloads:SLEEP"\nindex = [1, 2]\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with valid and invalid sweep files and records in it; no GPU is visible."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Store(Path("good.jsonl")).append(a_record())
    line = Path("good.jsonl").read_text()
    Path("twice.jsonl").write_text(line * 2)
    Path("newer.jsonl").write_text(line + line.replace('"format":1', '"format":99'))
    Path("corrupt.jsonl").write_text(line + line[:40] + "\n" + line)
    Path("empty.jsonl").touch()
    Path("binary.jsonl").write_bytes(b"\xff\xfe\x00\n")
    Path("folder").mkdir()
    Path("empty_folder").mkdir()
    Path("full_folder/in").mkdir(parents=True)
    Path("full_folder/in/it.jsonl").write_text(line)
    for name, text in {
        "good": SWEEP,
        "not_toml": "[grid\n",
        "no_grid": 'title = "x"\n',
        "empty_grid": "[grid]\n",
        "empty_list": "[grid]\nmodel = []\n",
        "unknown_key": 'titel = "x"\n[grid]\nmodel = "tiny"\n',
        "unknown_field": '[grid]\nmodle = ["tiny"]\n',
        "wrong_type": '[grid]\ncontext = "many"\n',
        "wrong_timeout": "timeout_s = -1\n" + SWEEP,
        "text_timeout": 'timeout_s = "long"\n' + SWEEP,
        "wrong_compare": 'compare = "nothing"\n' + SWEEP,
        "unknown_workload": '[grid]\nworkload = "sleep"\n',
        "cuda": '[grid]\nmodel = "tiny"\ndevice = "cuda"\n',
        "one_workload": "[grid]\nworkload = 1\n",
        "list_workload": "[grid]\nworkload = [[]]\n",
        "eight": "[[8]]\n",
        "deep": f"title = {'[' * 2000}{']' * 2000}\n",
        "digits": f"timeout_s = {'9' * 5000}\n",
        "no_such_day": "title = 2026-02-30\n",
        "large": "#" * 2**20 + "\n",
        "rows_of_lists": '[grid]\nworkload = "a:b"\n[[rows]]\nsides = [[1, 2]]\n',
    }.items():
        Path(f"{name}.toml").write_text(text)
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    Path("loop.toml").symlink_to("loop.toml")
    os.mkfifo("pipe")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("frob", 'Unknown command "frob"'),
        ("benhc", 'Did you mean "bench"'),
        ("--frob", 'Unknown command "--frob"'),
        ("bench --modle small", "--modle. Did you mean --mode"),
        ("bench extra", "extra"),
        ("bench --steps", "--steps requires an argument"),
        ("bench --steps 3 --steps 4", "--steps specified multiple times"),
        ("bench --model huge", "unknown size 'huge'; known: tiny, mini, small, medium, large, xl, 2.7B, 8B"),
        ("bench --model smal", "did you mean small"),
        ("bench --model a:b:c", "a:b:c"),
        ("bench --model 7", "model: must be a size's name"),
        ("bench --model my:build --layers 2", "layers: belongs to the built-in model"),
        ("bench --heads 3", "heads: 3 does not divide d_model 128; 2 would"),
        ("bench --heads 0", "heads: must be a whole number of at least 1"),
        ("bench --steps -1", "steps: must be a whole number of at least 1, not -1"),
        ("bench --steps 0", "steps: "),
        ("bench --warmups -1", "warmups: must be a whole number of at least 0"),
        ("bench --batch-size 0", "batch_size: "),
        ("bench --batch-size 1.5", "batch_size: must be a whole number"),
        ("bench --context many", "context: must be a whole number, not 'many'"),
        ("bench --context 128,", "context: an empty value in '128,'"),
        ("bench --context ,", "context: an empty value"),
        ("bench --learning-rate fast", "learning_rate: must be a number"),
        ("bench --learning-rate nan", "learning_rate: "),
        ("bench --clip-grad-norm -1", "clip_grad_norm: "),
        ("bench --mode backward", "mode: 'backward' is not known (did you mean forward_backward?)"),
        ("bench --attention falsh", "attention: 'falsh' is not known"),
        ("bench --sync never", "sync: "),
        ("bench --sync 1", "sync: must be a whole number of at least 2"),
        ("bench --sync 3 --steps 10", "sync: windows of 3 steps do not divide steps 10"),
        ("bench --seed -1", "seed: "),
        ("bench --cold-compile perhaps", "'perhaps'"),
        ("bench --device tpu", "device: 'tpu' is not known"),
        ("bench --device cpu,cuda", "device: "),
        ("bench --precision tf32 --device cpu", "precision: tf32 is a mode of NVIDIA matrix units; on a CPU take fp32"),
        ("bench --attention flex --device cpu", "attention: flex has no backward on a CPU"),
        ("bench --attention sdpa_cudnn --device cpu", "runs on CUDA only"),
        ("bench --nvtx --device cpu", "nvtx: ranges need a GPU"),
        ("bench --data nowhere.txt", "data: there is no file or folder 'nowhere.txt'"),
        ("bench --data stdlib --vocab-size 100", "vocab_size: "),
        ("bench --compare precision", "compare: the grid does not vary along 'precision'"),
        ("bench --compare precision --context 8,16", "it varies along context"),
        ("bench --timeout-s -1", "timeout_s: must be a positive number, not -1"),
        ("bench --timeout-s 0", "timeout_s: "),
        ("bench --timeout-s inf", "timeout_s: "),
        ("bench --timeout-s nan", "timeout_s: "),
        ("bench --timeout-s soon", '"soon" into float'),
        ("bench --memory-limit-gib -2", "memory_limit_gib: "),
        ("bench --memory-limit-gib 1e300", "memory_limit_gib: "),
        ("bench --out good.jsonl/x.jsonl", "good.jsonl/x.jsonl: cannot be written"),
        ("bench --out folder", "folder: cannot be "),
        ("bench --out corrupt.jsonl", "corrupt.jsonl: line 2 is corrupt"),
        ("bench --out binary.jsonl", "binary.jsonl: line 1 is corrupt"),
        ("bench --out good.toml", "good.toml: "),
        ("bench --out good.jsonl --page good.jsonl", "page: good.jsonl is the file of records"),
        ("bench --out new.jsonl --page folder/../new.jsonl", "is the file of records"),
        ("bench --rope-theta inf", "rope_theta: must be positive, not inf"),
        ("bench --seed 9223372036854775808", "seed: must be at most"),
        ("bench --steps 1000000000000000", "steps: must be at most"),
        ("bench --page folder", "page: folder cannot be written"),
        ("bench --page good.jsonl/page.html", "page: good.jsonl/page.html cannot be written"),
        ("sweep", "FILE requires an argument"),
        ("sweep nowhere.toml", "nowhere.toml: there is no such sweep file"),
        ("sweep folder", "folder: cannot be read"),
        ("sweep binary.toml", "binary.toml: not TOML, which is text in UTF-8"),
        ("sweep not_toml.toml", "not_toml.toml: not TOML"),
        ("sweep no_grid.toml", "no_grid.toml: needs a table [grid]"),
        ("sweep empty_grid.toml", "needs a table [grid]"),
        ("sweep empty_list.toml", "model: an empty list"),
        ("sweep unknown_key.toml", "unknown key 'titel' (did you mean title?)"),
        ("sweep unknown_field.toml", "unknown key 'modle' (did you mean mode"),
        ("sweep wrong_type.toml", "context: must be a whole number, not 'many'"),
        ("sweep wrong_timeout.toml", "timeout_s: must be a positive number"),
        ("sweep text_timeout.toml", "timeout_s: must be a positive number"),
        ("sweep wrong_compare.toml", "compare: the grid does not vary along 'nothing'"),
        ("sweep unknown_workload.toml", "workload: 'sleep' is not known"),
        ("sweep cuda.toml", "device: no NVIDIA GPU is visible"),
        ("sweep good.toml --timeout-s -1", "timeout_s: "),
        ("sweep good.toml --out newer.jsonl", "newer.jsonl: line 2: format 99"),
        ("sweep good.toml --out good.jsonl", "good.jsonl: holds records made with gpu None against NVIDIA H200"),
        ("sweep good.toml --page folder", "page: folder cannot be written"),
        ("sweep one_workload.toml", "workload: must be a name"),
        ("sweep list_workload.toml", "workload: must be a name"),
        ("sweep eight.toml", "eight.toml: unknown key '8'"),
        ("sweep deep.toml", "deep.toml: not a sweep file: its lists or tables are nested too deeply"),
        ("sweep digits.toml", "digits.toml: not TOML"),
        ("sweep no_such_day.toml", "no_such_day.toml: not TOML"),
        ("sweep large.toml", "large.toml: over 1,048,576 bytes"),
        ("sweep rows_of_lists.toml --set sides=1", "sides: no [[rows]] of sweep rows_of_lists has 1"),
        ("sweep /dev/zero", "/dev/zero: cannot be read: it is not a regular file"),
        ("sweep pipe", "pipe: cannot be read: it is not a regular file"),
        ("sweep loop.toml", "loop.toml: cannot be read"),
        ("sweep good.toml --slurm-args qos=high", "slurm_args: has no effect without --slurm PARTITION"),
        ("sweep good.toml --slurm-gpus 1", "slurm_gpus: has no effect without --slurm PARTITION"),
        ("sweep good.toml --slurm-jobs 16", "slurm_jobs: has no effect"),
        ("sweep good.toml --slurm-time 3", "slurm_time: has no effect"),
        ("sweep good.toml --slurm gpu --budget-minutes 2", "budget_minutes: jobs of Slurm run side by side"),
        ("sweep good.toml --slurm gpu --memory-limit-gib 2", "memory_limit_gib: limits cells on a CPU"),
        ("profile --from x.json --page p.html", "x.json: there is no such file"),
        ("profile --from x.json --nsys", "nothing runs: nsys would have no effect"),
        ("tune --retry-failed", "retry_failed: a new file holds no cell that failed; name the file with --out"),
        ("collectives --backend nccl", "use --backend gloo --device cpu"),
        ("report", "PATHS requires an argument"),
        ("report nowhere.jsonl", "nowhere.jsonl"),
        ("report empty.jsonl", "holds no records"),
        ("report good.jsonl []", "[]: there is no such file"),
        ("report pipe", "pipe: cannot be read: it is not a regular file"),
        ("compare good.jsonl pipe", "pipe: cannot be read: it is not a regular file"),
        ("memory --device cpu --out pipe", "pipe: cannot be read: it is not a regular file"),
        ("report empty_folder", "empty_folder: a folder without any *.jsonl"),
        ("report newer.jsonl", "newer.jsonl: line 2: format 99 of records is not known here"),
        ("report corrupt.jsonl", "corrupt.jsonl: line 2 is corrupt"),
        ("report binary.jsonl", "binary.jsonl: line 1 is corrupt"),
        ("report good.jsonl --format pdf", '"pdf"'),
        ("sweep good.toml --out s.jsonl --page s.jsonl", "page: s.jsonl is the file of records"),
        ("report good.jsonl --out ./good.jsonl --format html", "out: good.jsonl is one of the files of records"),
        ("report good.jsonl --out good.jsonl --format terminal", "out: good.jsonl is one of the files of records"),
        ("report full_folder --out full_folder/in/it.jsonl --format csv", "is one of the files of records"),
        ("report good.jsonl --out folder", "out: folder cannot be written"),
        ("report good.jsonl --out good.toml/x.md", "out: good.toml/x.md cannot be written"),
        ("compare good.jsonl", "B requires an argument"),
        ("compare good.jsonl nowhere.jsonl", "nowhere.jsonl: there is no such file"),
        ("compare folder good.jsonl", "folder: cannot be read"),
        ("compare good.jsonl corrupt.jsonl", "corrupt.jsonl: line 2"),
        ("compare good.jsonl empty.jsonl", "empty.jsonl: holds no records"),
        ("compare good.jsonl good.jsonl --quantity speed", "speed: a has no such quantity; it has step"),
        ("compare good.jsonl good.jsonl --minimum-effect -1", "minimum_effect: "),
        ("compare good.jsonl good.jsonl --minimum-effect nan", "minimum_effect: "),
        ("doctor --device tpu", '"tpu"'),
        ("doctor --device cuda", "device: "),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, words: str
):
    before = sorted(path.name for path in folder.rglob("*"))
    code = app.run(command.split())
    printed = capsys.readouterr()
    assert code == 2
    *earlier_lines, refusal = printed.err.splitlines()
    assert refusal.startswith("trainstep: ")
    assert words in refusal
    if not command.startswith("doctor"):  # doctor says what it inspects, and prints the machine
        assert (earlier_lines, printed.out) == ([], "")
    assert sorted(path.name for path in folder.rglob("*")) == before, "a refused command leaves no file"


def test_an_unreadable_file_is_named(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert app.run(["report", "good.jsonl"]) == 2
    assert capsys.readouterr().err == "trainstep: good.jsonl: cannot be read: Permission denied\n"


def test_a_bad_option_ends_the_process_without_a_traceback(folder: Path):
    code, out, err = finish(start("bench", "--model", "huge", folder=folder))
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("trainstep: model: unknown size 'huge'")


def test_a_full_disk_is_named_with_the_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def fail(words: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x.jsonl")

    monkeypatch.setattr(app, "build_app", fail)
    assert app.run([]) == 2
    assert capsys.readouterr().err == "trainstep: runs/x.jsonl: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_standard_output_on_a_full_disk_is_named(folder: Path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "trainstep", "report", "good.jsonl"],
            env={**os.environ, "PYTHONPATH": import_path()},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr == "trainstep: standard output: No space left on device\n"


def test_an_interrupt_exits_with_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupt(words: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "build_app", interrupt)
    assert app.run([]) == 130
    assert capsys.readouterr().err == "trainstep: interrupted\n"


def test_an_internal_error_is_not_reported_as_bad_input(monkeypatch: pytest.MonkeyPatch):
    def fail(words: Any) -> None:
        raise TypeError("a fault of ours")

    monkeypatch.setattr(app, "build_app", fail)
    with pytest.raises(TypeError):
        app.run([])


@pytest.mark.parametrize("words", [["--help"], []])
def test_help_names_every_verb_with_its_purpose(capsys: pytest.CaptureFixture[str], words: list[str]):
    assert app.run(words) == 0
    printed = capsys.readouterr().out
    for verb in ("bench", "sweep", "report", "compare", "doctor"):
        [line] = [line for line in printed.splitlines() if f"│ {verb} " in line]
        assert len(line.strip(" │").split()) > 3
    assert app.run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == trainstep.__version__


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (
            "bench",
            ["--model STR", "tiny, mini, small", "package.module:function", "trainstep bench", "--d-model", "--out"],
        ),
        ("sweep", ["--retry-failed", "--allow-mixed", "trainstep sweep sweeps/", "Exit code 3", "--slurm"]),
        ("report", ["--format", "--out"]),
        ("compare", ["--quantity", "--minimum-effect", "trainstep compare runs/"]),
        ("doctor", ["--measure", "--json", "Exit code 2"]),
    ],
)
def test_the_help_of_each_verb_names_its_options(capsys: pytest.CaptureFixture[str], verb: str, words: list[str]):
    assert app.run([verb, "--help"]) == 0
    printed = capsys.readouterr().out
    assert [word for word in words if word not in printed] == []


def test_a_closed_pipe_prints_no_error(folder: Path):
    """`trainstep report … | head -c 1` prints nothing on stderr."""
    command = f"{sys.executable} -m trainstep report twice.jsonl | head -c 1"
    environ = {"PYTHONPATH": import_path(), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_help_says_which_options_are_switches(capsys: pytest.CaptureFixture[str]):
    assert app.run(["bench", "--help"]) == 0
    printed = " ".join(re.sub(r"[│─╭╮]", " ", capsys.readouterr().out).split())
    assert printed.count("a switch: ") == 2
    assert "commas make a grid, except for switches" in printed

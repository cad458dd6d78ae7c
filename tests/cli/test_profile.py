"""`trainstep profile`: a CPU run from nothing to tables and page, anyone's trace, and bad input in one sentence."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from cell_maker import finish, start
from trace_maker import COMPILED, EAGER
from trainstep.cli import app
from trainstep.config.grid import expand
from trainstep.config.sweep import load_sweep
from trainstep.records.store import Store

SWEEP = Path(__file__).parents[2] / "sweeps" / "profile.toml"


@pytest.mark.slow
def test_a_grid_on_a_cpu(tmp_path: Path):
    options = [
        "--context",
        16,
        "--batch-size",
        1,
        "--mode",
        "forward_no_grad,step",
        "--steps",
        2,
        "--warmups",
        1,
        "--top",
        3,
    ]
    command = ["profile", *options, "--out", "p.jsonl", "--page", "p.html", "--keep-trace", "traces"]
    code, out, err = finish(start(*command, folder=tmp_path), timeout_s=100)
    assert (code, "Traceback" in err) == (0, False)
    for words in (
        "What limits each step",
        "Share of device time by class",
        "Kernels by phase",
        "Self CPU",
        "ui.perfetto.dev",
    ):
        assert words in out, words
    assert out.count("Kernels by phase") == 2
    assert out.index("-bound: ") < out.index("Profiled steps"), "the verdict comes first"
    page = (tmp_path / "p.html").read_text()
    assert "Where the time goes" in page
    assert 'title="how often a step;' in page
    records = Store(tmp_path / "p.jsonl").read()
    assert [record.workload for record in records] == ["profile"] * 2
    assert len(list((tmp_path / "traces").iterdir())) == 2
    kept = next((tmp_path / "traces").glob("*step-*"))
    assert app.run(["profile", "--from", str(kept)]) == 0


def test_anyones_trace(capsys: pytest.CaptureFixture[str]):
    assert app.run(["profile", "--from", str(EAGER), "--top", "2"]) == 0
    out = capsys.readouterr().out
    for words in (
        "Kernels by phase",
        "Attention: matmuls and softmax",
        "Launch-bound: ",
        "does not stall",
        "# of calls",
    ):
        assert words in out, words
    kernels = out.split("Classes by phase")[0]
    assert sum(line.startswith("backward") for line in kernels.splitlines()) == 3, "two, and the rest"


def test_as_json(capsys: pytest.CaptureFixture[str]):
    assert app.run(["profile", "--from", str(COMPILED), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    tables = {row["table"] for row in rows}
    assert {"kernels", "classes", "spans", "layers", "host"} <= tables
    shares = [row["share"] for row in rows if row["table"] == "kernels"]
    assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--from absent.json", "absent.json: there is no such file"),
        ("--from words.json", "words.json: is no profiler trace"),
        ("--from cut.json.gz", "cut.json.gz: the compressed file is cut off or damaged"),
        ("--from empty.json", "the trace is empty: it holds no op and no kernel; record one with"),
        ("--from good.json.gz --model small", "model would have no effect"),
        ("--from good.json.gz --page p.html", "would have no effect"),
        ("--from /dev/full", "/dev/full: cannot be read: it is no regular file"),
        (
            "--from good.json.gz --timeout-s 1e-6",
            "good.json.gz: reading it takes more than 1e-06 s; record fewer steps",
        ),
        ("--from good.json.gz --timeout-s 0", "timeout_s: must be a positive number"),
        ("--from bomb.json.gz --memory-limit-gib 0.01", "record fewer steps, or allow more with --memory-limit-gib"),
        ("--from null.json", "null.json: is no profiler trace: an event before character"),
        ("--from good.json.gz --top 0", "top: must be a whole number of at least 1"),
        ("--profiled-steps 0", "profiled_steps: must be a whole number of at least 1"),
        ("--mode backward", "mode: 'backward' is not known"),
        ("--frob 1", "--frob"),
    ],
)
def test_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, words: str
):
    monkeypatch.chdir(tmp_path)
    Path("words.json").write_text("hello")
    Path("empty.json").write_text('{"traceEvents": []}')
    Path("cut.json.gz").write_bytes(EAGER.read_bytes()[:5000])
    Path("bomb.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 10_000_000))
    event = {"ph": "X", "cat": "cpu_op", "name": None, "pid": 1, "tid": 1, "ts": 1, "dur": 1}
    Path("null.json").write_text(json.dumps({"traceEvents": [event]}))
    shutil.copy(EAGER, "good.json.gz")
    assert app.run(["profile", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_help_explains_the_columns(capsys: pytest.CaptureFixture[str]):
    assert app.run(["profile", "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        "Self CUDA",
        "CUDA total",
        "Self CPU",
        "CPU total",
        "# of calls",
        "--from",
        "--keep-trace",
        "Perfetto",
        "--top",
    ):
        assert words in printed, words


def test_the_sweep():
    sweep = load_sweep(SWEEP)
    cells = expand(sweep.grid, {"device": "cuda"})
    assert len(cells) == 5 * 4 * 3
    assert {cell.workload for cell in cells} == {"profile"}

"""`trainstep profile`: tables and a page of a CPU run and of a trace from elsewhere, and bad input in one sentence."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from cell_maker import run_here
from trace_maker import COMPILED, EAGER
from trainstep.cli import app
from trainstep.config.grid import expand
from trainstep.config.sweep import load_sweep
from trainstep.records.store import Store
from trainstep.report.kit.rows import rows_of

SWEEP = Path(__file__).parents[2] / "sweeps" / "profile.toml"


@pytest.mark.slow
def test_a_grid_on_a_cpu_gives_tables_a_page_and_traces(tmp_path: Path):
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
    code, out, err = run_here(*command, folder=tmp_path)
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
    assert 'title="calls per step;' in page
    records = Store(tmp_path / "p.jsonl").read()
    assert [record.workload for record in records] == ["profile"] * 2
    assert len(list((tmp_path / "traces").iterdir())) == 2
    assert not (tmp_path / "p.traces").exists(), "it is made only where no folder is named"
    trace = next((tmp_path / "traces").glob("*step-*"))
    assert app.run(["profile", "--from", str(trace)]) == 0


@pytest.mark.slow
def test_the_trace_is_kept_beside_the_records(tmp_path: Path):
    """That is the default; the cell has the same key with a kept trace and without."""
    command = ["profile", "--context", 8, "--batch-size", 1, "--d-model", 32, "--steps", 3, "--warmups", 0]
    code, out, _ = run_here(*command, "--out", "p.jsonl", folder=tmp_path)
    [trace] = (tmp_path / "p.traces").iterdir()
    assert code == 0
    assert f"p.traces/{trace.name}: open it at https://ui.perfetto.dev" in " ".join(out.split())
    assert run_here(*command, "--out", "q.jsonl", "--keep-trace", "none", folder=tmp_path)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["p.traces"]
    [with_trace], [without] = (Store(tmp_path / name).read() for name in ("p.jsonl", "q.jsonl"))
    assert with_trace.key == without.key
    assert without.fact("trace_file") is None
    labels = [row.label() for row in rows_of([("p", with_trace), ("q", without)])]
    assert not any("traces" in label for label in labels), labels


def test_a_trace_from_elsewhere_gets_its_tables(capsys: pytest.CaptureFixture[str]):
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
    assert sum(line.startswith("backward") for line in kernels.splitlines()) == 3, (
        "two kernels, and the sum of the rest"
    )


def test_json_holds_every_table(capsys: pytest.CaptureFixture[str]):
    assert app.run(["profile", "--from", str(COMPILED), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    tables = {row["table"] for row in rows}
    assert {"kernels", "classes", "spans", "layers", "host"} <= tables
    shares = [row["share"] for row in rows if row["table"] == "kernels"]
    assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--from absent.json", "absent.json: there is no such file"),
        ("--from words.json", "words.json: is not a profiler trace"),
        ("--from cut.json.gz", "cut.json.gz: the compressed file is cut off or damaged"),
        ("--from empty.json", "the trace is empty: it holds no op and no kernel; record one with"),
        ("--from good.json.gz --model small", "model would have no effect"),
        ("--from good.json.gz --out p.jsonl", "would have no effect"),
        ("--from good.json.gz --page words.json", "page: words.json"),
        ("--from good.json.gz --page good.json.gz", "page: good.json.gz"),
        ("--from bomb.json.gz --memory-limit-gib 0.01 --page p.html", "allow more with --memory-limit-gib"),
        ("--from /dev/full", "/dev/full: cannot be read: it is not a regular file"),
        (
            "--from good.json.gz --timeout-s 1e-6",
            "good.json.gz: reading it takes more than 1e-06 s; record fewer steps",
        ),
        ("--from good.json.gz --timeout-s 0", "timeout_s: must be a positive number"),
        ("--from bomb.json.gz --memory-limit-gib 0.01", "record fewer steps, or allow more with --memory-limit-gib"),
        ("--from null.json", "null.json: is not a profiler trace: an event before character"),
        ("--from good.json.gz --top 0", "top: must be a whole number of at least 1"),
        ("--profiled-steps 0", "profiled_steps: must be a whole number of at least 1"),
        ("--mode backward", "mode: 'backward' is not known"),
        ("--frob 1", "--frob"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
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
    assert not Path("p.html").exists()


@pytest.mark.parametrize("path", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_the_page_of_a_trace_from_elsewhere_claims_nothing_about_its_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: Path
):
    page = tmp_path / "p.html"
    assert app.run(["profile", "--from", str(path), "--page", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"page: {page}\n")
    text = page.read_text()
    for words in (f"Profile of {path.name}", "Launch-bound: the GPU works", "Kernels by phase", "NVIDIA H200"):
        assert words in text, words
    environment = text.partition("Environment: NVIDIA H200")[2].partition("</dl>")[0]
    assert "trainstep" in environment
    assert not any(word in environment for word in ("cores", "memory", "hostname"))
    assert app.run(["profile", "--from", str(path), "--page", str(page), "--json"]) == 0, (
        "an earlier page of ours is overwritten"
    )
    printed = capsys.readouterr()
    json.loads(printed.out)
    assert printed.err == f"page: {page}\n"


def test_a_trace_without_marked_steps_is_split_into_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The tables are those of the marked trace, and a sentence says how the steps were found."""
    plain = json.loads(gzip.decompress(EAGER.read_bytes()))
    plain["traceEvents"] = [event for event in plain["traceEvents"] if not str(event.get("name")).startswith("step ")]
    path = tmp_path / "bare.json"
    path.write_text(json.dumps(plain))
    outs = []
    for trace in (EAGER, path):
        assert app.run(["profile", "--from", str(trace)]) == 0
        outs.append(capsys.readouterr().out)
    kernels = [out.partition("Kernels by phase")[2].partition("Classes by phase")[0] for out in outs]
    assert kernels[0] == kernels[1] != ""
    assert "The trace marks no steps: it is split " in outs[1]


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


def test_the_sweep_of_profiles_expands_to_all_cells():
    sweep = load_sweep(SWEEP)
    cells = expand(sweep.grid, {"device": "cuda"})
    assert len(cells) == 5 * 4 * 3
    assert {cell.workload for cell in cells} == {"profile"}

"""`trainstep profile --nsys`, with a stand-in for nsys on PATH, and `--from report.sqlite`."""

import json
from pathlib import Path
from typing import Any

import pytest

import fake_nsys
from cell_maker import import_path
from nsys_maker import write_report
from trace_maker import EAGER
from trainstep.cli import app
from trainstep.traces.kineto import read_trace

TINY = ["--context", 8, "--batch-size", 1, "--d-model", 32, "--steps", 1, "--warmups", 0, "--profiled-steps", 1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", import_path())
    write_report(tmp_path / "eager.sqlite", read_trace(EAGER))
    return tmp_path


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line takes this machine for one with a GPU."""
    monkeypatch.setattr("trainstep.cli.profile.this_machine", lambda device, **_: (None, "cuda"))


def run(*words: Any) -> int:
    return app.run(["profile", *map(str, words)])


def test_an_export_gives_the_text_of_its_trace(folder: Path, capsys: pytest.CaptureFixture[str]):
    """The text about an export equals the text about the trace that it was made from."""
    assert run("--from", "eager.sqlite") == 0
    text = capsys.readouterr().out
    assert run("--from", EAGER) == 0
    assert capsys.readouterr().out == text
    assert text.startswith("Launch-bound: the GPU works ")
    assert run("--from", "eager.sqlite", "--json") == 0
    tables = {row["table"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {"kernels", "classes", "layers", "host", "verdict", "stall"} <= tables


def test_an_export_has_a_page(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert run("--from", "eager.sqlite", "--page", "p.html") == 0
    assert capsys.readouterr().out.endswith("page: p.html\n")
    page = (folder / "p.html").read_text()
    assert "Profile of eager.sqlite" in page
    assert "Kernels by phase" in page


@pytest.mark.usefixtures("on_a_gpu")
def test_a_run_under_nsys_is_exported_and_explained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    log = fake_nsys.install(monkeypatch, folder / "bin", export=folder / "eager.sqlite")
    options = ["--nsys-pytorch", "autograd-nvtx", "--nsys-python-backtrace"]
    assert run("--nsys", *options, "--model", "tiny", "--out", "kept/p.jsonl") == 0
    printed = capsys.readouterr()
    profile, exported = fake_nsys.calls(log)
    assert {"--pytorch=autograd-nvtx", "--python-backtrace=cuda", "--output=kept/p"} <= set(profile)
    assert exported[0] == "export"
    assert json.loads(profile[-1])["model"]["name"] == "tiny"
    for words in ("unverified", "nsys profile --trace=cuda,nvtx", "Launch-bound: ", "Kernels by phase", "p.nsys-rep"):
        assert words in printed.out, words
    assert (folder / "kept" / "p.nsys-rep").read_text() == "a report"
    assert printed.err == ""


@pytest.mark.usefixtures("on_a_gpu")
def test_a_run_under_nsys_prints_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    fake_nsys.install(monkeypatch, folder / "bin", export=folder / "eager.sqlite")
    assert run("--nsys", "--json", "--out", "p.jsonl") == 0
    assert {row["table"] for row in json.loads(capsys.readouterr().out)["rows"]} >= {"kernels", "verdict"}


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("profile fails", "nsys profile: exit code 5: The target application could not be attached to."),
        ("export fails", "nsys export: exit code 5: The target"),
        ("profile leaves nothing", "nsys profile: left no p.nsys-rep: it printed nothing"),
        ("export leaves nothing", "nsys export: left no p.sqlite"),
        ("runs", "nsys profile: exit code 1: "),
    ],
)
def test_a_failure_of_nsys_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], does: str, words: str
):
    """With `runs` the recorded process itself fails (no such GPU or model): its error is printed, not the last line of nsys."""
    fake_nsys.install(monkeypatch, folder / "bin", does=does, export=folder / "eager.sqlite")
    assert run("--nsys", "--out", "p.jsonl", "--model", "no_such_module:build") == 3
    printed = capsys.readouterr()
    assert words in printed.err
    assert "Generated nothing" not in printed.err
    assert printed.err.count("\n") == 1
    assert "Kernels by phase" not in printed.out
    assert (folder / "p.nsys-rep").exists() is does.startswith("export")


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("name", ["p.sqlite", "p.nsys-rep"])
def test_an_existing_file_with_the_name_of_the_report_is_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
):
    (folder / name).write_text("somebody's")
    log = fake_nsys.install(monkeypatch, folder / "bin", export=folder / "eager.sqlite")
    assert run("--nsys", "--out", "p.jsonl") == 2
    assert f"out: {name} exists already" in capsys.readouterr().err
    assert (folder / name).read_text() == "somebody's"
    assert not log.exists(), "nothing was run"


@pytest.mark.usefixtures("on_a_gpu")
def test_a_time_out_kills_nsys(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    fake_nsys.install(monkeypatch, folder / "bin", does="hangs")
    assert run("--nsys", "--out", "p.jsonl", "--timeout-s", 1) == 3
    assert "nsys profile: killed at its time limit of 1 s" in capsys.readouterr().err


@pytest.mark.usefixtures("on_a_gpu")
def test_an_export_without_kernels_is_refused_and_the_report_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    empty = write_report(
        folder / "empty.sqlite", read_trace(EAGER), statements=["DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL"]
    )
    fake_nsys.install(monkeypatch, folder / "bin", export=empty)
    assert run("--nsys", "--out", "p.jsonl") == 2
    assert "p.sqlite: holds no kernel" in capsys.readouterr().err
    assert (folder / "p.nsys-rep").exists(), "kept: Nsight Systems opens it all the same"


@pytest.mark.slow
@pytest.mark.parametrize(("installed", "words"), [(False, "nsys is not on PATH, so"), (True, "this is a CPU, so")])
def test_without_nsys_or_a_gpu_torchs_profiler_is_used(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    installed: bool,
    words: str,
):
    monkeypatch.setenv("PATH", str(folder))
    if installed:
        fake_nsys.install(monkeypatch, folder / "bin")
    assert run("--nsys", *TINY, "--device", "cpu", "--out", "p.jsonl") == 0
    out = capsys.readouterr().out
    assert "nsys profile --trace=cuda,nvtx" in out
    assert f"{words} torch.profiler is used" in out
    assert out.index("torch.profiler is used") < out.index("-bound: ") < out.index("Kernels by phase")
    assert (folder / "p.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--nsys --mode step,forward", "nsys: records one run, not a grid of 2"),
        ("--nsys --page p.html", "page: has no effect with --nsys"),
        ("--nsys --keep-trace t", "keep_trace: has no effect with --nsys"),
        ("--nsys-pytorch autograd-nvtx", "have no effect without --nsys"),
        ("--nsys-python-backtrace", "have no effect without --nsys"),
        ("--nsys --nsys-pytorch all", "nsys-pytorch"),
        ("--from eager.sqlite --nsys", "nsys would have no effect"),
        ("--from absent.sqlite", "absent.sqlite: there is no such file"),
        ("--from cut.sqlite", "cut.sqlite: the SQLite file is cut off or damaged"),
        ("--from none.sqlite", "none.sqlite: holds no kernel"),
        ("--from own.nsys-rep", "own.nsys-rep: is nsys's own format; make one with: nsys export"),
        ("--from words.sqlite", "words.sqlite: is not an SQLite file"),
        ("--graph-replay --device cpu", "graph_replay: a CUDA graph needs a GPU"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, words: str
):
    whole = Path("eager.sqlite").read_bytes()
    Path("cut.sqlite").write_bytes(whole[: len(whole) // 2])
    write_report(Path("none.sqlite"), read_trace(EAGER), statements=["DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL"])
    Path("own.nsys-rep").write_text("NSYS")
    Path("words.sqlite").write_text("hello")
    assert run(*arguments.split()) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""

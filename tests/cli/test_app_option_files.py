"""Options from `--config FILE` and from ./trainstep.toml: which value is used, what is refused, and what the records keep."""

from pathlib import Path

import pytest

from cell_maker import run_here
from trainstep.cli import app
from trainstep.config.sweep import VERBS
from trainstep.records.store import Store


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, empty; no GPU is visible."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[str], str]:
    """The labels of the cells that a dry run shows, and what it printed on standard error."""
    assert app.run([*words, "--dry-run"]) == 0
    printed = capsys.readouterr()
    return [line.partition(": ")[0].strip() for line in printed.out.splitlines() if line.startswith("  ")], printed.err


def test_a_list_in_a_file_of_options_is_a_grid(folder: Path, capsys: pytest.CaptureFixture[str]):
    Path("o.toml").write_text('model = ["tiny", "mini"]\ncontext = [16, 32]\nbatch-size = 2\ntimeout_s = 9.5\n')
    labels, err = planned(capsys, "bench", "--config", "o.toml")
    assert labels == [f"{model}, context {context}" for model in ("tiny", "mini") for context in (16, 32)]
    assert err == "trainstep: options from o.toml: model=tiny,mini context=16,32 batch_size=2 timeout_s=9.5\n"


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    Path("o.toml").write_text("context = [16, 32]\nsteps = [2, 3]\n")
    Path("trainstep.toml").write_text("[all]\nwarmups = [0, 1]\nseed = [1, 2]\n[bench]\nsteps = 9\nseed = 3\n")
    labels, err = planned(capsys, "bench", "--config", "o.toml", "--context", "8")
    assert labels == [f"tiny, warmups {warmups}, steps {steps}" for warmups in (0, 1) for steps in (2, 3)]
    assert err == "trainstep: options from o.toml: steps=2,3; trainstep.toml: warmups=0,1 seed=3\n"
    assert planned(capsys, "bench", "--quiet")[1] == ""


@pytest.mark.parametrize(
    ("verb", "text", "cells"),
    [
        ("parallel", 'sync = ["none", "flat"]\nranks = 2\nrounds = 2\n', 2),
        ("memory", 'recompute = ["none", "block"]\ncontext = [16, 32]\n', 4),
        ("profile", "top = 3\ncontext = [16, 32]\ngraph_replay = false\n", 2),
        ("explain", "steps = 3\ncontext = [16, 32]\n", 2),
        ("op", 'op = "rms_norm"\ndirection = ["forward", "both"]\n', 4),
        ("collectives", "mib = [1, 2.5]\nkib = 1\n", 3),
    ],
)
def test_each_verb_takes_its_own_options_from_a_file(
    folder: Path, capsys: pytest.CaptureFixture[str], verb: str, text: str, cells: int
):
    Path("o.toml").write_text(text)
    assert len(planned(capsys, verb, "--config", "o.toml", "--device", "cpu")[0]) == cells


def test_options_under_all_reach_the_verbs_that_have_them(folder: Path, capsys: pytest.CaptureFixture[str]):
    Path("trainstep.toml").write_text("[all]\nseq = [16, 32]\ncontext = [8, 16, 24]\n")
    assert len(planned(capsys, "bench")[0]) == 3
    labels, err = planned(capsys, "attention", "--implementation", "plain")
    assert labels == ["seq 16", "seq 32"]
    assert err == "trainstep: options from trainstep.toml: seq=16,32\n"


def test_every_verb_with_the_option_config_reads_it(capsys: pytest.CaptureFixture[str]):
    """Explain had the option, and ignored the file."""
    has_config = set[str]()
    for verb in app._VERBS:
        assert app.run([verb, "--help"]) == 0
        if "│ --config " in capsys.readouterr().out:
            has_config.add(verb)
    assert has_config == set(VERBS) - {"tune"}


def test_plan_takes_options_from_files(folder: Path, capsys: pytest.CaptureFixture[str]):
    Path("o.toml").write_text("batch_size = [1, 2]\ncontext = 64\n")
    Path("trainstep.toml").write_text('[all]\ncontext = 32\nwarmups = 3\n[plan]\ngpu = "h200"\n')
    assert app.run(["plan", "--model", "tiny", "--config", "o.toml"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("All 2 fit h200; ")
    assert err == "trainstep: options from o.toml: batch_size=1,2 context=64; trainstep.toml: gpu=h200\n"
    assert app.run(["plan", "--model", "tiny", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", [("explain", "nowhere.jsonl"), ("plan", "--grade", "nowhere.jsonl")])
def test_a_verb_that_reads_records_takes_no_defaults(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
):
    Path("trainstep.toml").write_text("[all]\ncontext = 8\n")
    assert app.run([*words]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
    Path("o.toml").write_text("context = 8\n")
    assert app.run([*words, "--config", "o.toml"]) == 2
    assert "config: " in capsys.readouterr().err


def test_a_sweep_ignores_defaults(folder: Path, capsys: pytest.CaptureFixture[str]):
    Path("s.toml").write_text('[grid]\nmodel = "tiny"\ndevice = "cpu"\n')
    Path("trainstep.toml").write_text("nonsense = true\n[all]\ncontext = [8, 16, 24]\n")
    assert planned(capsys, "sweep", "s.toml") == (["tiny"], "")


def test_a_verb_that_reads_a_file_takes_no_defaults(folder: Path, capsys: pytest.CaptureFixture[str]):
    Path("trainstep.toml").write_text("[all]\ncontext = 8\n")
    assert app.run(["profile", "--from", "nowhere.json"]) == 2
    assert "nowhere.json: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("contxt = 8\n", "o.toml: unknown key 'contxt' (did you mean context?)"),
        ("context = [8\n", "o.toml: not TOML"),
        ("[grid]\ncontext = 8\n", "o.toml: has a table [grid], as sweeps do; run it by trainstep sweep o.toml"),
        ("context = {a = 8}\n", "o.toml: context: must be finite numbers, text or true and false"),
        ("learning_rate = nan\n", "o.toml: learning_rate: must be finite numbers"),
        ("config = 'p.toml'\n", "o.toml: unknown key 'config'"),
        ("context = 'many'\n", "context: must be a whole number, not 'many' (context is from o.toml)"),
        ("timeout_s = 'soon'\n", '"soon" into float'),
        ("timeout_s = -1\n", "timeout_s: must be a positive number, not -1.0 (timeout_s is from o.toml)"),
        ("quiet = 1\n", "o.toml: quiet: must be true or false, not 1"),
        ("out = ['a', 'b']\n", "o.toml: out: must be one path, not ['a', 'b']"),
        ("nvtx = true\n", "nvtx: ranges need a GPU; leave it out on a CPU (nvtx is from o.toml)"),
    ],
)
def test_a_bad_file_of_options_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], text: str, words: str):
    Path("o.toml").write_text(text)
    refused_with(capsys, words, "bench", "--device", "cpu", "--config", "o.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[benhc]\n", "trainstep.toml: tables: unknown key 'benhc' (did you mean bench?)"),
        ("[sweep]\nsteps = 3\n", "trainstep.toml: tables: unknown key 'sweep'"),
        ("steps = 3\n", "trainstep.toml: tables: unknown key 'steps'"),
        ("bench = 3\n", "trainstep.toml: bench: must be a table [bench] of options, not 3"),
        ("[all]\ncompare = 'seed'\n", "trainstep.toml [all]: unknown key 'compare'"),
        ("[all]\nstpes = 3\n", "trainstep.toml [all]: unknown key 'stpes' (did you mean steps?)"),
        ("[bench]\nseq = 3\n", "trainstep.toml [bench]: unknown key 'seq'"),
        (
            "[bench]\nmodel = 'tiny'\n",
            "trainstep.toml [bench]: model cannot be a default: the command, or the file",
        ),
        ("[all]\ndata = 'stdlib'\n", "trainstep.toml [all]: data cannot be a default: the command, or the file"),
        ("[bench]\nout = 'x.jsonl'\n", "trainstep.toml [bench]: out cannot be a default: one command would write over"),
        ("[all]\npage = 'x.html'\n", "page cannot be a default"),
        ("[memory]\nkeep-snapshot = 'x'\n", ""),
        ("[all]\ndry_run = true\n", "dry_run cannot be a default: it is for one command"),
        ("[all]\nrounds = 2\n[bench]\ncompare = 'seed'\n", "compare: the grid does not vary along 'seed'"),
    ],
)
def test_bad_defaults_are_refused(folder: Path, capsys: pytest.CaptureFixture[str], text: str, words: str):
    Path("trainstep.toml").write_text(text)
    if words:
        refused_with(capsys, words, "bench", "--device", "cpu")
    else:
        refused_with(capsys, "keep-snapshot cannot be a default", "memory", "--device", "cpu")


def refused_with(capsys: pytest.CaptureFixture[str], words: str, *command: str) -> None:
    """Check for exit code 2 and one sentence with these words; only the line of options from files may come before it."""
    assert app.run(list(command)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "options from" not in line]
    assert len(lines) == 1
    assert words in lines[0]


@pytest.mark.slow
def test_records_keep_the_options_that_came_from_files(tmp_path: Path):
    (tmp_path / "o.toml").write_text("context = 16\nsteps = 2\n")
    (tmp_path / "trainstep.toml").write_text("[all]\nwarmups = 0\n")
    options = ["--config", "o.toml", "--out", "r.jsonl"]
    code, _, err = run_here("bench", *options, folder=tmp_path)
    assert code == 0, err
    words = "o.toml: context=16 steps=2; trainstep.toml: warmups=0"
    assert err.splitlines()[0] == f"trainstep: options from {words}"
    [record] = Store(tmp_path / "r.jsonl").read()
    assert record.fact("defaults_from") == words
    assert (record.config["context"], record.config["steps"], record.config["warmups"]) == (16, 2, 0)
    code, _, _ = run_here("report", "r.jsonl", "--format", "html", "--out", "p.html", folder=tmp_path)
    assert code == 0
    assert "context=16 steps=2" in (tmp_path / "p.html").read_text()


def test_help_names_both_files(capsys: pytest.CaptureFixture[str]):
    assert app.run(["bench", "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "trainstep.toml" in printed
    assert "--config FILE.toml" in printed
    assert "trainstep bench --dry-run" in printed


def test_no_other_verb_reads_the_defaults(folder: Path, capsys: pytest.CaptureFixture[str]):
    Path("trainstep.toml").write_text("nonsense = true\n")
    assert app.run(["report", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err

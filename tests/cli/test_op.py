"""`trainstep op` on a CPU: the tables and records of a run, refusals as cells, and bad input in one sentence."""

import json
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from cell_maker import run_here
from sources import ROOT
from trainstep.cli import app
from trainstep.cli.op import grids_of, runnable
from trainstep.config.grid import expand_all
from trainstep.config.op import OPS, PACKAGES
from trainstep.config.sweep import load_sweep
from trainstep.records.record import Record
from trainstep.records.store import Store

QUICK = ["--device", "cpu", "--steps", 6, "--warmups", 1]


def op(folder: Path, *arguments: object) -> tuple[int, str, str, list[Record]]:
    """Exit code, stdout, stderr and records of `trainstep op` in a folder."""
    code, out, err = run_here("op", *arguments, folder=folder)
    assert "Traceback" not in err
    paths = [line.removeprefix("records: ") for line in (out + err).splitlines() if line.startswith("records: ")]
    return code, out, err, Store(folder / paths[0]).read()


def test_two_ops_are_measured_and_a_refusal_is_a_record(tmp_path: Path):
    code, out, err, records = op(
        tmp_path, "rms_norm,swiglu", *QUICK, "--tokens", 16, "--width", 8, "--implementation", "trainstep,quack"
    )
    assert code == 0, "an op that a package does not have is a result"
    assert [(record.config["op"], record.config["implementation"]) for record in records] == [
        *(("rms_norm", "trainstep"), ("rms_norm", "quack")),
        *(("swiglu", "trainstep"), ("swiglu", "quack")),
    ]
    assert [record.failure and record.failure.kind for record in records] == [None, "unsupported"] * 2
    assert out.startswith("trainstep reaches ")
    assert "16 x 8" in out
    assert "quack has no swiglu" in out
    assert "On a CPU, trainstep runs the reference in plain PyTorch" in out
    assert "[1/4] rms_norm, trainstep: done in" in err
    [path] = (tmp_path / "runs").iterdir()
    assert path.name.startswith("op-")


@pytest.mark.slow
def test_compared_implementations_are_interleaved_and_json_has_their_ratio(tmp_path: Path):
    options = ["--implementation", "torch,trainstep", "--compare", "implementation", "--json", "--out", "a.jsonl"]
    code, out, _, records = op(tmp_path, "rms_norm,adamw", *QUICK, *options, "--page", "p.html")
    assert code == 0
    assert [record.fact("interleaving") for record in records] == ["live"] * 4
    ratios = [row for row in json.loads(out)["rows"] if row.get("compared_along") == "implementation"]
    assert [(row["against"], row["ratio"] > 0) for row in ratios] == [("torch", True)] * 2
    assert "<title>Ops on " in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("rms", "op: 'rms' is not known (did you mean rms_norm?)"),
        ("rms_norm,", "op: an empty value in 'rms_norm,'"),
        ("3", "op: must be a name, not 3"),
        ("rms_norm --implementation nope", "implementation: 'nope' is not known"),
        ("rms_norm --tokens 0", "tokens: must be a whole number of at least 1, not 0"),
        ("rms_norm --width wide", "width: must be a whole number or none, not 'wide'"),
        ("rms_norm,swiglu --vocabulary 9", "vocabulary: rms_norm has no such size; its sizes are tokens, width"),
        ("rotary --head-dim 7", "head_dim: rotary turns pairs of channels"),
        ("adamw --direction forward", "direction: adamw is an update without a backward pass"),
        ("rms_norm --l2 cold", "l2: cold is about a GPU's cache"),
        ("rms_norm --compare width --width 8", "compare: the grid does not vary along 'width'"),
        ("rms_norm --timeout-s 0", "timeout_s: must be a positive number"),
        ("rms_norm --seq 3", "Unknown option"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(words: str, sentence: str, refused: Callable[[Sequence[str], str], None]):
    refused(["op", *words.split(), "--device", "cpu"], f"trainstep: {sentence}")


def test_a_field_that_only_some_ops_have_is_left_out_for_the_others():
    norm, rotary, adamw = grids_of(
        ["rms_norm", "rotary", "adamw"], {"width": [8], "heads": [2], "direction": ["forward"]}, "cpu"
    )
    assert (norm["width"], "heads" in norm, norm["direction"]) == ([8], False, ["forward"])
    assert (rotary["heads"], "width" in rotary) == ([2], False)
    assert "direction" not in adamw


def test_defaults_depend_on_the_device():
    on_a_cpu = grids_of(["rms_norm", "adamw"], {}, "cpu")
    assert [grid["implementation"] for grid in on_a_cpu] == [["trainstep", "torch"]] * 2
    on_a_gpu = grids_of(["rms_norm", "adamw"], {}, "cuda")
    assert [grid["dtype"] for grid in on_a_gpu] == [["bf16"], ["fp32"]]
    assert {"eager", "compile"} <= set(on_a_gpu[0]["implementation"])
    assert grids_of(["rms_norm"], {"dtype": ["fp16"]}, "cuda")[0]["dtype"] == ["fp16"]


@pytest.mark.parametrize("installed", [[], ["liger-kernel"], [package for package, _ in PACKAGES.values()]])
def test_packages_are_peers_where_they_are_installed(installed: list[str], monkeypatch: pytest.MonkeyPatch):
    def version_of(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr("trainstep.cli.options.version", version_of)
    peers = [name for name in runnable("rms_norm", "cuda") if name in PACKAGES]
    assert [PACKAGES[name][0] for name in peers] == installed
    assert "cudnn" not in runnable("swiglu", "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_sweep_has_as_many_cells_on_both_devices(device: str):
    cells = expand_all(load_sweep(ROOT / "sweeps" / "ops.toml").grids({}), {"device": device})
    assert len(cells) == 5 * (3 * 4 + 1) + 4
    assert {cell.config["op"] for cell in cells} == set(OPS)


def test_help_shows_the_ops_and_the_defaults(capsys: pytest.CaptureFixture[str]):
    assert app.run(["op", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "rms_norm, add_rms_norm (with the residual addition before it), rotary, swiglu" in out
    assert "[fp32; on a GPU bf16, of adamw fp32]" in out
    assert "timed passes [10; on a GPU 20]" in out
    assert "[all that run here]" in out


def test_a_dry_run_of_one_op_has_its_cells(capsys: pytest.CaptureFixture[str]):
    assert app.run(["op", "rotary", "--device", "cpu", "--heads", "2,4", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("2 cells to run, about ")

"""`trainstep attention` on a CPU: the tables and records of a run, refusals as cells, and bad input in one sentence."""

import json
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from cell_maker import finish, run_here, start
from sources import ROOT
from trainstep.cli import app
from trainstep.cli.attention import runnable, with_defaults
from trainstep.config.grid import expand
from trainstep.config.sweep import load_sweep
from trainstep.records.record import Record
from trainstep.records.store import Store

QUICK = ["--device", "cpu", "--seq", 32, "--heads", 2, "--steps", 3, "--warmups", 1]


def attention(folder: Path, *arguments: object) -> tuple[int, str, str, list[Record]]:
    """Exit code, stdout, stderr and records of `trainstep attention` in a folder."""
    code, out, err = run_here("attention", *arguments, folder=folder)
    assert "Traceback" not in err
    paths = [line.removeprefix("records: ") for line in (out + err).splitlines() if line.startswith("records: ")]
    return code, out, err, Store(folder / paths[0]).read()


@pytest.mark.slow
def test_refused_implementations_are_records_beside_those_that_ran(tmp_path: Path):
    names = ["plain", "sdpa_cudnn", "trainstep"]
    code, out, err, records = attention(
        tmp_path, *QUICK, "--implementation", ",".join(names), "--direction", "forward", "--all"
    )
    assert code == 0, "an input that a peer does not support is a result"
    assert [record.config["implementation"] for record in records] == names
    assert [record.failure and record.failure.kind for record in records] == [None, "unsupported", None]
    assert "runs on GPUs only" in out
    assert "algorithm.py (tiled PyTorch)" in out
    assert "memory accounting" in out
    assert "On a CPU, trainstep's attention is algorithm.py" in out
    assert "[1/3] plain: done in" in err
    [path] = (tmp_path / "runs").iterdir()
    assert path.name.startswith("attention-")


@pytest.mark.slow
def test_compared_implementations_are_interleaved_and_json_has_their_ratio(tmp_path: Path):
    options = ["--implementation", "plain,trainstep", "--compare", "implementation", "--json", "--out", "a.jsonl"]
    code, out, err, records = attention(tmp_path, *QUICK, *options)
    assert code == 0
    assert [record.fact("interleaving") for record in records] == ["live", "live"]
    assert len({record.fact("interleaving_group") for record in records}) == 1
    rows = json.loads(out)["rows"]
    assert any(row.get("compared_along") == "implementation" and row["ratio"] for row in rows)
    assert "On a CPU, trainstep's attention is algorithm.py" in err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_peers_that_need_a_gpu_fail_on_a_cpu_with_exit_code_0(tmp_path: Path):
    code, out, _, records = attention(tmp_path, *QUICK, "--implementation", "flash_attn,flash_attn_4")
    assert code == 0
    assert [record.failure is not None for record in records] == [True, True]
    assert "runs on GPUs only" in out


@pytest.mark.parametrize("installed", [[], ["flash-attn"], ["flash-attn-4"], ["flash-attn", "flash-attn-4"]])
def test_packages_are_peers_where_they_are_installed(installed: list[str], monkeypatch: pytest.MonkeyPatch):
    def version_of(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr("trainstep.cli.options.version", version_of)
    peers = [name for name in runnable({"dtype": ["bf16"]}, "cuda") if name.startswith("flash_attn")]
    assert peers == [package.replace("-", "_") for package in installed]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--implementation nope", "implementation: 'nope' is not known"),
        ("--seq 0", "seq: must be a whole number of at least 1, not 0"),
        ("--seq long", "seq: must be a whole number, not 'long'"),
        ("--seq 1,,2", "seq: an empty value in '1,,2'"),
        ("--layout BSD --heads 4", "heads: layout BSD has one head, not 4"),
        ("--block-q 64 --implementation plain", "block_q: only trainstep's kernels take a tile"),
        ("--fp32-precision tf32", "fp32_precision: tf32 needs NVIDIA matrix units"),
        ("--l2 cold", "l2: cold is about a GPU's cache"),
        ("--compare seq --seq 16", "compare: the grid does not vary along 'seq'"),
        ("--timeout-s 0", "timeout_s: must be a positive number"),
        ("--page . --seq 16", "page: . cannot be written"),
        ("--sek 3", "Unknown option"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(words: str, sentence: str, refused: Callable[[Sequence[str], str], None]):
    refused(["attention", "--device", "cpu", *words.split()], f"trainstep: {sentence}")


def test_defaults_depend_on_the_device():
    on_a_cpu = with_defaults({}, "cpu")
    assert on_a_cpu["implementation"] == ["plain", "sdpa_flash", "sdpa_math", "trainstep"]
    on_a_gpu = with_defaults({}, "cuda")
    assert (on_a_gpu["seq"], on_a_gpu["dtype"]) == ([1024, 4096], ["bf16"])
    assert {"flex", "sdpa_cudnn", "plain_compiled"} <= set(on_a_gpu["implementation"])
    assert with_defaults({"layout": ["BSD"]}, "cuda")["heads"] == [1]
    assert with_defaults({"block_q": [64]}, "cuda")["implementation"] == ["trainstep"]
    assert with_defaults({"implementation": ["flex"]}, "cpu")["implementation"] == ["flex"], "as asked"


def test_implementations_that_run_in_none_of_the_dtypes_are_left_out():
    assert "sdpa_flash" not in runnable({"dtype": ["fp32"]}, "cuda")
    assert "sdpa_flash" in runnable({"dtype": ["fp32", "bf16"]}, "cuda")


@pytest.mark.parametrize(("name", "cells"), [("attention", 80), ("flash", 600), ("tiles", 50)])
def test_the_sweeps_of_attention_have_as_many_cells_on_both_devices(name: str, cells: int):
    config = load_sweep(ROOT / "sweeps" / f"{name}.toml")
    assert len(expand(config.grid, {"device": "cuda"})) == cells
    assert len(expand(config.grid, {"device": "cpu"})) == cells, "and on a CPU"


@pytest.mark.slow
def test_a_resumed_sweep_does_not_repeat_refusals(tmp_path: Path):
    grid: dict[str, Any] = {"block_q": '[24, "rule"]', "seq": 32, "heads": 2, "steps": 2}
    lines = "\n".join(f"{name} = {value}" for name, value in grid.items())
    (tmp_path / "t.toml").write_text(f'[grid]\nworkload = "attention"\nimplementation = "trainstep"\n{lines}\n')
    for _ in range(2):
        code, out, err = finish(
            start("sweep", "t.toml", "--device", "cpu", "--retry-failed", folder=tmp_path), timeout_s=100
        )
        assert (code, "illegal tile" in out) == (0, True), err
    assert len(Store(tmp_path / "runs" / "t.jsonl").read()) == 2, "the second sweep ran nothing"


def test_help_shows_the_defaults_and_the_other_name(capsys: pytest.CaptureFixture[str]):
    """The values in brackets are those that the command takes without options."""
    assert app.run(["attention", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    cpu, cuda = with_defaults({}, "cpu"), with_defaults({}, "cuda")
    assert f"queries in a sequence [{cpu['seq'][0]},{cpu['seq'][1]}; on a GPU {cuda['seq'][0]},{cuda['seq'][1]}]" in out
    assert "[fp32; on a GPU bf16]" in out
    assert "timed passes [10; on a GPU 20]" in out
    assert "[all that run here]" in out
    assert "flash is another name for trainstep" in out
    assert "trainstep tune" in out


@pytest.mark.parametrize("name", ["flash", "trainstep"])
def test_both_names_run_the_same_implementation(name: str, tmp_path: Path):
    code, _, err, [record] = attention(tmp_path, *QUICK, "--implementation", name, "--direction", "forward")
    assert code == 0, err
    assert record.config["implementation"] == "trainstep"

"""`trainstep tune`: bad input in one sentence, and a run in Triton's interpreter that prints rows for the table of tiles."""

import re
from pathlib import Path

import pytest

from cell_maker import import_path, run_here
from trainstep.cli import app
from trainstep.ops.flash_attention.portable import tiles
from trainstep.records.store import Store

TINY = "--device cpu --arithmetic fp16 --kernel forward --head-dim 16 --mask causal --candidates 16x16x4x1,32x32x4x1x2"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "",
            "device: tune needs a GPU, but none is visible here: tiles are chosen by timing them on their GPU",
        ),
        ("--device cuda", "tune needs a GPU"),
        (
            "--device cpu",
            "device: a CPU runs these kernels in Triton's interpreter only, for tests; set TRITON_INTERPRET=1",
        ),
        ("--device tpu", "device: 'tpu' is not known"),
        ("--kernel backward", "kernel: 'backward' is not known (did you mean forward?); known: forward, key_gradients"),
        ("--head-dim wide", "head_dim: must be a whole number, not 'wide'"),
        ("--head-dim 4", "head_dim: must be a whole number of at least 8"),
        ("--arithmetic half", "arithmetic: 'half' is not known"),
        ("--shape 4x16", "shape: '4x16' is not batch x heads x positions, as 4x16x4096"),
        ("--shape 4x16x4096,", "shape: an empty value"),
        ("--candidates 64x64", "candidates: '64x64' is neither 'generated' nor tiles"),
        ("--rounds 0", "rounds: must be a whole number of at least 1"),
        ("--budget-s 0", "budget_s: must be a positive number"),
        ("--timeout-s -1", "timeout_s: must be a positive number"),
        ("--top 0", "top: must be at least 1, not 0"),
        ("--tiles 3", "--tiles"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    words: str,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert app.run(["tune", *options.split()]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert not list(tmp_path.iterdir())


def test_help_has_examples(capsys: pytest.CaptureFixture[str]):
    assert app.run(["tune", "--help"]) == 0
    out = capsys.readouterr().out
    assert "trainstep tune --arithmetic tf32x3,ieee --shape 1x1x16384" in out
    assert "--budget-s" in out
    words = " ".join(out.replace("│", " ").split())
    assert "This needs a GPU" in words
    assert "width of a head [64,128]" in words, "as the bare command takes"
    assert "[4x16x4096,1x16x16384]" in words
    assert "trainstep attention --block-q 64" in words


@pytest.mark.slow
def test_a_run_ends_in_rows_for_the_table_of_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", import_path())
    command = ["tune", *TINY.split(), "--shape", "1x2x32,1x2x48", "--rounds", "3", "--workers", "1", "--out", "t.jsonl"]
    code, out, err = run_here(*command, folder=tmp_path)
    assert code == 0, err
    records = list(Store(tmp_path / "t.jsonl").read())
    assert [record.config["shape"] for record in records] == ["1x2x32", "1x2x48"]
    assert "Tiles: forward fp16 16 causal 1x2x32" in out
    assert "records: t.jsonl" in out
    *_, comment, line = out.splitlines()
    assert all(record.key in comment for record in records)
    assert re.fullmatch(
        r"    # 16: \d+x\d+x4x\dx\d takes [\d.]+( to [\d.]+)? of the best time, .* now in use; cells .*", comment
    )
    (row,) = eval(line.strip()[1:-1], vars(tiles))  # as if pasted
    assert (row.architecture, row.arithmetic, row.pass_, row.most_head_dim) == ("any", "half", "forward", 16)
    assert row.record == "t.jsonl"
    code, again, err = run_here(*command, "--allow-mixed", folder=tmp_path)
    assert code == 0
    assert "2 of 2 cells are done already" in err
    assert again.splitlines()[-1] == line

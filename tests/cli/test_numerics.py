"""`trainstep numerics` on a CPU: records, tables and a page; bad input in one sentence."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cell_maker import run_here
from trainstep.records.store import Store

NO_MATRICES = """
import torch


class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x).square().mean()


def build(run, device):
    return Own(), lambda step: {"x": torch.randn(4, 8)}
"""


@pytest.mark.slow
def test_the_toy_and_a_users_model_give_records_tables_and_a_page(tmp_path: Path):
    (tmp_path / "own.py").write_text(NO_MATRICES)
    options = ["--model", "toy,own:build", "--precision", "fp32,fp16_autocast", "--context", 8, "--steps", 2]
    code, out, err = run_here("numerics", *options, "--page", "p.html", folder=tmp_path)
    assert "Traceback" not in err
    assert code == 0
    for words in (
        "Error and cost of each precision",
        "Dtypes: toy 8",
        "9.9531",
        "fp16's range: toy 8",
        "Sums in 16 bits",
    ):
        assert words in out
    assert "autocast had no effect: no module of the model runs an operation that it casts to fp16" in out
    [path] = (tmp_path / "runs").glob("numerics-*.jsonl")
    records = Store(path).read()
    assert [record.config["precision"] for record in records] == ["fp32", "fp16_autocast"] * 2
    assert all(record.failure is None for record in records)
    assert "Numerics: error and cost" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "tny"], "did you mean tiny"),
        (["--precision", "fp17"], "precision: 'fp17' is not known"),
        (["--precision", "fp32,tf32"], "precision: tf32 is a mode of NVIDIA matrix units"),
        (["--model", "toy", "--layers", "3"], "layers: belongs to the built-in model"),
        (["--batch-size", "0"], "batch_size: must be"),
        (["--model", "tiny", "--data", "no/such/folder"], "data: there is no file"),
        (["--page", "x.jsonl", "--out", "x.jsonl"], "page: x.jsonl is the file of records"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    arguments: list[str], sentence: str, refused: Callable[[Sequence[str], str], None]
):
    refused(["numerics", "--device", "cpu", *arguments], sentence)

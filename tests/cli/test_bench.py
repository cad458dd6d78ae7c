"""`trainstep bench` on a CPU: the table and records of a run, a user's own model, and out of memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cell_maker import planted, run_here
from record_maker import a_record
from trainstep.cli import app
from trainstep.cli.cells import run_cells
from trainstep.records.record import Record
from trainstep.records.store import Store

OWN = """
import torch


class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).square().mean()


def build(run, device):
    return Own().to(device), lambda step: {"x": torch.randn(4, 8, device=device)}
"""


def bench(folder: Path, *arguments: object) -> tuple[int, str, str, list[Record]]:
    """Exit code, stdout, stderr and records of `trainstep bench` in a folder."""
    code, out, err = run_here("bench", *arguments, folder=folder)
    assert "Traceback" not in err
    [path] = [line.removeprefix("records: ") for line in out.splitlines() if line.startswith("records: ")]
    return code, out, err, Store(folder / path).read()


@pytest.mark.slow
def test_without_arguments_a_tiny_model_is_timed(tmp_path: Path):
    code, out, err, [record] = bench(tmp_path)
    assert code == 0
    assert record.config["model"]["name"] == "tiny"
    assert (record.config["device"], record.config["context"]) == ("cpu", 256)
    assert len(record.samples["step"].values) == record.config["steps"]
    assert {"forward", "backward", "optimizer", "step"} <= set(record.samples)
    assert "tiny" in out
    assert "total step (ms)" in out
    assert "[1/1] tiny: done in" in err
    [path] = (tmp_path / "runs").iterdir()
    assert path.name.startswith("bench-")


@pytest.mark.slow
def test_out_of_memory_is_a_result(tmp_path: Path):
    options = ["--batch-size", 100_000, "--memory-limit-gib", 2, "--steps", 1, "--warmups", 0, "--out", "oom.jsonl"]
    code, out, _, [record] = bench(tmp_path, *options, "--page", "deep/page.html")
    assert code == 0
    assert record.failure is not None
    assert record.failure.kind == "out_of_memory"
    assert record.failure.phase == "forward"
    assert (record.failure.asked_bytes or 0) > 2**30
    assert record.failure.capacity_bytes == 2 * 2**30
    assert "OOM" in out
    assert "records: oom.jsonl" in out
    assert "page: deep/page.html" in out
    assert "OOM" in (tmp_path / "deep" / "page.html").read_text()


@pytest.mark.slow
def test_a_users_model_is_found_in_the_current_folder(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    code, out, err, records = bench(tmp_path, "--model", "own:build,nowhere:build", "--steps", 3, "--warmups", 0)
    assert code == 3
    assert records[0].failure is None
    assert len(records[0].samples["step"].values) == 3
    assert records[1].failure is not None
    assert (records[1].failure.kind, records[1].failure.phase) == ("import_error", "build")
    assert "own:build" in out
    assert "nowhere:build: ModuleNotFoundError: No module named 'nowhere'" in err


@pytest.mark.slow
def test_compared_variants_are_interleaved(tmp_path: Path):
    small = ["--layers", 1, "--batch-size", 1, "--context", 16, "--steps", 5, "--warmups", 1, "--processes", 2]
    code, _, err, records = bench(tmp_path, "--attention", "plain,sdpa", "--compare", "attention", *small)
    assert code == 0
    assert "[2/2]" in err
    assert [record.config["attention"] for record in records] == ["plain", "sdpa"]
    assert [record.fact("interleaving") for record in records] == ["live", "live"]
    assert len({record.fact("interleaving_group") for record in records}) == 1


def test_a_grid_with_a_bad_cell_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Only the last cell of the grid is invalid; it is refused before the first one runs."""
    monkeypatch.chdir(tmp_path)
    assert app.run(["bench", "--device", "cpu", "--model", "tiny", "--context", "16,32", "--heads", "4,3"]) == 2
    assert "heads: 3 does not divide d_model 128" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rerun", [True, False])
@pytest.mark.parametrize(
    ("finished", "words"),
    [
        (0, "no cell was finished"),
        (1, "1 of 3 cells is finished and kept in {0}"),
        (2, "2 of 3 cells are finished and kept in {0}"),
    ],
)
def test_an_interrupt_says_how_many_cells_are_kept(tmp_path: Path, finished: int, words: str, rerun: bool):
    cells = [planted(index=index) for index in range(3)]
    store = Store(tmp_path / "records.jsonl")
    if rerun:  # records of an earlier run do not count as kept by this one
        for cell in cells:
            store.append(a_record(key=cell.key))

    def execute(_waiting: Any, _tell: Any) -> Iterator[list[Record]]:
        for cell in cells[:finished]:
            yield [a_record(key=cell.key, duration_s=7.0)]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as interrupt:
        run_cells([[cell] for cell in cells], store, execute, environment=None, rerun=rerun)
    message, _, command = str(interrupt.value).partition("; to continue: ")
    assert message == words.format(store.path)
    assert command.endswith(f"--out {store.path}") == bool(finished)

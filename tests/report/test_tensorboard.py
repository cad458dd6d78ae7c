"""`report --format tensorboard`: the scalars of records, read back by TensorBoard's own reader."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from record_maker import a_record
from trainstep.cli import app
from trainstep.config.parsing import build_run, to_plain
from trainstep.records.facts import facts_of
from trainstep.records.record import Failure, Samples
from trainstep.records.store import Store


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the records of two cells that ran and of one that failed."""
    monkeypatch.chdir(tmp_path)
    store = Store(Path("r.jsonl"))
    for context, step_s in ((16, 0.5), (32, 0.75)):
        store.append(
            a_record(
                key=f"{context:016}",
                config=to_plain(build_run({"model": "tiny", "context": context})),
                samples={"step": Samples(unit="s", values=(step_s, 2 * step_s), warmups=(9.0,))},
                facts=facts_of(tokens=64, peak_rss_bytes=1024.0),
            )
        )
    failure = Failure(kind="crash", phase="build", message="it did")
    config = to_plain(build_run({"model": "tiny", "context": 64}))
    store.append(a_record(key="c" * 16, config=config, failure=failure, samples={}))
    return tmp_path


def test_every_step_of_every_cell_comes_back(folder: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("tensorboard", reason="pip install 'trainstep[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert app.run(["report", "r.jsonl", "--format", "tensorboard", "--out", "board"]) == 0
    words = "board: 2 runs; no scalars for 1 of 3 cells, which failed; to view them: tensorboard --logdir board\n"
    assert capsys.readouterr().out == words
    assert sorted(path.name for path in Path("board").iterdir()) == ["tiny 16", "tiny 32"]
    run = EventAccumulator("board/tiny 32")
    run.Reload()
    times = [(event.step, event.value) for event in run.Scalars("time (ms)/step")]
    assert times == [(0, 750.0), (1, 1500.0)]
    assert [event.value for event in run.Scalars("warm-up (ms)/step")] == [9000.0]
    assert [event.value for event in run.Scalars("summary/step_median_s")] == [1.125]
    assert [event.value for event in run.Scalars("summary/peak_rss_bytes")] == [1024.0]
    assert [round(event.value, 3) for event in run.Scalars("summary/tokens_per_s")] == [round(64 / 1.125, 3)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "out: TensorBoard reads a folder; name a new one, as --out runs/tensorboard"),
        (["--out", "full"], "out: full is a file, or a folder with files in it"),
        (["--out", "full/file"], "out: full/file is a file"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
):
    Path("full").mkdir()
    Path("full/file").touch()
    assert app.run(["report", "r.jsonl", "--format", "tensorboard", *options]) == 2
    assert words in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["full", "r.jsonl"]


def test_a_missing_tensorboard_package_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    real_import = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "tensorboard":
            raise ModuleNotFoundError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert app.run(["report", "r.jsonl", "--format", "tensorboard", "--out", "board"]) == 2
    err = capsys.readouterr().err
    assert (
        err == "trainstep: format: tensorboard needs the package of that name: pip install 'trainstep[tensorboard]'\n"
    )
    assert not Path("board").exists()

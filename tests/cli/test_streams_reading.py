"""The line that is printed before large files are read."""

from pathlib import Path

import pytest

from record_maker import a_record
from trainstep.cli import app
from trainstep.records.store import Store


@pytest.mark.parametrize("verb", ["report", "compare"])
def test_reading_large_files_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        Store(Path(name)).append(a_record())
    assert app.run([verb, "a.jsonl", "b.jsonl"]) == 0
    assert "reading" not in capsys.readouterr().err
    for name in ("a.jsonl", "b.jsonl"):
        with open(name, "a") as file:
            file.write("\n" * (3 * 2**19))  # empty lines add bytes and no records
    assert app.run([verb, "a.jsonl", "b.jsonl"]) == 0
    assert "reading 2 files, 3 MiB\n" in capsys.readouterr().err

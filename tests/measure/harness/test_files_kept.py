"""A folder for kept files is made and tried before anything is measured; a file in it is complete or not there."""

import os
from pathlib import Path

import pytest

from full_disk import largest_file
from trainstep.config.parsing import build_config, to_plain
from trainstep.measure.harness.files import kept_file, kept_folder
from trainstep.measure.memory.workload import WORKLOAD


def test_the_folder_is_made_and_left_empty(tmp_path: Path):
    folder = kept_folder("keep_trace", str(tmp_path / "a" / "b"))
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with pytest.raises(ValueError, match=r"keep_trace: no file can be made in .*; name another folder"):
            kept_folder("keep_trace", str(tmp_path / name))


def test_a_cell_that_cannot_keep_its_snapshot_is_not_measured(tmp_path: Path):
    (tmp_path / "file").touch()
    config = to_plain(build_config("memory", {"model": "tiny", "keep_snapshot": str(tmp_path / "file")}))
    stages: list[str] = []
    with pytest.raises(ValueError, match="keep_snapshot"):
        WORKLOAD.prepare(config, stages.append)
    assert stages == []


def test_a_file_is_complete_or_not_there(tmp_path: Path):
    path = tmp_path / "trace.json.gz"
    with kept_file("keep_trace", path) as file:
        file.write(b"whole")
    with pytest.raises(
        ValueError, match=r"^keep_trace: .*trace\.json\.gz cannot be written: File too large; name another"
    ):
        fill(path)
    assert [file_.read_bytes() for file_ in tmp_path.iterdir()] == [b"whole"]


def fill(path: Path) -> None:
    with largest_file(1000), kept_file("keep_trace", path) as file:
        file.write(bytes(5000))


def test_a_partial_file_of_a_killed_process_is_removed_at_the_next_start(tmp_path: Path):
    partial = tmp_path / ".trace.json.gz.01234567-1-0123abcd.partial"
    partial.touch()
    os.utime(partial, (0, 0))
    kept_folder("keep_trace", str(tmp_path))
    assert [*tmp_path.iterdir()] == []

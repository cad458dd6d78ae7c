"""A folder for kept files is made and tried before anything is measured."""

from pathlib import Path

import pytest

from trainstep.config.memory import MemoryConfig
from trainstep.config.parsing import to_plain
from trainstep.config.presets import size
from trainstep.measure.kept_files import kept_folder
from trainstep.measure.step_memory import WORKLOAD


def test_the_folder_is_made_and_left_empty(tmp_path: Path):
    folder = kept_folder("keep_trace", str(tmp_path / "a" / "b"))
    assert list(folder.iterdir()) == []


def test_where_no_file_can_be(tmp_path: Path):
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with pytest.raises(ValueError, match=r"keep_trace: no file can be made in .*; name another folder"):
            kept_folder("keep_trace", str(tmp_path / name))


def test_a_cell_that_cannot_keep_its_snapshot_is_not_measured(tmp_path: Path):
    (tmp_path / "file").touch()
    config = to_plain(MemoryConfig(model=size("tiny"), keep_snapshot=str(tmp_path / "file")))
    stages: list[str] = []
    with pytest.raises(ValueError, match="keep_snapshot"):
        WORKLOAD.prepare(config, stages.append)
    assert stages == []

"""A bad `--data` is refused before anything starts."""

import os
from pathlib import Path

import pytest

from trainstep.cli import app
from trainstep.config.text_files import check_length, text_files


def test_text_files_of_a_folder_are_sorted(tmp_path: Path):
    (tmp_path / "b").mkdir()
    for name in ("b/second.md", "a.txt", "picture.png"):
        (tmp_path / name).write_text("text")
    assert text_files(str(tmp_path)) == [tmp_path / "a.txt", tmp_path / "b" / "second.md"]


def test_the_length_counts_the_files_and_their_separators(tmp_path: Path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    check_length(str(tmp_path), [4, 8])
    with pytest.raises(ValueError, match="data: 9 bytes of text are fewer than a sequence of 9 tokens and its target"):
        check_length(str(tmp_path), [4, 9])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("empty").touch()
    Path("pictures").mkdir()
    Path("pictures/a.png").write_bytes(b"\x89PNG")
    Path("short.txt").write_text("text")
    Path("loop.txt").symlink_to("loop.txt")
    os.mkfifo("pipe")
    Path("s.toml").write_text('[grid]\nmodel = "tiny"\ndata = ["stdlib", "pictures"]\n')
    return tmp_path


VERBS = ["bench", "memory", "numerics", "parallel", "profile", "sweep s.toml"]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("absent", "there is no file or folder 'absent'"),
        ("pictures", "no text found at pictures"),
        ("/dev/zero", "/dev/zero is not a regular file"),
        ("short.txt", "4 bytes of text are fewer than a sequence of"),
    ],
)
def test_each_verb_refuses_bad_data(folder: Path, capsys: pytest.CaptureFixture[str], verb: str, data: str, words: str):
    model = "--ranks=2" if verb == "parallel" else "--model=tiny"
    assert app.run([*verb.split(), "--device", "cpu", model, "--data", data]) == 2
    assert capsys.readouterr().err.startswith(f"trainstep: data: {words}")
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("empty", "no text found at empty"),
        ("pipe", "pipe is not a regular file"),
        ("loop.txt", "loop.txt"),
        ("x" * 300, "cannot be read: File name too long"),
        ("a\0b", "there is no file or folder"),
    ],
)
def test_paths_that_are_no_text_are_refused(folder: Path, data: str, words: str):
    with pytest.raises(ValueError, match=f"^data: .*{words}"):
        text_files(data)


def test_bad_data_in_a_sweep_file_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert app.run(["sweep", "s.toml", "--device", "cpu"]) == 2
    assert "data: no text found at pictures" in capsys.readouterr().err


def test_a_file_without_read_permission_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"^data: short\.txt cannot be read: Permission denied$"):
        text_files("short.txt")

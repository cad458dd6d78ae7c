"""Batches depend only on seed and step; text is read as bytes from a file, a folder or the standard library."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from trainstep.training.batches import NextBatch, random_batches, read_text, text_batches

CPU = torch.device("cpu")
TEXT = np.arange(200, dtype=np.uint8)


def random_source(**changes: int) -> NextBatch:
    return random_batches(**{"vocab_size": 97, "batch_size": 3, "context": 8, "seed": 5, **changes}, device=CPU)


def text_source(text: np.ndarray = TEXT, **changes: int) -> NextBatch:
    return text_batches(text, **{"batch_size": 3, "context": 8, "seed": 5, **changes}, device=CPU)


@pytest.mark.parametrize("source", [random_source, text_source])
def test_a_batch_has_tokens_and_shifted_targets(source: type):
    batch = source()(0)
    assert set(batch) == {"tokens", "targets"}
    for tensor in batch.values():
        assert (tensor.shape, tensor.dtype) == ((3, 8), torch.int64)
        assert tensor.is_contiguous()
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


@pytest.mark.parametrize("source", [random_source, text_source])
def test_batches_depend_only_on_seed_and_step(source: type):
    first, second = source(), source()
    second(7)  # the order in which steps are requested does not matter
    assert torch.equal(first(3)["tokens"], second(3)["tokens"])
    assert not torch.equal(first(3)["tokens"], first(4)["tokens"])
    assert not torch.equal(first(3)["tokens"], source(seed=6)(3)["tokens"])


def test_batches_do_not_depend_on_the_process_or_torchs_seed():
    code = (
        "import torch; from trainstep.training.batches import random_batches; torch.manual_seed(9);"
        "source = random_batches(vocab_size=97, batch_size=3, context=8, seed=5, device=torch.device('cpu'));"
        "print(source(3)['tokens'].flatten().tolist())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(random_source()(3)["tokens"].flatten().tolist())


def test_random_tokens_are_uniform_over_the_vocabulary():
    tokens = random_source(vocab_size=10, batch_size=100, context=100)(0)["tokens"]
    counts = torch.bincount(tokens.flatten(), minlength=10)
    assert len(counts) == 10
    assert (counts.double() / 1000 - 1).abs().max() < 0.2


def test_windows_cover_the_whole_text():
    starts = torch.cat([text_source(batch_size=50)(step)["tokens"][:, 0] for step in range(40)])
    assert set(starts.tolist()) == set(range(200 - 8)), "every window, the last one included, and none beyond"
    batch = text_source()(0)
    assert (batch["targets"] - batch["tokens"] == 1).all()


def test_a_text_shorter_than_a_window_is_refused():
    assert text_source(TEXT[:9])(0)["targets"].tolist() == [list(range(1, 9))] * 3
    with pytest.raises(ValueError, match="data: 8 bytes of text are fewer than a sequence of 8 tokens"):
        text_source(TEXT[:8])


def test_a_file_is_read_as_bytes(tmp_path: Path):
    file = tmp_path / "text.anything"
    file.write_bytes(b"caf\xc3\xa9")
    assert bytes(read_text(str(file))) == b"caf\xc3\xa9"


def test_text_files_of_a_folder_are_joined(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "second.md").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "a_folder.py").mkdir()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert bytes(read_text(str(tmp_path))) == b"one\ntwo"


def test_a_folder_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("config.text_files", "training.batches"):
        monkeypatch.setattr(f"trainstep.{module}.MAXIMUM_FOLDER_BYTES", 5)
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name * 3)
    assert bytes(read_text(str(tmp_path))) == b"aaa\nb"


def test_the_standard_library_is_a_text():
    text = read_text("stdlib")
    assert len(text) > 2**20
    assert b"import" in bytes(text[: 2**16])


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.txt").write_text("secret")
    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(ValueError, match=r"data: .*a\.txt cannot be read: .*Permission denied"):
        read_text(str(tmp_path / "a.txt"))

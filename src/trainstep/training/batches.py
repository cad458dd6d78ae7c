"""Batches of tokens, a function of seed and step alone: the same step sees the same tokens under every strategy and rank count."""

import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Batch = dict[str, Tensor]
NextBatch = Callable[[int], Batch]

_MAXIMUM_TEXT_BYTES = 64 * 2**20
_TEXT_SUFFIXES = frozenset(
    (".txt", ".md", ".rst", ".py", ".json", ".jsonl", ".csv", ".html", ".xml", ".tex", ".c", ".h", ".rs")
)


def random_batches(*, vocab_size: int, batch_size: int, context: int, seed: int, device: torch.device) -> NextBatch:
    """Tokens uniform over the vocabulary; targets are the tokens one position on."""

    def next_batch(step: int) -> Batch:
        generator = np.random.default_rng((seed, step))
        tokens = generator.integers(vocab_size, size=(batch_size, context + 1), dtype=np.int64)
        return _on(device, tokens)

    return next_batch


def text_batches(
    text: npt.NDArray[np.uint8], *, batch_size: int, context: int, seed: int, device: torch.device
) -> NextBatch:
    """Windows of a text's bytes at random places; a token is a byte. ValueError if the text is shorter than a window."""
    if len(text) < context + 1:
        raise ValueError(
            f"data: {len(text)} bytes of text are fewer than a sequence of {context} tokens and its target needs"
        )

    def next_batch(step: int) -> Batch:
        starts = np.random.default_rng((seed, step)).integers(len(text) - context, size=batch_size)
        return _on(device, np.stack([text[start : start + context + 1] for start in starts]).astype(np.int64))

    return next_batch


def read_text(data: str) -> npt.NDArray[np.uint8]:
    """The bytes of a file (memory-mapped), of a folder's text files, or of Python's standard library ('stdlib').

    Folders are read in the order of their paths, up to 64 MiB. ValueError where there is nothing to read.
    """
    try:
        return _text_bytes(data)
    except OSError as error:
        raise ValueError(f"data: {data} cannot be read: {error}") from None


def _text_bytes(data: str) -> npt.NDArray[np.uint8]:
    path = Path(sysconfig.get_path("stdlib")) if data == "stdlib" else Path(data)
    if path.is_file() and path.stat().st_size:
        return np.memmap(path, dtype=np.uint8, mode="r")
    suffixes = frozenset((".py",)) if data == "stdlib" else _TEXT_SUFFIXES
    found = (file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
    files = sorted(file for file in found if data != "stdlib" or "site-packages" not in file.parts)
    parts, total = [], 0
    for file in files:
        if total >= _MAXIMUM_TEXT_BYTES:
            break
        parts.append(file.read_bytes())
        total += len(parts[-1])
    if not total:
        raise ValueError(f"data: no text found at {path}; give a file, or a folder of text files")
    return np.frombuffer(b"\n".join(parts)[:_MAXIMUM_TEXT_BYTES], dtype=np.uint8)


def _on(device: torch.device, tokens: npt.NDArray[np.int64]) -> Batch:
    on_device = torch.from_numpy(tokens).to(device)
    return {"tokens": on_device[:, :-1].contiguous(), "targets": on_device[:, 1:].contiguous()}

"""Makes batches of tokens from the seed and the step alone.

So a step has the same tokens under every parallel strategy and on any number of ranks.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainstep.config.text_files import MAXIMUM_FOLDER_BYTES, text_files

Batch = dict[str, Tensor]
NextBatch = Callable[[int], Batch]


def random_batches(*, vocab_size: int, batch_size: int, context: int, seed: int, device: torch.device) -> NextBatch:
    """Tokens drawn uniformly from the vocabulary; the target of a position is the next token. Both (B, S), int64."""

    def next_batch(step: int) -> Batch:
        generator = np.random.default_rng((seed, step))
        tokens = generator.integers(vocab_size, size=(batch_size, context + 1), dtype=np.int64)
        return _on(device, tokens)

    return next_batch


def text_batches(
    text: npt.NDArray[np.uint8], *, batch_size: int, context: int, seed: int, device: torch.device
) -> NextBatch:
    """Windows of a text at random places; a token is a byte. Raises ValueError if the text is shorter than a window."""
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

    A folder's files are read in the order of their paths, up to 64 MiB. Raises ValueError if there is nothing to read.
    """
    files = text_files(data)
    try:
        if files == [Path(data)]:
            return np.memmap(files[0], dtype=np.uint8, mode="r")
        text = b"\n".join(file.read_bytes() for file in files)
    except OSError as error:
        raise ValueError(f"data: {data} cannot be read: {error}") from None
    return np.frombuffer(text[:MAXIMUM_FOLDER_BYTES], dtype=np.uint8)


def _on(device: torch.device, tokens: npt.NDArray[np.int64]) -> Batch:
    on_device = torch.from_numpy(tokens).to(device)
    return {"tokens": on_device[:, :-1].contiguous(), "targets": on_device[:, 1:].contiguous()}

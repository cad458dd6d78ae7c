"""A kernel that notes how it is launched, and runs nothing, and the stream on which it would."""

from typing import Any

import pytest
import torch


@pytest.fixture
def stream_77(monkeypatch: pytest.MonkeyPatch) -> None:
    """Direct launches on a pretended GPU find the stream 77."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: 77, raising=False)


class FakeKernel:
    """A kernel that keeps calls through Triton's launch, calls of the compiled kernel with hooks, and direct starts."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, *arg_names: str) -> None:
        self.arg_names = arg_names or ("x_ptr", "rows", "BLOCK")
        self.bound, self.hooked, self.started = [], [], []
        self.run = FakeLauncher()
        self.run.launch = lambda *arguments: self.started.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> "FakeKernel":
            (self.bound if options else self.hooked).append((grid, arguments, options))
            return self

        return launch


class FakeLauncher:
    """A launcher that passes its arguments on, as Triton's does."""

    launch: Any

    def __call__(self, *everything: Any) -> None:
        self.launch(*everything)

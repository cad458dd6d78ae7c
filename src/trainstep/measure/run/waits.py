"""Finds the lines of a script at which the host waits for the device, while one step is inspected, without any mode of torch.

    waits = Waits(on_gpu=True)
    waits.start(); ...; waits.stop()
    waits.table()

On a GPU torch's sync debug mode reports every wait. Beside it, and alone on a CPU, the methods of tensors that read a value
(`.item()`, `float(loss)`, `if mask:`) are replaced for that step by ones that note their caller and the time they took. On a CPU
nothing waits; they are the lines at which a GPU would.

[Note: no mode] A dispatch mode would see these reads too (capture/waits.py uses one), but it takes part in the step: autocast is
off inside it, and torch.compile compiles anew under it. Here the numbers of the script must not change.
"""

import functools
import linecache
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import trainstep
from trainstep.capture.waits import SYNCHRONIZES

_READS = {
    "item": "a tensor's value is read by the host",
    "tolist": "a tensor's values are read by the host",
    "cpu": "a tensor is copied to the host",
    "nonzero": "the result's shape depends on values",
    "__bool__": "a tensor's value decides a branch",
    "__int__": "a tensor's value is read by the host",
    "__float__": "a tensor's value is read by the host",
    "__index__": "a tensor's value is read by the host",
}
"""Method of a tensor -> why it waits."""
_WAITS = "the host waits for the GPU"
_TORCH, _OURS = (str(Path(module.__file__ or "").parent) for module in (torch, trainstep))
_PYTHON = str(Path(warnings.__file__).parent)
_MOST_PLACES = 100
_MOST_FRAMES = 200
_MOST_LINES, _LONGEST_SOURCE = 4, 200


class Waits:
    """The waits between `start` and `stop`, by place."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._places: dict[tuple[str, int], list[Any]] = {}
        """(file, line) -> [why, calls, seconds or None]"""
        self._undo: list[Callable[[], None]] = []
        self._inside = False

    def start(self) -> None:
        """Begin to note waits."""
        for name, why in _READS.items():
            self._replace_method(name, why)
        if self._on_gpu:
            self._watch_warnings()

    def stop(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def table(self) -> dict[str, list[Any]]:
        """A row for each place, those that took longest first."""
        rows = sorted(self._places.items(), key=lambda item: (-(item[1][2] or 0.0), item[0]))
        return {
            "file": [file for (file, _), _ in rows],
            "line": [line for (_, line), _ in rows],
            "source": [_source(file, line) for (file, line), _ in rows],
            "why": [why for _, (why, _, _) in rows],
            "calls": [calls for _, (_, calls, _) in rows],
            "time_s": [seconds for _, (_, _, seconds) in rows],
        }

    def _replace_method(self, name: str, why: str) -> None:
        original = getattr(torch.Tensor, name)
        own = name in torch.Tensor.__dict__

        @functools.wraps(original)
        def noted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if self._inside or torch.compiler.is_compiling() or (self._on_gpu and not tensor.is_cuda):
                return original(tensor, *arguments, **options)
            frame = sys._getframe(1)
            if not self._on_gpu and frame.f_code.co_filename.startswith(_TORCH):
                return original(tensor, *arguments, **options)  # torch's own code for a CPU, which reads as it likes
            self._inside, start_s = True, time.perf_counter()
            try:
                return original(tensor, *arguments, **options)
            finally:
                self._inside = False
                self._note(frame, why, time.perf_counter() - start_s)

        def put_back() -> None:
            if own:
                setattr(torch.Tensor, name, original)
            else:
                delattr(torch.Tensor, name)

        setattr(torch.Tensor, name, noted)
        self._undo.append(put_back)

    def _watch_warnings(self) -> None:
        """Have torch warn of every wait, and take these warnings; all others are shown as before."""
        mode = torch.cuda.get_sync_debug_mode()
        before = list(warnings.filters)
        warnings.filterwarnings("always", message=f".*{SYNCHRONIZES}")
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        added = [entry for entry in warnings.filters if entry not in before]
        show_before = warnings.showwarning

        def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
            if SYNCHRONIZES not in str(message):
                show_before(message, category, filename, lineno, file, line)
            elif not self._inside:  # else the read that waits notes itself
                self._note(sys._getframe(1), _WAITS, None)

        def put_back() -> None:
            torch.cuda.set_sync_debug_mode(mode)
            for entry in added:
                if entry in warnings.filters:  # the script may have set filters of its own
                    warnings.filters.remove(entry)  # type: ignore[attr-defined]
            warnings._filters_mutated()  # type: ignore[attr-defined]
            if warnings.showwarning is show:
                warnings.showwarning = show_before

        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        self._undo.append(put_back)

    def _note(self, frame: FrameType | None, why: str, seconds: float | None) -> None:
        """Note the innermost line outside of torch, of Python's own modules and of this package."""
        place = _place(frame)
        if place is None or (place not in self._places and len(self._places) >= _MOST_PLACES):
            return
        entry = self._places.setdefault(place, [why, 0, None])
        entry[1] += 1
        if seconds is not None:
            entry[2] = (entry[2] or 0.0) + seconds


def _source(file: str, line: int) -> str:
    """The statement's text, of which a line may have only the beginning: `if (`."""
    text = linecache.getline(file, line).strip()
    for following in range(line + 1, line + _MOST_LINES):
        if not text.endswith(("(", "[", "{", ",", "\\", " and", " or")):
            break
        text = f"{text.removesuffix(chr(92))} {linecache.getline(file, following).strip()}"
    return text[:_LONGEST_SOURCE]


def _place(frame: FrameType | None) -> tuple[str, int] | None:
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        file = frame.f_code.co_filename
        if not _is_library(file, (_TORCH, _OURS)):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


def _is_library(file: str, folders: Sequence[str]) -> bool:
    return file.startswith((*folders, "<")) or (file.startswith(_PYTHON) and "site-packages" not in file)

"""Finds the lines at which a step makes the host wait for the device, which no graph can hold.

A watched step is an ordinary training step and runs to its end, so all places are found at once and not only the first.
"""

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SYNCHRONIZES = "called a synchronizing CUDA operation"
"""The words of the warning of torch's sync debug mode (c10/cuda/CUDAFunctions.cpp)."""
_NOT_USER_CODE = (str(Path(torch.__file__).parent), str(Path(__file__).parent), str(Path(traceback.__file__).parent))
_READS_VALUE = "a tensor's value is read by the host"
_READ_BY_HOST = {
    "aten::_local_scalar_dense": _READS_VALUE,
    "aten::nonzero": "the result's shape depends on values",
    "aten::masked_select": "the result's shape depends on values",
    "aten::_unique2": "the result's shape depends on values",
    "aten::unique_dim": "the result's shape depends on values",
    "aten::equal": "a comparison's answer is read by the host",
}
"""Operators for which a GPU's host has to wait. `aten::index` with a mask is another."""
_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__repr__, torch.Tensor.cpu}
"""Methods that read a tensor's memory without an operator."""


class Wait(NamedTuple):
    """A place at which the host waits. `line`: its source, without indentation; empty if the source cannot be read."""

    file: str
    number: int
    line: str
    why: str

    def __str__(self) -> str:
        source = f"`{self.line}`: " if self.line else ""
        return f"{self.file}:{self.number}: {source}{self.why}"


class NotCapturable(ValueError):
    """No graph can hold the step. `waits`: the places that are the cause, if any are known."""

    def __init__(self, reason: str, waits: Sequence[Wait] = ()) -> None:
        super().__init__("; ".join([reason, *map(str, waits)]))
        self.waits = tuple(waits)


@contextmanager
def cuda_waits() -> Iterator[list[Wait]]:
    """Collect the places at which torch waits for the GPU inside the block.

    Waits of autograd's thread have the line of `backward()`.

    `torch.cuda.set_sync_debug_mode` reports implicit waits; `torch.cuda.synchronize()` itself fails during the capture.
    """
    distinct: dict[Wait, None] = {}

    def show(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        if SYNCHRONIZES in str(message):
            distinct[_here("the host waits for the GPU")] = None
        else:
            show_before(message, category, filename, lineno, file, line)

    places: list[Wait] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{SYNCHRONIZES}")
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        show_before, warnings.showwarning = warnings.showwarning, show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            places += distinct


class Pretence:
    """Answers `torch.cuda.is_current_stream_capturing()` in a step that is not captured. `asked`: whether anyone did."""

    def __init__(self, truth: Callable[[], bool]) -> None:
        self.asked = False
        self.ended = False
        self._truth = truth

    def __call__(self) -> bool:
        by_optimizer = isinstance(sys._getframe(1).f_locals.get("self"), torch.optim.Optimizer)
        if self.ended or by_optimizer:
            return torch.cuda.is_available() and self._truth()
        self.asked = True
        return True


@contextmanager
def as_if_capturing() -> Iterator[Pretence]:
    """Have `torch.cuda.is_current_stream_capturing()` answer True inside the block, on every device and in every thread.

    Libraries ask it before they read a value (Hugging Face's masks, SyncBatchNorm), so they compute here what they will
    compute in a graph. An optimizer asks in order to raise an error, which would end a real step half done: it hears the
    truth, as does whoever asks `torch.cuda.graphs.is_current_stream_capturing`.
    """
    truth = torch.cuda.is_current_stream_capturing
    pretence = Pretence(truth)
    torch.cuda.is_current_stream_capturing = pretence
    try:
        yield pretence
    finally:
        pretence.ended = True  # another thread's block that overlaps this one may put it back
        if torch.cuda.is_current_stream_capturing is pretence:
            torch.cuda.is_current_stream_capturing = truth


@contextmanager
def host_waits() -> Iterator[list[Wait]]:
    """Collect the places at which a GPU's host would wait, in a step on a CPU, inside the block."""
    watcher = HostWatcher()
    with watcher, reads_by_host(watcher):
        yield watcher.places


class HostWatcher(TorchDispatchMode):
    """Collects in `places` where a GPU's host would wait, while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: list[Wait] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if why := _why_the_host_waits(func, args):
            self.note(why)
        return func(*args, **(kwargs or {}))

    def note(self, why: str) -> None:
        """Note the user's current line, once."""
        if (place := _here(why)) not in self.places:
            self.places.append(place)


class _Reads(TorchFunctionMode):
    def __init__(self, watcher: HostWatcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self._watcher.note(_READS_VALUE)
        return func(*args, **(kwargs or {}))


def reads_by_host(watcher: HostWatcher) -> AbstractContextManager[Any]:
    """Have `watcher` note reads of a tensor's memory without an operator of torch: tolist(), numpy(), printing a tensor."""
    return _Reads(watcher)


def _why_the_host_waits(func: Any, args: Sequence[Any]) -> str | None:
    """Why a GPU's host would wait for this operator; None if it would not."""
    name = func._schema.name if hasattr(func, "_schema") else str(func)
    if name in ("aten::index", "aten::index_put", "aten::index_put_") and any(map(_is_mask, args[1])):
        if name != "aten::index" and args[2].numel() == 1 and len(args) < 4 and all(map(_is_mask, args[1])):
            return None  # `x[mask] = number`, for which torch fills the tensor in place
        return "a mask chooses elements: the result's shape depends on values"
    return _READ_BY_HOST.get(name)


def place_of(error: BaseException) -> Wait:
    """The innermost line of the user's code in an exception's traceback, with the exception's first line."""
    first_line = str(error).splitlines()[0] if str(error) else ""
    return _innermost(traceback.extract_tb(error.__traceback__), f"{type(error).__name__}: {first_line}".rstrip(": "))


def graphs_compiled() -> int:
    """The number of graphs that torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters: Mapping[str, Mapping[str, int]] = dynamo.counters if dynamo else {}
    return counters["stats"]["unique_graphs"] if counters else 0


def compiles_nothing() -> AbstractContextManager[Any]:
    """Make torch.compile raise an error instead of compiling, inside the block."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("fail_on_recompile")
    return stance


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _here(why: str) -> Wait:
    return _innermost(traceback.extract_stack(), why)


def _innermost(frames: Sequence[traceback.FrameSummary], why: str) -> Wait:
    """The last frame that belongs neither to torch nor to this package; without such a frame, the last of all."""
    user = [frame for frame in frames if not frame.filename.startswith(_NOT_USER_CODE) and frame.filename[0] != "<"]
    frame = (user or list(frames))[-1]
    return Wait(frame.filename, frame.lineno or 0, (frame.line or "").strip(), why)

"""Where a step makes the host wait for the device, which no graph can hold: found, with its line, by watching a step.

A watched step runs to its end: it is an ordinary training step, and every place is found in one go, not the first alone.
"""

import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_SYNCHRONIZES = "called a synchronizing CUDA operation"
"""How torch's sync debug mode words its warning (c10/cuda/CUDAFunctions.cpp)."""
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), str(Path(traceback.__file__).parent))
_READ_BY_HOST = {
    "aten::_local_scalar_dense": "a tensor's value is read by the host",
    "aten::nonzero": "the result's shape depends on values",
    "aten::masked_select": "the result's shape depends on values",
    "aten::_unique2": "the result's shape depends on values",
    "aten::unique_dim": "the result's shape depends on values",
    "aten::equal": "a comparison's answer is read by the host",
}
"""Operators after which a GPU's host has to wait. `aten::index` with a mask is another."""
_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__repr__, torch.Tensor.cpu}
"""What reads a tensor's memory below those."""


class Wait(NamedTuple):
    """One place. `line`: its source, without indentation; empty where the source cannot be read."""

    file: str
    number: int
    line: str
    why: str

    def __str__(self) -> str:
        shown = f"`{self.line}`: " if self.line else ""
        return f"{self.file}:{self.number}: {shown}{self.why}"


class NotCapturable(ValueError):
    """A step that no graph can hold. `waits`: the places that say why, where there are any."""

    def __init__(self, reason: str, waits: Sequence[Wait] = ()) -> None:
        super().__init__("; ".join([reason, *map(str, waits)]))
        self.waits = tuple(waits)


@contextmanager
def cuda_waits() -> Iterator[list[Wait]]:
    """The places inside at which torch waits for the GPU, autograd's thread included: those stand at the line of `backward()`.

    By `torch.cuda.set_sync_debug_mode`, which sees implicit waits; `torch.cuda.synchronize()` itself fails during the capture.
    """
    found: dict[Wait, None] = {}

    def show(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        if _SYNCHRONIZES in str(message):
            found[_here("the host waits for the GPU")] = None
        else:
            shown_before(message, category, filename, lineno, file, line)

    places: list[Wait] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{_SYNCHRONIZES}")
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        shown_before, warnings.showwarning = warnings.showwarning, show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            places += found


@contextmanager
def host_waits() -> Iterator[list[Wait]]:
    """The same of a step on a CPU: the places at which a GPU's host would wait."""
    watcher = HostWatcher()
    with watcher, reads_by_host(watcher):
        yield watcher.places


class HostWatcher(TorchDispatchMode):
    """`places`: those inside at which a GPU's host would wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: list[Wait] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if why := _why_the_host_waits(func, args):
            self.note(why)
        return func(*args, **(kwargs or {}))

    def note(self, why: str) -> None:
        """This place, once."""
        if (place := _here(why)) not in self.places:
            self.places.append(place)


class _Reads(TorchFunctionMode):
    def __init__(self, watcher: HostWatcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self._watcher.note("a tensor's value is read by the host")
        return func(*args, **(kwargs or {}))


def reads_by_host(watcher: HostWatcher) -> AbstractContextManager[Any]:
    """Inside, `watcher` notes what reads a tensor's memory without an operator of torch's: tolist(), numpy(), a tensor printed."""
    return _Reads(watcher)


def _why_the_host_waits(func: Any, args: Sequence[Any]) -> str | None:
    """Why a GPU's host would wait for this operator; None where it would not."""
    name = func._schema.name if hasattr(func, "_schema") else str(func)
    if name in ("aten::index", "aten::index_put", "aten::index_put_") and any(map(_is_mask, args[1])):
        if name != "aten::index" and args[2].numel() == 1 and len(args) < 4 and all(map(_is_mask, args[1])):
            return None  # `x[mask] = number`, which torch fills in place
        return "a mask chooses elements: the result's shape depends on values"
    return _READ_BY_HOST.get(name)


def place_of(error: BaseException) -> Wait:
    """The innermost line of the user's in an exception's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return _innermost(
        frames, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    )


def graphs_compiled() -> int:
    """How many graphs torch.compile has made so far in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters: Mapping[str, Mapping[str, int]] = dynamo.counters if dynamo else {}
    return counters["stats"]["unique_graphs"] if counters else 0


def compiles_nothing() -> AbstractContextManager[Any]:
    """Where torch.compile would compile inside, it raises instead."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("fail_on_recompile")
    return stance


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _here(why: str) -> Wait:
    return _innermost(traceback.extract_stack(), why)


def _innermost(frames: Sequence[traceback.FrameSummary], why: str) -> Wait:
    """The last frame that is neither torch's nor this package's; the last of all where every one is."""
    users = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS) and frame.filename[0] != "<"]
    frame = (users or list(frames))[-1]
    return Wait(frame.filename, frame.lineno or 0, (frame.line or "").strip(), why)

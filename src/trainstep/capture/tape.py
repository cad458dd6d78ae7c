"""A step on a CPU written down operator by operator, and run again on the same memory: what a CUDA graph is there.

It is as blind as a graph: numbers that Python worked out are what they were, Python is not asked again, inputs are read and results
written where they were. So whatever a graph would get wrong goes wrong on a laptop too, and in tests. Nothing is saved by it but
autograd's and Python's work. Refused: a compiled model, whose code torch's
dispatcher does not call. Not seen: what an extension of one's own computes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainstep.capture.cuda_graph import OnMark
from trainstep.capture.waits import NotCapturable, Wait, host_waits, place_of, why_the_host_waits

_MAKES_MEMORY = ("aten::empty", "aten::new_empty")
"""Operators that only make memory, which is there already when they would run again."""


class Tapes:
    """Tapes of a CPU; the interface is CudaGraphs'."""

    takes_step = True
    """Writing down runs the step."""

    def __init__(self) -> None:
        self._recording: _Recorder | None = None

    @contextmanager
    def eager(self) -> Iterator[None]:
        yield

    def watched(self) -> AbstractContextManager[list[Wait]]:
        return host_waits()

    def record(self, run: Callable[[], Any], on_mark: OnMark) -> tuple[Callable[[OnMark], None], Any]:
        """Run it once and write it down."""
        self._recording = _Recorder()
        try:
            with self._recording as recorder:
                outputs = run()
        finally:
            self._recording = None
        return recorder.run_again, outputs

    def mark(self, label: Any, on_mark: OnMark) -> None:
        assert self._recording is not None
        self._recording.entries.append(lambda on_mark: on_mark(label, None))
        on_mark(label, None)

    def forget(self) -> None:
        pass

    def pool_bytes(self) -> int:
        return 0


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Callable[[OnMark], None]] = []

    def run_again(self, on_mark: OnMark) -> None:
        with torch.no_grad():
            for entry in self.entries:
                entry(on_mark)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if why := why_the_host_waits(func, args):
            try:
                raise NotCapturable(f"a step cannot be captured: {why}")
            except NotCapturable as error:
                raise NotCapturable("a step cannot be captured", [place_of(error)._replace(why=why)]) from None
        results = func(*args, **kwargs)
        if not _only_makes_memory(func) and not _is_view(func):
            self.entries.append(_entry(func, args, kwargs, results))
        return results


def _entry(func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Any) -> Callable[[OnMark], None]:
    """The operator once more. What it makes new goes where its first results are; what it writes in place is there."""
    made = [leaf if _is_new(func, index) else None for index, leaf in enumerate(tree_leaves(results))]

    def run_again(_on_mark: OnMark) -> None:
        for mine, again in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
            if isinstance(mine, Tensor) and mine is not again:
                mine.copy_(again)

    return run_again


def _only_makes_memory(func: Any) -> bool:
    return hasattr(func, "_schema") and str(func._schema.name).startswith(_MAKES_MEMORY)


def _is_view(func: Any) -> bool:
    """Whether its results are other views of its arguments' memory, and nothing is written."""
    returns = func._schema.returns if hasattr(func, "_schema") else []
    return bool(returns) and all(each.alias_info and not each.alias_info.is_write for each in returns)


def _is_new(func: Any, index: int) -> bool:
    """Whether that result has memory of its own. A list of results counts as new: there is one schema for all of it."""
    returns = func._schema.returns if hasattr(func, "_schema") else []
    return index >= len(returns) or returns[index].alias_info is None

"""A step on a CPU written down operator by operator, and run again on the same memory: what a CUDA graph is there.

It is as blind as a graph: numbers that Python worked out are what they were, Python is not asked again, inputs are read and results
written where they were. So whatever a graph would get wrong goes wrong on a laptop too, and in tests. Nothing is saved by it but
autograd's and Python's work. Refused, as by a GPU's generator: random numbers drawn again from a state that was kept, as a
checkpoint does. Not seen: what a compiled model or an extension of one's own computes, whose code torch's dispatcher does not call.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from trainstep.capture.cuda_graph import OnMark
from trainstep.capture.waits import HostWatcher, Wait, host_waits, reads_by_host

_MAKES_MEMORY = ("aten::empty", "aten::new_empty")
"""Operators that only make memory, which is there already when they would run again."""


class Tapes:
    """Tapes of a CPU; the interface is CudaGraphs'."""

    takes_step = True
    """Writing down runs the step."""

    def __init__(self) -> None:
        self._recording: _Recorder | None = None
        self.refused: Sequence[Wait] = ()
        """The places of the last tape that a graph could not hold. Its step was taken all the same."""

    @contextmanager
    def eager(self) -> Iterator[None]:
        yield

    def watched(self) -> AbstractContextManager[list[Wait]]:
        return host_waits()

    def record(self, run: Callable[[], Any], on_mark: OnMark) -> tuple[Callable[[OnMark], None], Any]:
        """Run it once and write it down."""
        self._recording = _Recorder()
        try:
            with self._recording as recorder, reads_by_host(recorder), _unseen_by_torch(recorder):
                outputs = run()
            self.refused = recorder.places
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


class _Recorder(HostWatcher):
    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Callable[[OnMark], None]] = []
        self._random_state = torch.get_rng_state()

    def run_again(self, on_mark: OnMark) -> None:
        with torch._C._AutoDispatchBelowAutograd():
            for entry in self.entries:
                entry(on_mark)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if draws and not torch.equal(torch.get_rng_state(), self._random_state):
            self.note(
                "the state of the random numbers was set within the step (a checkpoint: preserve_rng_state=False)"
            )
        kept_args, kept_kwargs = tree_map(_alias, args), tree_map(_alias, kwargs)
        results = super().__torch_dispatch__(func, types, args, kwargs)
        if draws:
            self._random_state = torch.get_rng_state()
        if not _only_makes_memory(func) and not _is_view(func) and _namespace(func) != "profiler":
            self.entries.append(_entry(func, kept_args, kept_kwargs, results))
        return results


class _NoWork:
    """Where torch is built without messages."""

    wait: Any = None


@contextmanager
def _unseen_by_torch(recorder: _Recorder) -> Iterator[None]:
    """Inside, what torch's dispatcher hears nothing of, or too much, is on the tape as a graph would have it: memory that a storage
    gives away and takes again (FSDP's whole parameters), and nothing of what waiting for a message does on gloo."""
    resize = torch.UntypedStorage.resize_
    work: Any = torch._C._distributed_c10d.Work if torch.distributed.is_available() else _NoWork
    wait = work.wait

    def noted_resize(storage: torch.UntypedStorage, nbytes: int) -> None:
        resize(storage, nbytes)
        recorder.entries.append(lambda _on_mark: resize(storage, nbytes))

    def unseen_wait(*arguments: Any) -> Any:
        with _disable_current_modes():
            return wait(*arguments)

    torch.UntypedStorage.resize_ = noted_resize  # type: ignore[method-assign, assignment]
    work.wait = unseen_wait
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        work.wait = wait


def _entry(func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Any) -> Callable[[OnMark], None]:
    """The operator once more. What it makes new goes where its first results are; what it writes in place is there."""
    given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)} - {None}
    made = [
        _alias(leaf) if isinstance(leaf, Tensor) and _is_new(func, index) and _storage(leaf) not in given else None
        for index, leaf in enumerate(tree_leaves(results))
    ]

    sends = _namespace(func) == "c10d"
    grad_enabled = torch.is_grad_enabled()  # some operators ask: an LSTM keeps nothing for backward without

    def run_again(_on_mark: OnMark) -> None:
        with torch.set_grad_enabled(grad_enabled):
            for kept, again in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
                if sends and hasattr(again, "wait"):  # who waited for the message is not on the tape
                    again.wait()
                elif kept is not None and kept is not again:
                    kept.copy_(again)

    return run_again


def _alias(leaf: Any) -> Any:
    """The same memory in the shape that it has now: `squeeze_` and the like change a tensor, and a graph knows the memory alone."""
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.layout == torch.strided else leaf


def _storage(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def _namespace(func: Any) -> str:
    return str(func._schema.name).partition("::")[0] if hasattr(func, "_schema") else ""


def _only_makes_memory(func: Any) -> bool:
    return hasattr(func, "_schema") and str(func._schema.name).startswith(_MAKES_MEMORY)


def _is_view(func: Any) -> bool:
    """Whether its results are other views of its arguments' memory, and nothing is written."""
    if torch.Tag.inplace_view in getattr(func, "tags", ()):
        return True
    returns = func._schema.returns if hasattr(func, "_schema") else []
    return bool(returns) and all(each.alias_info and not each.alias_info.is_write for each in returns)


def _is_new(func: Any, index: int) -> bool:
    """Whether that result has memory of its own. A list of results counts as new: there is one schema for all of it."""
    returns = func._schema.returns if hasattr(func, "_schema") else []
    return index >= len(returns) or returns[index].alias_info is None

"""Records a step and runs it again: as a CUDA graph on a GPU, or as a tape of operators on a CPU.

[Note: a tape] A tape is as blind as a graph: numbers that Python computed keep their values, Python is not asked again, and
inputs are read and results written at the same addresses. So a step that a graph would get wrong also goes wrong on a
laptop and in tests. A tape saves only the work of autograd and Python. Unlike a graph of a GPU, which repeats them, it
refuses random numbers that are drawn again from a saved state, as a checkpoint draws them. It misses what a compiled model
or a user's extension computes, because torch's dispatcher does not call their code.

[Note: one stream] Autograd runs a backward node on the stream on which its forward ran, and accumulates a parameter's
gradient on the stream on which the accumulating node was made. If some of these were made on the default stream, backward
would wait for that stream inside the capture, which CUDA refuses (Megatron-LM#6021, vLLM#29207). So everything before a
capture runs on the capture's stream: `eager()`.

[Note: workspaces] cuBLAS has a workspace for each stream and thread, which the warm-ups made in ordinary memory, and whose address
a graph keeps. Whoever clears workspaces, as torch.compile's own graphs do around each of theirs, would free it, and launches
would write into memory that has another owner or none. So it is cleared before a pool's first capture: the capture then makes one
in the graphs' pool, whose memory stays as long as they do. Whoever clears it later gives it back to that pool, of which only a
later capture of the same step, for another shape, could take it for a result of its own.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from trainstep.capture.memset_nodes import Fills, driver, replace_memsets
from trainstep.capture.waits import HostWatcher, Wait, cuda_waits, host_waits, reads_by_host

_MAKES_MEMORY = ("aten::empty", "aten::new_empty")
"""Operators that only allocate memory; when the tape runs again, the memory is already there."""

OnMark = Callable[[Any, torch.cuda.Event | None], None]
"""Called for each mark of a step with its label, and with the event that a graph recorded there, or None if the step is
at this point now."""


class Tapes:
    """Records tapes on a CPU, with the same interface as CudaGraphs. [Note: a tape]"""

    takes_step = True
    """Recording runs the step."""

    def __init__(self) -> None:
        self._recording: _Recorder | None = None
        self.refused: Sequence[Wait] = ()
        """The places in the last tape that a graph could not hold. Its step was taken nevertheless."""

    @contextmanager
    def eager(self) -> Iterator[None]:
        yield

    def watched(self) -> AbstractContextManager[list[Wait]]:
        return host_waits()

    def record(self, run: Callable[[], Any], on_mark: OnMark) -> tuple[Callable[[OnMark], None], Any]:
        """Run `run` once and record it."""
        self._recording = _Recorder()
        try:
            with self._recording as recorder, reads_by_host(recorder), _patched_for_tape(recorder):
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

    def pool_bytes(self, *, unused: bool = False) -> int:
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
        if not _name(func).startswith((*_MAKES_MEMORY, "profiler::")) and not _is_view(func):
            self.entries.append(_entry(func, kept_args, kept_kwargs, results))
        return results


class _NoWork:
    """Stands for torch's class Work in a torch that is built without distributed."""

    wait: Any = None


@contextmanager
def _patched_for_tape(recorder: _Recorder) -> Iterator[None]:
    """Patch two functions of torch inside the block, so that the tape holds what a graph would hold.

    Resizing a storage, with which FSDP frees and allocates whole parameters, bypasses the dispatcher: record it. Waiting
    for a message on gloo runs operators that a graph does not have: hide them from the recorder.
    """
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
    """A tape's entry, which runs the operator again and copies new results to the memory of its first results."""
    argument_storages = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)} - {None}

    def has_own_memory(index: int, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and _is_new(func, index) and _storage(leaf) not in argument_storages

    first_results = [
        _alias(leaf) if has_own_memory(index, leaf) else None for index, leaf in enumerate(tree_leaves(results))
    ]
    sizes = [_storage_bytes(first) for first in first_results]
    sends = _name(func).startswith("c10d::")
    grad_enabled = torch.is_grad_enabled()  # some operators depend on it: an LSTM keeps nothing for backward without it

    def run_again(_on_mark: OnMark) -> None:
        with torch.set_grad_enabled(grad_enabled):
            new_results = tree_leaves(func(*args, **kwargs))
            for first, nbytes, result in zip(first_results, sizes, new_results, strict=True):
                if sends and hasattr(result, "wait"):  # the step's own wait for the message is not on the tape
                    result.wait()
                elif first is not None and first is not result:
                    if _storage_bytes(first) < nbytes:  # the step has freed it before its end
                        first.untyped_storage().resize_(nbytes)
                    first.copy_(result)

    return run_again


def _alias(leaf: Any) -> Any:
    """An alias of the tensor's memory with the current shape, because `squeeze_` and the like may change the tensor's shape."""
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.layout == torch.strided else leaf


def _storage(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def _storage_bytes(tensor: Tensor | None) -> int:
    return tensor.untyped_storage().nbytes() if tensor is not None and tensor.layout == torch.strided else 0


def _name(func: Any) -> str:
    return str(func._schema.name) if hasattr(func, "_schema") else ""


def _returns(func: Any) -> Sequence[Any]:
    return func._schema.returns if hasattr(func, "_schema") else ()


def _is_view(func: Any) -> bool:
    """Whether the results are views of the arguments' memory, and nothing is written."""
    if torch.Tag.inplace_view in getattr(func, "tags", ()):
        return True
    returns = _returns(func)
    return bool(returns) and all(value.alias_info and not value.alias_info.is_write for value in returns)


def _is_new(func: Any, index: int) -> bool:
    """Whether the result with this index has memory of its own, by the operator's schema."""
    returns = _returns(func)
    # A list of results has one schema for all of them, and counts as new.
    return index >= len(returns) or returns[index].alias_info is None


class CudaGraphs:
    """Records graphs on one device that share one pool of memory.

    Each graph has its inputs, its outputs and the gradients that it leaves to itself. Everything else in the pool is free
    between launches, and the next launch of any graph may use it.
    """

    takes_step = False
    """A capture only records."""
    refused: Sequence[Wait] = ()
    """Always empty: a capture raises an error for what no graph can hold."""

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator] = ()) -> None:
        self._device = device
        self._generators = generators
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._has_workspaces = False
        self._marks: list[tuple[Any, torch.cuda.Event]] = []

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run a step outside a graph: on the capture's stream, in order with the current stream. [Note: one stream]"""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # after a failed step, too: its running kernels write into weights and gradients
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def watched(self) -> AbstractContextManager[list[Wait]]:
        """Collect the places at which the host waits inside the block."""
        return cuda_waits()

    def record(self, run: Callable[[], Any], on_mark: OnMark) -> tuple[Callable[[OnMark], None], Any]:
        """Capture `run` without running it. Returns the launch, and the outputs, which each launch overwrites.

        An exception of `run` is raised unchanged, and the current stream is restored.
        """
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # so that it can be edited before it is instantiated
        for generator in self._generators:
            graph.register_generator_state(generator)
        gc.collect()
        torch.cuda.synchronize(self._device)
        if not self._has_workspaces:
            torch._C._cuda_clearCublasWorkspaces()  # [Note: workspaces]
            self._has_workspaces = True
        torch.cuda.empty_cache()  # the graph cannot use the memory that earlier steps left cached on this stream
        self._marks = []
        gc_was_enabled = gc.isenabled()
        gc.disable()  # a collection may free events and graphs, which breaks a capture
        try:
            outputs = self._capture(graph, run)
        finally:
            if gc_was_enabled:
                gc.enable()
        marks = tuple(self._marks)

        def launch(on_mark: OnMark) -> None:
            graph.replay()
            for label, event in marks:
                on_mark(label, event)

        return launch, outputs

    def mark(self, label: Any, on_mark: OnMark) -> None:
        """Capture an event that each launch records at this point."""
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self._marks.append((label, event))

    def forget(self) -> None:
        """Give later graphs a new pool; the caller drops all earlier graphs."""
        torch.cuda.synchronize(self._device)
        # A pool without graphs takes no new graph while a gradient still lies in it.
        self._pool = torch.cuda.graph_pool_handle()
        self._has_workspaces = False

    def pool_bytes(self, *, unused: bool = False) -> int:
        """Bytes of the device in the graphs' pool; with `unused`, those of them that no tensor has now."""
        segments = [
            segment
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(self._pool)
        ]
        return sum(segment["total_size"] - (segment["allocated_size"] if unused else 0) for segment in segments)

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Callable[[], Any]) -> Any:
        # Not with torch.cuda.graph, which after a failed capture leaves the capture's stream current. `thread_local`,
        # because NCCL's watchdog threads may query events meanwhile.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            except BaseException:
                with suppress(RuntimeError):  # the first error has broken the capture, and is the one to raise
                    graph.capture_end()
                raise
            graph.capture_end()
            graph_driver = driver()
            if graph_driver is not None:
                replace_memsets(graph.raw_cuda_graph(), graph_driver, Fills(graph_driver))
        graph.instantiate()
        return outputs

"""A CUDA graph of a step: the stream it is warmed up and captured on, its memory, and its launch.

[Note: one stream] Autograd runs a node of backward on the stream that its forward ran on, and what gathers a parameter's gradient
on the stream on which it was made. Were some of it made on the default stream, backward would wait for that stream inside the
capture, which CUDA refuses (Megatron-LM#6021, vLLM#29207). So whatever comes before a capture runs on its stream: `eager()`.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from trainstep.capture.waits import Wait, cuda_waits

OnMark = Callable[[Any, torch.cuda.Event | None], None]
"""Called for each mark of a step: with its label, and the event that a graph recorded there or None where the step is there now."""


class CudaGraphs:
    """Graphs of one device that share one pool of memory. Each has its inputs, its outputs and gradients that it leaves to itself;
    all else in the pool is free between launches, and the next launch of any graph may use it."""

    takes_step = False
    """A capture only writes down."""
    refused: Sequence[Wait] = ()
    """What no graph can hold is an error of the capture."""

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator] = ()) -> None:
        self._device = device
        self._generators = generators
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._marks: list[tuple[Any, torch.cuda.Event]] = []

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Where a step runs that is not in a graph: the capture's stream, in order with the current one."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # of a step that failed, too: what it left running writes into weights and gradients
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def watched(self) -> AbstractContextManager[list[Wait]]:
        """The places at which the host waits inside."""
        return cuda_waits()

    def record(self, run: Callable[[], Any], on_mark: OnMark) -> tuple[Callable[[OnMark], None], Any]:
        """Capture `run` without running it: its launch, and what it returned, which each launch writes anew.

        Whatever `run` raises comes out as it is, and the stream that was current is current again.
        """
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what the steps before kept cached on this stream, the graph cannot use
        self._marks = []
        collecting = gc.isenabled()
        gc.disable()  # a collection may free events and graphs, which a capture does not survive
        try:
            outputs = self._capture(graph, run)
        finally:
            if collecting:
                gc.enable()
        marks = tuple(self._marks)

        def launch(on_mark: OnMark) -> None:
            graph.replay()
            for label, event in marks:
                on_mark(label, event)

        return launch, outputs

    def mark(self, label: Any, on_mark: OnMark) -> None:
        """While a step is captured: an event that each launch records here."""
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self._marks.append((label, event))

    def forget(self) -> None:
        """The graphs made so far are dropped once this returns: those to come have memory of their own, for a pool without graphs
        takes no new ones while a gradient still lies in it."""
        torch.cuda.synchronize(self._device)
        self._pool = torch.cuda.graph_pool_handle()

    def pool_bytes(self) -> int:
        """What the graphs' memory holds of the device."""
        segments = torch.cuda.memory_snapshot()
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == tuple(self._pool))

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Callable[[], Any]) -> Any:
        """Not torch.cuda.graph: where a capture fails, that leaves the capture's stream the current one.

        `thread_local`: threads of NCCL's watchdog may ask for events meanwhile.
        """
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            except BaseException:
                with suppress(RuntimeError):  # of a capture that the error before has broken: that one says why
                    graph.capture_end()
                raise
            graph.capture_end()
        return outputs

"""The capture of a CUDA graph, tested without a GPU: streams, the order of calls, and the state after a failure."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from trainstep.capture import tape
from trainstep.capture.tape import CudaGraphs
from trainstep.capture.waits import cuda_waits


class FakeCuda:
    """A stand-in for torch.cuda that logs its calls in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.streams = ["default"]
        self.sync_debug_mode: Any = 0
        self.broken = False
        replaced = {
            "Stream": lambda _device: FakeStream("capture", self),
            "current_stream": lambda _device=None: FakeStream(self.streams[-1], self),
            "stream": self.stream,
            "CUDAGraph": lambda keep_graph: FakeGraph(self),
            "Event": lambda **options: FakeEvent(self, options),
            "graph_pool_handle": lambda: (0, len(self.calls)),
            "synchronize": lambda _device=None: self.calls.append("synchronize"),
            "empty_cache": lambda: self.calls.append("empty_cache"),
            "get_sync_debug_mode": lambda: self.sync_debug_mode,
            "set_sync_debug_mode": self.set_sync_debug_mode,
        }
        monkeypatch.setattr(tape, "driver", lambda: None)
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        clear = "_cuda_clearCublasWorkspaces"  # which a torch without CUDA does not have
        monkeypatch.setattr(torch._C, clear, lambda: self.calls.append("clear workspaces"), raising=False)

    def set_sync_debug_mode(self, mode: Any) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        self.sync_debug_mode = mode

    @contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        self.streams.append(stream.name)
        try:
            yield
        finally:
            self.streams.pop()


class FakeStream:
    def __init__(self, name: str, cuda: FakeCuda) -> None:
        self.name, self._cuda = name, cuda

    def wait_stream(self, other: "FakeStream") -> None:
        self._cuda.calls.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        self._cuda.calls.append(f"begin on {self._cuda.streams[-1]}, {capture_error_mode}")

    def capture_end(self) -> None:
        self._cuda.calls.append("end")
        if self._cuda.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def register_generator_state(self, generator: Any) -> None:
        self._cuda.calls.append(f"generator {generator}")

    def instantiate(self) -> None:
        self._cuda.calls.append("instantiate")

    def replay(self) -> None:
        self._cuda.calls.append("launch")


class FakeEvent:
    def __init__(self, cuda: FakeCuda, options: dict[str, bool]) -> None:
        assert options == {"enable_timing": True, "external": True}
        self._cuda = cuda

    def record(self) -> None:
        self._cuda.calls.append("event")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_capture_and_its_launches_run_in_order(cuda: FakeCuda):
    graphs = CudaGraphs(torch.device("cuda"), generators=["mine"])  # type: ignore[list-item]
    marks: list[Any] = []

    def run() -> str:
        cuda.calls.append(f"run on {cuda.streams[-1]}")
        graphs.mark("forward", lambda *_: pytest.fail("it runs later"))
        return "loss"

    launch, outputs = graphs.record(run, lambda *_: None)
    assert outputs == "loss"
    launch(lambda label, event: marks.append(label))
    launch(lambda label, event: marks.append(label))
    assert cuda.calls == [
        *("generator mine", "synchronize", "clear workspaces", "empty_cache"),
        *("begin on capture, thread_local", "run on capture", "event", "end", "instantiate", "launch", "launch"),
    ]
    assert marks == ["forward", "forward"]


def test_steps_that_are_not_captured_run_on_the_captures_stream(cuda: FakeCuda):
    with CudaGraphs(torch.device("cuda")).eager():
        assert cuda.streams[-1] == "capture"
    assert cuda.calls == ["capture waits for default", "default waits for capture"]


def test_work_of_a_failed_step_is_waited_for(cuda: FakeCuda):
    with pytest.raises(KeyError), CudaGraphs(torch.device("cuda")).eager():
        raise KeyError
    assert cuda.calls == ["capture waits for default", "default waits for capture"]


def test_a_failed_capture_raises_its_reason_and_ends(cuda: FakeCuda):
    cuda.broken = True

    def run() -> None:
        raise ValueError("the reason")

    with pytest.raises(ValueError, match="the reason"):
        CudaGraphs(torch.device("cuda")).record(run, lambda *_: None)
    assert cuda.calls[-1] == "end"


def test_an_error_at_the_end_of_a_capture_is_raised(cuda: FakeCuda):
    cuda.broken = True
    with pytest.raises(RuntimeError, match="previous error during capture"):
        CudaGraphs(torch.device("cuda")).record(lambda: None, lambda *_: None)


def test_forgotten_graphs_leave_their_pool(cuda: FakeCuda):
    graphs = CudaGraphs(torch.device("cuda"))
    before = graphs._pool
    graphs.forget()
    assert graphs._pool != before
    assert cuda.calls == ["synchronize"]


def test_workspaces_are_made_anew_for_each_pool_and_not_for_each_graph(cuda: FakeCuda):
    graphs = CudaGraphs(torch.device("cuda"))
    cleared = []
    for _ in range(2):
        for _ in range(2):
            graphs.record(lambda: None, lambda *_: None)
            cleared.append(cuda.calls.count("clear workspaces"))
        graphs.forget()
    assert cleared == [1, 1, 2, 2]


@pytest.mark.gpu
def test_a_launch_survives_that_somebody_clears_the_workspaces_of_cublas():
    graphs = CudaGraphs(torch.device("cuda"))
    # Few rows and columns and a long sum: cuBLAS splits it, and keeps the parts in its workspace
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((64, 65_536), (65_536, 64)))
    with graphs.eager():
        expected = a @ b
    launch, result = graphs.record(lambda: a @ b, lambda *_: None)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.zeros(2**20, device="cuda") for _ in range(64)]  # they take what was given back
    for _ in range(3):
        launch(lambda *_: None)
    torch.cuda.synchronize()
    torch.testing.assert_close(result, expected, rtol=2**-7, atol=0.5)
    assert not any(bool(other.any()) for other in others)


def wait_twice(cuda: FakeCuda) -> None:
    assert cuda.sync_debug_mode == "warn"
    for _ in range(2):
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)  # here
    warnings.warn("something else", stacklevel=1)


def test_waits_of_the_host_have_their_line(cuda: FakeCuda):
    cuda.sync_debug_mode = "default"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with cuda_waits() as waits:
            wait_twice(cuda)
    assert [str(warning.message) for warning in warned] == ["something else"]
    assert cuda.sync_debug_mode == "default"
    assert [wait.file for wait in waits] == [__file__]
    assert waits[0].line.endswith("# here")
    assert waits[0].why == "the host waits for the GPU"

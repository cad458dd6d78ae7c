"""Times of calls on a pretend GPU, whose clock is the work done so far in milliseconds, and on a CPU."""

import pytest
import torch

from trainstep.measure.step.clock import time_alone_s, times_in_a_row_s


class Gpu:
    """A pretend GPU; `log` has its events in order, a call as the milliseconds that it takes."""

    def __init__(self) -> None:
        self.log: list[str | float] = []

    def work(self, ms: float) -> str:
        self.log.append(ms)
        return "result"

    @property
    def now_ms(self) -> float:
        return sum(entry for entry in self.log if isinstance(entry, float))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = gpu.now_ms
            gpu.log.append("event")

        def synchronize(self) -> None:
            gpu.log.append("wait")

        def elapsed_time(self, end: "Event") -> float:
            assert gpu.log[-1] in ("idle", "wait")
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: gpu.log.append("idle"))
    return gpu


def test_calls_in_a_row_are_timed_after_an_untimed_one(gpu: Gpu):
    calls = [lambda ms=ms: gpu.work(ms) for ms in (8.0, 2.0, 4.0)]
    assert times_in_a_row_s(calls, "cuda") == [0.008, 0.002, 0.004]
    assert gpu.log == [8.0, "event", 8.0, "event", 2.0, "event", 4.0, "event", "idle"], (
        "the first call runs once untimed before"
    )


def test_a_call_alone_begins_with_the_device_idle(gpu: Gpu):
    gpu.work(50.0)
    device_s, host_s = time_alone_s(lambda: gpu.work(3.0), "cuda")
    assert device_s == 0.003
    assert host_s > 0
    assert gpu.log == [50.0, "idle", "event", 3.0, "event", "wait"]


def test_on_a_cpu_the_host_waits_for_the_work():
    calls: list[int] = []
    device_s, host_s = time_alone_s(lambda: calls.append(1), "cpu")
    assert device_s == host_s > 0
    assert len(times_in_a_row_s([lambda: calls.append(1)] * 3, "cpu")) == 3
    assert len(calls) == 4

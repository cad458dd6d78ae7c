"""Clocks on pretended time: the seconds of each phase, and where each clock synchronises."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainstep.config.run import Phase
from trainstep.measure.step import clock
from trainstep.measure.step.clock import Clock, EventClock, HostClock, clock_for

FORWARD, BACKWARD, GRAD_SYNC, OPTIMIZER = Phase


class Time:
    """A host clock and a device clock that a test moves; `log` has the calls made to them."""

    def __init__(self) -> None:
        self.host_s = 100.0
        self.device_s = 1000.0
        self.log: list[str] = []

    def perf_counter(self) -> float:
        return self.host_s

    def synchronize(self) -> None:
        self.log.append("synchronize")
        self.host_s += 0.5  # waiting takes time on the host

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        self.log.append("event made")
        return Event(self)

    def run(self, host_s: float, device_s: float = 0.0) -> None:
        self.host_s += host_s
        self.device_s += device_s


class Event:
    def __init__(self, time: Time) -> None:
        self.time = time

    def record(self) -> None:
        self.at_s = self.time.device_s
        self.time.log.append("record")

    def elapsed_time(self, end: "Event") -> float:
        assert self.time.log[-1] == "synchronize", "an event is read before the device has reached it"
        return (end.at_s - self.at_s) * 1e3


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=fake.perf_counter))
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    return fake


def run_steps(clock: Clock, time: Time, steps: list[list[tuple[Phase, float]]], *, device: bool = False) -> Any:
    """Run a window of these steps, where each phase takes its seconds on the device or the host."""
    clock.start_window()
    for step in steps:
        clock.start_step()
        for phase, seconds in step:
            time.run(*((0.001, seconds) if device else (seconds,)))
            clock.mark(phase)
    return clock.stop_window()


def test_the_host_clock_times_each_phase(time: Time):
    window = run_steps(HostClock(), time, [[(FORWARD, 1.0), (BACKWARD, 2.0), (OPTIMIZER, 4.0)]])
    assert window.step_s == 7.0
    assert window.phases == ({FORWARD: 1.0, BACKWARD: 2.0, OPTIMIZER: 4.0},)
    assert window.enqueue_s is None


def test_micro_batches_add_up_by_phase(time: Time):
    step = [(FORWARD, 1.0), (BACKWARD, 2.0), (FORWARD, 3.0), (BACKWARD, 5.0), (GRAD_SYNC, 0.25), (OPTIMIZER, 7.0)]
    window = run_steps(HostClock(), time, [step])
    assert window.phases == ({FORWARD: 4.0, BACKWARD: 7.0, GRAD_SYNC: 0.25, OPTIMIZER: 7.0},)
    assert sum(window.phases[0].values()) == window.step_s == 18.25


def test_a_window_has_the_phases_of_each_step(time: Time):
    window = run_steps(HostClock(), time, [[(FORWARD, float(seconds))] for seconds in (1, 2, 6)])
    assert window.phases == ({FORWARD: 1.0}, {FORWARD: 2.0}, {FORWARD: 6.0})
    assert window.step_s == 3.0


def test_time_between_steps_belongs_to_no_phase(time: Time):
    clock = HostClock()
    clock.start_window()
    for _ in range(2):
        clock.start_step()
        time.run(1.0)
        clock.mark(FORWARD)
        time.run(10.0)
    window = clock.stop_window()
    assert window.phases == ({FORWARD: 1.0}, {FORWARD: 1.0})
    assert window.step_s == 11.0


def test_a_graphs_first_work_begins_its_step_anew(time: Time):
    """The host checks and launches a graph for 10 s, in which the device has nothing to do."""
    for each_clock, host, device in ((HostClock(), True, False), (EventClock(), True, True)):
        each_clock.start_window()
        each_clock.start_step()
        time.run(10.0 * host, 10.0 * device)
        each_clock.mark(None)
        time.run(1.0 * host, 1.0 * device)
        each_clock.mark(FORWARD)
        window = each_clock.stop_window()
        assert window.phases == ({FORWARD: 1.0},)
        assert window.step_s >= 11.0


def test_a_window_of_unmarked_steps_has_all_of_them(time: Time):
    """A graph's phases are not marked in windows of several steps."""
    for each_clock in (HostClock(), EventClock()):
        each_clock.start_window()
        for _ in range(4):
            each_clock.start_step()
            time.run(1.0, 1.0)
        window = each_clock.stop_window()
        assert window.step_s == pytest.approx(1.0, abs=0.2)
        assert len(window.phases) == 4


def test_windows_do_not_leak_into_each_other(time: Time):
    for each_clock in (HostClock(), EventClock()):
        for seconds in (1.0, 2.0):
            window = run_steps(each_clock, time, [[(FORWARD, seconds)]], device=isinstance(each_clock, EventClock))
            assert window.phases == ({FORWARD: pytest.approx(seconds)},)


def test_an_empty_window_has_no_phases(time: Time):
    for each_clock in (HostClock(), EventClock()):
        each_clock.start_window()
        assert each_clock.stop_window().phases == ()


def test_host_clock_synchronises_at_each_edge(time: Time):
    window = run_steps(HostClock(time.synchronize), time, [[(FORWARD, 1.0), (OPTIMIZER, 2.0)]])
    assert time.log == ["synchronize"] * 4
    assert window.phases == ({FORWARD: 1.5, OPTIMIZER: 2.5},), "the wait for a phase's work is that phase's"
    assert window.step_s == 4.5


def test_event_clock_reads_the_devices_time(time: Time):
    steps = [[(FORWARD, 1.0), (BACKWARD, 2.0), (FORWARD, 4.0)], [(FORWARD, 8.0), (BACKWARD, 16.0)]]
    window = run_steps(EventClock(), time, steps, device=True)
    assert window.phases == ({FORWARD: 5.0, BACKWARD: 2.0}, {FORWARD: 8.0, BACKWARD: 16.0})
    assert window.step_s == pytest.approx((5 * 0.001 + 0.5) / 2), "the host's clock, the wait at the end included"
    assert window.enqueue_s == pytest.approx(5 * 0.001 / 2), "without that wait"


def test_event_clock_synchronises_at_a_windows_ends_only(time: Time):
    clock = EventClock()
    run_steps(clock, time, [[(FORWARD, 1.0), (BACKWARD, 1.0)]] * 3, device=True)
    assert [entry for entry in time.log if entry != "event made"] == ["synchronize", *["record"] * 9, "synchronize"]
    time.log.clear()
    run_steps(clock, time, [[(FORWARD, 1.0), (BACKWARD, 1.0)]] * 3, device=True)
    assert "event made" not in time.log, "events are used again"


def test_only_unsynchronised_gpu_steps_have_the_event_clock():
    assert isinstance(clock_for(torch.device("cpu"), "step"), HostClock)
    assert isinstance(clock_for(torch.device("cpu"), "phase"), HostClock)
    assert isinstance(clock_for(torch.device("cuda"), "phase"), HostClock)
    for sync in ("step", 5):
        assert isinstance(clock_for(torch.device("cuda"), sync), EventClock)


def test_on_a_gpu_phases_synchronise_by_torch(monkeypatch: pytest.MonkeyPatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(1))
    clock = clock_for(torch.device("cuda"), "phase")
    clock.start_window()
    clock.start_step()
    clock.mark(FORWARD)
    assert len(calls) == 2


@pytest.mark.gpu
def test_event_clock_and_host_clock_agree():
    """Both clocks time the same matmuls, and a step is no shorter than its phases."""
    matrix = torch.randn(4096, 4096, device="cuda")
    windows = {}
    for name, each_clock in (("events", EventClock()), ("host", HostClock(torch.cuda.synchronize))):
        for _ in range(3):
            each_clock.start_window()
            each_clock.start_step()
            for _ in range(20):
                matrix @ matrix
            each_clock.mark(FORWARD)
            windows[name] = each_clock.stop_window()
    device_s, host_s = (windows[name].phases[0][FORWARD] for name in ("events", "host"))
    assert device_s == pytest.approx(host_s, rel=0.2)
    assert device_s <= windows["events"].step_s
    assert windows["events"].enqueue_s < windows["events"].step_s

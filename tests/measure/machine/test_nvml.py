"""Driver and GPU readings from a fake NVML: units, words, CUDA's rule of visible devices, and None for a missing reading."""

import pytest

from fake_nvml import FakeNvml, NVMLError, install
from trainstep.measure.machine.nvml import Driver, GpuState, read_driver


def test_readings_in_si_units(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, FakeNvml("NVIDIA H200"))
    state = GpuState(0)
    assert state.sm_clock_hz() == pytest.approx(1.98e9)
    assert state.sm_clock_max_hz() == pytest.approx(2.1e9)
    assert state.power_w() == pytest.approx(412.5)
    assert state.temperature_c() == 61


def test_processes_on_a_gpu_are_none_where_nvml_does_not_tell(monkeypatch: pytest.MonkeyPatch):
    fake = FakeNvml("NVIDIA H200")
    install(monkeypatch, fake)
    assert GpuState(0).processes() == ()
    fake.pids = [7, 11]
    assert GpuState(0).processes() == (7, 11)
    fake.unsupported = {"nvmlDeviceGetComputeRunningProcesses"}
    assert GpuState(0).processes() is None


def test_the_clock_costs_one_call(monkeypatch: pytest.MonkeyPatch):
    fake = FakeNvml("NVIDIA H200")
    install(monkeypatch, fake)
    state = GpuState(0)
    fake.calls.clear()
    for _ in range(3):
        state.sm_clock_hz()
    assert fake.calls == ["nvmlDeviceGetClockInfo"] * 3


@pytest.mark.parametrize(
    ("bits", "words"),
    [(0, ""), (0x1, ""), (0x4, "power cap"), (0x1 | 0x4 | 0x40, "power cap, hardware thermal"), (0x8000, "")],
)
def test_throttle_reasons_are_words_and_idling_is_none(monkeypatch: pytest.MonkeyPatch, bits: int, words: str):
    fake = FakeNvml("NVIDIA H200")
    fake.reasons = bits
    install(monkeypatch, fake)
    assert GpuState(0).throttle_reasons() == words


def test_throttle_reasons_by_their_older_name(monkeypatch: pytest.MonkeyPatch):
    fake = FakeNvml("NVIDIA H200")
    fake.unsupported = {"nvmlDeviceGetCurrentClocksEventReasons"}
    fake.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x4  # type: ignore[attr-defined]
    install(monkeypatch, fake)
    assert GpuState(0).throttle_reasons() == "power cap"


def test_a_reading_that_the_gpu_does_not_report_is_none(monkeypatch: pytest.MonkeyPatch):
    fake = FakeNvml("NVIDIA H200")
    install(monkeypatch, fake)
    state = GpuState(0)
    fake.unsupported = {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksEventReasons"}
    assert state.power_w() is None
    assert state.throttle_reasons() is None  # the older name is missing altogether
    assert state.sm_clock_hz() == pytest.approx(1.98e9)


@pytest.mark.parametrize("uuid", ["GPU-1aaa-bbb", "1aaa-bbb"])
def test_a_gpu_is_found_by_uuid(monkeypatch: pytest.MonkeyPatch, uuid: str):
    install(monkeypatch, FakeNvml("one", "two"))
    assert GpuState(uuid).temperature_c() == 62


@pytest.mark.parametrize("device", [7, "no-such-uuid"])
def test_an_absent_gpu_has_no_readings(monkeypatch: pytest.MonkeyPatch, device: int | str):
    install(monkeypatch, FakeNvml("NVIDIA H200"))
    assert GpuState(device).sm_clock_hz() is None


@pytest.mark.parametrize("fake", [None, FakeNvml(init_error=NVMLError(12)), FakeNvml(init_error=NVMLError(9))])
def test_a_missing_library_or_driver_is_not_an_error(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml | None):
    install(monkeypatch, fake)
    assert read_driver() == Driver()
    assert GpuState(0).sm_clock_hz() is None
    assert GpuState(0).throttle_reasons() is None


def test_a_driver_that_does_not_answer_says_why(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, FakeNvml("NVIDIA H200", init_error=NVMLError(18, "Driver/library version mismatch")))
    assert read_driver() == Driver(error="Driver/library version mismatch")


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["a", "b", "c"]),
        ("", []),
        ("1", ["b"]),
        ("2,0", ["c", "a"]),
        (" 2 , 0 ", ["c", "a"]),
        ("0,9,1", ["a"]),
        ("-1", []),
        ("GPU-1aaa", ["b"]),
        ("GPU-2aaa-bbb,0", ["c", "a"]),
        ("NoDevFiles", []),
        ("MIG-unknown", []),
    ],
)
def test_visible_devices_follow_cuda(monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]):
    install(monkeypatch, FakeNvml("a", "b", "c"))
    assert [gpu.name for gpu in read_driver(visible).gpus] == names


def test_the_driver_has_versions_and_gpus(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, FakeNvml("a", cuda=13020))
    driver = read_driver()
    assert (driver.version, driver.cuda, driver.error) == ("570.86.15", (13, 2), None)
    assert driver.gpus[0].memory_bytes == 2**30

"""A simulated pynvml for GPUs that do not exist, which stands in sys.modules during a test."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest


class NVMLError(Exception):
    """An exception with a number, as that of pynvml."""

    def __init__(self, value: int, text: str = "Not Supported") -> None:
        super().__init__(text)
        self.value = value


class FakeNvml:
    """The functions of pynvml that trainstep calls, with a list of the calls. None stands for a function that the library lacks."""

    NVMLError = NVMLError
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_DRIVER_NOT_LOADED = 9

    def __init__(self, *names: str, cuda: int = 12080, init_error: NVMLError | None = None) -> None:
        self.names = names
        self.cuda = cuda
        self.init_error = init_error
        self.unsupported: set[str] = set()
        self.calls: list[str] = []
        self.reasons = 0
        self.pids: list[int] = []
        self.busy_percents = [0]

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("nvml"):
            self.calls.append(name)
            if name in self.unsupported:
                raise NVMLError(3)
        return value

    def nvmlInit(self) -> None:
        if self.init_error:
            raise self.init_error

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.names):
            raise NVMLError(2, "Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        for index in range(len(self.names)):
            if uuid == f"GPU-{index}aaa-bbb":
                return index
        raise NVMLError(6, "Not Found")

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}aaa-bbb"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=(handle + 1) * 2**30)

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return {1: 1980}[clock]

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:
        return {1: 2100}[clock]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 412_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return {0: 61 + handle}[sensor]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        """The next reading; the last one is repeated."""
        return SimpleNamespace(gpu=self.busy_percents.pop(0) if len(self.busy_percents) > 1 else self.busy_percents[0])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self.reasons


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml | None) -> None:
    """Make `import pynvml` return the simulated library, or fail if it is None."""
    monkeypatch.setitem(sys.modules, "pynvml", fake)

"""Reads through NVML which GPUs there are, and the clock, power and temperature of a GPU while it works.

NVML needs neither torch nor a CUDA context. Without its library or a driver, everything here returns None or nothing.
It stays initialised until the process ends, because opening it can take longer than a training step.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_SM_CLOCK = 1
_TEMPERATURE_OF_GPU = 0

_REASONS = {
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal",
    0x040: "hardware thermal",
    0x080: "power brake",
    0x100: "display clocks",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that lower the clock; the idle bit (1) is no throttling."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that the driver shows."""

    name: str
    uuid: str
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The driver and the GPUs that a CUDA process may use. `cuda`: the newest CUDA it supports, (major, minor)."""

    version: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    error: str | None = None
    """Why an installed driver does not answer, for example a version mismatch after an update."""


def read_driver(visible_devices: str | None = None) -> Driver:
    """The driver with the visible GPUs, in the order of `visible_devices`, the value of CUDA_VISIBLE_DEVICES (None: all)."""
    nvml, error = _open()
    if nvml is None:
        return Driver(error=error)
    count = _ask(nvml, "nvmlDeviceGetCount") or 0
    handles = [_ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(count)]
    handles = [handle for handle in handles if handle is not None]
    if visible_devices is not None:
        handles = _visible(nvml, handles, visible_devices)
    cuda = _ask(nvml, "nvmlSystemGetCudaDriverVersion")
    return Driver(
        version=_text(_ask(nvml, "nvmlSystemGetDriverVersion")) or None,
        cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        gpus=tuple(_gpu(nvml, handle) for handle in handles),
    )


class GpuState:
    """Readings of one GPU, named by NVML index or by UUID (with or without `GPU-`); None for what cannot be read.

    A UUID is safer than an index, because CUDA may number GPUs in another order than the driver. Read while the GPU
    works: clocks and power fall within milliseconds after its last kernel.
    """

    def __init__(self, device: int | str = 0) -> None:
        nvml, _ = _open()
        self._nvml = nvml
        self._handle = None if nvml is None else _handle(nvml, device)

    def sm_clock_hz(self) -> float | None:
        """The current SM clock; one call into the driver, cheap enough to read after every step."""
        return _scaled(self._read("nvmlDeviceGetClockInfo", _SM_CLOCK), 1e6)

    def sm_clock_max_hz(self) -> float | None:
        """The highest SM clock to which the GPU can be set."""
        return _scaled(self._read("nvmlDeviceGetMaxClockInfo", _SM_CLOCK), 1e6)

    def power_w(self) -> float | None:
        """Board power; on recent GPUs the mean over the last second."""
        return _scaled(self._read("nvmlDeviceGetPowerUsage"), 1e-3)

    def temperature_c(self) -> float | None:
        """Core temperature."""
        return _scaled(self._read("nvmlDeviceGetTemperature", _TEMPERATURE_OF_GPU), 1.0)

    def throttle_reasons(self) -> str | None:
        """The current reasons for a lowered clock, in words separated by commas; empty if there are none."""
        bits = self._read("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # drivers before 535 have the other name
            bits = self._read("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if bits is None else ", ".join(word for bit, word in _REASONS.items() if bits & bit)

    def utilisation(self) -> float | None:
        """The share of the last moments, up to a second, in which a kernel ran."""
        rates = self._read("nvmlDeviceGetUtilizationRates")
        return None if rates is None else float(rates.gpu) / 100

    def processes(self) -> tuple[int, ...] | None:
        """Numbers of the processes with a context on the GPU; inside a container these are the host's numbers."""
        processes = self._read("nvmlDeviceGetComputeRunningProcesses")
        return None if processes is None else tuple(int(process.pid) for process in processes)

    def process_shares(self, since_s: float) -> dict[int, float]:
        """Process -> its mean share of the multiprocessors since that time.time(); empty if the driver does not tell."""
        samples = self._read("nvmlDeviceGetProcessUtilization", int(since_s * 1e6)) or ()
        shares: dict[int, list[float]] = {}
        for sample in samples:
            shares.setdefault(int(sample.pid), []).append(float(sample.smUtil) / 100)
        return {pid: sum(values) / len(values) for pid, values in shares.items()}

    def _read(self, function: str, *arguments: Any) -> Any:
        if self._handle is None:
            return None
        return _ask(self._nvml, function, self._handle, *arguments)


def _open() -> tuple[Any, str | None]:
    """(initialised pynvml, None), or (None, why an installed driver does not answer)."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        absent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return None, None if error.value in absent else str(error)
    return nvml, None


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """What an NVML function returns; None if this library, driver or GPU does not have it."""
    try:
        return getattr(nvml, function)(*arguments)
    except (AttributeError, nvml.NVMLError):
        return None


def _handle(nvml: Any, device: int | str) -> Any:
    if isinstance(device, int):
        return _ask(nvml, "nvmlDeviceGetHandleByIndex", device)
    names = [device] if device.startswith(("GPU-", "MIG-")) else [f"GPU-{device}", f"MIG-{device}"]
    handles = [_ask(nvml, "nvmlDeviceGetHandleByUUID", name) for name in names]
    return next((handle for handle in handles if handle is not None), None)


def _visible(nvml: Any, handles: Sequence[Any], visible_devices: str) -> list[Any]:
    """The GPUs by CUDA's rule: a list of indices or (starts of) UUIDs, cut at the first unknown entry."""
    chosen = []
    for word in (word.strip() for word in visible_devices.split(",")):
        if word.isdecimal():
            handle = handles[int(word)] if int(word) < len(handles) else None
        elif word.startswith("MIG-"):
            handle = _handle(nvml, word)
        else:
            uuids = [_text(_ask(nvml, "nvmlDeviceGetUUID", handle)) for handle in handles]
            handle = next((h for h, uuid in zip(handles, uuids, strict=True) if word and uuid.startswith(word)), None)
        if handle is None:
            break
        chosen.append(handle)
    return chosen


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    return Gpu(
        name=_text(_ask(nvml, "nvmlDeviceGetName", handle)) or "unnamed GPU",
        uuid=_text(_ask(nvml, "nvmlDeviceGetUUID", handle)),
        memory_bytes=None if memory is None else int(memory.total),
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""  # older bindings return bytes


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor

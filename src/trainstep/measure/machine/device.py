"""Decides which device a run may use, without importing torch here: a child process asks torch about the GPUs."""

import json
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainstep.config.fields import nearest
from trainstep.config.import_path import python_command
from trainstep.measure.machine.nvml import Driver, read_driver
from trainstep.records.record import Environment

_REQUESTS = ("auto", "cpu", "cuda")
_PROBE_MODULE = "trainstep.measure.machine.device_probe"

_BUILDS = {12: "cu126", 13: "cu130"}
"""The driver's CUDA major -> a build of torch >= 2.11 that runs on it."""
_OLDEST_DRIVERS = {12: "525", 13: "580"}
"""CUDA major -> the oldest driver for it."""
_INSTALL = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What torch says about its devices. `error`: why torch or its CUDA does not work, in a sentence."""

    cuda_available: bool = False
    devices: tuple[Mapping[str, Any], ...] = ()
    threads: int | None = None
    cpu_capability: str | None = None
    error: str | None = None

    @property
    def imports(self) -> bool:
        """Whether torch can be imported."""
        return self.threads is not None


def usable_device(
    requested: str,
    environment: Environment,
    *,
    driver: Driver | None = None,
    probe: Probe | None = None,
    instead: str = "--device cpu",
) -> str:
    """'cuda' or 'cpu', for a request of auto, cpu or cuda.

    Raises ValueError, with the options `instead` as advice, if torch cannot use a GPU that is there, also for `auto`: a
    GPU that is left idle by mistake must not become a table of CPU times. Raises ValueError, too, if cuda is requested
    and there is no GPU.
    """
    if requested not in _REQUESTS:
        known = ", ".join(_REQUESTS)
        raise ValueError(f"device: {requested!r} is not known{nearest(requested, _REQUESTS)}; known: {known}")
    if requested == "cpu":
        return "cpu"
    driver = driver or read_driver()
    if environment.gpu is None:
        if driver.error:
            raise ValueError(f"device: the driver does not answer ({driver.error}); repair it, or use {instead}")
        if requested == "cuda":
            raise ValueError(f"device: no NVIDIA GPU is visible (no driver, or CUDA_VISIBLE_DEVICES); use {instead}")
        return "cpu"
    if problem := _torch_problem(environment, driver, probe):
        supported = f" (CUDA {driver.cuda[0]}.{driver.cuda[1]})" if driver.cuda else ""
        shown = f"driver {environment.driver}{supported} shows {environment.gpu}"
        raise ValueError(f"device: {shown}, but {problem}, or use {instead}")
    return "cuda"


def probe_device(timeout_s: float = 120.0) -> Probe:
    """Import torch in a child process and ask it about its devices. A crash, a hang or an ImportError becomes `error`."""
    command = python_command(_PROBE_MODULE)
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return Probe(error=f"importing torch and asking it for its devices took more than {timeout_s:g} s")
    except OSError as error:
        return Probe(error=f"no child process could be started: {error}")
    if child.returncode < 0:
        return Probe(error=f"the process that imported torch was killed by {signal.Signals(-child.returncode).name}")
    try:
        answer = json.loads(child.stdout.strip().splitlines()[-1])
        return Probe(**{**answer, "devices": tuple(answer["devices"])})
    except (IndexError, ValueError, TypeError, KeyError):
        printed = child.stderr.strip().splitlines()
        return Probe(error=f"torch does not import: {printed[-1] if printed else f'exit code {child.returncode}'}")


def _torch_problem(environment: Environment, driver: Driver, probe: Probe | None) -> str | None:
    """Why torch cannot use the GPU, and what to install; None if it can."""
    if environment.torch is None:
        return f"PyTorch is not installed; {_remedy(driver)}"
    if environment.cuda is None:
        return f"torch {environment.torch} is a CPU build; {_remedy(driver)}"
    # Minor versions do not matter: a torch for CUDA 12.8 runs on any driver for CUDA 12.
    major = int(environment.cuda.split(".")[0])
    if driver.cuda and major > driver.cuda[0]:
        newer = f"driver {_OLDEST_DRIVERS[major]} or newer" if major in _OLDEST_DRIVERS else "a newer driver"
        return f"torch {environment.torch} is built for CUDA {environment.cuda}; {_remedy(driver)}, or {newer}"
    if probe and (probe.error or not probe.cuda_available):
        reason = probe.error or "torch.cuda.is_available() is False"
        return f"torch {environment.torch} cannot use it ({reason}); {_remedy(driver)}"
    return None


def _remedy(driver: Driver) -> str:
    """How to install a build that fits the driver."""
    if driver.cuda is None:
        return "install a CUDA build of torch that fits the driver"
    newest = max(_BUILDS)
    if driver.cuda[0] < min(_BUILDS):
        return f"install driver {_OLDEST_DRIVERS[newest]} or newer, then {_INSTALL}/{_BUILDS[newest]}"
    major = min(driver.cuda[0], newest)
    return f"install a build for CUDA {major}: {_INSTALL}/{_BUILDS[major]}"

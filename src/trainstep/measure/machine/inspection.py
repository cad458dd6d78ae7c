"""Inspects this machine for `trainstep doctor`: hardware, data sheets, packages, tools and problems.

`inspect_machine` makes a plain dictionary; `ceiling_cells` and `calibration_cells` list what to measure; `with_ceilings` adds the
measured ceilings.
"""

import dataclasses
import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from trainstep.config.calibration import CalibrationConfig
from trainstep.config.collective import CeilingConfig, CollectiveConfig
from trainstep.config.grid import Cell
from trainstep.config.machine import MachineSpec, machine_spec
from trainstep.config.parsing import to_plain
from trainstep.measure.machine.device import Probe, probe_device, usable_device
from trainstep.measure.machine.environment import environment, installed_version
from trainstep.measure.machine.nvml import Driver, read_driver
from trainstep.records.record import Record

Plain = dict[str, Any]

_PACKAGES = (
    ("torch", "pip install torch", "everything that runs a step"),
    ("triton", "pip install triton (Linux)", "kernels, torch.compile on a GPU"),
    ("numpy", "pip install numpy", "statistics"),
    ("pandas", "pip install pandas", "tables"),
    ("plotly", "pip install plotly", "the page's charts"),
    ("jinja2", "pip install jinja2", "the page, LaTeX tables"),
    ("nvidia-ml-py", "pip install nvidia-ml-py", "GPU names, clocks, power"),
    ("tensorboard", "pip install 'trainstep[tensorboard]'", "report --format tensorboard"),
    ("submitit", "pip install 'trainstep[slurm]'", "sweep --slurm"),
    ("transformers", "pip install 'trainstep[hf]'", "measuring Hugging Face models"),
    ("tokenizers", "pip install 'trainstep[train]'", "training on your own text"),
    ("safetensors", "pip install 'trainstep[train]'", "checkpoints"),
)
"""Distribution, the command that installs it, what it is for."""
_TOOLS = (
    ("git", ("git",), "the commit in every record"),
    ("C compiler", ("gcc", "cc", "clang"), "Triton kernels, torch.compile on a GPU"),
    ("C++ compiler", ("g++", "c++", "clang++"), "torch.compile on a CPU"),
    ("nsys", ("nsys",), "NVIDIA's timeline of a step"),
    ("srun", ("srun",), "Slurm"),
    ("sbatch", ("sbatch",), "Slurm"),
)
"""Tool, its commands, what it is for."""


def inspect_machine(*, device: str = "auto", visible_devices: str | None = None) -> Plain:
    """Everything that `trainstep doctor` shows, except ceilings.

    In the result `device` is the device that will be used, and `problem` says why torch or the GPU cannot be used, or is
    None.
    """
    driver = read_driver(visible_devices)
    here = environment(driver=driver)
    probe = probe_device()
    try:
        chosen, problem = usable_device(device, here, driver=driver, probe=probe), None
    except ValueError as error:
        chosen, problem = "cpu", str(error)
    if not probe.imports:
        problem = problem or f"torch: {probe.error}"
    return {
        "environment": dataclasses.asdict(here),
        "driver": dataclasses.asdict(driver),
        "torch": {"threads": probe.threads, "cpu_capability": probe.cpu_capability, "error": probe.error},
        "gpus": _gpus(driver, probe),
        "device": chosen,
        "problem": problem,
        "packages": [
            {"name": name, "version": installed_version(name), "install": install, "purpose": purpose}
            for name, install, purpose in _PACKAGES
        ],
        "tools": [_tool(*row) for row in _TOOLS],
        "records": str(Path("runs").absolute()),
        "ceilings": [],
    }


def ceiling_cells(device: str, gpu_count: int = 0) -> list[Cell]:
    """Every ceiling that is worth measuring on a device."""
    # Sizes that keep a GPU busy for milliseconds, and a CPU for seconds at most.
    if device == "cpu":
        grid: list[Plain] = [{"kind": "matmul", "dtype": dtype, "n": 1024} for dtype in ("fp32", "bf16")]
        grid.append({"kind": "copy", "mib": 256})
    else:
        grid = [{"kind": "matmul", "dtype": dtype} for dtype in ("fp32", "tf32", "bf16", "fp16")]
        grid += [{"kind": kind} for kind in ("copy", "host_to_device", "device_to_host")]
        grid += [{"kind": "peer_copy", "peer": peer} for peer in range(1, gpu_count)]
    return [
        Cell(workload="ceiling", config=to_plain(CeilingConfig(device=device, **point)), point=point) for point in grid
    ]


def calibration_cells(device: str, gpu_count: int = 0) -> list[Cell]:
    """What `trainstep plan` needs to know of this machine: its kernels, and messages between its GPUs."""
    cells = [Cell(workload="calibration", config=to_plain(CalibrationConfig(device=device)), point={})]
    if device == "cuda" and gpu_count > 1:
        for operation, mib in product(
            ("all_reduce", "all_gather", "reduce_scatter", "broadcast"), (0.0625, 8, 128, 1024)
        ):
            config = CollectiveConfig(operation=operation, backend="nccl", ranks=gpu_count, mib=mib, device="cuda")
            cells.append(
                Cell(workload="collective", config=to_plain(config), point={"operation": operation, "mib": mib})
            )
    return cells


def with_ceilings(inspection: Plain, records: Sequence[Record]) -> Plain:
    """The inspection with the measured ceilings beside the data sheet's."""
    spec = machine_spec(inspection["environment"]["gpu"]) if inspection["device"] == "cuda" else None
    return {**inspection, "ceilings": [_ceiling(record, spec) for record in records]}


def _ceiling(record: Record, spec: MachineSpec | None) -> Plain:
    """One ceiling. `of_data_sheet`: measured over printed; None for links, unknown chips and CPUs, which have no entry."""
    config, rate = record.config, record.fact("rate")
    peak = None
    if spec and config["kind"] == "matmul":
        peak = spec.peak_flops.get(config["dtype"])
    elif spec and config["kind"] == "copy":
        peak = spec.memory_bytes_per_s
    return {
        "kind": config["kind"],
        "dtype": config["dtype"] if config["kind"] == "matmul" else None,
        "peer": config["peer"] if config["kind"] == "peer_copy" else None,
        "rate": rate,
        "unit": record.facts["rate"].unit if rate is not None else None,
        "data_sheet": peak,
        "of_data_sheet": rate / peak if rate and peak else None,
        "counted": record.fact("counted"),
        "route": record.fact("route"),
        "failure": record.failure.message if record.failure else None,
    }


def _gpus(driver: Driver, probe: Probe) -> list[Plain]:
    """Each GPU with the driver's name for it, torch's properties and its data sheet."""
    gpus = []
    for index, gpu in enumerate(driver.gpus):
        spec = machine_spec(gpu.name)
        properties = probe.devices[index] if index < len(probe.devices) else {}
        gpus.append({**dataclasses.asdict(gpu), **properties, "name": gpu.name, "data_sheet": _plain_spec(spec)})
    return gpus


def _plain_spec(spec: MachineSpec | None) -> Plain | None:
    if spec is None:
        return None
    return {
        "name": spec.name,
        "peak_flops": dict(spec.peak_flops),
        "memory_bytes_per_s": spec.memory_bytes_per_s,
        "source": spec.source,
    }


def _tool(name: str, commands: Sequence[str], purpose: str) -> Plain:
    paths = (shutil.which(command) for command in commands)
    return {"name": name, "path": next((path for path in paths if path), None), "purpose": purpose}

"""Prints what torch says about this machine's GPUs as one line of JSON.

`python -m trainstep.measure.machine.device_probe`. It runs in a process of its own, because a broken driver or build can
crash or hang it, and so that no other process has to wait for the import of torch.
"""

import json
import sys
import warnings
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """The fields of `Probe` (device.py). `error` is None only if a kernel has run, or if there is no GPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    first_warning = next((str(warning.message).splitlines()[0] for warning in caught), None)
    error = _kernel_error() if available else first_warning
    return {
        "cuda_available": available,
        "devices": [_device(index) for index in range(torch.cuda.device_count())] if available else [],
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "error": error,
    }


def _kernel_error() -> str | None:
    """Why the simplest kernel does not run; None if it runs."""
    # A GPU for which the build of torch has no code passes every earlier check.
    try:
        torch.ones(8, device="cuda").sum().item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _device(index: int) -> dict[str, Any]:
    properties: Any = torch.cuda.get_device_properties(index)  # torch's stubs lack some fields
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "shared_memory_per_sm_bytes": properties.shared_memory_per_multiprocessor,
        "shared_memory_per_block_bytes": properties.shared_memory_per_block_optin,
        "registers_per_sm": properties.regs_per_multiprocessor,
        "peers": [other for other in others if torch.cuda.can_device_access_peer(index, other)],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe()) + "\n")

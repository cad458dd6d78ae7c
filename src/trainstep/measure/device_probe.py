"""What torch says of this machine's GPUs, as one line of JSON: `python -m trainstep.measure.device_probe`.

A process of its own: a broken driver or build can crash or hang it, and nobody else need wait for torch.
"""

import json
import sys
import warnings
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """The fields of `measure.device.Probe`. CUDA counts as available only once a kernel has run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    error = None if available else next((str(warning.message).splitlines()[0] for warning in caught), None)
    if available:
        error = _kernel_error()
    return {
        "cuda_available": available,
        "devices": [_device(index) for index in range(torch.cuda.device_count())] if available else [],
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "error": error,
    }


def _kernel_error() -> str | None:
    """Why the simplest kernel does not run: a GPU the build has no code for passes every earlier check."""
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

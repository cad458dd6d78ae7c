"""What every test gets: GPU tests skipped with a reason where there is no GPU, and the Slurm fixture."""

import functools

import pytest

from slurm_cluster import slurm_cluster, slurm_daemons

__all__ = ["slurm_cluster", "slurm_daemons"]


@functools.cache
def gpu_count() -> int:
    """GPUs that torch sees; asked only when a test needs one, since it imports torch."""
    import torch

    return torch.cuda.device_count()


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
    if needed and gpu_count() < needed:
        pytest.skip(f"needs {needed} CUDA GPU{'s' if needed > 1 else ''}; this machine has {gpu_count()}")

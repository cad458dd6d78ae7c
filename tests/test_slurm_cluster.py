"""The simulated cluster is a real Slurm: it runs commands on its nodes, assigns its GPUs, and accepts jobs of submitit."""

import platform
from pathlib import Path

import pytest

from slurm_cluster import GPUS_PER_NODE, NODES, SlurmCluster

submitit = pytest.importorskip("submitit", reason="submitit is not installed: pip install 'trainstep[slurm]'")

pytestmark = pytest.mark.slow


def test_srun_runs_a_command(slurm_cluster: SlurmCluster):
    assert slurm_cluster.call("srun", "-N1", "hostname").strip() == platform.node()


def test_two_nodes_get_their_gpus(slurm_cluster: SlurmCluster):
    show = 'echo "$SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"'
    output = slurm_cluster.call("srun", "-N2", "--gpus-per-node", str(GPUS_PER_NODE), "sh", "-c", show)
    assert sorted(output.splitlines()) == [f"{node} 0,1" for node in NODES]


@pytest.mark.timeout(300)
def test_submitit_runs_a_job(slurm_cluster: SlurmCluster, tmp_path: Path):
    executor = submitit.AutoExecutor(folder=tmp_path, cluster="slurm")
    executor.update_parameters(slurm_partition=slurm_cluster.partition, timeout_min=1, cpus_per_task=1)
    job = executor.submit(pow, 2, 10)
    assert job.result() == 1024

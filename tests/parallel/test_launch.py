"""The variables of launchers: torchrun's, Slurm's, and one sentence that names what is missing or wrong."""

import pytest

from trainstep.parallel.launch import find_launch, first_host

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NODELIST": "n[7-9,12],m3",
    "SLURM_NNODES": "2",
}


def test_torchruns_variables_are_read():
    launch = find_launch({**TORCHRUN, **SLURM, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_size) == (3, 4, 1, 2)
    assert (launch.address, launch.port, launch.store_is_there) == ("node7", 1234, True)


def test_rank_and_world_size_are_enough():
    launch = find_launch({"RANK": "1", "WORLD_SIZE": "2"})
    assert (launch.local_rank, launch.local_size, launch.address, launch.port) == (1, None, "127.0.0.1", 29500)
    assert not launch.store_is_there


def test_slurms_variables_are_read():
    launch = find_launch(SLURM)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_size) == (3, 4, 1, None)
    assert (launch.address, launch.port) == ("n7", 17_702)
    assert not launch.own_gpu_only


def test_slurm_on_one_node_uses_loopback():
    launch = find_launch({**SLURM, "SLURM_NNODES": "1", "SLURM_GPUS_PER_TASK": "1"})
    assert (launch.local_size, launch.address, launch.own_gpu_only) == (4, "127.0.0.1", True)


def test_an_address_that_the_script_sets_is_used():
    launch = find_launch({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4321"})
    assert (launch.address, launch.port) == ("10.0.0.1", 4321)


def test_steps_of_a_job_do_not_share_a_port():
    assert find_launch(SLURM).port != find_launch({**SLURM, "SLURM_STEP_ID": "3"}).port


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n7", "n7"), ("n7,n8", "n7"), ("n[7-9,12],m3", "n7"), ("n[012,014]", "n012"), ("a-b[3-4]-ib,c", "a-b3-ib")],
)
def test_the_first_host_of_a_node_list_is_found(nodes: str, host: str):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({}, "torchrun --nproc-per-node 2 SCRIPT"),
        ({"RANK": "1"}, "no launcher is found"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE: must be a whole number, not 'two'"),
        ({**TORCHRUN, "RANK": "4"}, "RANK: 4 is not one of 4 ranks"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT: must be from 1 to 65535"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "no launcher is found"),  # a batch script, not srun's
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS: must be a whole number"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "SLURM_JOB_NODELIST: is not set"),
    ],
)
def test_bad_variables_are_refused_by_name(environ: dict[str, str], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        find_launch(environ)

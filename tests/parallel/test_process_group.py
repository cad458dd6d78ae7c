"""Starting and stopping ranks under real launchers, and what is refused before anything starts."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from cell_maker import import_path
from ranks import free_port
from slurm_cluster import SlurmCluster
from trainstep.parallel.launch import Launch
from trainstep.parallel.liveness.desk import Desk
from trainstep.parallel.liveness.link import LOOPBACK, Link, listen
from trainstep.parallel.liveness.watch import LEFT, Watch
from trainstep.parallel.process_group import open_store, start_ranks, stop_ranks

PROGRAM = """
import os
import torch
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.process_group import start_ranks, stop_ranks

torch.set_num_threads(1)
for turn in range(2):  # a second group in the same processes
    ranks = start_ranks("gloo", timeout_s=60)
    total = torch.ones(4) * (ranks.rank + 1)
    Collectives(ranks).all_reduce(total).wait()
    ranks = stop_ranks(ranks)
assert ranks.group is None
os.write(1, f"rank {ranks.rank} of {ranks.world_size}: {total.tolist()}\\n".encode())
"""
EXPECTED_LINES = [f"rank {rank} of 2: [3.0, 3.0, 3.0, 3.0]" for rank in range(2)]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.slow
def test_ranks_of_torchrun_start_and_stop(program: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environ = {**os.environ, "PYTHONPATH": import_path()}
    process = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110)
    assert process.returncode == 0, process.stderr
    assert sorted(process.stdout.splitlines()) == EXPECTED_LINES
    assert "died" not in process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("placed", [["-N1", "-n2"], ["-N2", "-n2"]], ids=["one node", "two nodes"])
def test_ranks_of_slurm_start_and_stop(
    slurm_cluster: SlurmCluster, program: Path, placed: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", import_path())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # the pretend nodes have names that resolve nowhere
    output = slurm_cluster.call("srun", *placed, sys.executable, str(program), timeout_s=100)
    assert sorted(output.splitlines()) == EXPECTED_LINES


SENDING = """
import os, signal, sys
import torch
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.copies.messages import CopyEngines
from trainstep.parallel.process_group import start_ranks, stop_ranks

def all_reduce():
    collectives.all_reduce(values).wait()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()

ranks = start_ranks(sys.argv[1])
if sys.argv[1] == "nccl":
    assert torch.cuda.current_device() == ranks.device.index == ranks.rank
collectives = Collectives(ranks)
collectives.send_by(CopyEngines(least_bytes=1) if "copies" in sys.argv else None)
values = torch.full((1024,), ranks.rank + 1.0, device=ranks.device)
all_reduce()
if "kill" in sys.argv and ranks.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if "kill" in sys.argv:
    all_reduce()  # hangs, as the other rank is dead
total = values[0].item()
del values
stop_ranks(ranks)
print(f"rank {ranks.rank}: {total}", flush=True)
"""


def two_sending_ranks(*arguments: str) -> list[tuple[int, str, str]]:
    """Run two ranks; exit code, stdout and stderr of each."""
    base = {**os.environ, "PYTHONPATH": import_path(), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SENDING, *arguments],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
        return [(process.returncode, *texts) for process, texts in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.multigpu
@pytest.mark.parametrize("transport", ["library", "copies"])
def test_two_ranks_on_nccl_start_and_stop(transport: str):
    results = two_sending_ranks("nccl", transport)
    assert [(code, out) for code, out, _ in results] == [(0, f"rank {rank}: 3.0\n") for rank in range(2)], results
    assert not any("died" in err for *_, err in results)


@pytest.mark.parametrize(
    ("backend", "transport"),
    [
        pytest.param("gloo", "copies", marks=pytest.mark.slow),
        pytest.param("nccl", "library", marks=pytest.mark.multigpu),
        pytest.param("nccl", "copies", marks=pytest.mark.multigpu),
    ],
)
def test_a_killed_rank_is_named_by_one_that_waits_for_its_message(backend: str, transport: str):
    (code, out, err), (killed, *_) = two_sending_ranks(backend, transport, "kill")
    assert (code, out, killed) == (LEFT, "", -signal.SIGKILL)
    assert "trainstep: rank 1 (" in err
    assert err.rstrip().endswith("died; rank 0 leaves")


def set_variables(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    """Set a launcher's variables: one rank alone, unless `variables` say otherwise."""
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in {**defaults, **variables}.items():
        monkeypatch.setenv(name, str(value))


def test_a_stranger_at_the_port_is_not_waited_for():
    """It takes connections and says nothing, for which torch's store would wait without a limit."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        launch = Launch(
            rank=1, world_size=2, local_rank=0, local_size=1, address="127.0.0.1", port=port, nodes=2, node=1
        )
        with pytest.raises(ConnectionError, match=f"127.0.0.1:{port}: what listens there gave no answer in 0.5 s"):
            open_store(launch, 0.5)


def test_a_single_rank_needs_no_watch(monkeypatch: pytest.MonkeyPatch):
    set_variables(monkeypatch)
    ranks = start_ranks("gloo", timeout_s=10)
    assert (ranks.rank, ranks.world_size, ranks.device, ranks.watch) == (0, 1, torch.device("cpu"), None)
    assert not torch.distributed.is_initialized() or stop_ranks(ranks).group is None
    assert not torch.distributed.is_initialized()


def test_a_missing_launcher_is_refused(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="no launcher is found"):
        start_ranks()


def test_a_port_in_use_is_refused(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        set_variables(monkeypatch, MASTER_PORT=port)
        with pytest.raises(ValueError, match=rf"MASTER_PORT: port {port} of 127.0.0.1 is in use; .*--master-port"):
            start_ranks("gloo", timeout_s=10)


def test_a_missing_rank_0_is_named(monkeypatch: pytest.MonkeyPatch):
    port = free_port()
    set_variables(monkeypatch, RANK=1, WORLD_SIZE=2, MASTER_PORT=port)
    with pytest.raises(ConnectionError, match=rf"rank 0 at 127.0.0.1:{port} \(MASTER_ADDR, MASTER_PORT\) did not come"):
        start_ranks("gloo", timeout_s=1)


def test_rank_0_that_dies_after_listening_is_named(monkeypatch: pytest.MonkeyPatch):
    """torch's store then tries three times, which together stay within the time limit."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]

    def accept_and_die() -> None:
        listener.accept()[0].close()
        listener.close()

    set_variables(monkeypatch, RANK=1, WORLD_SIZE=2, MASTER_PORT=port)
    rank_0 = threading.Thread(target=accept_and_die)
    rank_0.start()
    began_s = time.monotonic()
    with pytest.raises(ConnectionError, match=f"rank 0 at 127.0.0.1:{port} .* did not come within 6 s, or died"):
        start_ranks("gloo", timeout_s=6)
    assert time.monotonic() - began_s < 7.5
    rank_0.join()


def test_ranks_of_one_machine_meet_on_loopback(monkeypatch: pytest.MonkeyPatch):
    """MASTER_ADDR is ignored: no host here has this address."""
    set_variables(monkeypatch, MASTER_ADDR="192.0.2.1", LOCAL_WORLD_SIZE=1)
    ranks = start_ranks("gloo", timeout_s=10)
    assert stop_ranks(ranks).group is None


def test_a_wrong_token_is_refused(monkeypatch: pytest.MonkeyPatch):
    class FakeStore(dict[str, str]):
        """A store in memory."""

        def get(self, key: str) -> bytes:  # type: ignore[override]
            return self[key].encode()

        def set(self, key: str, value: str) -> None:
            self[key] = value

    store = FakeStore()
    own, far = socket.socketpair()
    listener = listen(LOOPBACK)
    store.set("watch", f"{listener.getsockname()[1]} ")
    Desk(Link(far), "rank 0", listener=listener, token="right", world_size=2, timeout_s=600)
    with own, pytest.raises(ValueError, match="TRAINSTEP_TOKEN: rank 0 did not let rank 1 in"):
        Watch(store, rank=1, world_size=2, address=LOOPBACK, timeout_s=600, token="wrong")


@pytest.mark.parametrize(("count", "words"), [(0, "0 are visible"), (1, "1 is visible")])
def test_more_local_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, count: int, words: str):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: pytest.fail(f"bound to {index}"))
    set_variables(monkeypatch, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    with pytest.raises(ValueError, match=rf'2 on this machine need 2 GPUs and {words}.*start_ranks\("gloo"\)'):
        start_ranks("nccl")


def test_a_slurm_task_that_sees_only_its_own_gpu_uses_gpu_0(monkeypatch: pytest.MonkeyPatch):
    bound: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", bound.append)
    monkeypatch.delenv("RANK", raising=False)
    slurm = {"PROCID": 1, "NTASKS": 1, "LOCALID": 1, "NNODES": 1, "GPUS_PER_TASK": 1, "STEP_ID": 0}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    with pytest.raises(ValueError, match="RANK: 1 is not one of 1"):
        start_ranks("nccl")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    ranks = start_ranks("gloo", device="cuda", timeout_s=10)
    monkeypatch.undo()
    torch.distributed.destroy_process_group()
    assert (bound, ranks.device) == ([0], torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"backend": "mpi"}, "backend: 'mpi' is not known; known: nccl, gloo"),
        ({"backend": "nccl", "device": "cpu"}, "device: NCCL sends between GPUs, not from cpu"),
    ],
)
def test_bad_arguments_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, str], sentence: str):
    set_variables(monkeypatch)
    with pytest.raises(ValueError, match=sentence):
        start_ranks(**arguments)  # type: ignore[arg-type]


def test_a_second_start_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(ValueError, match="there is a process group already"):
        start_ranks("gloo")

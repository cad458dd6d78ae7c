"""A real Slurm on one machine for tests: two simulated nodes with two GPUs each, in a temporary folder, on loopback only.

It needs no munge, systemd, cgroups or database, and writes only to the folder: `slurmctld` and one `slurmd` per node run as the
user who runs the tests, on free ports. A node's name resolves nowhere; its address is 127.0.0.1.
Where Slurm is not installed the fixture skips; with TRAINSTEP_REQUIRE_SLURM=1 (CI) that skip is a failure.
"""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

NODES = ("n1", "n2")
GPUS_PER_NODE = 2
PARTITION = "debug"
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scancel", "squeue")
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
"""The search path with sbin, where the daemons are; the PATH of an ordinary user may lack it."""

CONFIG = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={controller_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
GresTypes=gpu
{nodes}
PartitionName={partition} Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster. `environ` is what a process needs to talk to it."""

    folder: Path
    partition: str = PARTITION

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: str, timeout_s: float = 60) -> str:
        """Run a Slurm command; its output, or CalledProcessError with its message."""
        done = subprocess.run(
            command, env=self.environ, cwd=self.folder, capture_output=True, text=True, timeout=timeout_s, check=True
        )
        return done.stdout

    def start(self) -> None:
        """Write the configuration, start the daemons, wait until every node is idle."""
        _write_configuration(self.folder)
        self.call("slurmctld")
        for node in NODES:
            self.call("slurmd", "-N", node)
        _wait_until(lambda: self._idle_nodes() == len(NODES), START_TIMEOUT_S, f"Slurm did not start:\n{self._logs()}")

    def stop(self) -> None:
        """End the jobs, then the daemons by their pid files: a daemon that has ended cannot end the processes that it started."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.call("scancel", "--user", getpass.getuser())
            _wait_until(lambda: not self.call("squeue", "--noheader").strip(), STOP_TIMEOUT_S, "jobs did not end")
        _end([self.folder / f"{name}.pid" for name in (*NODES, "slurmctld")])

    def _idle_nodes(self) -> int:
        with contextlib.suppress(subprocess.SubprocessError):
            return self.call("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")
        return 0

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-1000:] for path in sorted(self.folder.glob("*.log")))


@pytest.fixture(scope="session")
def slurm_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """The cluster, started once per session."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        refuse = pytest.fail if os.environ.get("TRAINSTEP_REQUIRE_SLURM") == "1" else pytest.skip
        refuse(f"Slurm is not installed here (no {', '.join(missing)}): on Debian, apt install slurm-wlm")
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def slurm_cluster(slurm_daemons: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The cluster, with this process's environment pointing at it for one test: what submitit and sbatch read."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm_daemons.environ[name])
    return slurm_daemons


def _write_configuration(folder: Path) -> None:
    (folder / "state").mkdir()
    host = socket.gethostname().split(".")[0]
    controller_port, *ports = _free_ports(1 + len(NODES))
    nodes, resources = [], []
    for node, port in zip(NODES, ports, strict=True):
        (folder / "spool" / node).mkdir(parents=True)
        gpus = [folder / f"{node}_gpu{index}" for index in range(GPUS_PER_NODE)]
        for gpu in gpus:
            gpu.symlink_to(os.devnull)  # Slurm needs the file of a device, and never opens it
        nodes.append(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000"
            f" Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN"
        )
        resources += [f"NodeName={node} Name=gpu File={gpu}" for gpu in gpus]
    text = CONFIG.format(
        folder=folder,
        host=host,
        user=getpass.getuser(),
        controller_port=controller_port,
        nodes="\n".join(nodes),
        names=",".join(NODES),
        partition=PARTITION,
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text("\n".join(resources) + "\n")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def _wait_until(condition: Callable[[], bool], timeout_s: float, message: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise subprocess.SubprocessError(message)
        time.sleep(0.1)


def _end(pid_files: list[Path]) -> None:
    """End the daemons with these pid files: first by SIGTERM to all, then by SIGKILL to those that are left."""
    pids = []
    for pid_file in pid_files:
        with contextlib.suppress(OSError, ValueError):  # it never started, or it is gone
            pids.append(int(pid_file.read_text()))
            os.kill(pids[-1], signal.SIGTERM)
    with contextlib.suppress(subprocess.SubprocessError):
        _wait_until(lambda: not any(map(_is_alive, pids)), STOP_TIMEOUT_S, "daemons did not end")
    for pid in filter(_is_alive, pids):
        os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

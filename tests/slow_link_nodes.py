"""Two pretend nodes for tests: network namespaces joined by a veth pair of limited speed; skipped where that is not allowed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cell_maker import MARK, import_path
from ranks import free_port
from slow_link_ranks import limited_to

ADDRESSES = ("10.213.77.1", "10.213.77.2")


@pytest.fixture
def nodes() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """What `pretend_nodes` makes; skips where this machine cannot make them."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(pretend_nodes())
        except OSError as error:
            pytest.skip(str(error))
        yield found


@contextmanager
def pretend_nodes() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """For each of two nodes its namespace and the name of its end of the link, of 1 Gbit/s. OSError where that is not allowed."""
    names = tuple((f"trainstep-{os.getpid()}-{end}", f"ts{os.getpid()}{end}") for end in "ab")
    (first, link), (second, peer) = names
    commands = [
        f"ip netns add {first}",
        f"ip netns add {second}",
        f"ip link add {link} netns {first} type veth peer name {peer} netns {second}",
        *(f"ip -n {name} link set lo up" for name, _ in names),
        *(
            f"ip -n {name} addr add {address}/24 dev {end}"
            for (name, end), address in zip(names, ADDRESSES, strict=True)
        ),
        *(f"ip -n {name} link set {end} up" for name, end in names),
        *(f"ip netns exec {name} tc qdisc add dev {end} root {' '.join(limited_to('1gbit'))}" for name, end in names),
    ]
    try:
        for command in commands:
            try:
                done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            except FileNotFoundError:
                raise OSError(f"needs {command.split()[0]} (iproute2)") from None
            if done.returncode != 0:
                raise OSError(f"no network namespaces with a limited link here: {command}: {done.stderr.strip()}")
        yield names[0], names[1]
    finally:
        for name, _ in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextmanager
def started_on_both_nodes(
    places: Sequence[tuple[str, str]], words_of: Callable[[str], Sequence[str]], *, folder: Path, mark: str = ""
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start torchrun on both nodes, two processes each, with `words_of(link)` behind its own options; killed in the end.

    All that they start has the mark (cell_maker.py).
    """
    port = str(free_port())
    agents = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", namespace, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--nproc-per-node", "2", "--node-rank", str(number), "--master-addr", ADDRESSES[0]),
                *("--master-port", port, *words_of(link)),
            ],
            cwd=folder,
            env={
                **os.environ,
                "GLOO_SOCKET_IFNAME": link,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": import_path(),
                "SLURMD_NODENAME": f"n{number + 1}",
                "TRAINSTEP_TOKEN": "slow link",
                MARK: mark,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for number, (namespace, link) in enumerate(places)
    ]
    try:
        yield agents
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.communicate()


def on_both_nodes(
    places: Sequence[tuple[str, str]], words_of: Callable[[str], Sequence[str]], *, folder: Path, timeout_s: float
) -> list[str]:
    """Run torchrun on both nodes, as `started_on_both_nodes` starts it; both must end with 0. What each printed."""
    with started_on_both_nodes(places, words_of, folder=folder) as agents:
        outputs = [agent.communicate(timeout=timeout_s)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(output[-2000:] for output in outputs)
    return outputs


def limit(places: Sequence[tuple[str, str]], rate: str) -> None:
    """Limit both ends of the link to this rate: 1gbit, 200mbit."""
    for namespace, link in places:
        command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", link, "root", *limited_to(rate)]
        subprocess.run(command, check=True)

"""Two pretend nodes for tests: network namespaces joined by a veth pair whose speed is limited. Skips where that is not allowed."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from slow_link_ranks import limited_to

ADDRESSES = ("10.213.77.1", "10.213.77.2")


@pytest.fixture
def nodes() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """For each of two nodes its namespace and the name of its end of the link. Skips where this machine cannot make them."""
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
                pytest.skip(f"needs {command.split()[0]} (iproute2)")
            if done.returncode != 0:
                pytest.skip(f"no network namespaces with a limited link here: {command}: {done.stderr.strip()}")
        yield names[0], names[1]
    finally:
        for name, _ in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

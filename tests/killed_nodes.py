"""Kills a node of two at a random moment of a sweep or of `parallel`, and checks what must hold: a script, and the part of a test.

    python tests/killed_nodes.py 10 > results/cpu/killed_nodes.txt

The moment is uniform over the time that the command takes undisturbed, its start and the nodes' meeting included, and either node
is killed: the agent's, or the driver's. Then no finished cell may be lost, no process may be left, the other node must have ended
within 60 s with the dead one's name, and the same command must finish the rest.
"""

import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from cell_maker import finish, marked, wait_until
from node_launch import two_nodes
from trainstep.records.store import Store

MOST_S = 60.0
MEETING_S = 20.0
"""How long a node waits for one that was killed before they met."""
SWEEP = """
timeout_s = 60
[grid]
workload = "workloads:SLEEP"
device = ["cpu"]
ranks = [4]
nodes = [2]
seconds = [0.05]
steps = [6]
name = ["a", "b", "c", "d", "e", "f"]
"""
COMMANDS = {
    "sweep": ("sweep", "it.toml", "--out", "it.jsonl"),
    "parallel": (
        *(
            "parallel",
            "--sync",
            "flat",
            "--context",
            "8,12,16,24",
            "--steps",
            "2",
            "--window-steps",
            "1",
            "--warmups",
            "1",
        ),
        *("--out", "it.jsonl", "--resume"),
    ),
}
CELLS = {"sweep": 6, "parallel": 4}
NAMED = {0: ("the first node",), 1: ("n2", "node 1")}
"""Killed node -> words of which the other node says one. Before they have met, it knows number or address alone."""


@dataclass(frozen=True, kw_only=True)
class Killed:
    """What followed a kill. `ended_s`: seconds until the other node had ended; `code`: its exit code."""

    node: str
    after_s: float
    finished: int
    """Cells that were finished when the node was killed."""
    ended_s: float
    code: int
    said: str
    """The sentence with the dead node's name; empty if the command was over before."""


def undisturbed_s(kind: str, folder: Path) -> float:
    """Seconds that the command takes if nothing is killed."""
    began_s = time.monotonic()
    run_to_the_end(kind, folder, mark=f"whole{os.getpid()}")
    return time.monotonic() - began_s


def kill_a_node(kind: str, seed: int, most_s: float, folder: Path) -> Killed:
    """Kill one node within the first `most_s` seconds of the command, and check everything; then run the command to its end."""
    chance = random.Random(f"{kind} {seed}")
    victim, after_s, mark = chance.randrange(2), chance.uniform(0, most_s), f"killed{os.getpid()}{kind}{seed}"
    (folder / "it.toml").write_text(SWEEP)
    store = Store(folder / "it.jsonl")
    with two_nodes(*COMMANDS[kind], folder=folder, mark=mark, of_all={"TRAINSTEP_MEETING_S": f"{MEETING_S:g}"}) as both:
        time.sleep(after_s)
        before = store.read() if store.path.exists() else []
        os.killpg(both[victim].pid, signal.SIGKILL)
        killed_s = time.monotonic()
        code, _, err = finish(both[1 - victim], timeout_s=2 * MOST_S)
        ended_s = time.monotonic() - killed_s
        was_over = finish(both[victim])[0] == 0
    assert wait_until(lambda: not marked(mark)), "a process is left"
    found = store.read() if store.path.exists() else []
    assert found[: len(before)] == before, "a finished cell was lost"
    failures = [record.failure for record in found if record.failure is not None]
    said = "" if was_over or code == 0 else _naming_line(victim, err, [failure.message for failure in failures])
    if code != 0:
        assert said, f"the node is not named: {err}{failures}"
        assert ended_s < MOST_S, f"it took {ended_s:.0f} s"
    assert all(failure.kind == "node_lost" for failure in failures), failures
    run_to_the_end(kind, folder, mark=f"{mark}again")
    latest = Store(store.path).latest()
    assert len(latest) == CELLS[kind]
    assert all(latest[record.key] == record for record in found if record.failure is None), "a finished cell ran again"
    return Killed(node=f"n{victim + 1}", after_s=after_s, finished=len(before), ended_s=ended_s, code=code, said=said)


def run_to_the_end(kind: str, folder: Path, *, mark: str) -> None:
    """Run the command on both nodes; it continues what is there, and measures again what a lost node failed."""
    (folder / "it.toml").write_text(SWEEP)
    with two_nodes(*COMMANDS[kind], folder=folder, mark=mark) as (first, second):
        code, _, err = finish(first, timeout_s=150)
        assert code == 0, err
        assert finish(second)[0] == 0
    assert wait_until(lambda: not marked(mark))


def _naming_line(victim: int, err: str, failures: list[str]) -> str:
    lines = [line for line in (*failures, *err.splitlines()) if any(name in line for name in NAMED[victim])]
    return lines[-1] if lines else ""


def main(count: int) -> None:
    for kind in COMMANDS:
        with tempfile.TemporaryDirectory() as folder:
            whole_s = undisturbed_s(kind, Path(folder))
        print(f"{kind}: {CELLS[kind]} cells, {whole_s:.1f} s undisturbed", flush=True)
        for seed in range(count):
            with tempfile.TemporaryDirectory() as folder:
                killed = kill_a_node(kind, seed, whole_s, Path(folder))
            print(
                f"  {killed.node} killed after {killed.after_s:5.1f} s, {killed.finished} cells finished; the other node ended "
                f"{killed.ended_s:4.1f} s later with code {killed.code}: {killed.said or 'it was over before'}",
                flush=True,
            )
        print(
            "  all: no finished cell lost or run again, no process left, the rest finished by the same command",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))

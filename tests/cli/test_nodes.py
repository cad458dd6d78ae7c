"""Verbs in a launch over two pretend nodes of two tasks: one record a cell, strategies agree, a killed node loses no record."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import trainstep
from cell_maker import MARK, finish, import_path, marked, wait_until
from killed_nodes import COMMANDS, SWEEP, kill_a_node
from node_launch import NAMES, RANKS_OF_NODE, two_nodes
from ranks import free_port
from slurm_cluster import SlurmCluster
from trainstep.config.parallel import OURS
from trainstep.records.ranks import node_of_rank, rank_values
from trainstep.records.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
PLACES = [name for name in NAMES for _ in range(RANKS_OF_NODE)]


def ran(*words: object, folder: Path, mark: str, expected: int = 0) -> tuple[str, str]:
    """Run on both nodes to the end, which is this exit code; what the first printed."""
    with two_nodes(*words, folder=folder, mark=mark) as (first, second):
        code, out, err = finish(first, timeout_s=100)
        assert code == expected, err
        assert finish(second)[0] == expected
    assert wait_until(lambda: not marked(mark))
    return out, err


def test_every_strategy_agrees_over_two_nodes(tmp_path: Path):
    strategies = [*(name for name in OURS if name != "none"), "torch_ddp"]
    options = ["--steps", "2", "--warmups", "1", "--window-steps", "1", "--processes", "1", "--context", "16"]
    options += ["--shard-ranks", "4,2"]  # all ranks, and those of a node
    ran("parallel", "--sync", ",".join(strategies), *options, "--out", "p.jsonl", folder=tmp_path, mark="parity")
    records = Store(tmp_path / "p.jsonl").read()
    grouped = {record.config["sync"] for record in records if record.config["shard_ranks"] == RANKS_OF_NODE}
    assert grouped == {"bucketed", "sharded_flat", "fsdp"}
    assert list(dict.fromkeys(record.config["sync"] for record in records)) == strategies
    losses = {}
    for record in records:
        assert record.failure is None, record.failure
        assert (record.config["ranks"], record.config["nodes"]) == (4, 2)
        assert [node_of_rank(record, rank) for rank in range(4)] == PLACES
        assert all(len(values) == 2 for values in rank_values(record, "step").values())
        assert record.fact("waiting_s") is None, "clocks of nodes are not compared"
        losses[record.config["sync"], record.config["shard_ranks"]] = record.tables["losses"]["loss"]
    assert len(losses) == len(strategies) + len(grouped)
    for strategy, values in losses.items():
        assert values == pytest.approx(next(iter(losses.values())), rel=1e-5), strategy


def test_collectives_by_level(tmp_path: Path):
    out, _ = ran(
        *("collectives", "--mib", "0.01,0.1,1", "--steps", "3", "--out", "c.jsonl", "--page", "c.html"),
        folder=tmp_path,
        mark="levels",
    )
    records = Store(tmp_path / "c.jsonl").read()
    assert [record.config["level"] for record in records] == [
        level for level in ("all", "in_nodes", "across_nodes") for _ in range(3)
    ]
    for record in records:
        links = record.tables.get("links")
        pairs = None if links is None else list(zip(links["rank"], links["to_rank"], strict=True))
        assert pairs == {"all": None, "in_nodes": [(0, 1), (2, 3)], "across_nodes": [(0, 2)]}[record.config["level"]]
        size = record.fact("payload_bytes")
        sent = {"all": 1.5 * size, "in_nodes": None, "across_nodes": 2 * size}[record.config["level"]]
        assert record.fact("node_bytes") == (None if sent is None else pytest.approx(sent, abs=2))
    assert "n1 - n2" in out
    assert "slowest link" in out
    page = (tmp_path / "c.html").read_text()
    assert all(words in page for words in ("in nodes", "across nodes", "slowest link", "n1 - n2"))


@pytest.mark.parametrize(("kind", "seed", "most_s"), [("sweep", 7, 12.0), ("parallel", 4, 17.0)])
def test_a_node_that_is_killed_loses_no_finished_cell(kind: str, seed: int, most_s: float, tmp_path: Path):
    """The second node after 7 s, the first after 15: a few cells are finished then. killed_nodes.py kills at many moments."""
    kill_a_node(kind, seed, most_s, tmp_path)


def test_a_driver_that_is_killed_leaves_nothing_on_the_other_node(tmp_path: Path):
    (tmp_path / "it.toml").write_text(SWEEP.replace("0.05", "5"))
    with two_nodes("sweep", "it.toml", folder=tmp_path, mark="driver") as (first, second):
        assert wait_until(lambda: len(marked("driver")) >= 2 + 4, 40)
        os.killpg(first.pid, signal.SIGKILL)
        code, _, err = finish(second)
        assert (code, "nodes: the first node, n1, is lost" in err) == (3, True)
    assert wait_until(lambda: not marked("driver"))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_that_is_killed_leaves_no_task(victim: int, tmp_path: Path):
    (tmp_path / "it.toml").write_text(SWEEP.replace("0.05", "60"))
    run_id = {"TORCHELASTIC_RUN_ID": "1"}
    launcher = ("sh", "-c", '"$@"; exit $?', "sh")  # stays the parent, as torchrun's agent does
    with two_nodes("sweep", "it.toml", folder=tmp_path, mark="agent", launcher=launcher, of_all=run_id) as both:
        assert wait_until(lambda: len(marked("agent")) >= 4 + 4, 40)
        os.kill(both[victim].pid, signal.SIGKILL)
        assert wait_until(lambda: not marked("agent"), 30), "a step takes 60 s"
        assert "is lost" in finish(both[1 - victim])[2]


def test_bad_input_ends_both_nodes(tmp_path: Path):
    with two_nodes("parallel", "--ranks", "3", folder=tmp_path, mark="bad") as (first, second):
        code, _, err = finish(first)
        assert (code, finish(second)[0]) == (2, 2)
    assert "nodes: 3 ranks cannot be spread evenly over 2 nodes" in err


def test_nodes_with_other_packages_are_refused_unless_they_may_be_mixed(tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(Path(trainstep.__file__).parent, other / "trainstep", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "trainstep" / "spans.py").open("a") as file:
        file.write("# changed\n")
    words = ("collectives", "--level", "all", "--mib", "0.01", "--steps", "3", "--out", "c.jsonl")
    for options, expected in (((), 2), (("--allow-mixed",), 0)):
        launch = two_nodes(*words, *options, folder=tmp_path, mark="mixed", of_second={"PYTHONPATH": str(other)})
        with launch as (first, second):
            code, _, err = finish(first, timeout_s=100)
            assert (code, finish(second)[0]) == (expected, expected), err
        assert ("nodes: n1 and n2 differ: " in err) == (expected == 2)
    [record] = Store(tmp_path / "c.jsonl").read()
    assert record.failure is None


def test_every_node_takes_the_same_step(tmp_path: Path):
    options = ["--context", "16,32", "--steps", "6", "--out", "b.jsonl"]
    out, _ = ran("bench", *options, folder=tmp_path, mark="bench")
    records = Store(tmp_path / "b.jsonl").read()
    for record in records:
        assert record.failure is None
        assert (record.config["ranks"], record.config["nodes"]) == (2, 2), "one a node on CPUs"
        assert [node_of_rank(record, rank) for rank in range(2)] == list(NAMES)
        steps = rank_values(record, "step")
        assert [len(values) for values in steps.values()] == [6, 6]
        assert record.samples["step"].values in [tuple(values) for values in steps.values()]
    assert [record.config["context"] for record in records] == [16, 32]
    assert "slowest of 2 nodes" in out
    assert "Step on each node" in out


def test_memory_of_every_node(tmp_path: Path):
    options = ["--ranks", "4", "--sync", "fsdp", "--context", "16", "--out", "m.jsonl", "--page", "m.html"]
    out, _ = ran("memory", *options, folder=tmp_path, mark="memory")
    [record] = Store(tmp_path / "m.jsonl").read()
    assert record.failure is None
    assert (record.config["ranks"], record.config["nodes"]) == (4, 2)
    assert [node_of_rank(record, rank) for rank in range(4)] == PLACES
    assert "Peak of each rank" in out
    assert "(n1)" in (tmp_path / "m.html").read_text()


def test_one_process_runs_on_the_first_node(tmp_path: Path):
    options = ["--context", "16", "--steps", "2", "--nodes", "1", "--ranks", "1", "--out", "b.jsonl"]
    ran("bench", *options, folder=tmp_path, mark="first")
    [record] = Store(tmp_path / "b.jsonl").read()
    assert record.failure is None
    assert "ranks" not in record.tables


def on_slurm(command: list[str], folder: Path, cluster: SlurmCluster, mark: str) -> None:
    """Run a command with the pretend cluster, to exit code 0, and check that nothing is left of it."""
    # Pretend clusters that run side by side number their jobs alike, and share the ports of this machine.
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ = {**meeting, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": import_path(), MARK: mark}
    done = subprocess.run(
        command, cwd=folder, env={**cluster.environ, **environ}, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert wait_until(lambda: not marked(mark))


TRAINSTEP = (sys.executable, "-m", "trainstep")


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        (("srun", "--nodes", "2", "--ntasks-per-node", "2"), ()),
        ((), ("--slurm", "debug", "--slurm-gpus", "0", "--nodes", "2", "--ranks", "4")),
    ],
    ids=["srun", "option"],
)
def test_srun_on_two_nodes(
    launcher: tuple[str, ...], options: tuple[str, ...], tmp_path: Path, slurm_daemons: SlurmCluster
):
    few = ["--level", "across_nodes", "--mib", "0.01", "--steps", "3", "--out", "c.jsonl"]
    on_slurm([*launcher, *TRAINSTEP, "collectives", *few, *options], tmp_path, slurm_daemons, "srun")
    step = ["--context", "16", "--steps", "3", "--out", "b.jsonl"]
    on_slurm([*launcher, *TRAINSTEP, "bench", *step, *options], tmp_path, slurm_daemons, "srun")
    for name, places in (("c.jsonl", PLACES), ("b.jsonl", PLACES if options else list(NAMES))):
        [record] = Store(tmp_path / name).read()
        assert record.failure is None
        assert [node_of_rank(record, rank) for rank in range(len(places))] == places


def test_jobs_of_a_sweep_on_two_nodes(tmp_path: Path, slurm_daemons: SlurmCluster):
    (tmp_path / "it.toml").write_text(SWEEP)
    command = [
        sys.executable,
        "-m",
        "trainstep",
        *COMMANDS["sweep"],
        "--slurm",
        slurm_daemons.partition,
        "--slurm-gpus",
        "0",
    ]
    on_slurm([*command, "--set", "name=a"], tmp_path, slurm_daemons, "jobs")
    [record] = Store(tmp_path / "it.jsonl").read()
    assert record.failure is None
    assert [node_of_rank(record, rank) for rank in range(4)] == PLACES

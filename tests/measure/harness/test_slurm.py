"""Groups as Slurm jobs: tests on a real Slurm are slow; parts, requests, refusals and lost jobs are tested without it."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from record_maker import ENVIRONMENT, a_record
from slurm_cluster import SlurmCluster
from sources import ROOT
from trainstep.cli.app import run
from trainstep.config.grid import Cell, group_name
from trainstep.measure.harness import slurm as executor_slurm
from trainstep.measure.harness.nodes import NodeLost
from trainstep.measure.harness.runner import Limits
from trainstep.measure.harness.slurm import run_groups_on_slurm
from trainstep.measure.harness.slurm_queue import Job, JobRequest, drop_stored_parts, part_path, read_part, run_group
from trainstep.measure.harness.sweep import run_sweep
from trainstep.records.record import Failure, Record
from trainstep.records.store import Store

REQUEST = JobRequest(partition="debug", gpus=0)
SLEEPS = """
timeout_s = 60
{top}
[grid]
workload = "tests.workloads:SLEEP"
seconds = {seconds}
steps = {steps}
"""
WORKLOADS = """
timeout_s = 300
[grid]
workload = {names}
"""


def a_cell(name: str) -> Cell:
    return Cell(workload="tests.workloads:SLEEP", config={"seconds": 0, "name": name}, point={"name": name})


def record_of(cell: Cell, **changes: object) -> Record:
    return a_record(workload=cell.workload, key=cell.key, config=cell.config, **changes)


def leave_part(store: Store, group: Sequence[Cell], records: Sequence[Record]) -> Path:
    """Write the part that a job leaves, whose lines are those of a store."""
    part = part_path(store.path.with_suffix(".slurm"), group)
    for record in records:
        Store(part).append(record)
    return part


def a_sweep(folder: Path, text: str, partition: str = "debug") -> list[str]:
    """The command line of a sweep on the pretend cluster's CPUs."""
    file = folder / "it.toml"
    file.write_text(text)
    slurm = ["--slurm", partition, "--slurm-gpus", "0"]
    return ["sweep", str(file), "--out", str(folder / "it.jsonl"), *slurm]


# Without Slurm


def test_cells_of_different_numbers_of_nodes_are_no_jobs_of_one_sweep():
    groups = [[Cell(workload="tests.workloads:SLEEP", config={"nodes": nodes}, point={})] for nodes in (2, 1, 2)]
    REQUEST.check(groups[::2])
    with pytest.raises(
        ValueError, match=r"^nodes: the jobs of a sweep have one size, and its cells need 1 and 2 nodes"
    ):
        REQUEST.check(groups)


def test_parts_come_first_and_are_removed_once_they_are_stored(tmp_path: Path):
    store, cell, pair = Store(tmp_path / "it.jsonl"), a_cell("a"), [a_cell("b"), a_cell("c")]
    parts = [
        leave_part(store, [cell], [record_of(cell)]),
        leave_part(store, pair, [record_of(member) for member in pair]),
    ]
    groups = run_groups_on_slurm([[cell], pair], Limits(), lambda cell, stage: None, request=REQUEST, store=store)
    assert [record.key for record in next(groups)] == [cell.key]
    assert all(part.exists() for part in parts)
    assert [record.key for record in next(groups)] == [member.key for member in pair]
    assert [part.exists() for part in parts] == [False, True]
    assert next(groups, None) is None
    assert not parts[1].exists()


def test_a_part_the_store_has_is_dropped(tmp_path: Path):
    store, stored, missing = Store(tmp_path / "it.jsonl"), a_cell("stored"), a_cell("other")
    store.append(record_of(stored))
    store.append(record_of(missing, duration_s=9.0))
    parts = [leave_part(store, [cell], [record_of(cell)]) for cell in (stored, missing)]
    drop_stored_parts(parts[0].parent, store.latest())
    assert [part.exists() for part in parts] == [False, True]


def test_a_part_has_each_variant_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """This also holds where one variant had finished before another ran out of memory."""
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    group = [a_cell("a"), a_cell("b")]
    group[1] = replace(group[1], config={**group[1].config, "act": "run_out", "where": "finish"})
    run_group(group, Limits(), tmp_path / "part.jsonl", tmp_path / "node")
    assert [record.key for record in read_part(tmp_path / "part.jsonl")] == [cell.key for cell in group]


def test_what_a_lost_node_leaves_of_a_group_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    group = [a_cell("a"), a_cell("b")]

    def lose(*_arguments: object) -> Iterator[list[Record]]:
        yield [record_of(group[0])]
        raise NodeLost("nodes: n2 is lost")

    monkeypatch.setattr("trainstep.measure.harness.slurm_queue.run_groups", lose)
    run_group(group, Limits(), tmp_path / "part.jsonl", tmp_path / "node")
    first, second = read_part(tmp_path / "part.jsonl")
    assert first.failure is None
    assert second.key == group[1].key
    assert second.failure is not None
    assert (second.failure.kind, second.failure.message) == ("node_lost", "nodes: n2 is lost")


def test_an_unreadable_part_is_empty_and_stays(tmp_path: Path):
    part = tmp_path / "k.jsonl"
    assert read_part(part) == []
    part.write_text('{"format": 99}\n')
    assert read_part(part) == []
    drop_stored_parts(tmp_path, {})
    assert part.exists()


def test_a_cell_alone_is_another_group_than_the_cell_in_a_pair():
    first, second = a_cell("a"), a_cell("b")
    assert group_name([first]) == first.key
    assert len({group_name([first]), group_name([second]), group_name([first, second])}) == 3
    assert group_name([first, second]) == group_name([second, first])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"partition": " "}, "partition"),
        ({"gpus": -1}, "slurm_gpus"),
        ({"minutes": 0}, "slurm_time"),
        ({"minutes": float("nan")}, "slurm_time"),
        ({"at_once": 0}, "slurm_jobs"),
        ({"arguments": {"array": "0-3"}}, "slurm_args"),
    ],
)
def test_a_wrong_request_is_refused_by_its_option(changes: dict[str, object], word: str):
    with pytest.raises(ValueError, match=word):
        JobRequest(**{"partition": "debug", **changes})


def test_one_job_at_a_time_may_be_asked_for():
    assert JobRequest(partition="debug", at_once=1, gpus=0).at_once == 1


def test_minutes_are_the_cells_limits_and_a_margin():
    pair = [[a_cell("a")], [a_cell("b"), a_cell("c")]]
    assert REQUEST.minutes_for(pair, Limits(timeout_s=90)) == 3 + 5
    assert replace(REQUEST, minutes=1.5).minutes_for(pair, Limits(timeout_s=90)) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--slurm-args", "exclusive"], "a flag as exclusive=true"),
        (["--slurm-args", "qos="], "has no value"),
        (["--slurm-jobs", "0"], "slurm_jobs: must be at least 1"),
        (["--device", "cuda"], "take --slurm-gpus 1"),
    ],
)
def test_bad_options_are_one_sentence(
    options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = a_sweep(tmp_path, SLEEPS.format(top="", seconds=[0], steps=1))
    assert run([*words, *options]) == 2
    assert_one_sentence(capsys.readouterr().err, sentence)


def test_a_missing_submitit_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert run(a_sweep(tmp_path, SLEEPS.format(top="", seconds=[0], steps=1))) == 2
    assert_one_sentence(capsys.readouterr().err, "pip install 'trainstep[slurm]'")


def test_a_missing_slurm_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(a_sweep(tmp_path, SLEEPS.format(top="", seconds=[0], steps=1))) == 2
    assert_one_sentence(capsys.readouterr().err, "there is no sbatch here")


def assert_one_sentence(stderr: str, part: str) -> None:
    *before, refusal = stderr.splitlines()
    assert part in refusal
    assert refusal.startswith("trainstep: ")
    assert len(before) <= 1, "only the line that counts the cells"


@pytest.mark.parametrize(
    ("state", "kind", "words"),
    [
        ("TIMEOUT", "timeout", "time limit"),
        ("OUT_OF_MEMORY", "out_of_memory", "more memory than Slurm gave it"),
        ("CANCELLED", "crash", "was cancelled"),
        ("NODE_FAIL", "node_lost", "its node failed"),
        ("FAILED", "crash", "ended as FAILED"),
    ],
)
def test_a_lost_job_becomes_its_cells_failures(state: str, kind: str, words: str, tmp_path: Path):
    pair, stderr = [a_cell("a"), a_cell("b")], tmp_path / "log.err"
    stderr.write_text("first\nlast\n")
    part, node = part_path(tmp_path, pair), tmp_path / "it.node"
    records = executor_slurm._lost(Job(group=pair, id="7_1", name="n", part=part, node=node, stderr=stderr), state)
    assert [record.key for record in records] == [cell.key for cell in pair]
    for failure in (record.failure for record in records):
        assert failure is not None
        assert (failure.kind, failure.phase, failure.last_lines) == (kind, "queued", ("first", "last"))
        assert "job 7_1" in failure.message
        assert words in failure.message


def test_records_of_another_machine_than_the_first_are_refused(tmp_path: Path):
    cells = [a_cell(name) for name in "abc"]
    never_ran = Failure(kind="crash", phase="queued", message="cancelled")
    elsewhere = replace(ENVIRONMENT, hostname="other", gpu="NVIDIA L4")
    records = [
        record_of(cells[0], environment=replace(ENVIRONMENT, gpu=None), failure=never_ran),
        record_of(cells[1]),
        record_of(cells[2], environment=elsewhere),
    ]
    store = Store(tmp_path / "it.jsonl")

    def sweep(**options: bool) -> list[str]:
        steps = run_sweep(
            [[cell] for cell in cells], store, lambda groups: iter([[r] for r in records]), here=None, **options
        )
        return [record.key for step in steps for record in step.records]

    with pytest.raises(ValueError, match="on other with gpu NVIDIA L4 against NVIDIA H200"):
        sweep()
    assert list(store.latest()) == [cell.key for cell in cells[:2]]
    records[:2] = []
    with pytest.raises(ValueError, match="--allow-mixed"):
        sweep()
    assert sweep(allow_mixed=True) == [cells[2].key]


JOB = """
import sys
from pathlib import Path
from trainstep.config.grid import Cell
from trainstep.measure.harness.slurm_queue import run_group
from trainstep.measure.harness.runner import Limits
cell = Cell(workload="tests.workloads:" + sys.argv[1], config={"device": "cpu"}, point={})
run_group([cell], Limits(), Path(sys.argv[2]), Path(sys.argv[3]))
"""


def test_a_job_that_is_terminated_leaves_no_part(tmp_path: Path):
    part, node = tmp_path / "part.jsonl", tmp_path / "it.node"
    job = subprocess.Popen([sys.executable, "-c", JOB, "HANG", part, node], cwd=ROOT)
    try:
        wait_until(node.exists)
        time.sleep(0.5)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=30) == 128 + signal.SIGTERM
        assert not part.exists()
    finally:
        job.kill()


# On Slurm


@pytest.fixture
def driver(slurm_cluster: SlurmCluster) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `trainstep WORDS` in the background."""
    drivers: list[subprocess.Popen[str]] = []

    def start(words: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "trainstep", *words]
        environ = slurm_cluster.environ
        drivers.append(subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True))
        return drivers[-1]

    yield start
    for process in drivers:
        process.kill()
    slurm_cluster.call("scancel", "--partition", slurm_cluster.partition)


def finish(driver: subprocess.Popen[str]) -> int:
    driver.communicate(timeout=90)
    return driver.returncode


def wait_until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def running(cluster: SlurmCluster) -> list[str]:
    return cluster.call("squeue", "--noheader", "--array", "--states=RUNNING", "--format=%i").split()


def waits_on(cluster: SlurmCluster, folder: Path) -> bool:
    """Whether a job runs and its cell has begun."""
    return bool(running(cluster)) and any(folder.glob("it.slurm/*/*.node"))


@pytest.mark.slow
def test_records_on_slurm_are_those_of_local_cells(driver: Callable[..., subprocess.Popen[str]], tmp_path: Path):
    words = a_sweep(tmp_path, SLEEPS.format(top="", seconds=[0.001, 0.002], steps=3))
    assert finish(driver(words)) == 0
    assert finish(driver([*words[:2], "--out", str(tmp_path / "here.jsonl"), "--device", "cpu"])) == 0
    on_slurm, locally = Store(tmp_path / "it.jsonl").latest(), Store(tmp_path / "here.jsonl").latest()
    assert set(on_slurm) == set(locally)
    for key, record in on_slurm.items():
        assert record.config == locally[key].config
        assert set(record.facts) == set(locally[key].facts)
        assert {name: len(samples.values) for name, samples in record.samples.items()} == {"step": 3}
    assert not list(tmp_path.glob("it.slurm/*.jsonl"))
    assert finish(driver(words)) == 0
    assert Store(tmp_path / "it.jsonl").latest() == on_slurm, "nothing is run twice"


@pytest.mark.slow
def test_variants_are_interleaved_in_one_job(driver: Callable[..., subprocess.Popen[str]], tmp_path: Path):
    text = SLEEPS.format(top='compare = "seconds"', seconds=[0.001, 0.002], steps=10)
    assert finish(driver(a_sweep(tmp_path, text))) == 0
    records = Store(tmp_path / "it.jsonl").read()
    assert [record.fact("interleaving") for record in records] == ["live", "live"]
    assert len({record.fact("interleaving_group") for record in records}) == 1
    assert len(list(tmp_path.glob("it.slurm/*/*.node"))) == 1


@pytest.mark.slow
def test_failures_are_records(driver: Callable[..., subprocess.Popen[str]], tmp_path: Path):
    names = [f"tests.workloads:{name}" for name in ("CRASH", "OOM", "SLEEP")]
    assert finish(driver(a_sweep(tmp_path, WORKLOADS.format(names=names)))) == 3
    records = {record.workload.split(":")[1]: record for record in Store(tmp_path / "it.jsonl").read()}
    kinds = {name: record.failure and record.failure.kind for name, record in records.items()}
    assert kinds == {"CRASH": "crash", "OOM": "out_of_memory", "SLEEP": None}


@pytest.mark.slow
def test_a_cancelled_job_is_a_crash(
    driver: Callable[..., subprocess.Popen[str]], slurm_cluster: SlurmCluster, tmp_path: Path
):
    started = driver(a_sweep(tmp_path, WORKLOADS.format(names=["tests.workloads:HANG"])))
    wait_until(lambda: waits_on(slurm_cluster, tmp_path))
    slurm_cluster.call("scancel", *running(slurm_cluster))
    assert finish(started) == 3
    [record] = Store(tmp_path / "it.jsonl").read()
    assert record.failure is not None
    assert (record.failure.kind, record.failure.phase) == ("crash", "running")
    assert "was cancelled" in record.failure.message
    assert any("CANCELLED" in line for line in record.failure.last_lines)


@pytest.mark.slow
def test_a_killed_driver_loses_nothing(
    driver: Callable[..., subprocess.Popen[str]], slurm_cluster: SlurmCluster, tmp_path: Path
):
    words = a_sweep(tmp_path, SLEEPS.format(top="", seconds=[0.001, 1, 0.002], steps=5))
    store = Store(tmp_path / "it.jsonl")
    killed = driver([*words, "--slurm-jobs", "1"])
    wait_until(lambda: store.latest() and running(slurm_cluster))
    killed.kill()
    [stored] = store.latest().values()
    assert finish(driver(words)) == 0
    assert len(store.read()) == 3
    assert store.latest()[stored.key] == stored
    assert len(list(tmp_path.glob("it.slurm/*/"))) == 1, (
        "the jobs running and queued were waited for, not submitted again"
    )


@pytest.mark.slow
def test_an_interrupted_driver_cancels_its_jobs(
    driver: Callable[..., subprocess.Popen[str]], slurm_cluster: SlurmCluster, tmp_path: Path
):
    names = ["tests.workloads:SLEEP", "tests.workloads:HANG", "tests.workloads:CRASH"]
    started = driver([*a_sweep(tmp_path, WORKLOADS.format(names=names)), "--slurm-jobs", "1"])
    store = Store(tmp_path / "it.jsonl")
    wait_until(lambda: store.latest() and len(list(tmp_path.glob("it.slurm/*/*.node"))) == 2)
    started.send_signal(signal.SIGINT)
    assert finish(started) == 130
    wait_until(lambda: not slurm_cluster.call("squeue", "--noheader").strip())
    assert [record.workload for record in store.read()] == names[:1]
    assert not list(tmp_path.glob("it.slurm/*.jsonl")), "a cell that was cut short is no result"


@pytest.mark.slow
def test_an_unknown_partition_is_refused(
    slurm_cluster: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(a_sweep(tmp_path, SLEEPS.format(top="", seconds=[0], steps=1), "nope")) == 2
    assert_one_sentence(capsys.readouterr().err, "partitions here: debug")

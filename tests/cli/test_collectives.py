"""`trainstep collectives`: records, tables and a page from two real ranks; bad input in one sentence."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cell_maker import import_path, run_here
from record_maker import ENVIRONMENT
from trainstep.cli import app, collectives
from trainstep.records.ranks import rank_values
from trainstep.records.record import Environment
from trainstep.records.store import Store


def test_two_gloo_ranks_give_records_a_table_and_a_page(tmp_path: Path):
    options = ["--operation", "all_reduce,broadcast", "--kib", "1,64", "--mib", "0.5", "--steps", 4, "--page", "p.html"]
    code, out, err = run_here("collectives", *options, folder=tmp_path)
    assert code == 0, err
    assert "Traceback" not in err
    assert "busiest rank" in out, "the table's note; the fit is left out where noise hides it"
    rows = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    assert ["all_reduce", "gloo", "2", "fp32", "1.00 KiB"] in [cells[:5] for cells in rows]
    [path] = (tmp_path / "runs").glob("collectives-*.jsonl")
    records = Store(path).read()
    assert [record.fact("payload_bytes") for record in records] == [2**10, 2**16, 2**19] * 2
    for record in records:
        assert record.failure is None
        times = rank_values(record, "time")
        assert set(times) == {0, 1}
        assert record.samples["time"].values == tuple(map(max, times[0], times[1]))
        assert (record.fact("messages"), record.fact("message_bytes")) == (4, 4 * record.fact("payload_bytes"))
    page = (tmp_path / "p.html").read_text()
    assert "Bus bandwidth by size" in page
    assert "Time of a call by size" in page
    assert "all_reduce by gloo, 2 ranks, fp32" in page


@pytest.mark.slow
def test_compared_dtypes_are_interleaved_and_json_has_their_bandwidths(tmp_path: Path):
    options = ["--compare", "dtype", "--dtype", "fp32,bf16", "--mib", "0.25", "--steps", 10, "--json"]
    code, out, err = run_here("collectives", *options, folder=tmp_path)
    assert code == 0, err
    rows = json.loads(out)["rows"]
    cells = [row for row in rows if row["workload"] == "collective" and "bus_bytes_per_s" in row]
    assert [row["dtype"] for row in cells] == ["fp32", "bf16"]
    for row in cells:
        assert row["algorithm_bytes_per_s"] == pytest.approx(row["payload_bytes"] / row["time_median_s"])
        assert row["bus_bytes_per_s"] == row["algorithm_bytes_per_s"]  # two ranks: 2 (n - 1) / n is 1
        assert row["slowest_rank_median_s"] >= row["fastest_rank_median_s"]
    [path] = (tmp_path / "runs").glob("collectives-*.jsonl")
    assert [record.fact("interleaving") for record in Store(path).read()] == ["live", "live"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--backend", "glo"], "backend: 'glo' is not known (did you mean gloo?)"),
        (["--backend", "nccl"], "device: no NVIDIA GPU is visible"),
        (["--ranks", "0"], "ranks: must be a whole number of at least 1"),
        (["--ranks", "1000"], "ranks: must be at most 64, not 1000"),
        (["--ranks", "two"], "ranks: must be a whole number"),
        (["--mib", "0"], "mib: must be over 0"),
        (["--kib", "-1"], "kib: must be positive numbers"),
        (["--kib", "1,,2"], "kib: an empty value"),
        (["--operation", "all-reduce"], "operation: 'all-reduce' is not known (did you mean all_reduce?)"),
        (["--compare", "dtype"], "compare: the grid does not vary along 'dtype'"),
        (["--page", "x.jsonl", "--out", "x.jsonl"], "page: x.jsonl is the file of records"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    arguments: list[str], sentence: str, refused: Callable[[Sequence[str], str], None]
):
    refused(["collectives", *arguments], sentence)


@pytest.mark.slow
def test_under_torchrun_only_the_first_task_runs_the_cells(tmp_path: Path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "trainstep", "collectives", "--mib", "0.001,0.1,1", "--steps", "3", "--out", "c.jsonl"]
    environ = {**os.environ, "PYTHONPATH": import_path(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("busiest rank") == 1, "the table's note; the fit is left out where noise hides it"
    records = Store(tmp_path / "c.jsonl").read()
    assert [set(rank_values(record, "time")) for record in records] == [{0, 1}] * 3


@pytest.mark.parametrize(
    ("verb", "variables", "code", "words"),
    [
        (
            "collectives",
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            0,
            "",
        ),  # the first task runs the cells
        ("collectives", {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 0, ""),
        ("attention", {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 2, "ranks: 4 tasks on several nodes"),
        ("collectives", {"RANK": "3", "WORLD_SIZE": "2"}, 2, "RANK: 3 is not one of 2 ranks"),
    ],
)
def test_other_tasks_of_a_launcher_run_nothing_or_are_refused(
    verb: str,
    variables: dict[str, str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert app.run([verb, "--device", "cpu"]) == code
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which two GPUs can be used."""
    here = dataclasses.replace(ENVIRONMENT, gpu_count=2)

    def this_machine(device: str | None, *, instead: str, **_: object) -> tuple[Environment, str]:
        return here, "cpu" if device == "cpu" else "cuda"

    monkeypatch.setattr(collectives, "this_machine", this_machine)


@pytest.mark.usefixtures("two_gpus")
def test_more_nccl_ranks_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    assert app.run(["collectives", "--backend", "nccl", "--ranks", "2,4"]) == 2
    err = capsys.readouterr().err
    assert "ranks: 4 NCCL ranks need a GPU each, but 2 are visible" in err
    assert "trainstep collectives --backend gloo --ranks 4" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("arguments", "backend", "device", "ranks"),
    [
        ([], "nccl", "cuda", 2),
        (["--backend", "gloo"], "gloo", "cpu", 2),
        (["--backend", "gloo", "--ranks", "6"], "gloo", "cpu", 6),
    ],
)
def test_a_machine_with_two_gpus_runs_nccl_unless_told_otherwise(
    arguments: list[str], backend: str, device: str, ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from trainstep.cli import cells

    monkeypatch.chdir(tmp_path)
    groups_run: list[Any] = []
    monkeypatch.setattr(cells, "run_cells", lambda groups, *rest, **more: groups_run.extend(groups) or [])
    monkeypatch.setattr(cells, "show", lambda *rest, **more: 0)
    assert app.run(["collectives", *arguments]) == 0
    configs = [group[0].config for group in groups_run]
    assert {(config["backend"], config["device"], config["ranks"]) for config in configs} == {(backend, device, ranks)}
    assert len(configs) > 3


@pytest.mark.parametrize(
    ("options", "begins"),
    [
        (
            ["--slurm", "p", "--nodes", "1,2", "--ranks", "8"],
            "--partition=p --nodes=2 --ntasks-per-node=1 --gres=gpu:4 ",
        ),
        (
            ["--slurm", "p", "--device", "cpu", "--slurm-args", "exclusive=true"],
            "--partition=p --nodes=1 --ntasks-per-node=1 --exclusive",
        ),
    ],
)
def test_slurm_runs_the_same_words_by_srun(
    options: list[str], begins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert app.run(["collectives", *options]) == 3
    printed = capfd.readouterr().out.strip()
    assert printed.startswith(begins)
    assert printed.endswith(f"-m trainstep collectives {' '.join(options)}")


@pytest.mark.parametrize("by_us", [False, True])
def test_slurm_inside_a_launch_has_no_effect_and_says_so(
    by_us: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    if by_us:
        monkeypatch.setenv("TRAINSTEP_BY_SRUN", "1")
    assert app.run(["collectives", "--device", "cpu", "--slurm", "p", "--level", "in_nodes"]) == 2
    err = capsys.readouterr().err
    assert ("slurm: has no effect in a task of srun or torchrun" in err) == (not by_us)
    assert "level: in_nodes needs several nodes" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--slurm-gpus", "2"], "slurm_gpus: has no effect without --slurm PARTITION"),
        (["--slurm", " "], "slurm: needs the name of a partition"),
        (["--slurm", "p", "--slurm-args", "flag"], "slurm_args: 'flag' has no value"),
        (["--device", "cpu", "--nodes", "2"], "nodes: 2 nodes are asked for and this is one; add --slurm PARTITION"),
        (["--device", "cpu", "--nodes", "2", "--ranks", "3"], "nodes: 3 ranks cannot be spread evenly over 2 nodes"),
        (["--device", "cpu", "--level", "in_nodes"], "level: in_nodes needs several nodes"),
    ],
)
def test_wrong_options_of_nodes_are_refused(
    arguments: list[str], sentence: str, refused: Callable[[Sequence[str], str], None]
):
    refused(["collectives", *arguments], sentence)


@pytest.mark.parametrize(
    ("device", "nodes", "gpus", "backend"),
    [
        ("cuda", [2], 1, "nccl"),
        ("cuda", [1], 1, "gloo"),
        ("cuda", [1], 2, "nccl"),
        ("cpu", [2], 0, "gloo"),
    ],
)
def test_gpus_of_several_nodes_send_by_nccl(device: str, nodes: list[int], gpus: int, backend: str):
    """Also where each node has one GPU."""
    here = dataclasses.replace(ENVIRONMENT, gpu_count=gpus)
    assert collectives._with_defaults({"nodes": nodes, "ranks": [2]}, [], device, here)["backend"] == [backend]

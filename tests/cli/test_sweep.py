"""`trainstep sweep` as a process: a kill at any moment loses no finished cell, and every failure of a cell is a record."""

import random
import shutil
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from cell_maker import finish, is_alive, marked, run_here, start, wait_until
from sources import ROOT
from trainstep.cli import app
from trainstep.config.grid import Cell, expand_all, grid_from_settings, groups_along
from trainstep.config.sweep import load_sweep
from trainstep.records.store import Store

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def write_sweep(folder: Path, count: int = 3, workload: str = "SLEEP", head: str = "", **grid: Any) -> Path:
    """A sweep file of `count` cells."""
    lines = [f"{name} = {value!r}" for name, value in grid.items()]
    path = folder / "s.toml"
    path.write_text(
        "\n".join([head, "[grid]", f'workload = "workloads:{workload}"', f"index = {list(range(count))}", *lines])
    )
    return path


def indices(folder: Path) -> list[int]:
    """The indices of the cells on disk, in the order of the file."""
    return [record.config["index"] for record in Store(folder / "runs" / "s.jsonl").latest().values()]


def reported(stderr: str) -> set[int]:
    """The indices of the cells that whole lines report as done."""
    lines = [line for line in stderr.splitlines(keepends=True) if line.endswith("\n") and "done in" in line]
    return {int(line.split("index ")[1].split(":")[0].split(",")[0]) for line in lines}


def sweep(folder: Path, *arguments: object) -> tuple[int, str, str]:
    return run_here("sweep", "s.toml", *arguments, folder=folder)


@pytest.mark.slow
def test_a_finished_sweep_runs_no_cell_again(tmp_path: Path):
    write_sweep(tmp_path, 3)
    code, out, err = sweep(tmp_path)
    assert code == 0
    first, *lines = err.splitlines()
    assert first == "3 cells to run, about 30 s by a rough guess of 10 s for each of 3"
    assert [line.split(":")[0] for line in lines] == ["[1/3] index 0", "[2/3] index 1", "[3/3] index 2"]
    assert [" s left" in line for line in lines] == [True, True, False]
    assert "records: runs/s.jsonl" in out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["s.jsonl"]
    before = (tmp_path / "runs" / "s.jsonl").read_bytes()
    code, again, err = sweep(tmp_path)
    assert (code, err) == (0, "3 of 3 cells are done already\n")
    assert again == out
    assert (tmp_path / "runs" / "s.jsonl").read_bytes() == before


def kill_at_random(folder: Path, moments: random.Random, longest_s: float) -> None:
    """Start the sweep, kill its process without warning, and check what it left."""
    before = set(indices(folder))
    mark = uuid.uuid4().hex
    process = start("sweep", "s.toml", folder=folder, mark=mark)
    time.sleep(moments.uniform(0.05, longest_s))
    process.kill()
    _, _, err = finish(process)
    after = set(indices(folder))
    assert before <= after, "what was finished before is still there"
    assert reported(err) <= after, "what was reported is on disk"
    assert wait_until(lambda: not marked(mark)), "an orphan"


@linux
def test_a_killed_sweep_is_resumed_and_runs_no_cell_twice(tmp_path: Path):
    write_sweep(tmp_path, 4, seconds=0.1)
    moments = random.Random(0)
    for _ in range(2):
        kill_at_random(tmp_path, moments, longest_s=1.5)
    code, _, _ = sweep(tmp_path)
    assert code == 0
    assert sorted(indices(tmp_path)) == list(range(4))
    assert len(Store(tmp_path / "runs" / "s.jsonl").read()) == 4, "no cell was run twice"


@pytest.mark.slow
@linux
def test_a_sweep_killed_between_rounds_continues_with_the_next_part(tmp_path: Path):
    """The stored parts are continued, and removed once the whole records are stored."""
    log = tmp_path / "log"
    write_sweep(tmp_path, 1, head='compare = "name"', name=["a", "b"], steps=10, seconds=0.02, log=str(log))
    parts = tmp_path / "runs" / "s.rounds"
    mark = uuid.uuid4().hex
    process = start("sweep", "s.toml", "--rounds", 2, folder=tmp_path, mark=mark)
    assert wait_until(lambda: len(lines_in(parts)) >= 2, 30)
    process.kill()
    finish(process)
    assert wait_until(lambda: not marked(mark)), "an orphan"
    assert indices(tmp_path) == []
    parts_kept = len(lines_in(parts))
    assert parts_kept < 4
    shutil.copytree(parts, tmp_path / "kept")
    log.unlink()
    code, _, _ = sweep(tmp_path, "--rounds", 2)
    assert code == 0
    rounds_taken = [line for line in log.read_text().splitlines() if "take" in line]
    assert rounds_taken == ["a take 5", "b take 5", "b take 5", "a take 5"][parts_kept:]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["s.jsonl"]
    assert [len(record.samples["step"].values) for record in Store(tmp_path / "runs" / "s.jsonl").read()] == [10, 10]
    shutil.copytree(tmp_path / "kept", parts)  # as if killed before they were removed
    sweep(tmp_path)
    assert not parts.exists()


def lines_in(folder: Path) -> list[str]:
    """The whole lines of all files there."""
    return [line for path in folder.glob("*.jsonl") for line in path.read_text().split("\n")[:-1]]


@linux
@pytest.mark.slow
def test_no_kill_at_twenty_moments_loses_a_cell(tmp_path: Path):
    """Each sweep of 20 cells is killed until it is complete; then the next begins."""
    moments = random.Random(1)
    kills = 0
    while kills < 20:
        folder = tmp_path / str(kills)
        folder.mkdir()
        write_sweep(folder, 20, seconds=0.1)
        while kills < 20 and len(indices(folder)) < 20:
            kill_at_random(folder, moments, longest_s=2.5)
            kills += 1
    code, _, _ = sweep(folder)
    assert code == 0
    assert sorted(indices(folder)) == list(range(20))
    assert len(Store(folder / "runs" / "s.jsonl").read()) == 20


@linux
@pytest.mark.parametrize("compare", [False, True])
def test_ctrl_c_keeps_what_is_finished(tmp_path: Path, compare: bool):
    """The sweep is too long to end before the signal comes, however busy the machine is."""
    head = 'compare = "variant"' if compare else ""
    write_sweep(tmp_path, 100, head=head, seconds=0.2, variant=[1, 2] if compare else [1])
    mark = uuid.uuid4().hex
    process = start("sweep", "s.toml", folder=tmp_path, mark=mark)
    assert wait_until(lambda: (tmp_path / "runs" / "s.jsonl").exists() and len(indices(tmp_path)) >= 1, 30)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert "Traceback" not in err
    done, cells = len(Store(tmp_path / "runs" / "s.jsonl").latest()), 200 if compare else 100
    verb = "is" if done == 1 else "are"
    message = f"{done} of {cells} cells {verb} finished and kept in runs/s.jsonl"
    assert err.endswith(f"trainstep: interrupted; {message}; to continue: trainstep sweep s.toml\n")
    assert 1 <= len(set(indices(tmp_path))) < 100
    assert reported(err) <= set(indices(tmp_path))
    assert wait_until(lambda: not marked(mark)), "an orphan"


@pytest.mark.slow
@linux
def test_a_hung_cell_is_killed_with_its_grandchildren(tmp_path: Path):
    """The time-out on the command line replaces that of the file."""
    write_sweep(tmp_path, 2, "SPAWNS", "timeout_s = 600", then="hang", pid_file=str(tmp_path / "pid"))
    mark = uuid.uuid4().hex
    code, out, err = finish(start("sweep", "s.toml", "--timeout-s", 4, folder=tmp_path, mark=mark))
    assert code == 3
    assert "index 0: killed in steps at its time limit of 4 s" in err
    assert "time-out" in out
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert wait_until(lambda: not marked(mark))


@pytest.mark.slow
def test_every_failure_is_a_record(tmp_path: Path):
    acts = [
        "nothing",
        "run_out",
        "kill",
        "abort",
        "hang",
        "import",
        "segfault",
        "raise",
        "nan",
        "words",
        "nothing_known",
    ]
    write_sweep(tmp_path, 1, head="timeout_s = 8", act=acts, where="prepare")
    code, out, err = sweep(tmp_path)
    assert code == 3
    assert "Traceback (most recent call last)" not in err.split("[11/11]")[0]
    records = {record.config["act"]: record for record in Store(tmp_path / "runs" / "s.jsonl").read()}
    assert list(records) == acts, "the sweep went on"
    kinds = {act: record.failure.kind if record.failure else None for act, record in records.items()}
    assert kinds == {
        "nothing": None,
        "run_out": "out_of_memory",
        "kill": "crash",
        "abort": "crash",
        "hang": "timeout",
        "import": "import_error",
        "segfault": "crash",
        "raise": "crash",
        "nan": "crash",
        "words": "crash",
        "nothing_known": "crash",
    }
    for word in ("OOM", "time-out", "crash", "import error"):
        assert word in out
    assert "10 of 11 cells failed" in out


def test_out_of_memory_alone_exits_with_code_0(tmp_path: Path):
    write_sweep(tmp_path, 2, "OOM")
    code, out, _ = sweep(tmp_path)
    assert code == 0
    assert "2 of 2 cells failed: 2 OOM" in out


def test_retry_failed_runs_failed_cells_again(tmp_path: Path):
    write_sweep(tmp_path, 2, act=["import"], where="prepare")
    assert sweep(tmp_path)[0] == 3
    (tmp_path / "a_package_that_is_nowhere.py").touch()
    code, _, err = sweep(tmp_path)
    assert (code, err.splitlines()[0]) == (3, "2 of 2 cells are done already"), "a failure is a result"
    code, _, err = sweep(tmp_path, "--retry-failed")
    assert code == 0
    assert "[2/2] index 1: done" in err
    assert [record.failure for record in Store(tmp_path / "runs" / "s.jsonl").latest().values()] == [None, None]


def test_a_killed_cell_is_a_record_and_runs_again_when_retried(tmp_path: Path):
    write_sweep(tmp_path, 1, "KILLED")
    code, _, err = sweep(tmp_path)
    assert code == 3
    assert "workloads:KILLED: killed by SIGKILL in steps; the sender is unknown" in err
    sweep(tmp_path, "--retry-failed")
    assert len(Store(tmp_path / "runs" / "s.jsonl").read()) == 2


def test_a_second_sweep_on_the_same_file_is_refused(tmp_path: Path):
    write_sweep(tmp_path, 3, seconds=0.5)
    first = start("sweep", "s.toml", folder=tmp_path)
    assert wait_until(lambda: (tmp_path / "runs" / "s.jsonl").exists(), 30)
    code, _, err = sweep(tmp_path)
    assert code == 2
    assert err == "trainstep: runs/s.jsonl: another trainstep is writing to it; give --out another file\n"
    assert finish(first)[0] == 0
    assert indices(tmp_path) == [0, 1, 2]


def test_another_environment_is_refused_unless_allowed(tmp_path: Path):
    write_sweep(tmp_path, 1)
    assert sweep(tmp_path)[0] == 0
    path = tmp_path / "runs" / "s.jsonl"
    torch = Store(path).read()[0].environment.torch
    path.write_text(path.read_text().replace(f'"torch":"{torch}"', '"torch":"2.0.1"'))
    write_sweep(tmp_path, 2)
    code, _, err = sweep(tmp_path)
    assert code == 2
    assert f"holds records made with torch {torch} against 2.0.1" in err
    code, out, _ = sweep(tmp_path, "--allow-mixed")
    assert code == 0
    assert "2 different environments" in out


def test_a_torn_last_line_is_measured_again(tmp_path: Path):
    write_sweep(tmp_path, 3)
    sweep(tmp_path)
    path = tmp_path / "runs" / "s.jsonl"
    path.write_bytes(path.read_bytes()[:-100])
    code, _, err = sweep(tmp_path)
    assert code == 0
    already_done, _, line = err.splitlines()
    assert already_done == "2 of 3 cells are done already"
    assert line.startswith("[3/3] index 2: done")
    assert indices(tmp_path) == [0, 1, 2]


def test_the_command_line_replaces_values_of_the_file(tmp_path: Path):
    (tmp_path / "s.toml").write_text('timeout_s = 5\n[grid]\nmodel = "8B"\ndevice = "cuda"\nnvtx = true\n')
    code, _, err = sweep(tmp_path, "--device", "cpu", "--model", "tiny")
    assert code == 2
    assert "nvtx: ranges need a GPU" in err, "the device on the command line replaces that of the file"


@pytest.mark.slow
def test_records_and_page_go_to_the_named_files(tmp_path: Path):
    write_sweep(tmp_path, 2)
    code, out, _ = sweep(tmp_path, "--out", "deep/er/own.jsonl", "--page", "page.html")
    assert code == 0
    assert "records: deep/er/own.jsonl" in out
    assert "page: page.html" in out
    assert "<html" in (tmp_path / "page.html").read_text()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_a_closed_pipe_ends_no_sweep(tmp_path: Path, stream: str):
    """`trainstep sweep ... 2>&1 | head`: every cell runs, the page is written, and the exit code is that of the cells."""
    write_sweep(tmp_path, 3)
    process = start("sweep", "s.toml", "--page", "page.html", folder=tmp_path)
    getattr(process, stream).close()
    setattr(process, stream, None)
    code, _, err = finish(process)
    assert code == 0, err
    assert indices(tmp_path) == [0, 1, 2]
    assert (tmp_path / "page.html").exists()


def test_the_page_has_the_title_and_description_of_the_sweep(tmp_path: Path):
    write_sweep(tmp_path, 1, head='title = "Sleeping & waking"\ndescription = "How long it sleeps."')
    assert sweep(tmp_path, "--page", "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "<h1>Sleeping &amp; waking</h1>\n<p>How long it sleeps.</p>" in page


@pytest.mark.parametrize("name", sorted(path.name for path in (Path(__file__).parents[2] / "sweeps").glob("*.toml")))
def test_published_sweeps_expand_on_both_devices(name: str):
    """Each expands on a GPU and on a CPU; one that compares, into groups of at least two cells of one workload."""
    config = load_sweep(Path(__file__).parents[2] / "sweeps" / name)
    for device in ("cuda", "cpu"):
        groups = groups_along(expand_all(config.grids({}), {"device": device}), config.compare)
        least = min(map(len, groups))
        assert least == 1 if config.compare is None else least > 1
        assert all(len({cell.workload for cell in group}) == 1 for group in groups)
    assert config.description


def cells_of(name: str, *settings: str) -> list[list[Cell]]:
    config = load_sweep(ROOT / "sweeps" / name)
    return groups_along(expand_all(config.grids(grid_from_settings(settings)), {"device": "cuda"}), config.compare)


def test_plain_is_compared_at_one_size_only():
    groups = cells_of("attention_peers.toml")
    with_plain = [group for group in groups if any(cell.config["implementation"] == "plain" for cell in group)]
    assert len(groups) == 33, "eleven sizes, three directions"
    (group,) = with_plain
    names = [cell.config["implementation"] for cell in group]
    assert names == ["trainstep", "sdpa_flash", "sdpa_cudnn", "flex", "flash_attn_4", "plain"]
    config = group[-1].config
    assert [config[name] for name in ("batch", "heads", "seq", "head_dim", "direction")] == [1, 16, 16384, 64, "both"]


def test_the_hopper_sweep_compares_peers_at_eleven_sizes():
    groups = cells_of("attention_hopper.toml")
    assert len(groups) == 33, "eleven sizes, three directions"
    sizes = ("batch", "heads", "seq", "head_dim", "mask", "direction")
    assert {tuple(group[0].config[name] for name in sizes) for group in groups} == {
        tuple(group[0].config[name] for name in sizes) for group in cells_of("attention_peers.toml")
    }
    everywhere = ["trainstep", "sdpa_cudnn", "flash_attn_4"]
    for group in groups:
        names = [cell.config["implementation"] for cell in group]
        assert names in (everywhere, [*everywhere, "flex", "sdpa_flash"])
        assert {cell.config["dtype"] for cell in group} == {"bf16"}
    with_all = [group[0].config for group in groups if len(group) == 5]
    assert sorted({config["head_dim"] for config in with_all}) == [64, 128]
    assert len(with_all) == 6, "two sizes, three directions"


def test_the_sweeps_of_attention_memory_and_widths_have_their_sizes():
    memory = [group[0].config for group in cells_of("attention_memory.toml")]
    assert sorted({config["seq"] for config in memory if config["head_dim"] == 64}) == [2**n for n in range(10, 17)]
    assert {config["seq"] for config in memory if config["head_dim"] == 128} == {65536}
    groups = cells_of("attention_widths.toml")
    assert [[cell.config["head_dim"] for cell in group] for group in groups] == [[64, 80, 96, 128]] * 2


def test_settings_replace_values_of_a_published_sweep():
    cells = [cell for group in cells_of("flash.toml", "dtype=bf16", "seq=1024,4096") for cell in group]
    assert len(cells) == 5 * 2 * 3 * 2
    assert {cell.config["dtype"] for cell in cells} == {"bf16"}
    (group,) = cells_of("attention_peers.toml", "seq=256", "direction=both")
    assert {cell.config["batch"] for cell in group} == {4}


def test_a_sweep_runs_with_its_settings(tmp_path: Path):
    grid = 'workload = "attention"\nimplementation = ["plain", "trainstep"]\nseq = [32, 64]\nsteps = 2\nheads = 2'
    (tmp_path / "s.toml").write_text(f"[grid]\n{grid}\n")
    code, _, err = sweep(
        tmp_path, "--set", "implementation=flash", "--set", "seq=16,24", "--set", "device=cpu", "--set", "head-dim=8"
    )
    assert code == 0, err
    records = Store(tmp_path / "runs" / "s.jsonl").read()
    assert [record.config["seq"] for record in records] == [16, 24]
    assert {record.config["implementation"] for record in records} == {"trainstep"}
    assert {record.config["head_dim"] for record in records} == {8}
    assert "[1/2] seq 16: done" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "dtpe=bf16"], "sweep flash: unknown key 'dtpe' (did you mean dtype?)"),
        (["--set", "dtype"], "set: 'dtype' is not field=value; write it as --set dtype=bf16"),
        (["--set", "dtype=bf17"], "dtype: 'bf17' is not known"),
        (["--context", "8", "--set", "context=8"], "set: context is given as an option too; give it once"),
        (["--context", "8"], "sweep flash: unknown key 'context'"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(options: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert app.run(["sweep", str(ROOT / "sweeps" / "flash.toml"), "--device", "cpu", *options]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_help_has_an_example_of_settings(capsys: pytest.CaptureFixture[str]):
    assert app.run(["sweep", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "trainstep sweep sweeps/flash.toml --set dtype=bf16 --set seq=1024,4096" in out

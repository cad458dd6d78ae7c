"""`trainstep memory`: the records and tables of a run, a snapshot from elsewhere, a search, and bad input in one sentence."""

import dataclasses
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cell_maker import run_here
from record_maker import ENVIRONMENT, a_record
from trainstep.cli.app import run
from trainstep.records.record import Record
from trainstep.records.store import Store
from trainstep.report.memory.tables import headroom_bytes

FIXTURE = Path(__file__).parents[1] / "traces" / "fixtures" / "snapshot_tiny.pickle.gz"
SMALL = ("--model", "tiny", "--layers", "1", "--context", "16", "--batch-size", "2", "--device", "cpu")


def test_a_step_is_recorded_and_its_snapshot_kept(tmp_path: Path):
    command = (
        "memory",
        *SMALL,
        "--out",
        "m.jsonl",
        "--page",
        "m.html",
        "--keep-snapshot",
        "kept",
        "--min-share",
        "0.01",
    )
    code, out, err = run_here(*command, folder=tmp_path)
    assert code == 0, err
    assert "Largest allocations at the peak" in out
    [record] = Store(tmp_path / "m.jsonl").read()
    assert record.failure is None
    assert record.fact("allocated_residual_bytes") == 0
    assert record.config["min_share"] == 0.01
    assert "Memory over one step" in (tmp_path / "m.html").read_text()
    [snapshot] = (tmp_path / "kept").iterdir()
    assert run(["memory", "--from", str(snapshot)]) == 0


@pytest.mark.slow
def test_two_ranks_give_a_record_with_both_ledgers(tmp_path: Path):
    options = ("--ranks", "1,2", "--sync", "fsdp", "--page", "m.html", "--keep-snapshot", "kept", "--out", "m.jsonl")
    code, out, err = run_here("memory", *SMALL, *options, folder=tmp_path)
    assert code == 0, err
    assert "Peak of each rank" in out
    assert "Held by each rank" in out
    alone, both = Store(tmp_path / "m.jsonl").read()
    assert [record.config["sync"] for record in (alone, both)] == ["none", "fsdp"]
    assert "fullest_rank" not in alone.facts
    assert set(both.tables["ledger"]["rank"]) == {0, 1}
    assert both.fact("process_group") == "gloo"
    assert both.fact("allocated_residual_share") <= 0.01
    assert "Memory over one step of rank" in (tmp_path / "m.html").read_text()
    snapshots = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert snapshots == [
        "tiny-16-fp32-step-fsdp-rank0.pickle",
        "tiny-16-fp32-step-fsdp-rank1.pickle",
        "tiny-16-fp32-step.pickle",
    ]


def machine(gpus: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Simulate a machine with this many GPUs; the returned list gets the groups of cells, none of which is run."""
    from trainstep.cli import cells, memory

    here = dataclasses.replace(ENVIRONMENT, gpu_count=gpus)
    monkeypatch.setattr(memory, "this_machine", lambda device, **_: (here, "cpu" if device == "cpu" else "cuda"))
    groups_run: list[Any] = []
    monkeypatch.setattr(cells, "run_cells", lambda groups, *rest, **more: groups_run.extend(groups) or [])
    monkeypatch.setattr(cells, "show", lambda *rest, **more: 0)
    return groups_run


def test_more_ranks_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    groups_run = machine(1, monkeypatch)
    assert run(["memory", "--ranks", "2", "--sync", "fsdp"]) == 2
    err = capsys.readouterr().err
    assert "ranks: 2 ranks need a GPU each, but 1 is visible" in err
    assert "trainstep memory --device cpu --ranks 2" in err
    assert err.count("\n") == 1
    assert not groups_run
    assert list(tmp_path.iterdir()) == []


def test_options_of_several_ranks_make_no_needless_cells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    groups_run = machine(4, monkeypatch)
    assert run(["memory", "--ranks", "1,2", "--sync", "bucketed,fsdp", "--bucket-mib", "1,10"]) == 0
    strategies = [(cell.config["ranks"], cell.config["sync"], cell.config["bucket_mib"]) for [cell] in groups_run]
    assert strategies == [(1, "none", None), (2, "bucketed", 1.0), (2, "bucketed", 10.0), (2, "fsdp", None)]
    groups_run.clear()
    assert run(["memory", "--ranks", "4"]) == 0
    assert [(cell.config["ranks"], cell.config["sync"]) for [cell] in groups_run] == [(4, "bucketed")]


def test_help_has_an_example_with_several_ranks(capsys: pytest.CaptureFixture[str]):
    assert run(["memory", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "trainstep memory --model xl --ranks 2 --sync bucketed,sharded_flat,fsdp" in out
    assert "--bucket-mib" in out


@pytest.mark.parametrize(
    ("finished", "words"), [(0, "no trial was finished"), (1, "1 trial is finished and kept in "), (2, "2 trials are ")]
)
def test_an_interrupted_search_keeps_its_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], finished: int, words: str
):
    trials = iter([a_record(workload="memory")] * finished)

    def run_groups(_groups: Any, _bounds: Any, _tell: Any) -> Iterator[list[Record]]:
        trial = next(trials, None)
        if trial is None:
            raise KeyboardInterrupt
        yield [trial]

    monkeypatch.setattr("trainstep.cli.memory.run_groups", run_groups)
    assert run(["memory", *SMALL, "--fit", "batch_size", "--out", str(tmp_path / "fit.jsonl")]) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"trainstep: interrupted; {words}")
    assert [record.fact("fit_of") for record in Store(tmp_path / "fit.jsonl").finished()] == ["batch_size"] * finished


@pytest.mark.slow
def test_a_search_finds_the_largest_batch_that_fits(tmp_path: Path):
    model = ("--model", "tiny", "--layers", "1", "--mode", "forward_backward", "--device", "cpu")
    search = ("--fit", "batch_size", "--batch-size", "64", "--memory-limit-gib", "0.75")
    command = ("memory", *model, *search, "--out", "fit.jsonl")
    code, out, err = run_here(*command, folder=tmp_path)
    assert code == 0, err
    assert "What fits" in out
    records = Store(tmp_path / "fit.jsonl").read()
    assert all(record.fact("fit_of") == "batch_size" for record in records)
    fits = [record.config["batch_size"] for record in records if record.failure is None]
    fails = [record.config["batch_size"] for record in records if record.failure is not None]
    assert max(fits) < min(fails) <= max(fits) + max(1, max(fits) // 64)
    assert all(record.failure.kind == "out_of_memory" for record in records if record.failure)
    headrooms = [headroom_bytes(record) for record in records if record.failure is None]
    assert all(size is not None and size > 0 for size in headrooms)


def test_a_snapshot_from_elsewhere_is_read(capsys: pytest.CaptureFixture[str]):
    assert run(["memory", "--from", str(FIXTURE)]) == 0
    out = capsys.readouterr().out
    assert "75.2 MiB" in out
    assert "forward (linear.py:134)" in out
    assert "full ring" not in out
    assert run(["memory", "--from", str(FIXTURE), "--json"]) == 0
    [totals] = json.loads(capsys.readouterr().out)["rows"]
    assert (totals["requested_peak_bytes"], totals["allocated_peak_bytes"]) == (78_868_556, 78_878_208)


def test_a_full_ring_buffer_has_a_highest_value_and_no_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    event = {"action": "alloc", "addr": 512, "size": 4, "stream": 0, "time_us": 1, "frames": []}
    path = tmp_path / "ring.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[event] * 1000]}))
    assert run(["memory", "--from", str(path)]) == 0
    out = capsys.readouterr().out
    assert "its beginning is lost" in out
    assert "at the highest" in out
    assert "at the peak" not in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--from", "absent.pickle"], "no such file"),
        (["--from", str(FIXTURE), "--model", "tiny"], "model would have no effect"),
        (["--from", str(FIXTURE), "--page", "page.html"], "page would have no effect"),
        (["--from", str(FIXTURE), "--fit", "context"], "fit would have no effect"),
        (["--keep-snapshot", f"{__file__}/x", "--device", "cpu"], "keep_snapshot: no file can be made"),
        (["--page", f"{__file__}/x.html", "--device", "cpu"], "page: "),
        (["--from", __file__], "no memory snapshot"),
        (["--from", "/dev/zero"], "/dev/zero: cannot be read: it is not a regular file"),
        (["--from", str(FIXTURE), "--timeout-s", "1e-6"], "reading it takes more than 1e-06 s"),
        (["--from", str(FIXTURE), "--timeout-s", "1e8"], "timeout_s: must be a positive number of at most 2,000,000"),
        (["--from", str(FIXTURE), "--memory-limit-gib", "-1"], "memory_limit_gib: must be a positive number"),
        (["--from", str(FIXTURE), "--min-share", "2"], "min_share"),
        (["--from", str(FIXTURE), "--min-share", "much"], "min_share"),
        (["--min-share", "2", "--device", "cpu"], "min_share"),
        (["--recompute", "blocks", "--device", "cpu"], "did you mean block"),
        (["--recompute-every", "2", "--device", "cpu"], "recompute_every: has no effect without recompute"),
        (["--fit", "layers"], "--fit"),
        (["--steps", "3"], "steps"),
        (["--sync", "fsdp", "--device", "cpu"], "sync: has no effect on one rank; add --ranks 2 or more"),
        (["--bucket-mib", "1", "--device", "cpu"], "bucket_mib: has no effect on one rank"),
        (["--ranks", "2", "--sync", "fsdp", "--bucket-mib", "1", "--device", "cpu"], "bucket_mib: has no effect with"),
        (["--ranks", "2", "--sync", "fdsp", "--device", "cpu"], "did you mean fsdp?"),
        (["--ranks", "two", "--device", "cpu"], "ranks: must be a whole number"),
        (["--ranks", "2", "--mode", "forward", "--device", "cpu"], "mode: several ranks run a whole step"),
        (["--from", str(FIXTURE), "--ranks", "2"], "ranks would have no effect"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]):
    assert run(["memory", *arguments]) == 2
    err = capsys.readouterr().err
    assert word in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("name", "count"), [("memory", 12), ("memory_ranks", 9)])
def test_the_sweeps_of_memory_expand_to_all_cells(name: str, count: int):
    from trainstep.config.grid import expand
    from trainstep.config.sweep import load_sweep

    sweep = load_sweep(Path(__file__).parents[2] / "sweeps" / f"{name}.toml")
    cells = expand(sweep.grid, {"device": "cuda"})
    assert (len(cells), {cell.workload for cell in cells}) == (count, {"memory"})

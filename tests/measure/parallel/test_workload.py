"""The workload `parallel` on two ranks: times, messages, memory and traces of every strategy."""

import gzip
import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from cell_maker import silent
from parallel_cells import SMALL, failure_of, measured
from quick import slow_unless
from ranks import run_ranks
from trainstep.config.grid import Cell
from trainstep.config.parallel import OURS, PEERS
from trainstep.config.parsing import build_config, to_plain
from trainstep.costs.strategies import strategy_named
from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.harness.interleave import run_interleaved
from trainstep.measure.harness.runner import Limits, open_run, run_alone
from trainstep.measure.harness.workload import Findings
from trainstep.measure.memory import workload as step_memory
from trainstep.measure.parallel import meeting
from trainstep.measure.parallel import trace as parallel_trace
from trainstep.measure.parallel import workload as parallel
from trainstep.parallel.ranks import Ranks

FAST = ("none", "bucketed", "sharded_flat", "fsdp")


def rows_of(findings: Findings, name: str) -> list[dict[str, Any]]:
    table = findings.tables[name]
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def check_counts(findings: Findings, sync: str) -> None:
    """Check that messages and bytes of a step are those of the formula."""
    if sync in PEERS:
        assert "traffic" not in findings.tables
        return
    for line in rows_of(findings, "traffic"):
        assert (line["messages"], line["bytes"]) == (line["expected_messages"], line["expected_bytes"])
    assert findings.facts["wire_bytes"].value == findings.facts["expected_wire_bytes"].value
    assert bool(findings.facts["wire_bytes"].value) == (sync != "none")


def check_memory(findings: Findings, sync: str, masters: bool = False, ranks: int = 2) -> None:
    """Check that at four points of all ranks every category is the formula's, to the byte."""
    lines = rows_of(findings, "memory_points")
    assert {(line["rank"], line["point"]) for line in lines} == {
        (rank, f"after {point}") for rank in range(ranks) for point in ("init", "forward", "backward", "step")
    }
    sizes = {(line["point"], line["line"]): line["bytes"] for line in lines if line["rank"] == 0}
    assert sizes["after forward", "activations"] > sizes["after backward", "activations"] == 0
    assert sizes["after backward", "gradients"] > 0
    assert (sizes["after init", "optimizer state"] > 0) == masters
    assert sizes["after init", "optimizer state"] < sizes["after step", "optimizer state"]
    for line in lines:
        if sync in PEERS:
            assert line["expected_bytes"] is None
        else:
            assert line["bytes"] == line["expected_bytes"], line
    if sync not in PEERS:
        totals: dict[tuple[int, str], int] = {}
        for line in lines:
            key = line["rank"], line["point"]
            totals[key] = totals.get(key, 0) + line["expected_bytes"]
        peak, point = (findings.facts[f"expected_peak_{name}"].value for name in ("bytes", "point"))
        at_points = [total for (_, at), total in totals.items() if at == point]
        assert peak in at_points if at_points else peak >= max(totals.values())


@pytest.mark.parametrize(
    ("sync", "ops"),
    [
        *slow_unless(lambda sync, _ops: sync in FAST, [(sync, "plain") for sync in (*OURS, *PEERS)]),
        *slow_unless(lambda *_: False, [(sync, "fused") for sync in FAST]),
    ],
)
def test_every_strategy_is_timed_counted_and_traced(sync: str, ops: str):
    every_rank = run_ranks(2, measured, {"sync": sync, "ops": ops, "steps": 4, "bucket_mib": 0.01}, (3, 1))
    for findings in every_rank:
        assert {name: len(samples.values) for name, samples in findings.samples.items() if name != "grad_sync"} == {
            **dict.fromkeys(("step", "forward", "backward", "optimizer"), 4),
            "window_step": 2,  # one a turn
        }
        assert ("grad_sync" in findings.samples) == (sync != "none")
        assert findings.facts["tokens"].value == 2 * SMALL["batch_size"] * SMALL["context"]
        assert "afterwards_failed" not in findings.facts
        check_counts(findings, sync)
        check_memory(findings, sync)
        check_trace(findings, sync)
    checked = {"none": None, "fsdp": "buffers", "torch_fsdp2": "buffers"}.get(sync, "parameters and buffers")
    assert [findings.facts["agreement"].value if checked else None for findings in every_rank] == [checked] * 2


@pytest.mark.parametrize(
    "sync",
    slow_unless(
        ("bucketed", "sharded_flat").__contains__, [name for name in OURS if not strategy_named(name).shards_parameters]
    ),
)
def test_masters_have_the_formulas_messages_and_memory(sync: str):
    values = {"sync": sync, "precision": "bf16_master", "adamw": "trainstep", "bucket_mib": 0.01, "steps": 2}
    for findings in run_ranks(2, measured, values, (2,)):
        assert "afterwards_failed" not in findings.facts
        check_counts(findings, sync)
        check_memory(findings, sync, masters=True)


def check_trace(findings: Findings, sync: str, ranks: int = 2) -> None:
    """Check that each message of one step is hidden or exposed, and that communication is waiting plus transfer."""
    if sync == "none":
        assert "buckets" not in findings.tables
        return
    lines = rows_of(findings, "buckets")
    if sync not in PEERS:
        assert len(lines) == sum(line["messages"] for line in rows_of(findings, "traffic"))
    for line in lines:
        assert line["launched_s"] <= line["finished_s"]
        assert line["hidden_s"] + line["exposed_s"] == pytest.approx(line["finished_s"] - line["started_s"], abs=1e-8)
    seconds = {name: findings.facts[f"{name}_s"].value for name in ("communication", "waiting", "transfer", "exposed")}
    assert seconds["communication"] == pytest.approx(seconds["waiting"] + seconds["transfer"])
    assert 0 <= seconds["exposed"] <= seconds["communication"] * (1 + 1e-9)
    assert [line["rank"] for line in rows_of(findings, "communication")] == list(range(ranks))


@pytest.mark.parametrize("sync", ["none", "bucketed", "sharded_flat", "fsdp"])
def test_a_captured_cell_says_what_was_captured_and_has_no_trace(sync: str):
    values = {"sync": sync, "capture": "step", "adamw": "trainstep", "accumulation": 2}
    for findings in run_ranks(2, measured, values, (4,)):
        assert findings.facts["captured"].value == "step"
        assert findings.facts["wire_bytes"] == findings.facts["expected_wire_bytes"]
        assert "exposed_s" not in findings.facts
        assert len(findings.samples["step"].values) == 4


@pytest.mark.parametrize("sync", ["bucketed", "sharded_flat"])
def test_replicas_that_differ_are_a_failure_that_names_the_tensor(sync: str):
    for findings in run_ranks(2, measured, {"sync": sync}, (1,), True):
        failure = failure_of(findings)
        assert (failure.kind, failure.phase) == ("divergence", "agreement")
        assert "blocks.0.attention_norm.weight on ranks 0, 1" in failure.message
    unchecked = run_ranks(2, measured, {"sync": sync, "check_agreement": False}, (1,), True)
    assert all("agreement" not in findings.facts for findings in unchecked)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["bucketed", "fsdp"])
def test_groups_are_timed_counted_and_traced(sync: str):
    every_rank = run_ranks(4, measured, {"sync": sync, "shard_ranks": 2, "bucket_mib": 0.01}, (2,))
    for findings in every_rank:
        check_counts(findings, sync)
        check_memory(findings, sync, ranks=4)
        check_trace(findings, sync, ranks=4)
        assert {"all_reduce across groups", "all_gather in groups"} <= set(findings.tables["traffic"]["operation"])
        assert findings.facts["agreement"].value == (
            "shards and buffers" if sync == "fsdp" else "parameters and buffers"
        )


@pytest.mark.slow
def test_shards_that_differ_between_groups_are_a_failure_of_every_rank():
    for findings in run_ranks(4, measured, {"sync": "fsdp", "shard_ranks": 2}, (1,), True):
        failure = failure_of(findings)
        assert (failure.kind, failure.phase) == ("divergence", "agreement")
        assert failure.message.startswith("of rank 1's shard, where a rank stands for its group: ")
        assert "norm.weight on ranks 0, 1" in failure.message


def test_options_of_the_step_are_applied():
    values = {"sync": "fsdp", "accumulation": 2, "clip_grad_norm": 0.5, "reshard_after_forward": False, "adamw": "loop"}
    for findings in run_ranks(2, measured, values):
        assert findings.facts["tokens"].value == 2 * 2 * SMALL["batch_size"] * SMALL["context"]
        check_counts(findings, "fsdp")
        assert {line["operation"] for line in rows_of(findings, "traffic")} == {
            "all_gather",
            "reduce_scatter",
            "all_reduce",
        }


@pytest.mark.parametrize("accumulation", [1, 2])
def test_fsdp_may_compute_in_bf16(accumulation: int):
    """Gathers send half as many bytes; memory between steps does not change."""
    values = {"sync": "fsdp", "compute_dtype": "bf16", "accumulation": accumulation}
    in_fp32 = {
        line["operation"]: line["bytes"] for line in rows_of(run_ranks(2, measured, {"sync": "fsdp"})[0], "traffic")
    }
    for findings in run_ranks(2, measured, values):
        check_counts(findings, "fsdp")
        check_memory(findings, "fsdp")
        if accumulation == 1:
            sent = {line["operation"]: line["bytes"] for line in rows_of(findings, "traffic")}
            assert sent["all_gather"] == in_fp32["all_gather"] // 2
            assert sent["reduce_scatter"] == in_fp32["reduce_scatter"]


def test_gradients_may_stay_in_bf16_buckets():
    values = {"sync": "bucketed", "reduce_dtype": "bf16", "keeps_gradient_dtype": False, "adamw": "trainstep"}
    for findings in run_ranks(2, measured, values):
        check_counts(findings, "bucketed")
        assert rows_of(findings, "memory_points")


def measured_with_an_unreadable_trace(ranks: Ranks) -> Any:
    """Measure while rank 1 cannot read its trace and rank 0 can."""

    def read_trace(path: Path) -> Any:
        if ranks.rank == 1:
            raise ValueError(f"{path.name}: not JSON")
        return original(path)

    original = parallel_trace.read_trace
    with patch.object(parallel_trace, "read_trace", read_trace):
        return measured(ranks, {"sync": "bucketed"})


def test_a_trace_that_cannot_be_read_costs_no_timed_step():
    for findings in run_ranks(2, measured_with_an_unreadable_trace):
        assert findings.facts["trace_failed"].value == "ValueError: trace.json: not JSON"
        assert len(findings.samples["step"].values) == 2
        assert "traffic" in findings.tables
        assert "buckets" not in findings.tables


@pytest.mark.slow
def test_each_rank_keeps_its_trace(tmp_path: Path):
    every_rank = run_ranks(2, measured, {"sync": "bucketed", "keep_trace": str(tmp_path)})
    files = [Path(findings.facts["trace_file"].value) for findings in every_rank]
    assert sorted(tmp_path.iterdir()) == files
    for rank, file in enumerate(files):
        assert file.name.endswith(f"-rank{rank}.json.gz")
        trace = json.loads(gzip.decompress(file.read_bytes()))
        names = {event.get("name") for event in trace["traceEvents"]}
        assert "all_reduce bucket 0" in names


def test_a_step_that_is_not_inspected_has_its_times_losses_and_agreement_alone():
    findings, _ = run_ranks(2, measured, {"sync": "bucketed", "inspect": False})
    assert set(findings.tables) == {"losses"}
    assert {"step", "window_step"} <= set(findings.samples)
    assert findings.facts["agreement"].value == "parameters and buffers"
    assert not {"wire_bytes", "model_flops"} & set(findings.facts)


def test_a_single_rank_sends_nothing():
    config = build_config("parallel", {**SMALL, "ranks": 1, "sync": "bucketed", "warmups": 1, "window_steps": 1})
    measurement = parallel.WORKLOAD.prepare(to_plain(config), lambda _stage: None)
    measurement.take(1)
    findings = measurement.finish()
    assert findings.facts["wire_bytes"].value == 0
    assert not findings.tables.keys() & {"buckets", "communication"}


@pytest.mark.parametrize(
    ("steps", "window_steps", "expected"),
    [
        (1, 10, [1, "window of 10"]),
        (9, 10, [9, "window of 10"]),
        (20, 10, [10, "window of 10", 10, "window of 10"]),
        (7, 2, [2, "window of 2", 2, "window of 2", 3, "window of 2"]),
    ],
)
def test_windows_have_as_many_steps_as_are_timed_one_by_one(steps: int, window_steps: int, expected: list[int | str]):
    config = build_config("parallel", {**SMALL, "ranks": 1, "warmups": 1, "window_steps": window_steps})
    measurement = parallel.WORKLOAD.prepare(to_plain(config), lambda _stage: None)
    calls: list[int | str] = []

    def time_window(steps: int) -> float:
        calls.append(f"window of {steps}")
        return 1.0

    timed = SimpleNamespace(take=calls.append, time_window=time_window)
    replace(measurement, timed=timed).take(steps)  # type: ignore[arg-type]
    assert calls == expected
    windows = measurement._windows()["window_step"].values
    assert windows == (1.0,) * calls.count(f"window of {window_steps}")


@pytest.mark.slow
def test_only_the_last_round_counts_traffic():
    grid = {**SMALL, "ranks": 2, "device": "cpu", "warmups": 1, "steps": 4, "window_steps": 2}
    cells = [
        Cell(
            workload="parallel", config=to_plain(build_config("parallel", {**grid, "sync": sync})), point={"sync": sync}
        )
        for sync in ("none", "bucketed")
    ]
    stages: list[tuple[str, str]] = []
    [records] = run_interleaved(
        cells, Limits(rounds=2), lambda cell, stage: stages.append((cell.config["sync"], stage))
    )
    order = [sync for sync, stage in stages if stage == "build"]
    assert [sync for sync, _ in itertools.groupby(order)] == ["none", "bucketed", "none"]
    assert [sync for sync, stage in stages if stage == "traffic"] == ["bucketed", "none"]
    for record in records:
        assert record.failure is None
        assert (len(record.samples["step"].values), len(record.samples["window_step"].values)) == (4, 2)
        assert set(record.tables["ranks"]["rank"]) == {0, 1}
        assert "traffic" in record.tables
        assert record.fact("interleaving") == "rounds"


def test_more_ranks_than_gpus_are_unsupported():
    config = build_config("parallel", {**SMALL, "ranks": 512, "device": "cuda"})
    with pytest.raises(CellFailed) as caught:
        parallel.WORKLOAD.prepare(to_plain(config), lambda _stage: None)
    assert caught.value.failure.kind == "unsupported"


@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize("sync", ["bucketed", "fsdp", "torch_ddp"])
def test_two_gpus_have_traces_and_memory(sync: str):
    values = {"model": "small", "ranks": 2, "device": "cuda", "context": 128, "sync": sync, "steps": 3}
    cell = Cell(workload="parallel", config=to_plain(build_config("parallel", values)), point={})
    record, _ = run_alone(open_run(cell, Limits(), silent))
    assert record.failure is None
    assert (
        record.fact("nccl_bytes") > 0 or record.fact("gpu_other_processes") > 0
    )  # other processes' memory is in the driver's figure too
    # Not above: a slow host launches so late that nothing computes beside a message.
    assert record.fact("communication_s") >= record.fact("exposed_s") >= 0
    table = record.tables["memory_points"]
    lines = list(zip(table["point"], table["line"], table["bytes"], table["rank"], strict=True))
    sizes = {(point, line): size for point, line, size, rank in lines if rank == 0}
    for point in ("after init", "after forward", "after backward", "after step"):
        named = sum(size for (at, line), size in sizes.items() if at == point and line not in _OF_THE_ALLOCATOR)
        assert sizes[point, "allocated"] == named + sizes[point, "unnamed"]
        if sync == "bucketed":
            assert abs(sizes[point, "unnamed"]) < 0.1 * sizes[point, "allocated"]


_OF_THE_ALLOCATOR = ("unnamed", "allocated", "reserved", "driver")


@pytest.mark.parametrize("workload", [parallel.WORKLOAD, step_memory.WORKLOAD])
def test_running_out_of_memory_while_ranks_meet_is_a_failure_in_meet(workload: Any):
    name = "parallel" if workload is parallel.WORKLOAD else "memory"
    config = build_config(name, {**SMALL, "ranks": 2, "sync": "fsdp"})
    stages: list[str] = []
    with patch.object(meeting, "start_ranks", side_effect=MemoryError), pytest.raises(CellFailed) as caught:
        workload.prepare(to_plain(config), stages.append)
    assert (caught.value.failure.kind, caught.value.failure.phase) == ("out_of_memory", "meet")
    assert stages == ["build", "meet"]


def measured_without_memory_to_agree(ranks: Ranks) -> Any:
    with patch.object(parallel, "check_agreement", side_effect=MemoryError):
        return measured(ranks, {"sync": "bucketed"})


def test_running_out_of_memory_after_the_steps_is_a_failure_in_that_stage():
    failure = failure_of(run_ranks(2, measured_without_memory_to_agree)[0])
    assert (failure.kind, failure.phase) == ("out_of_memory", "agreement")
    assert failure.holders

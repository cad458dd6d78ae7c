"""The tuner runs end to end in Triton's interpreter, in processes and on a GPU; a candidate that goes wrong is a row."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cell_maker import import_path
from record_maker import a_record
from trainstep.config.attention import AttentionTilesConfig
from trainstep.config.grid import Cell
from trainstep.config.parsing import to_plain
from trainstep.measure.attention.tiles import Candidate
from trainstep.measure.harness.local import run_groups
from trainstep.measure.harness.runner import Limits
from trainstep.ops.flash_attention.portable.tiles import TileConfig
from trainstep.records.facts import Fact
from trainstep.records.record import Failure, Record

TINY = {"head_dim": 16, "shape": "1x2x32", "rounds": 4, "workers": 1, "device": "cpu", "arithmetic": "fp16"}


def tuned(workload: str = "attention_tiles", /, **fields: Any) -> Record:
    config = to_plain(AttentionTilesConfig(**{**TINY, **fields}))
    cell = Cell(workload=workload, config=config, point={"kernel": config["kernel"]})
    ((record,),) = run_groups([[cell]], Limits(timeout_s=110), lambda cell, stage: None)
    return record


def columns(record: Record, *names: str) -> list[tuple[Any, ...]]:
    table = record.tables["candidates"]
    return list(zip(*(table[name] for name in names), strict=True))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started by the test run kernels in the interpreter, and import the tests' workloads."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", import_path())


@pytest.mark.parametrize(
    ("kernel", "arithmetic", "mask"),
    [
        pytest.param("forward", "fp16", "causal", marks=pytest.mark.slow),
        pytest.param("key_gradients", "fp16x3", "causal", marks=pytest.mark.slow),
        pytest.param("query_gradients", "fp16x3", "full", marks=pytest.mark.slow),
        pytest.param("forward", "fp16x3", "causal", marks=pytest.mark.slow),
        pytest.param("key_gradients", "ieee", "full", marks=pytest.mark.slow),
        pytest.param("query_gradients", "fp16", "causal", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_tiles_are_timed_in_the_interpreter(kernel: str, arithmetic: str, mask: str):
    tiles = "16x16x4x1,16x16x4x1x2,32x16x64x1"
    record = tuned(kernel=kernel, arithmetic=arithmetic, mask=mask, candidates=tiles)
    assert record.failure is None, record.failure
    *own, in_use = columns(record, "outcome", "reason")
    assert own[:2] == [("right", "")] * 2
    assert own[2] == ("illegal", "num_warps=64 is not 1, 2, 4, 8 or 16")
    assert in_use == ("right", "")
    check_numbers(record)


def check_numbers(record: Record) -> None:
    """Check that facts, samples and the two tables agree."""
    timed = [row for row in columns(record, "time_s", "rounds", "error_ratio", "outcome") if row[3] == "right"]
    assert all(1 <= rounds <= record.config["rounds"] and 0 < ratio <= 1 for _, rounds, ratio, _ in timed)
    best_s = min(time_s for time_s, *_ in timed)
    assert record.fact("rate") == pytest.approx(record.fact("flops") / best_s)
    assert len(record.samples["time"].values) == record.config["rounds"]
    assert len(record.samples["time"].warmups) == 1
    assert len(record.tables["times"]["time_s"]) == sum(rounds for _, rounds, *_ in timed)
    assert record.fact("in_use_time") >= best_s


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_tiles_that_go_wrong_are_rows():
    record = tuned("tile_workloads:TUNER", candidates="16x16x4x1,16x32x4x1,16x128x4x1,16x64x4x1")
    assert record.failure is None, record.failure
    killed, raised, wrong, right, _ = columns(record, "outcome", "reason", "time_s")
    assert killed == ("failed", "compile: the process was killed by SIGSEGV in compile", None)
    assert raised == ("failed", "compile: RuntimeError: out of resource: shared memory", None)
    assert wrong == ("wrong", "o is not finite", None)
    assert right[0] == "right"
    assert right[2] is not None


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_nothing_to_time_is_a_failure_with_a_reason():
    record = tuned(candidates="16x16x4x1", budget_s=1e-9)
    assert record.failure is not None
    assert "none of 2 tiles can be timed; the first: not begun within 1e-09 s" in record.failure.message


CHECK_NAN = """
import json, os, sys
from trainstep.config.attention import AttentionTilesConfig
from trainstep.config.parsing import to_plain
from trainstep.measure.attention import lone_kernel
problem = to_plain(AttentionTilesConfig(**json.loads(sys.argv[1])))
tile = {"block_q": 16, "block_k": 16, "num_warps": 4, "num_stages": 1}
def facts():
    measurement = lone_kernel.WORKLOAD.prepare({"problem": problem, "tile": tile}, lambda stage: None)
    return {name: fact.value for name, fact in measurement.finish().facts.items()}
results = [facts()]
run = lone_kernel.LoneKernel.run
lone_kernel.LoneKernel.run = lambda kernel, bound: None
results.append(facts())
def off(kernel, bound):
    run(kernel, bound)
    next(iter(kernel.outputs.values()))[0, 0, 0, 0] += 0.25
lone_kernel.LoneKernel.run = off
results.append(facts())
print(json.dumps(results))
"""


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kernel", ["forward", "key_gradients"])
def test_the_check_sees_what_is_wrong(kernel: str):
    """The check of a kernel that is right, of one that writes nothing, and of one that is wrong in one place."""
    fields = json.dumps({**TINY, "kernel": kernel})
    process = subprocess.run(
        [sys.executable, "-c", CHECK_NAN, fields],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    correct, nothing, off = json.loads(process.stdout.splitlines()[-1])
    assert "wrong" not in correct
    assert 0 < correct["error_ratio"] <= 1
    assert nothing["wrong"].endswith("is not finite")
    assert "times what is allowed" in off["wrong"]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["forward", "key_gradients", "query_gradients"])
def test_tiles_are_timed_on_a_gpu(kernel: str, tmp_path: Path):
    tiles = "64x64x4x2,64x64x4x2x8,32x32x4x1"
    fields = {"head_dim": 64, "shape": "1x4x1000", "device": "cuda", "arithmetic": "bf16", "workers": 2}
    record = tuned(kernel=kernel, candidates=tiles, **fields)
    assert record.failure is None, record.failure
    assert [outcome for (outcome,) in columns(record, "outcome")] == ["right"] * 4
    assert all(registers > 0 and shared > 0 for registers, shared in columns(record, "registers", "shared_bytes"))
    check_numbers(record)


def test_a_candidate_takes_over_what_its_check_found():
    candidates = [Candidate(tile=TileConfig(block_q=16, block_k=16, num_warps=4, num_stages=1)) for _ in range(4)]
    failure = Failure(kind="crash", phase="compile", message="no such layout")
    records = (None, a_record(failure=failure), a_record(facts={"wrong": Fact(value="dq is 0.1 off")}), a_record())
    for candidate, record in zip(candidates, records, strict=True):
        candidate.learn(record, budget_s=30)
    assert [(candidate.outcome, candidate.reason) for candidate in candidates] == [
        ("not_begun", "not begun within 30 s"),
        ("failed", "compile: no such layout"),
        ("wrong", "dq is 0.1 off"),
        ("right", ""),
    ]

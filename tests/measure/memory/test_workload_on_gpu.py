"""The workload `memory` on a GPU, each cell in its process: the ledger agrees to the byte with the allocator and the driver."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cell_maker import silent
from trainstep.config.grid import expand
from trainstep.measure.harness.local import run_groups
from trainstep.measure.harness.runner import Limits
from trainstep.records.ranks import facts_of_rank, table_of_rank
from trainstep.records.record import Record
from trainstep.traces.memory_timeline import MemoryTimeline
from trainstep.traces.snapshot import read_snapshot

pytestmark = pytest.mark.gpu
MIB = 2**20
MOMENT = "after step"


def measured(**fields: Any) -> Record:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    grid = {
        "workload": ["memory"],
        "model": ["small"],
        "layers": [3],
        **{name: [value] for name, value in fields.items()},
    }
    [[record]] = run_groups([expand(grid, {"device": "cuda"})], Limits(timeout_s=110), silent)
    assert record.failure is None, record.failure
    return record


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "bf16_autocast", "attention": "plain"},
        {"recompute": "block"},
        {"mode": "forward_no_grad", "precision": "bf16"},
        {"compile": "model"},
        {"capture": "step", "adamw": "trainstep"},
        {"capture": "auto", "adamw": "loop", "precision": "bf16_autocast"},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())) or "plain step",
)
def test_the_ledger_adds_up(fields: dict[str, Any]):
    record = measured(**fields)
    assert record.fact("timeline_peak_bytes") == record.fact("peak_requested_bytes")
    assert record.fact("allocated_residual_bytes") == 0
    assert record.fact("driver_residual_bytes") <= max(64 * MIB, 0.01 * record.fact("driver_bytes"))
    assert record.fact("allocation_retries") == 0


def test_a_captured_step_needs_as_much_and_keeps_its_pool():
    eager, captured = (measured(capture=capture, adamw="trainstep") for capture in ("none", "step"))
    assert captured.fact("captured") == "step"
    assert captured.fact("peak_allocated_bytes") <= 1.03 * eager.fact("peak_allocated_bytes")
    ledger = captured.tables["ledger"]
    pool_bytes = ledger[MOMENT][list(ledger["line"]).index("of that, the graph's pool")]
    assert 0.2 * captured.fact("capture_pool_bytes") < pool_bytes <= captured.fact("capture_pool_bytes")
    assert [*captured.tables["peaks"]["phase"]] == ["forward", "backward", "optimizer"]


def test_a_kept_snapshot_has_the_same_peak(tmp_path: Path):
    record = measured(keep_snapshot=str(tmp_path))
    timeline = MemoryTimeline(read_snapshot(Path(record.fact("snapshot"))))
    assert timeline.requested_bytes.max() >= record.fact("peak_requested_bytes")
    assert timeline.held_before_bytes == 0


@pytest.mark.multigpu
@pytest.mark.parametrize("sync", ["none", "bucketed", "sharded", "sharded_flat", "fsdp", "torch_fsdp2"])
def test_every_rank_is_accounted_for(sync: str):
    """On two GPUs the ledger agrees with the allocator and its categories with the formula; NCCL has its own line."""
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs here")
    record = measured(ranks=2, sync=sync)
    assert record.fact("process_group") == "nccl"
    for rank in (0, 1):
        facts = facts_of_rank(record, rank)
        assert facts["allocated_residual_share"] <= 0.01
        assert facts["timeline_peak_bytes"] == pytest.approx(facts["peak_requested_bytes"], rel=0.01)
        assert facts["nccl_bytes"] > 0
        ledger, expected = (table_of_rank(record, name, rank) for name in ("ledger", "expected"))
        assert "NCCL" in ledger["line"]
        for line in ("parameters", "gradients", "optimizer state", "communication") if expected else ():
            measured_bytes, formula = (table[MOMENT][list(table["line"]).index(line)] for table in (ledger, expected))
            assert measured_bytes == pytest.approx(formula, rel=0.01, abs=4096)

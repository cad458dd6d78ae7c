"""The workload `memory` on several ranks: each rank's ledger agrees with the formula, and one record has them all."""

from pathlib import Path
from typing import Any

import pytest

from memory_cells import SHAPE, measured
from ranks import run_ranks
from trainstep.config.memory import MemoryConfig
from trainstep.config.model import ModelConfig
from trainstep.config.parallel import OURS, PEERS
from trainstep.config.parsing import from_plain
from trainstep.measure.harness.workload import Findings
from trainstep.traces.ledger import CATEGORIES
from trainstep.traces.memory_timeline import MemoryTimeline
from trainstep.traces.snapshot import read_snapshot

FAST = ("none", "bucketed", "sharded_flat", "fsdp")
COMPARED = ("parameters", "gradients", "optimizer state", "communication")
MOMENTS = ("init", "after forward", "after backward", "after step")
MODEL = ModelConfig(**SHAPE)
WEIGHTS = 4 * MODEL.parameters


def lines_of(findings: Findings, name: str) -> dict[tuple[int, str], dict[str, Any]]:
    """(rank, line) -> moment -> bytes."""
    table = findings.tables[name]
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    return {(row["rank"], row["line"]): row for row in rows}


def facts_of(findings: Findings, name: str) -> list[Any]:
    """Each rank's value of a fact."""
    table = findings.tables["rank_facts"]
    return [value for fact, value in zip(table["fact"], table["value"], strict=True) if fact == name]


def check_adds_up(findings: Findings) -> None:
    """Check that every byte of every rank has a category."""
    assert max(facts_of(findings, "allocated_residual_share")) <= 0.01
    ledger = lines_of(findings, "ledger")
    for rank in (0, 1):
        for moment in (*MOMENTS, "peak"):
            named = sum(ledger[rank, category][moment] for category in CATEGORIES)
            assert named + ledger[rank, "allocated, unexplained"][moment] == ledger[rank, "allocated"][moment]


def check_formula(findings: Findings) -> None:
    ledger, expected = lines_of(findings, "ledger"), lines_of(findings, "expected")
    for rank in (0, 1):
        for line in COMPARED:
            for moment in MOMENTS:
                measured_bytes, formula = ledger[rank, line][moment], expected[rank, line][moment]
                assert measured_bytes == formula, (
                    f"rank {rank}, {line} {moment}: {measured_bytes}, by formula {formula}"
                )


@pytest.mark.parametrize("sync", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in OURS])
def test_categories_are_the_formulas_to_the_byte(sync: str):
    findings, of_rank_1 = run_ranks(2, measured, {"sync": sync, "bucket_mib": 0.05})
    assert (findings.facts, findings.tables) == (of_rank_1.facts, of_rank_1.tables)
    check_adds_up(findings)
    check_formula(findings)
    fullest = findings.facts["fullest_rank"].value
    peaks = facts_of(findings, "peak_allocated_bytes")
    assert peaks[fullest] == max(peaks) == findings.facts["peak_allocated_bytes"].value
    assert findings.facts["parameters"].value == MODEL.parameters
    assert findings.facts["tokens"].value == 2 * 2 * 16


@pytest.mark.slow
def test_sharded_categories_are_half_as_large():
    """Sizes written out here, not taken from plan/: two ranks, fp32, AdamW."""
    replicated, flat, fsdp = (
        lines_of(run_ranks(2, measured, {"sync": sync})[0], "ledger") for sync in ("bucketed", "sharded_flat", "fsdp")
    )
    for rank in (0, 1):
        assert replicated[rank, "parameters"]["after step"] == flat[rank, "parameters"]["after step"] == WEIGHTS
        assert fsdp[rank, "parameters"]["after step"] == WEIGHTS // 2
        assert replicated[rank, "optimizer state"]["after step"] == pytest.approx(2 * WEIGHTS, rel=0.01)
        assert flat[rank, "optimizer state"]["after step"] == pytest.approx(WEIGHTS, rel=0.01)
        assert fsdp[rank, "optimizer state"]["after step"] == pytest.approx(WEIGHTS, rel=0.01)
        assert replicated[rank, "gradients"]["init"] == pytest.approx(WEIGHTS, rel=0.01)  # buckets, from the start on
        assert flat[rank, "gradients"]["after backward"] == fsdp[rank, "gradients"]["after backward"] == WEIGHTS // 2
        root = 4 * (2 * 300 * 32 + 32)  # embedding, head and last norm are whole until backward reaches the embedding
        last_block = (WEIGHTS - root) // 3  # backward begins with it
        gathered = fsdp[rank, "communication"]["after forward"] - fsdp[rank, "communication"]["after step"]
        assert gathered == root + last_block


@pytest.mark.parametrize(
    "values",
    [
        {"sync": "fsdp", "accumulation": 2, "reshard_after_forward": False},
        {"sync": "fsdp", "compute_dtype": "bf16", "precision": "bf16_autocast"},
        {"sync": "fsdp", "compute_dtype": "bf16", "accumulation": 2},
        {"sync": "fsdp", "compute_dtype": "bf16", "accumulation": 3},
        {"sync": "sharded_flat", "precision": "bf16_autocast", "clip_grad_norm": 1.0},
        {"sync": "bucketed", "recompute": "block", "reduce_dtype": "bf16", "bucket_mib": 0.05},
        {"sync": "bucketed", "precision": "bf16_master", "reduce_dtype": "fp32", "bucket_mib": 0.05},
        {"sync": "sharded", "precision": "bf16_master", "adamw": "trainstep"},
        {"sync": "sharded_flat", "precision": "bf16_master", "adamw": "trainstep"},
        {"sync": "bucketed", "adamw": "trainstep", "update": "in_backward", "bucket_mib": 0.05},
        {"sync": "none", "adamw": "trainstep", "update": "in_backward", "precision": "bf16_master"},
    ],
    ids=lambda values: " ".join(map(str, values.values())),
)
def test_options_of_a_step_are_accounted_for(values: dict[str, Any]):
    findings = run_ranks(2, measured, values)[0]
    check_adds_up(findings)
    check_formula(findings)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["bucketed", "sharded_flat", "fsdp"])
def test_categories_of_groups_are_the_formulas_to_the_byte(sync: str):
    findings = run_ranks(4, measured, {"sync": sync, "shard_ranks": 2, "bucket_mib": 0.05})[0]
    check_adds_up(findings)
    check_formula(findings)


@pytest.mark.slow
@pytest.mark.parametrize("sync", PEERS)
def test_torchs_own_strategies_have_a_ledger_and_no_formula(sync: str):
    findings = run_ranks(2, measured, {"sync": sync})[0]
    check_adds_up(findings)
    assert "expected" not in findings.tables
    assert "expected_peak_bytes" not in findings.facts


def test_each_rank_has_its_timeline_and_its_snapshot(tmp_path: Path):
    findings = run_ranks(2, measured, {"sync": "fsdp", "keep_snapshot": str(tmp_path)})[0]
    table = findings.tables["timeline"]
    assert set(table["rank"]) == {0, 1}
    files = [Path(file) for file in facts_of(findings, "snapshot")]
    assert [file.name for file in files] == [f"small-16-fp32-step-fsdp-rank{rank}.pickle" for rank in (0, 1)]
    for rank, file in enumerate(files):
        held_bytes = [
            sum(table[category][row] for category in CATEGORIES)
            for row, row_rank in enumerate(table["rank"])
            if row_rank == rank
        ]
        assert max(held_bytes) == facts_of(findings, "timeline_peak_bytes")[rank]
        assert MemoryTimeline(read_snapshot(file)).requested_bytes.max() >= max(held_bytes)


def test_a_full_ring_gives_no_tables():
    findings = run_ranks(2, measured_with_a_small_ring)[0]
    assert facts_of(findings, "history_full") == [True, True]
    assert set(findings.tables) == {"rank_facts"}


def measured_with_a_small_ring(ranks: Any) -> Findings:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trainstep.measure.memory.history._CpuHistory.ring_entries", 100)
        return measured(ranks, {"sync": "bucketed"})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sync": "fsdp"}, "sync: fsdp is for several ranks; take ranks 2 or more"),
        ({"ranks": 0}, "ranks: must be a whole number of at least 1"),
        ({"ranks": 2, "sync": "bucketed", "mode": "forward"}, "mode: several ranks run a whole step"),
        ({"ranks": 2, "sync": "fsdp", "compile": "model"}, "compile: fsdp gathers parameters block by block"),
        ({"ranks": 2, "sync": "fdsp"}, "sync: 'fdsp' is not known (did you mean fsdp?)"),
        ({"ranks": 2, "sync": "bucketed", "bucket_mib": -1.0}, "bucket_mib: must be a positive number"),
    ],
)
def test_impossible_configs_are_refused(fields: dict[str, Any], words: str):
    with pytest.raises(ValueError) as caught:
        from_plain(MemoryConfig, {"model": MODEL, **fields})
    assert str(caught.value).startswith(words)

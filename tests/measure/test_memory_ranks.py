"""The workload `memory` on several ranks: each rank's ledger is the formula's, and all of them are in one record."""

from pathlib import Path
from typing import Any

import pytest

from memory_cells import SHAPE, measured
from ranks import run_ranks
from trainstep.config.memory import MemoryConfig
from trainstep.config.model import ModelConfig
from trainstep.config.parsing import from_plain
from trainstep.config.sync import OURS, PEERS
from trainstep.measure.workload import Findings
from trainstep.traces.ledger import CATEGORIES
from trainstep.traces.memory_timeline import MemoryTimeline
from trainstep.traces.snapshot import read_snapshot

FAST = ("none", "bucketed", "sharded_flat", "fsdp")
COMPARED = ("parameters", "gradients", "optimizer state", "communication")
MOMENTS = ("init", "after forward", "after backward", "after step")
MODEL = ModelConfig(**SHAPE)
WEIGHTS = 4 * MODEL.parameters


def lines_of(found: Findings, name: str) -> dict[tuple[int, str], dict[str, Any]]:
    """(rank, line) -> moment -> bytes."""
    table = found.tables[name]
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    return {(row["rank"], row["line"]): row for row in rows}


def facts_of(found: Findings, name: str) -> list[Any]:
    """Each rank's value of a fact."""
    table = found.tables["rank_facts"]
    return [value for fact, value in zip(table["fact"], table["value"], strict=True) if fact == name]


def check_adds_up(found: Findings) -> None:
    """Every byte of every rank has a category."""
    assert max(facts_of(found, "allocated_residual_share")) <= 0.01
    ledger = lines_of(found, "ledger")
    for rank in (0, 1):
        for moment in (*MOMENTS, "peak"):
            named = sum(ledger[rank, category][moment] for category in CATEGORIES)
            assert named + ledger[rank, "allocated, unexplained"][moment] == ledger[rank, "allocated"][moment]


def check_formula(found: Findings) -> None:
    ledger, expected = lines_of(found, "ledger"), lines_of(found, "expected")
    for rank in (0, 1):
        for line in COMPARED:
            for moment in MOMENTS:
                seen, formula = ledger[rank, line][moment], expected[rank, line][moment]
                assert seen == formula, f"rank {rank}, {line} {moment}: {seen}, by formula {formula}"


@pytest.mark.parametrize("sync", [pytest.param(one, marks=() if one in FAST else pytest.mark.slow) for one in OURS])
def test_categories_are_the_formulas_to_the_byte(sync: str):
    found, same = run_ranks(2, measured, {"sync": sync, "bucket_mib": 0.05})
    assert (found.facts, found.tables) == (same.facts, same.tables)  # either may be asked
    check_adds_up(found)
    check_formula(found)
    fullest = found.facts["fullest_rank"].value
    peaks = facts_of(found, "peak_allocated_bytes")
    assert peaks[fullest] == max(peaks) == found.facts["peak_allocated_bytes"].value
    assert found.facts["parameters"].value == MODEL.parameters
    assert found.facts["tokens"].value == 2 * 2 * 16


def test_what_is_sharded_is_half_as_large():
    """Written out, not from plan/: two ranks, fp32, AdamW."""
    whole, flat, fully = (
        lines_of(run_ranks(2, measured, {"sync": sync})[0], "ledger") for sync in ("bucketed", "sharded_flat", "fsdp")
    )
    for rank in (0, 1):
        assert whole[rank, "parameters"]["after step"] == flat[rank, "parameters"]["after step"] == WEIGHTS
        assert fully[rank, "parameters"]["after step"] == WEIGHTS // 2
        assert whole[rank, "optimizer state"]["after step"] == pytest.approx(2 * WEIGHTS, rel=0.01)
        assert flat[rank, "optimizer state"]["after step"] == pytest.approx(WEIGHTS, rel=0.01)
        assert fully[rank, "optimizer state"]["after step"] == pytest.approx(WEIGHTS, rel=0.01)
        assert whole[rank, "gradients"]["init"] == pytest.approx(WEIGHTS, rel=0.01)  # buckets, from the start on
        assert flat[rank, "gradients"]["after backward"] == fully[rank, "gradients"]["after backward"] == WEIGHTS // 2
        root = 4 * (2 * 300 * 32 + 32)  # embedding, head and last norm: whole until backward comes to the embedding
        last_block = (WEIGHTS - root) // 3  # backward begins with it
        gathered = fully[rank, "communication"]["after forward"] - fully[rank, "communication"]["after step"]
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
    ],
    ids=lambda values: " ".join(map(str, values.values())),
)
def test_options_of_a_step_are_accounted_for(values: dict[str, Any]):
    found = run_ranks(2, measured, values)[0]
    check_adds_up(found)
    check_formula(found)


@pytest.mark.slow
@pytest.mark.parametrize("sync", PEERS)
def test_torchs_own_ways_have_a_ledger_and_no_formula(sync: str):
    found = run_ranks(2, measured, {"sync": sync})[0]
    check_adds_up(found)
    assert "expected" not in found.tables
    assert "expected_peak_bytes" not in found.facts


def test_each_rank_has_its_timeline_and_its_snapshot(tmp_path: Path):
    found = run_ranks(2, measured, {"sync": "fsdp", "keep_snapshot": str(tmp_path)})[0]
    table = found.tables["timeline"]
    assert set(table["rank"]) == {0, 1}
    files = [Path(file) for file in facts_of(found, "snapshot")]
    assert [file.name for file in files] == [f"small-16-fp32-step-fsdp-rank{rank}.pickle" for rank in (0, 1)]
    for rank, file in enumerate(files):
        held = [
            sum(table[category][place] for category in CATEGORIES)
            for place, its in enumerate(table["rank"])
            if its == rank
        ]
        assert max(held) == facts_of(found, "timeline_peak_bytes")[rank]
        assert MemoryTimeline(read_snapshot(file)).requested_bytes.max() >= max(held)


def test_a_full_ring_gives_no_peak_of_ours():
    found = run_ranks(2, measured_with_a_small_ring)[0]
    assert facts_of(found, "history_full") == [True, True]
    assert set(found.tables) == {"rank_facts"}


def measured_with_a_small_ring(ranks: Any) -> Findings:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trainstep.measure.memory_history._CpuHistory.ring_entries", 100)
        return measured(ranks, {"sync": "bucketed"})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sync": "fsdp"}, "sync: fsdp keeps several ranks together; take ranks 2 or more"),
        ({"ranks": 0}, "ranks: must be a whole number of at least 1"),
        ({"ranks": 2, "sync": "bucketed", "mode": "forward"}, "mode: of several ranks a whole step"),
        ({"ranks": 2, "sync": "fsdp", "compile": "model"}, "compile: fsdp gathers block by block"),
        ({"ranks": 2, "sync": "fdsp"}, "sync: 'fdsp' is not known (did you mean fsdp?)"),
        ({"ranks": 2, "sync": "bucketed", "bucket_mib": -1.0}, "bucket_mib: must be a positive number"),
    ],
)
def test_what_cannot_be(fields: dict[str, Any], words: str):
    with pytest.raises(ValueError) as caught:
        from_plain(MemoryConfig, {"model": MODEL, **fields})
    assert str(caught.value).startswith(words)

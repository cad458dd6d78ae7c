"""Recomputation chosen for a budget: measured costs predict what steps hold, and no step holds more than its budget."""

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from recomputed_model import WIDTH
from trainstep.config.model import ModelConfig, UserModel
from trainstep.config.run import RunConfig
from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.step import recompute_budget
from trainstep.measure.step.live_bytes import live_bytes
from trainstep.measure.step.recompute_budget import Recomputation, fit_budget, set_choice
from trainstep.measure.step.workload import prepare_step
from trainstep.plan.recomputation import MODES, BudgetTooSmall, choice_of, curve
from trainstep.records.facts import wrong_fact
from trainstep.records.tables import wrong_table
from trainstep.training.build import Assembly, build_step

SHAPE = ModelConfig(d_model=32, d_ff=88, layers=6, heads=2, vocab_size=64)
RUN = RunConfig(model=SHAPE, batch_size=2, context=64, adamw="trainstep", recompute_budget_gib=1.0)
USERS = UserModel(function="recomputed_model:build_with_dropout")
CASES: list[dict[str, Any]] = [
    {},
    {"ops": "fused", "precision": "bf16", "attention": "trainstep"},
    {"precision": "bf16_autocast"},
    {"accumulation": 2},
    {"model": USERS},
]


def fitted(budget_gib: float = 1.0, **fields: Any) -> tuple[Assembly, Recomputation]:
    assembly = build_step(dataclasses.replace(RUN, recompute_budget_gib=budget_gib, **fields))
    return assembly, fit_budget(assembly)


def held_bytes(assembly: Assembly) -> int:
    """The most that tensors hold in a step after the first, weights and state included."""
    assembly.take(assembly.micro_batches(0))
    optimizer = assembly.step.optimizer
    assert optimizer is not None
    state = [x for values in optimizer.state.values() for x in values.values() if isinstance(x, torch.Tensor)]
    tensors = [*assembly.module.parameters(), *assembly.module.buffers(), *state]
    batches = assembly.micro_batches(1)
    with live_bytes(assembly.device) as live:
        assembly.take(batches)
        return sum({x.data_ptr(): x.nbytes for x in tensors}.values()) + live.peak()


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_no_step_holds_more_than_its_budget_and_larger_budgets_add_less(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    _, unbounded = fitted(**fields)
    assert unbounded.choice.added_s == 0
    # The same costs for every budget, and times that no load changes: what keeps less takes longer.
    added_s = {mode: float(number) for number, mode in enumerate(MODES)}
    costs = {
        tuple(block.kept_bytes.items()): dataclasses.replace(block, added_s=added_s) for block in unbounded.step.blocks
    }
    measure = recompute_budget.block_cost
    monkeypatch.setattr(
        recompute_budget,
        "block_cost",
        lambda *arguments: costs[tuple(measure(*arguments).kept_bytes.items())],
    )
    blocks = [costs[tuple(block.kept_bytes.items())] for block in unbounded.step.blocks]
    choices = curve(dataclasses.replace(unbounded.step, blocks=blocks), points=4)
    low, high = choices[0].peak_bytes, choices[-1].peak_bytes
    one_block = max(block.kept_bytes["none"] - block.kept_bytes["block"] for block in unbounded.step.blocks)
    added = []
    for part in range(5):
        # A moment beyond the lowest peak, because the prediction is not exact.
        budget = low + (high - low) * part // 4 + (0 if part else one_block)
        assembly, recomputation = fitted(budget / 2**30, **fields)
        held = held_bytes(assembly)
        assert held <= budget
        assert recomputation.choice.added_s == 0 or held > budget - 2 * one_block
        added.append(recomputation.choice.added_s)
    assert added[1:] == sorted(added[1:], reverse=True)
    assert added[-1] == 0 < added[1]


@pytest.mark.parametrize("fields", [{}, {"model": USERS}], ids=str)
def test_the_prediction_is_what_a_step_holds(fields: dict[str, Any]):
    """With blocks alike and nothing cast, to the byte; never less than what is held."""
    assembly, recomputation = fitted(**fields)
    count = len(assembly.recomputed)
    for modes in [[mode] * count for mode in MODES] + [["block"] * (count // 2) + ["none"] * (count - count // 2)]:
        choice = choice_of(recomputation.step, modes)
        set_choice(assembly.recomputed, choice)
        assert held_bytes(assembly) <= choice.peak_bytes


@pytest.mark.parametrize(("optimizer_bytes", "fits"), [(0, True), (10**12, False)])
def test_fragments_that_are_given_back_do_not_hide_the_optimizer(
    optimizer_bytes: int, fits: bool, monkeypatch: pytest.MonkeyPatch
):
    assembly, whole = fitted()
    step = dataclasses.replace(whole.step, optimizer_bytes=optimizer_bytes)
    budget = choice_of(whole.step, ["none"] * len(whole.step.blocks)).peak_bytes
    monkeypatch.setattr(recompute_budget, "_peak_bytes", lambda *_: budget + 1)
    monkeypatch.setattr(recompute_budget, "_peak_within", lambda *_: budget - 1)
    verified = recompute_budget._verified
    if not fits:
        with pytest.raises(BudgetTooSmall):
            verified(assembly, assembly.micro_batches(0)[0], step, budget)
        return
    choice, held = verified(assembly, assembly.micro_batches(0)[0], step, budget)
    assert (choice.added_s, held) == (0, budget - 1)


@pytest.mark.slow
def test_a_budget_changes_no_loss():
    for fields in ({}, {"model": USERS}, {"precision": "bf16_autocast", "ops": "fused"}):
        _, whole = fitted(**fields)
        budget = (curve(whole.step)[0].peak_bytes + curve(whole.step)[-1].peak_bytes) / 2 / 2**30
        kept = build_step(dataclasses.replace(RUN, recompute_budget_gib=None, **fields))
        chosen = build_step(dataclasses.replace(RUN, recompute_budget_gib=budget, **fields))
        losses = []
        for assembly in (kept, chosen):
            torch.manual_seed(1)
            if assembly is chosen:
                assert fit_budget(assembly).choice.added_s > 0
                assert all(x.grad is None for x in assembly.module.parameters())
            losses.append([assembly.take(assembly.micro_batches(step)).item() for step in range(3)])
        assert losses[0] == losses[1]


@pytest.mark.slow
def test_chains_fit_where_whole_blocks_do_not():
    shape = dataclasses.replace(SHAPE, layers=16, d_ff=32)
    fields = {"model": shape, "accumulation": 2}  # gradients are there from the start, so that inputs are what counts
    assembly, unbounded = fitted(**fields)
    whole = choice_of(unbounded.step, ["block"] * 16)
    lowest = curve(unbounded.step)[0]
    assert lowest.chains
    assert lowest.peak_bytes < whole.peak_bytes
    assembly, recomputation = fitted((lowest.peak_bytes + whole.peak_bytes) / 2 / 2**30, **fields)
    assert recomputation.choice.chains
    assert held_bytes(assembly) <= (lowest.peak_bytes + whole.peak_bytes) / 2


def test_a_budget_below_the_minimum_is_refused_in_one_sentence():
    with pytest.raises(
        BudgetTooSmall, match=r"recompute_budget_gib: 0.0001 GiB are less than the 0\.00\d+ GiB that this step"
    ):
        fitted(0.0001)
    with pytest.raises(CellFailed) as failed:
        prepare_step(dataclasses.replace(RUN, recompute_budget_gib=0.0001), lambda _stage: None)
    assert (failed.value.failure.kind, failed.value.failure.phase) == ("unsupported", "recompute")


def test_a_record_has_the_choice_and_the_curve(monkeypatch: pytest.MonkeyPatch):
    measure = recompute_budget.block_cost
    added_s = {
        mode: float(number) for number, mode in enumerate(MODES)
    }  # beside other work a block may seem to add nothing
    monkeypatch.setattr(
        recompute_budget,
        "block_cost",
        lambda *arguments: dataclasses.replace(measure(*arguments), added_s=added_s),
    )
    measurement = prepare_step(dataclasses.replace(RUN, steps=1, warmups=0), lambda _stage: None)
    measurement.take(1)
    findings = measurement.finish()
    assert findings.facts["recompute_choice"].value == "6 none"
    assert not any(wrong_fact(name, fact.value) for name, fact in findings.facts.items())
    for name in ("recompute_curve", "recompute_blocks"):
        assert wrong_table("train_step", name, findings.tables[name]) is None
    table = findings.tables["recompute_curve"]
    assert table["added_s"] == sorted(table["added_s"], reverse=True)
    assert table["chosen"].count(True) == 1
    assert findings.tables["recompute_blocks"]["mode"] == list(MODES)


def test_blocks_with_other_inputs_are_a_kind_of_their_own():
    _, recomputation = fitted(ops="fused")
    assert recomputation.kinds == (0, 1, 1, 1, 1, 1), "nothing is added to the first block's residual stream"


def test_a_model_that_runs_a_block_twice_is_refused():
    assembly = build_step(dataclasses.replace(RUN, model=USERS))
    blocks = assembly.module.blocks
    assembly.module.between = lambda x: x if x.shape[-1] != WIDTH else blocks[0](x, scale=assembly.module.scale)
    with pytest.raises(ValueError, match="recompute_budget_gib: a forward runs"):
        fit_budget(assembly)


@pytest.mark.slow
def test_compiled_blocks_are_measured_uncompiled_on_a_cpu():
    torch._dynamo.reset()
    _, eager = fitted()
    budget = (curve(eager.step)[0].peak_bytes + curve(eager.step)[-1].peak_bytes) / 2 / 2**30
    assembly, recomputation = fitted(budget, compile="block")
    assert recomputation.choice.added_s > 0
    plain, _ = fitted(budget)
    losses = [[one.take(one.micro_batches(step)).item() for step in range(2)] for one in (assembly, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.fixture
def whole_gpu() -> Iterator[None]:
    """Frees what earlier tests left, and takes the limit of memory away again, that a budget sets.

    cuBLAS has a workspace for each stream, 32 MiB on Hopper, which no step needs whose stream is gone.
    """
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_gpu")
@pytest.mark.parametrize(
    ("compile_", "capture"), [("none", "none"), ("block", "none"), ("none", "step"), ("block", "step")]
)
def test_a_gpu_reserves_no_more_than_its_budget(compile_: str, capture: str):
    shape = ModelConfig(d_model=512, d_ff=1408, layers=12, heads=8, vocab_size=4096)
    fields = {"model": shape, "batch_size": 4, "context": 2048, "precision": "bf16", "ops": "fused"}
    fields |= {"attention": "trainstep", "device": "cuda", "compile": compile_, "capture": capture}
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    _, whole = fitted(total, **fields)
    choices = curve(whole.step)
    low, high = choices[0].peak_bytes, choices[-1].peak_bytes
    del _
    for part in (1, 2, 3):
        torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()  # a captured step and its assembly hold each other
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        budget = low + (high - low) * part // 4
        assembly, _ = fitted(budget / 2**30, **fields)
        torch.cuda.reset_peak_memory_stats()
        for step in range(6):
            assembly.take(assembly.micro_batches(step))
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_reserved() <= budget
        del assembly, _
    torch.cuda.set_per_process_memory_fraction(1.0)

"""Recomputation chosen for a budget on several ranks: all choose the same, whatever each measures, and no rank holds more."""

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch

from parallel_cells import failure_of, measured
from quick import slow_unless
from ranks import run_ranks
from recomputed_model import WIDTH
from trainstep.config.model import ModelConfig, UserModel
from trainstep.config.parallel import OURS, RankRunConfig, SyncConfig
from trainstep.measure.step import recompute_budget
from trainstep.measure.step.budget_passes import base_bytes, live_bytes_of
from trainstep.measure.step.budget_ranks import agreed_cost, check_kinds, largest_bytes
from trainstep.measure.step.lone_block import block_cost
from trainstep.measure.step.recompute_budget import Recomputation, fit_budget, set_choice
from trainstep.parallel.ranks import Ranks, alone
from trainstep.plan.recomputation import MODES, BlockCost, BudgetTooSmall, Choice, StepCost, choice_of, choose, curve
from trainstep.records.facts import wrong_fact
from trainstep.records.tables import wrong_table
from trainstep.training.build import Assembly, build_step
from trainstep.training.parallelism import parallel

RUN = RankRunConfig(
    model=ModelConfig(d_model=32, d_ff=88, layers=4, heads=2, vocab_size=64),
    batch_size=2,
    context=64,
    adamw="trainstep",
    recompute_budget_gib=1.0,
)
USERS = UserModel(function="recomputed_model:build_with_dropout")
SPEEDS = ({"selective": 1.0, "narrow": 8.0, "block": 9.0}, {"selective": 9.0, "narrow": 8.0, "block": 1.0})
"""What each mode adds on rank 0 and on rank 1."""


def built(ranks: Ranks, sync: str, **fields: Any) -> Assembly:
    config = SyncConfig(name=sync, bucket_mib=0.05)
    return build_step(dataclasses.replace(RUN, **fields), parallel(ranks, config))


def fitted(ranks: Ranks, sync: str, budget_bytes: int, added_s: dict[str, float], **fields: Any) -> Recomputation:
    """The recomputation for a budget, where this rank's blocks add this time."""

    def measure(*arguments: Any) -> BlockCost:
        return dataclasses.replace(block_cost(*arguments), added_s={"none": 0.0, **added_s})

    with patch.object(recompute_budget, "block_cost", measure):
        return fit_budget(built(ranks, sync, recompute_budget_gib=budget_bytes / 2**30, **fields))


def choices(ranks: Ranks, sync: str) -> tuple[Choice, Choice, int]:
    """What this rank chooses with the others, what it would choose by its own times, and the budget."""
    added_s = SPEEDS[ranks.rank]
    step = fitted(ranks, sync, 2**30, added_s).step
    low, high = (choice_of(step, [mode] * len(step.blocks)).peak_bytes for mode in ("block", "none"))
    budget = (low + high) // 2
    own = [dataclasses.replace(block, added_s={"none": 0.0, **added_s}) for block in step.blocks]
    together = fitted(ranks, sync, budget, added_s)
    return together.choice, choose(dataclasses.replace(step, blocks=own), budget), budget


@pytest.mark.parametrize("sync", slow_unless(("fsdp",).__contains__, OURS))
def test_ranks_that_would_choose_differently_choose_the_same(sync: str):
    (first, first_alone, budget), (second, second_alone, _) = run_ranks(2, choices, sync)
    assert first_alone.modes != second_alone.modes
    assert first == second
    assert first.count("narrow")  # the mode whose longest time of both is shortest
    assert first.peak_bytes <= budget


def test_a_cost_is_the_largest_of_all_ranks():
    steps = [step_of(rank) for rank in range(3)]
    for agreed in run_ranks(3, agreed_step):
        assert agreed.blocks[0].kept_bytes == {"none": 100, "block": 12}
        assert agreed.blocks[0].added_s == {"none": 0.0, "block": 0.75}
        assert (agreed.held_bytes, agreed.optimizer_bytes, agreed.may_chain) == (2, 20, False)
        # What fits together fits each rank.
        for step in steps:
            for choice in curve(agreed):
                assert choice_of(step, choice.modes).peak_bytes <= choice.peak_bytes


def step_of(rank: int) -> StepCost:
    block = BlockCost(
        kept_bytes={"none": 100 - rank, "block": 10 + rank},
        backward_bytes={"none": 120, "block": 130 - rank},
        added_s={"none": 0.0, "block": 0.25 + 0.5 * (rank == 1)},
        forward_s=0.1 + rank / 7,
    )
    return StepCost(
        blocks=[block] * 2, held_bytes=rank, head_bytes=3 - rank, optimizer_bytes=10 * rank, may_chain=rank != 1
    )


def agreed_step(ranks: Ranks) -> StepCost:
    return agreed_cost(ranks, step_of(ranks.rank))


def test_a_single_process_agrees_with_itself():
    assert agreed_cost(alone(), step_of(1)) == step_of(1)
    assert largest_bytes(alone(), 7) == 7
    check_kinds(alone(), [0, 1], 2)


def most_held(ranks: Ranks, sync: str, parts: Sequence[float]) -> list[tuple[int, int, int]]:
    """For budgets between the lowest and the highest peak: the budget, what a step holds, and what was measured."""
    added_s = {mode: float(number) for number, mode in enumerate(MODES) if number}
    step = fitted(ranks, sync, 2**30, added_s).step
    low, high = (choice_of(step, [mode] * len(step.blocks)).peak_bytes for mode in ("block", "none"))
    found = []
    for part in parts:
        budget = int(low + (high - low) * part)
        assembly = built(ranks, sync, recompute_budget_gib=budget / 2**30)
        recomputation = fit_budget(assembly)
        assembly.take(assembly.micro_batches(0))
        batches, base = assembly.micro_batches(1), base_bytes(assembly)
        with live_bytes_of(assembly) as live:
            assembly.take(batches)
            found.append((budget, base + live.peak(), recomputation.measured_peak_bytes))
    return found


@pytest.mark.parametrize("sync", slow_unless(("fsdp",).__contains__, OURS))
def test_no_rank_holds_more_than_the_budget(sync: str):
    for found in run_ranks(2, most_held, sync, (0.1, 0.6, 1.0)):
        for budget, held, measured_bytes in found:
            assert held <= measured_bytes <= budget
            assert held > 0.6 * budget


def losses(ranks: Ranks, sync: str, budget: bool, fields: dict[str, Any]) -> list[float]:
    assembly = built(ranks, sync, **{**fields, "recompute_budget_gib": None})
    if budget:
        whole = fitted(ranks, sync, 2**30, SPEEDS[0], **fields).step
        low, high = (choice_of(whole, [mode] * len(whole.blocks)).peak_bytes for mode in ("block", "none"))
        assembly = built(ranks, sync, **{**fields, "recompute_budget_gib": (low + high) / 2 / 2**30})
        torch.manual_seed(1)
        modes = fit_budget(assembly).choice.modes
        assert set(modes) != {"none"}
        assert [block.mode for block in assembly.recomputed] == list(modes)
    torch.manual_seed(1)
    return [float(assembly.take(assembly.micro_batches(step))) for step in range(3)]


@pytest.mark.parametrize(
    ("sync", "fields"),
    slow_unless(
        lambda sync, fields: sync in ("sharded_flat", "fsdp") and not fields,
        [
            *((sync, {}) for sync in OURS),
            *((sync, {"accumulation": 2}) for sync in ("bucketed", "sharded_flat", "fsdp")),
            ("bucketed", {"update": "by_bucket"}),
            ("sharded", {"precision": "bf16_master"}),
            ("fsdp", {"model": USERS}),
            ("sharded_flat", {"capture": "auto"}),
        ],
    ),
)
def test_a_budget_changes_no_loss(sync: str, fields: dict[str, Any]):
    without, within = (run_ranks(2, losses, sync, budget, fields) for budget in (False, True))
    assert within == without


def refusal(ranks: Ranks, case: str) -> str:
    assembly = built(ranks, "bucketed", recompute_budget_gib=0.0001 if case == "budget" else 1.0, model=USERS)
    blocks, on_last = assembly.module.blocks, ranks.rank == 1
    if case == "a block twice" and on_last:
        assembly.module.between = lambda x: x if x.shape[-1] != WIDTH else blocks[0](x, scale=assembly.module.scale)
    if case == "another kind" and on_last:
        blocks[1].up.register_parameter("unused", torch.nn.Parameter(torch.zeros(1), requires_grad=False))
    with (
        patch.object(recompute_budget, "largest_bytes", measured_on_last if case == "one rank" else largest_bytes),
        pytest.raises(ValueError, match="recompute_budget_gib") as error,
    ):
        fit_budget(assembly)
    assert isinstance(error.value, BudgetTooSmall) == (case in ("budget", "one rank"))
    return str(error.value)


def measured_on_last(ranks: Ranks, byte_count: int) -> int:
    """Rank 1 holds more than any budget."""
    return largest_bytes(ranks, 2**34 if ranks.rank == 1 else byte_count)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("budget", "0.0001 GiB are less than the 0.00"),
        ("one rank", "1 GiB are less than the 16 GiB that this step needs when it recomputes all it can"),
        ("a block twice", "a forward runs 8 blocks and the model has 4"),
        ("another kind", "blocks that are alike on one rank differ on another"),
    ],
)
def test_every_rank_is_refused_with_the_same_sentence(case: str, words: str):
    first, second = run_ranks(2, refusal, case)
    assert first == second
    assert words in first


@pytest.mark.parametrize("sync", ["sharded_flat", *slow_unless(lambda _: False, ["none", "fsdp"])])
def test_a_record_of_several_ranks_has_the_choice_and_the_curve(sync: str):
    values = {"sync": sync, "steps": 2, "warmups": 1, "recompute_budget_gib": 1.0, "bucket_mib": 0.01}
    first, second = run_ranks(2, measured, values, (2,))
    names = ("recompute_choice", "recompute_peak_bytes", "recompute_measured_peak_bytes", "recompute_added_s")
    for name in names:
        assert wrong_fact(name, first.facts[name].value) is None
        assert first.facts[name] == second.facts[name]
    for name in ("recompute_curve", "recompute_blocks"):
        assert wrong_table("parallel", name, first.tables[name]) is None
        assert first.tables[name] == second.tables[name]
    assert first.tables["recompute_curve"]["chosen"].count(True) == 1
    assert "afterwards_failed" not in first.facts


def test_a_cell_with_too_small_a_budget_fails_on_every_rank():
    for result in run_ranks(2, measured, {"sync": "fsdp", "recompute_budget_gib": 1e-5}):
        failure = failure_of(result)
        assert (failure.kind, failure.phase) == ("unsupported", "recompute")
        assert failure.message.startswith("recompute_budget_gib: 1e-05 GiB are less than")


def predicted_and_held(ranks: Ranks, sync: str) -> list[tuple[int, int]]:
    assembly = built(ranks, sync)
    step = fit_budget(assembly).step
    found = []
    for mode in MODES:
        choice = choice_of(step, [mode] * len(step.blocks))
        set_choice(assembly.recomputed, choice)
        assembly.take(assembly.micro_batches(0))
        batches, base = assembly.micro_batches(1), base_bytes(assembly)
        with live_bytes_of(assembly) as live:
            assembly.take(batches)
            found.append((choice.peak_bytes, base + live.peak()))
    return found


@pytest.mark.parametrize("sync", slow_unless(("fsdp",).__contains__, OURS))
def test_the_prediction_has_what_a_strategy_gathers_and_sends(sync: str):
    for found in run_ranks(2, predicted_and_held, sync):
        for predicted, held in found:
            assert held <= predicted <= 1.2 * held


def most_reserved(ranks: Ranks, sync: str, capture: str) -> list[tuple[int, int, str]]:
    """For budgets between the lowest and the highest peak: the budget, what a GPU reserves in steps, and what was chosen."""
    shape = ModelConfig(d_model=512, d_ff=1408, layers=12, heads=8, vocab_size=4096)
    fields: dict[str, Any] = {"model": shape, "batch_size": 4, "context": 2048, "precision": "bf16", "ops": "fused"}
    fields |= {"attention": "trainstep", "device": "cuda", "capture": capture}
    total_gib = torch.cuda.get_device_properties(ranks.device).total_memory / 2**30
    choices = curve(fit_budget(built(ranks, sync, recompute_budget_gib=total_gib, **fields)).step)
    low, high = choices[0].peak_bytes, choices[-1].peak_bytes
    found = []
    try:
        for part in (2, 3):
            torch.cuda.set_per_process_memory_fraction(1.0, ranks.device.index)
            gc.collect()  # a captured step and its assembly hold each other
            torch.cuda.empty_cache()
            budget = low + (high - low) * part // 4
            assembly = built(ranks, sync, recompute_budget_gib=budget / 2**30, **fields)
            recomputation = fit_budget(assembly)
            torch.cuda.reset_peak_memory_stats()
            for step in range(6):
                assembly.take(assembly.micro_batches(step))
            assembly.complete()
            torch.cuda.synchronize()
            found.append(
                (budget, torch.cuda.max_memory_reserved(), recompute_budget.choice_words(recomputation.choice))
            )
            del assembly
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, ranks.device.index)
    return found


@pytest.mark.multigpu
@pytest.mark.parametrize("capture", ["none", "step"])
@pytest.mark.parametrize("sync", ["none", "bucketed", "sharded_flat", "fsdp"])
def test_no_gpu_of_several_reserves_more_than_the_budget(sync: str, capture: str):
    first, second = run_ranks(2, most_reserved, sync, capture, backend="nccl")
    assert [choice for _, _, choice in first] == [choice for _, _, choice in second]
    for budget, reserved, _ in (*first, *second):
        assert reserved <= budget

"""Memory by formula is as worked out by hand, and that of the tensors of real steps on gloo, byte for byte."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import pytest
import torch

from held_bytes import Holdings, MostHeld, sampled_at_messages, state_bytes, storage_bytes
from quick import slow_unless
from ranks import run_ranks
from trainstep.config.model import ModelConfig
from trainstep.config.parallel import OURS, PEERS, ParallelConfig
from trainstep.config.parsing import from_plain
from trainstep.costs.exchange import ParameterSize
from trainstep.ops.adamw import AdamW
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.units import parameter_sizes
from trainstep.plan.memory_terms import transformer_parameters
from trainstep.plan.peak_memory import ExpectedMemory, Held, expected_memory
from trainstep.training.attention import attention_named
from trainstep.training.optimizer import adamw_options, with_masters
from trainstep.training.parallelism import parallel
from trainstep.training.precision import precision_named
from trainstep.training.transformer import Transformer
from trainstep.training.update_in_backward import UpdateInBackward

MODEL = ModelConfig(d_model=12, d_ff=20, layers=4, heads=2, vocab_size=50)
MIB = 2**20
STRATEGY_OPTIONS = {
    "none": {"sync": "none"},
    "naive": {"sync": "naive"},
    "naive, bf16": {"sync": "naive", "reduce_dtype": "bf16"},
    "flat": {"sync": "flat"},
    "flat, bf16": {"sync": "flat", "reduce_dtype": "bf16"},
    "overlapped": {"sync": "overlapped"},
    "overlapped, bf16": {"sync": "overlapped", "reduce_dtype": "bf16"},
    "bucketed": {"sync": "bucketed", "bucket_mib": 6000 / MIB},
    "bucketed, bf16": {"sync": "bucketed", "bucket_mib": 6000 / MIB, "reduce_dtype": "bf16"},
    "bucketed, in place": {"sync": "bucketed", "bucket_mib": 6000 / MIB, "in_place": True},
    "bucketed, fp32": {"sync": "bucketed", "bucket_mib": 6000 / MIB, "reduce_dtype": "fp32"},
    "sharded": {"sync": "sharded", "bucket_mib": 6000 / MIB},
    "sharded_flat": {"sync": "sharded_flat"},
    "sharded_flat, joined": {"sync": "sharded_flat", "bucket_mib": 1},
    "sharded_flat, bf16": {"sync": "sharded_flat", "reduce_dtype": "bf16"},
    "fsdp": {"sync": "fsdp"},
    "fsdp, bf16": {"sync": "fsdp", "reduce_dtype": "bf16"},
    "fsdp, two ahead": {"sync": "fsdp", "ahead": 2},
    "fsdp, kept whole": {"sync": "fsdp", "reshard_after_forward": False},
}
SCALARS_BYTES = 64
"""Bytes that formulas leave out: the loss and its gradient, which live until backward ends, and scalar tensors of an update."""


def config_of(ranks: int, **options: object) -> ParallelConfig:
    return from_plain(ParallelConfig, {"model": MODEL, "ranks": ranks, "context": 8, "batch_size": 1, **options})


def model_of(config: ParallelConfig, frozen: bool) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(MODEL, attention=attention_named("sdpa", 8, torch.device("cpu")), context=8)
    model.to(precision_named(config.run.precision).weights)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" not in name)
    return model


def measured_bytes(ranks: Ranks, config: ParallelConfig, frozen: bool) -> dict[str, Any]:
    """(parameters, optimizer state, all) in bytes at the start and at each moment of a second step; also `activations` of the
    unwrapped model, and `messages`: (label, all) at the start of each message of the last backward."""
    model = model_of(config, frozen)
    tokens = torch.randint(MODEL.vocab_size, (2, 1, 8))
    holdings = Holdings(but=model)
    before_bytes = holdings.total_bytes()
    loss = model(*tokens)
    sizes: dict[str, Any] = {"activations": holdings.total_bytes() - before_bytes}
    del loss
    optimizer_cls = AdamW if config.run.updates_in_backward else torch.optim.AdamW
    if config.run.precision == "bf16_master":
        optimizer_cls = with_masters(optimizer_cls)
    wrapped = parallel(ranks, config.sync).wrap(
        model, optimizer_cls, adamw_options(config.run.adamw, learning_rate=1e-3)
    )
    sync, optimizer = wrapped.gradient_sync, wrapped.optimizer
    update = UpdateInBackward(wrapped.module, optimizer, sync) if config.run.updates_in_backward else None

    def note(moment: str, all_bytes: int | None = None) -> None:
        parameters_bytes = sum(storage_bytes(model.parameters()).values())
        sizes[moment] = (parameters_bytes, state_bytes(optimizer), all_bytes or holdings.settled_bytes())

    def step(note: Callable[..., None], sampled: bool) -> None:
        in_sync = None
        for last in [False] * (config.run.accumulation - 1) + [True]:
            with nullcontext() if last or sync is None else sync.no_sync():
                loss = wrapped.module(*tokens)
                note("after_forward")
                with (
                    sampled_at_messages(holdings) if sampled else nullcontext([]) as samples,
                    update.running() if update else nullcontext(),
                ):
                    loss.backward()
                    del loss
                    if last and sync is not None:
                        with (
                            MostHeld(holdings) if sampled and config.sync.name == "naive" else nullcontext() as in_sync
                        ):
                            sync.finish_gradient_synchronization()
        if in_sync is not None:
            samples.append(("all", in_sync.most_bytes))
        sizes["messages"] = [sample for sample in samples if sample[0] != "usage"]
        note("after_backward")
        with MostHeld(holdings) if sampled and not update else nullcontext() as most:
            update.finish() if update else optimizer.step()
        if most is not None:
            note("in_step", most.most_bytes)
        optimizer.zero_grad()
        if config.sync.name == "sharded_flat":
            sync.wait_for_parameters()
        note("after_step")

    note("after_init")
    step(lambda *_: None, False)
    step(note, True)
    return sizes


@pytest.mark.parametrize(("precision", "frozen"), [("fp32", False), ("bf16", True)], ids=["fp32", "bf16, norms frozen"])
@pytest.mark.parametrize("strategy", STRATEGY_OPTIONS)
def test_tensors_of_a_real_step_have_the_formulas_bytes(strategy: str, precision: str, frozen: bool):
    config = config_of(2, precision=precision, **STRATEGY_OPTIONS[strategy])
    agree(config, frozen)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "strategy", [name for name, options in STRATEGY_OPTIONS.items() if options["sync"] != "fsdp" and "bf16" not in name]
)
def test_bytes_with_masters_are_the_formulas(strategy: str, frozen: bool):
    agree(config_of(2, precision="bf16_master", **STRATEGY_OPTIONS[strategy]), frozen)


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
@pytest.mark.parametrize("strategy", ["none", "bucketed", "bucketed, bf16", "bucketed, fp32", "bucketed, in place"])
def test_bytes_with_an_update_in_backward_are_the_formulas(strategy: str, precision: str):
    options = {"precision": precision, "adamw": "trainstep", "update": "in_backward"}
    agree(config_of(2, **options, **STRATEGY_OPTIONS[strategy]), frozen=strategy == "bucketed")


@pytest.mark.parametrize("strategy", ["naive", "bucketed", "sharded_flat", "fsdp", "fsdp, kept whole"])
def test_bytes_with_micro_batches_are_the_formulas(strategy: str):
    agree(config_of(2, accumulation=2, **STRATEGY_OPTIONS[strategy]), frozen=False)


@pytest.mark.slow
@pytest.mark.parametrize("adamw", ["loop", "foreach"])
@pytest.mark.parametrize("strategy", ["naive", "sharded", "sharded_flat", "fsdp"])
def test_bytes_on_three_ranks_are_the_formulas_for_each_optimizer(strategy: str, adamw: str):
    agree(config_of(3, adamw=adamw, **STRATEGY_OPTIONS[strategy]), frozen=False)


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        *slow_unless(
            lambda strategy, _precision: "bf16" not in strategy,
            itertools.product(("bucketed", "sharded_flat", "fsdp", "bucketed, bf16", "fsdp, bf16"), ("fp32",)),
        ),
        pytest.param("sharded_flat, bf16", "bf16", marks=pytest.mark.slow),
        pytest.param("fsdp", "bf16", marks=pytest.mark.slow),
    ],
)
def test_bytes_in_groups_are_the_formulas(strategy: str, precision: str):
    agree(config_of(4, shard_ranks=2, precision=precision, **STRATEGY_OPTIONS[strategy]), frozen=precision == "bf16")


def agree(config: ParallelConfig, frozen: bool) -> None:
    sizes = parameter_sizes(model_of(config, frozen))
    for rank, moments in enumerate(run_ranks(config.ranks, measured_bytes, config, frozen)):
        expected = expected_memory(config, sizes, rank=rank, activations_bytes=moments.pop("activations"))
        messages = moments.pop("messages")
        for name, (parameters, state, total) in moments.items():
            moment: Held = getattr(expected, name)
            if name == "in_step":
                assert 0 <= total - moment.total_bytes <= SCALARS_BYTES
                continue
            assert (name, moment.total_bytes) == (name, total)
            if name == "after_forward" and config.sync.name == "fsdp":
                continue  # parameters are views of whole units then
            assert moment.parameters_bytes == parameters
            assert moment.optimizer_state_bytes == state
        if messages and (config.sync.name in ("sharded_flat", "fsdp") or config.run.updates_in_backward):
            a_block_bytes = expected.after_forward.activations_bytes // MODEL.layers
            assert (
                abs(expected.in_backward.total_bytes - max(measured_bytes for _, measured_bytes in messages))
                <= a_block_bytes
            )
        if messages:
            beyond = messages[-1][1] - expected.before_sync.total_bytes
            # naive's are read after each op, where gloo's thread may still hold the copy in bf16 of the gradient before
            copies = config.sync.name == "naive" and config.sync.reduce_dtype == "bf16"
            late_bytes = 2 * max(size.numel for size in sizes) if copies else 0
            assert beyond <= SCALARS_BYTES + late_bytes
            if (
                config.sync.name != "fsdp" or config.run.accumulation == 1
            ):  # otherwise the most is allocated a moment before, as gradients are added
                assert beyond >= 0


def by_hand(sync: str, **options: object) -> ExpectedMemory:
    """Memory of four parameters of 64 elements, the root's and those of three blocks, on two ranks; nothing is padded."""
    sizes = [
        ParameterSize(name=f"w{number}", numel=64, element_bytes=4, unit=unit)
        for number, unit in enumerate(["root", "blocks.0", "blocks.1", "blocks.2"])
    ]
    expected = expected_memory(config_of(2, sync=sync, **options), sizes, activations_bytes=1000)
    assert expected is not None
    return expected


def terms(moment: Held) -> tuple[int, int, int, int, int]:
    return tuple(getattr(moment, field.name) for field in fields(moment))  # type: ignore[return-value]


P = 4 * 64 * 4
"""Bytes of all parameters, in fp32."""
STATE = 2 * P + 4 * 4
ONE = 64 * 4
FLAGS = 4


def test_naive_is_as_counted_by_hand():
    """The peak is P + P + 2 P and copies of two gradients in bf16."""
    expected = by_hand("naive", reduce_dtype="bf16")
    assert terms(expected.after_init) == (P, 0, 0, 0, 0)
    assert terms(expected.after_forward) == (P, 0, STATE, 1000, FLAGS)
    assert terms(expected.before_sync) == (P, P, STATE, 0, FLAGS + 2 * ONE // 2)
    assert terms(expected.after_backward) == (P, P, STATE, 0, FLAGS)
    assert terms(expected.after_step) == (P, 0, STATE, 0, FLAGS)
    assert expected.peak_point == "before_sync"
    assert expected.peak.total_bytes == 4 * P + 16 + 4 + 256


def test_bucketed_is_as_counted_by_hand():
    """Gradients are views of the buckets, so they take P bytes, and they stay."""
    flags = 4 * 4
    expected = by_hand("bucketed", bucket_mib=ONE / MIB)
    assert terms(expected.after_init) == (P, P + flags, 0, 0, 0)
    assert terms(expected.after_backward) == (P, P + flags, STATE, 0, 0)
    assert terms(expected.before_sync) == (P, P + flags + ONE, STATE, 0, 0)
    assert terms(by_hand("flat").before_sync) == (P, 2 * P + flags, STATE, 0, 0)
    assert terms(by_hand("flat", reduce_dtype="bf16").before_sync) == (P, P, STATE, 0, (P + flags) // 2)


def test_sharded_is_as_counted_by_hand():
    """Each of two ranks owns two of four parameters, packed in a message of two."""
    assert terms(by_hand("sharded").after_step) == (P, P + 16, STATE // 2, 0, 2 * 2 * ONE)


def test_sharded_flat_is_as_counted_by_hand():
    """Each rank has all parameters and half of the rest; at the end a block's and the root's gradients are being sent."""
    expected = by_hand("sharded_flat")
    assert terms(expected.after_init) == (P, 0, 0, 0, 0)
    assert terms(expected.in_backward) == (
        P,
        ONE + 2 * ONE // 2,
        P + 16,
        333,
        2 * ONE + FLAGS,
    )  # the second of three blocks
    assert terms(expected.before_sync) == (P, ONE + P // 2, P + 16, 0, 2 * ONE + FLAGS)
    assert terms(expected.after_backward) == (P, P // 2, P + 16, 0, FLAGS)
    assert expected.peak_point == "in_backward"
    assert by_hand("bucketed").in_backward == by_hand("bucketed").entering_backward


def test_fsdp_in_bf16_is_as_counted_by_hand():
    """Gathered units take half of the bytes, shards do not: gradients are averaged in the parameters' dtype."""
    in_bf16, in_fp32 = by_hand("fsdp", compute_dtype="bf16"), by_hand("fsdp")
    assert in_bf16.after_step == in_fp32.after_step
    assert in_bf16.after_backward == in_fp32.after_backward
    gathered_bytes = [
        moment.after_forward.communication_bytes - moment.after_step.communication_bytes
        for moment in (in_bf16, in_fp32)
    ]
    assert gathered_bytes == [2 * ONE // 2, 2 * ONE]  # the root and the last block
    assert (
        in_fp32.before_sync.total_bytes - in_bf16.before_sync.total_bytes == ONE // 2
    )  # the block's gradient; the block is freed


def test_fsdp_is_as_counted_by_hand():
    """Each rank has half of everything; the root and the last block are whole after forward, and one more block at backward."""
    expected = by_hand("fsdp")
    assert terms(expected.after_init) == (P // 2, 0, 0, 0, 0)
    assert terms(expected.after_forward) == (P // 2, 0, P + 16, 1000, FLAGS + 2 * ONE)
    assert terms(expected.entering_backward) == (P // 2, 0, P + 16, 1000, FLAGS + 3 * ONE)
    assert terms(expected.before_sync) == (P // 2, ONE + P // 2, P + 16, 0, 3 * ONE + FLAGS)
    assert terms(expected.after_step) == (P // 2, 0, P + 16, 0, FLAGS)
    assert terms(by_hand("fsdp", ahead=0).entering_backward)[-1] == FLAGS + 2 * ONE
    assert terms(by_hand("fsdp", reshard_after_forward=False).after_forward)[-1] == FLAGS + 4 * ONE
    assert terms(expected.in_backward) == (
        P // 2,
        ONE + 2 * ONE // 2,
        P + 16,
        333,
        FLAGS + 2 * ONE + 2 * ONE,
    )  # root and next
    assert expected.peak_point == "in_backward"


def test_frozen_units_are_freed_as_backward_passes_them():
    """Frozen units of the root and of the first block are whole to the end."""
    sizes = [
        ParameterSize(name=f"{unit}.{kind}", numel=64, element_bytes=4, unit=unit, trained=kind == "trained")
        for unit in ("root", "blocks.0", "blocks.1", "blocks.2")
        for kind in ("trained", "frozen")
    ]
    expected = expected_memory(config_of(2, sync="fsdp"), sizes)
    without_reshard = expected_memory(config_of(2, sync="fsdp", reshard_after_forward=False), sizes)
    assert expected is not None
    assert without_reshard is not None
    assert terms(expected.before_sync) == (P, ONE + P // 2, P + 16, 0, 3 * ONE + FLAGS + 2 * ONE)
    assert terms(without_reshard.before_sync)[-1] == 3 * ONE + FLAGS + 4 * ONE


@pytest.mark.parametrize("sync", PEERS)
def test_torchs_strategies_have_no_formula(sync: str):
    assert expected_memory(config_of(2, sync=sync), []) is None


@pytest.mark.parametrize("precision", ["fp32", "bf16_autocast", "bf16"])
def test_the_peak_is_16_bytes_per_parameter_in_fp32_and_8_in_bf16(precision: str):
    sizes = transformer_parameters(MODEL, precision)
    expected = expected_memory(config_of(2, sync="none", precision=precision), sizes)
    counters = 4 * len(sizes)
    assert expected is not None
    assert expected.peak.total_bytes - counters == (8 if precision == "bf16" else 16) * MODEL.parameters


def test_masters_are_sharded_with_the_state():
    """By hand: of four bf16 parameters each rank has all, and of the 12 bytes of state for an element those of its half."""
    p = P // 2
    for sync, updated in (("bucketed", 256), ("sharded", 128), ("sharded_flat", 128)):
        expected = masters_by_hand(sync)
        tensors = 2 if sync == "sharded" else 4
        assert expected.after_init.optimizer_state_bytes == 4 * updated
        assert expected.after_step.optimizer_state_bytes == 12 * updated + 4 * tensors
        assert expected.after_step.parameters_bytes == p
    gradients = [masters_by_hand(sync).after_backward.gradients_bytes for sync in ("naive", "sharded_flat")]
    assert gradients == [p, p // 2]
    in_step = [masters_by_hand("naive", adamw=adamw).in_step.total_bytes for adamw in ("trainstep", "fused", "foreach")]
    assert in_step == [in_step[0], in_step[0] + 4 * 256, in_step[0] + 2 * 4 * 256]


def masters_by_hand(sync: str, **options: object) -> ExpectedMemory:
    sizes = [
        ParameterSize(name=f"w{number}", numel=64, element_bytes=2, unit=unit)
        for number, unit in enumerate(["root", "blocks.0", "blocks.1", "blocks.2"])
    ]
    expected = expected_memory(config_of(2, sync=sync, precision="bf16_master", **options), sizes)
    assert expected is not None
    return expected


def test_shards_shrink_with_ranks():
    model = ModelConfig(d_model=512, d_ff=1344, layers=4, heads=16)
    sizes = transformer_parameters(model, "fp32")
    single = expected_memory(from_plain(ParallelConfig, {"model": model, "ranks": 1, "sync": "none"}), sizes)
    sharded = expected_memory(from_plain(ParallelConfig, {"model": model, "ranks": 8, "sync": "fsdp"}), sizes)
    assert single is not None
    assert sharded is not None
    shard_bytes = sharded.after_step.total_bytes - sharded.after_step.communication_bytes
    assert shard_bytes == pytest.approx(single.after_step.total_bytes / 8, rel=1e-3)


def test_shards_are_those_of_a_group():
    """16 ranks in groups of 8 hold on each what 8 ranks hold, and rank 11 what rank 3 does."""
    sizes = transformer_parameters(MODEL, "fp32")
    for sync in ("sharded_flat", "fsdp"):
        grouped = expected_memory(config_of(16, sync=sync, shard_ranks=8), sizes, rank=11)
        assert grouped == expected_memory(config_of(8, sync=sync), sizes, rank=3)
        assert grouped != expected_memory(config_of(16, sync=sync), sizes, rank=11)


def test_every_strategy_has_its_formula():
    assert {options["sync"] for options in STRATEGY_OPTIONS.values()} == set(OURS)

"""Every parallel strategy trains the built-in model as one process does with the same batches."""

from dataclasses import replace
from functools import cache
from inspect import signature

import pytest
import torch

from ranks import run_ranks
from trainstep.config.model import ModelConfig
from trainstep.config.parallel import OURS, PEERS, SyncConfig
from trainstep.config.parsing import from_plain
from trainstep.config.run import RunConfig
from trainstep.costs.strategies import STRATEGIES, strategy_named
from trainstep.parallel.flat_optimizer import FlatShardedOptimizer
from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.ranks import Ranks, alone
from trainstep.parallel.sharded_flat import ShardedGradients
from trainstep.training.build import build_step
from trainstep.training.parallelism import parallel

STEPS = 3
MODEL = ModelConfig(d_model=16, d_ff=32, layers=2, heads=2, vocab_size=40)


def run_config(**changes: object) -> RunConfig:
    fields = {"batch_size": 2, "context": 8, "precision": "fp32", "learning_rate": 1e-2, "clip_grad_norm": 0.5}
    return RunConfig(model=MODEL, **{**fields, **changes})


def losses(ranks: Ranks, config: SyncConfig) -> list[float]:
    assembly = build_step(run_config(), parallel(ranks, config))
    return [float(assembly.step(assembly.micro_batches(step))) for step in range(STEPS)]


@cache
def losses_alone() -> list[float]:
    """Losses of one process whose micro-batches are those of the two ranks; each is that of the second micro-batch."""
    assembly = build_step(run_config(accumulation=2))
    return [float(assembly.step(assembly.micro_batches(step))) for step in range(STEPS)]


@pytest.mark.parametrize("sync", [sync for sync in OURS + PEERS if sync != "none"])
def test_losses_are_those_of_one_process(sync: str):
    _, second = run_ranks(2, losses, SyncConfig(name=sync, bucket_mib=0.05))
    assert second == pytest.approx(losses_alone(), rel=1e-5)


IN_FLIGHT = [strategy.name for strategy in STRATEGIES if strategy.most_in_flight > 0]


@pytest.mark.parametrize("sync", IN_FLIGHT)
def test_as_many_units_are_in_flight_as_the_row_says(sync: str, monkeypatch: pytest.MonkeyPatch):
    row = replace(strategy_named(sync), most_in_flight=5)
    monkeypatch.setattr(SyncConfig, "strategy", property(lambda _config: row))
    sync_ = build_step(run_config(), parallel(alone(torch.device("cpu")), SyncConfig(name=sync))).step.gradient_sync
    assert isinstance(sync_, FSDP | ShardedGradients)
    assert sync_.most_in_flight == 5


@pytest.mark.parametrize(
    ("name", "kind"), [("fsdp", FSDP), ("sharded_flat", ShardedGradients), ("sharded_flat", FlatShardedOptimizer)]
)
def test_the_default_of_units_in_flight_is_the_rows(name: str, kind: type):
    assert signature(kind).parameters["most_in_flight"].default == strategy_named(name).most_in_flight


def test_none_trains_each_rank_separately():
    first, second = run_ranks(2, losses, SyncConfig(name="none"))
    assert second[0] == pytest.approx(losses_alone()[0], rel=1e-5)
    assert second[1:] != pytest.approx(losses_alone()[1:], rel=1e-5)
    assert first != second


@pytest.mark.parametrize("sync", ["bucketed", "sharded_flat", "fsdp"])
def test_gradients_may_be_averaged_in_bf16(sync: str):
    _, second = run_ranks(2, losses, SyncConfig(name=sync, reduce_dtype="bf16"))
    assert second == pytest.approx(losses_alone(), rel=1e-3)
    assert second != pytest.approx(losses_alone(), rel=1e-9)


def test_fsdp_computes_in_bf16_and_keeps_fp32():
    """The pieces, their averaged gradients and the update stay fp32, as in torch's FSDP."""
    fsdp_losses, torch_losses = (
        run_ranks(2, losses, SyncConfig(name=sync, compute_dtype="bf16"))[1] for sync in ("fsdp", "torch_fsdp2")
    )
    assert fsdp_losses == pytest.approx(losses_alone(), rel=1e-2)
    assert fsdp_losses != pytest.approx(losses_alone(), rel=1e-9)
    assert fsdp_losses == pytest.approx(torch_losses, rel=1e-3)
    assert run_ranks(2, dtypes_of_pieces) == [{torch.float32}] * 2


def dtypes_of_pieces(ranks: Ranks) -> set[torch.dtype]:
    assembly = build_step(run_config(), parallel(ranks, SyncConfig(name="fsdp", compute_dtype="bf16")))
    assembly.step(assembly.micro_batches(0))
    return {parameter.dtype for parameter in assembly.module.parameters()}


def losses_with_masters(ranks: Ranks, config: SyncConfig, run: RunConfig) -> list[float]:
    assembly = build_step(run, parallel(ranks, config))
    assert {parameter.dtype for parameter in assembly.module.parameters()} == {torch.bfloat16}
    return [float(assembly.take(assembly.micro_batches(step))) for step in range(6)]


@pytest.mark.parametrize("adamw", ["trainstep", "fused"])
@pytest.mark.parametrize("sync", [sync for sync in OURS + PEERS if not strategy_named(sync).shards_parameters])
def test_masters_are_trained_by_every_strategy_that_keeps_whole_parameters(sync: str, adamw: str):
    """Losses of two ranks with bf16 weights are those of one process with bf16 weights and twice the micro-batches."""
    run = run_config(precision="bf16_master", adamw=adamw, clip_grad_norm=None)
    _, second = run_ranks(2, losses_with_masters, SyncConfig(name=sync, bucket_mib=0.02), run)
    alone_ = build_step(replace(run, accumulation=2))
    expected = [float(alone_.step(alone_.micro_batches(step))) for step in range(6)]
    if sync == "none":
        assert second[0] == expected[0]
        assert second[1:] != expected[1:]
    else:
        assert second == expected


def losses_of_bf16_gradients(ranks: Ranks) -> list[float]:
    config = SyncConfig(name="bucketed", reduce_dtype="bf16", keeps_gradient_dtype=False)
    assembly = build_step(run_config(adamw="trainstep"), parallel(ranks, config))
    return [float(assembly.step(assembly.micro_batches(step))) for step in range(STEPS)]


def test_trainsteps_adamw_reads_bf16_buckets():
    _, second = run_ranks(2, losses_of_bf16_gradients)
    assert second == pytest.approx(losses_alone(), rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sync": "bucket"}, "sync: 'bucket' is not known"),
        ({"bucket_mib": 0}, "bucket_mib: must be a positive number of MiB"),
        ({"last_bucket_mib": -1.0}, "last_bucket_mib: must be a positive number"),
        ({"ahead": 3}, "ahead: must be 0, 1 or 2"),
        ({"keeps_gradient_dtype": False}, "keeps_gradient_dtype: only gradients that"),
        ({"sync": "torch_ddp", "reduce_dtype": "bf16"}, "reduce_dtype: torch_ddp averages"),
        ({"sync": "bucketed", "compute_dtype": "bf16"}, "compute_dtype: only fsdp and torch_fsdp2"),
        ({"sync": "fsdp", "compute_dtype": "fp16"}, "compute_dtype: 'fp16' is not known"),
    ],
)
def test_wrong_options_are_refused_by_name(fields: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        from_plain(SyncConfig, fields)

"""ParallelConfig, and grids without the options that a strategy does not use."""

from typing import Any

import pytest

from sources import ROOT
from trainstep.config.grid import Cell, expand, expand_all, grid_from_settings, groups_along
from trainstep.config.memory import MemoryConfig, RecordedRunConfig
from trainstep.config.model import size
from trainstep.config.parallel import PEERS, SYNCS, USED_BY, ParallelConfig, RankRunConfig, SyncConfig, needless
from trainstep.config.parsing import build_config, flat_form, from_plain, to_plain
from trainstep.config.sweep import load_sweep


def cells(**grid: list[Any]) -> list[Cell]:
    return expand({"workload": ["parallel"], "model": ["tiny"], **grid}, {"device": "cpu"})


def test_plain_values_give_the_same_config():
    config = build_config("parallel", {"model": "tiny", "layers": 1, "sync": None, "bucket_mib": 3, "context": 8})
    assert (config.ranks, config.run.model.layers, config.run.batch_size) == (2, 1, 2)
    assert from_plain(ParallelConfig, to_plain(config)) == config
    assert (config.run.sync, config.run.context) == ("step", 8)
    assert config.sync == SyncConfig(name="none", bucket_mib=3.0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ranks": 0}, "ranks: must be a whole number of at least 1"),
        ({"sync": "bucketd"}, "sync: 'bucketd' is not known (did you mean bucketed?)"),
        ({"ranks": 1, "sync": "torch_ddp"}, "ranks: torch_ddp needs several ranks"),
        ({"compile": "model", "sync": "fsdp"}, "compile: fsdp gathers parameters block by block"),
        ({"window_steps": 0}, "window_steps: must be"),
        (
            {"recompute_budget_gib": 1, "sync": "torch_fsdp2"},
            "recompute_budget_gib: torch_fsdp2 is torch's and does not show",
        ),
        (
            {"recompute_budget_gib": 1, "sync": "fsdp", "recompute": "block"},
            "recompute: is chosen by recompute_budget_gib",
        ),
        (
            {"recompute_budget_gib": 1, "update": "in_backward", "adamw": "trainstep"},
            "recompute_budget_gib: its measured backward must not update weights",
        ),
        ({"recompute_budget_gib": 1, "compile": "model"}, "recompute_budget_gib: chooses by block"),
        ({"inspect": False, "keep_trace": "t"}, "keep_trace: only an inspected step has a trace"),
        ({"ahead": 3}, "ahead: must be 0, 1 or 2"),
        ({"context": 0}, "context: must be"),
        ({"contxt": 1}, "parallel: unknown key 'contxt' (did you mean context?)"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], words: str):
    with pytest.raises(ValueError) as caught:
        build_config("parallel", {"model": "tiny", **values})
    assert str(caught.value).startswith(words)


def test_bucket_sizes_multiply_only_strategies_with_buckets():
    expanded = cells(sync=[None, "naive", "bucketed", "fsdp"], bucket_mib=[1, 10], ahead=[0, 1])
    assert [cell.label for cell in expanded] == [
        *("tiny, sync none", "tiny, naive"),
        *("tiny, bucketed, bucket_mib 1", "tiny, bucketed, bucket_mib 10"),
        *("tiny, fsdp, ahead 0", "tiny, fsdp, ahead 1"),
    ]
    assert expanded[0].config["bucket_mib"] == SyncConfig.bucket_mib


def test_every_option_names_the_strategies_that_use_it():
    assert set(USED_BY) == set(flat_form(SyncConfig)) - {"sync"}
    assert {strategy for strategies in USED_BY.values() for strategy in strategies} <= set(SYNCS)
    assert needless({"sync": "torch_ddp"}) == set(USED_BY) - {"bucket_mib"}
    used = {"bucket_mib", "reduce_dtype", "shard_ranks", "transport", "inbox_mib"}
    assert needless({"sync": "sharded_flat"}) == set(USED_BY) - used


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"sync": "fsdp", "ranks": 6, "shard_ranks": 4},
            "6 ranks cannot be divided into groups of 4; take a divisor of 6",
        ),
        (
            {"sync": "naive", "ranks": 4, "shard_ranks": 2},
            "naive has no groups; leave it out, or take bucketed, sharded_flat",
        ),
        ({"sync": "fsdp", "ranks": 4, "shard_ranks": 0}, "must be a whole number of at least 1, not 0"),
        ({"sync": "bucketed", "ranks": 4, "shard_ranks": 2, "in_place": True}, "averages slices of a copy"),
    ],
)
def test_groups_that_cannot_be_are_refused(options: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=f"shard_ranks.*{sentence}"):
        from_plain(ParallelConfig, {"model": "tiny", **options})


def test_strategies_are_compared_with_all_their_options():
    expanded = cells(context=[8, 16], sync=["none", "bucketed", "fsdp"], bucket_mib=[1, 10])
    groups = groups_along(expanded, "sync")
    assert [len(group) for group in groups] == [4, 4]
    assert [group[0].config["sync"] for group in groups] == ["none", "none"]


@pytest.mark.parametrize(
    ("name", "settings", "groups"),
    [
        ("ddp", ["model=tiny"], [11]),
        ("ddp", ["model=medium,xl"], [11, 8]),
        ("buckets", ["device=cpu", "model=tiny", "context=64", "compile=none", "bucket_mib=0.1,0.5,1,2"], [9]),
        ("sharded_optimizer", ["device=cpu", "model=tiny", "context=64"], [6]),
    ],
)
def test_sweeps_of_strategies_expand_on_both_devices(name: str, settings: list[str], groups: list[int]):
    sweep = load_sweep(ROOT / "sweeps" / f"{name}.toml")
    assert groups_along(expand_all(sweep.grids({}), {"device": "cuda"}), sweep.compare)
    overrides = grid_from_settings(settings)
    device = overrides.pop("device", ["cpu"])[0]
    cell_groups = groups_along(expand_all(sweep.grids(overrides), {"device": device}), sweep.compare)
    assert [len(group) for group in cell_groups] == groups
    assert {group[0].config["sync"] for group in cell_groups} == {"none"}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sync", SYNCS)
def test_master_weights_are_for_strategies_that_keep_whole_parameters(sync: str, ranks: int):
    values = {"model": "tiny", "precision": "bf16_master", "ranks": ranks, "sync": sync}
    if ranks == 1 and sync in PEERS:
        return
    if sync in ("fsdp", "torch_fsdp2"):
        with pytest.raises(
            ValueError, match=f"precision: {sync} needs no masters beside its shards, .*; take that with"
        ):
            build_config("parallel", values)
    else:
        assert build_config("parallel", values).run.precision == "bf16_master"


def test_a_config_is_made_of_a_run_and_a_strategy():
    """Python and flat values give the same defaults; a field that the record would not hold is refused."""
    model = size("tiny")
    assert ParallelConfig(run=RankRunConfig(model=model)) == build_config("parallel", {"model": "tiny"})
    assert MemoryConfig(run=RecordedRunConfig(model=model)) == build_config("memory", {"model": "tiny"})
    forward = RankRunConfig(model=model, mode="forward")
    with pytest.raises(ValueError, match="mode: has no meaning in a ParallelConfig; leave it at step"):
        ParallelConfig(run=forward)


def test_a_forward_without_gradients_may_use_flex_on_a_cpu():
    """FlexAttention has no backward on a CPU."""
    config = build_config("memory", {"model": "tiny", "mode": "forward_no_grad", "attention": "flex"})
    assert config.run.mode == "forward_no_grad"

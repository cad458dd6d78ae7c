"""The change that is advised for a cause is the first of its page's options that the config has not taken."""

from typing import Any

import pytest

from sources import ROOT
from trainstep.config.parallel import RanksConfig, SyncConfig
from trainstep.config.parsing import build_run
from trainstep.explain.causes import page_of
from trainstep.explain.changes import change_of, changes_of
from trainstep.plan.step_memory import alone


def a_config(**changes: Any) -> RanksConfig:
    return alone(build_run({"model": "small", "device": "cuda", **changes}))


@pytest.mark.parametrize(
    ("cause", "taken", "change", "is_taken"),
    [
        ("optimizer", {"adamw": "loop"}, {"adamw": "fused"}, False),
        ("optimizer", {"adamw": "fused"}, {"adamw": "trainstep"}, False),
        ("optimizer", {"adamw": "trainstep"}, {"adamw": "trainstep"}, True),
        ("unfused", {}, {"compile": "block"}, False),
        ("unfused", {"ops": "fused"}, {"compile": "block"}, False),
        ("unfused", {"compile": "block"}, {"ops": "fused"}, False),
        ("unfused", {"compile": "model"}, {"ops": "fused"}, False),
        ("unfused", {"compile": "block", "ops": "fused"}, {"ops": "fused"}, True),
        ("small_kernels", {"compile": "block"}, {"ops": "fused"}, False),
        ("casts", {"compile": "block", "precision": "bf16_autocast"}, {"precision": "bf16_master"}, False),
        ("casts", {"compile": "block", "precision": "bf16"}, {"precision": "bf16_master"}, True),
        ("host_launches", {"adamw": "loop"}, {"capture": "step", "adamw": "fused"}, False),
        ("host_launches", {"capture": "step"}, {"capture": "step"}, True),
        ("data", {}, {}, False),
    ],
)
def test_the_first_option_that_is_not_taken(cause: str, taken: dict[str, str], change: dict[str, str], is_taken: bool):
    assert change_of(a_config(**taken), cause) == (change, is_taken)


@pytest.mark.parametrize(("cause", "option"), [("optimizer", "--adamw trainstep"), ("unfused", "--ops fused")])
def test_the_page_names_the_last_option(cause: str, option: str):
    assert option in (ROOT / page_of(cause)).read_text()


def test_only_strategies_without_buckets_are_told_of_them():
    for name, change in (("naive", {"sync": "bucketed"}), ("flat", {"sync": "bucketed"}), ("bucketed", {})):
        config = RanksConfig(run=a_config().run, ranks=2, sync=SyncConfig(name=name))
        assert change_of(config, "exposed_messages") == (change, False)


def test_recomputing_nothing_is_advised_with_what_it_refuses():
    few = a_config(recompute="selective", narrow_blocks=1)
    assert change_of(few, "recomputation") == ({"recompute": "none", "narrow_blocks": 0}, False)
    assert ("recomputation", {"recompute": "none", "recompute_every": 1}) in changes_of(
        a_config(recompute="block", recompute_every=2)
    )


def test_a_model_without_formulas_has_no_change():
    assert change_of(None, "optimizer") == ({}, False)


def test_all_changes_are_those_that_are_not_taken_each_once():
    changes = [fields for _, fields in changes_of(a_config(adamw="loop", attention="plain"))]
    assert {"capture": "step", "adamw": "fused"} in changes, "what capture needs"
    assert [fields for fields in changes if set(fields) == {"adamw"}] == [{"adamw": "fused"}, {"adamw": "trainstep"}]
    assert changes.count({"compile": "block"}) == 1
    assert {"attention": "sdpa"} in changes
    assert not any("sync" in fields or "recompute" in fields for fields in changes), (
        "one rank, and nothing is recomputed"
    )
    taken = {"capture": "step", "compile": "block", "ops": "fused", "adamw": "trainstep", "attention": "trainstep"}
    assert changes_of(a_config(**taken, precision="bf16_autocast")) == [
        ("host_launches", {"compile": "model"}),
        ("casts", {"precision": "bf16_master"}),
        ("attention_kernel", {"attention": "sdpa"}),
    ]

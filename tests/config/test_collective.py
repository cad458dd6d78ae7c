"""CollectiveConfig: sizes that all ranks can divide, and refusals in one sentence."""

from typing import Any

import pytest

from trainstep.config.collective import CollectiveConfig
from trainstep.config.parsing import config_hash, to_plain


@pytest.mark.parametrize(
    ("config", "elements", "payload_bytes"),
    [
        ({"mib": 1.0, "ranks": 2}, 2**18, 2**20),
        ({"mib": 1.0, "ranks": 2, "dtype": "bf16"}, 2**19, 2**20),
        ({"mib": 1.0, "ranks": 3}, 262_146, 1_048_584),  # rounded up to a multiple of three
        ({"mib": 1e-9, "ranks": 4}, 4, 16),
        ({"mib": 1 / 1024, "ranks": 2}, 256, 1024),
    ],
)
def test_sizes_are_rounded_up_to_a_multiple_of_the_ranks(config: dict[str, Any], elements: int, payload_bytes: int):
    collective = CollectiveConfig(**config)
    assert (collective.elements, collective.payload_bytes) == (elements, payload_bytes)
    assert collective.elements % collective.ranks == 0


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"operation": "all_to_all"}, "operation: 'all_to_all' is not known"),
        ({"backend": "nccl"}, "backend: nccl sends between GPUs; on a CPU take gloo"),
        ({"ranks": 0}, "ranks: must be a whole number of at least 1"),
        ({"mib": 0.0}, "mib: must be over 0"),
        ({"mib": float("inf")}, "mib: must be over 0"),
        ({"steps": 0}, "steps: must be"),
        ({"dtype": "fp64"}, "dtype: 'fp64' is not known"),
        ({"inbox_mib": 0}, "inbox_mib: must be a whole number of at least 1"),
        (
            {"transport": "copies", "operation": "broadcast"},
            "^transport: a broadcast is sent by the library; leave it at",
        ),
        (
            {"transport": "copies", "ranks": 4, "nodes": 2},
            "^transport: what goes to another node is sent by the library",
        ),
    ],
)
def test_a_bad_field_is_refused_by_name(config: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        CollectiveConfig(**config)


def test_nodes_and_levels():
    level = {"ranks": 6, "nodes": 3, "level": "across_nodes"}
    config = CollectiveConfig(**level)
    assert (config.members, config.node_messages) == (3, 2)
    assert (CollectiveConfig(ranks=6, nodes=3).members, CollectiveConfig(ranks=6, nodes=3).node_messages) == (6, 1)
    inside = CollectiveConfig(ranks=6, nodes=3, level="in_nodes")
    assert (inside.members, inside.node_messages) == (2, 0)
    assert CollectiveConfig(ranks=128, nodes=2).ranks == 128, "64 on each node"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ranks": 4, "nodes": 3}, r"^nodes: 4 ranks cannot be spread evenly over 3 nodes; take a multiple of 3$"),
        ({"nodes": 0}, r"^nodes: must be a whole number of at least 1, not 0$"),
        ({"level": "in_nodes"}, r"^level: in_nodes needs several nodes"),
        ({"ranks": 2, "nodes": 2, "level": "in_nodes"}, r"^level: in_nodes needs several ranks on each node"),
        ({"ranks": 130, "nodes": 2}, r"^ranks: must be at most 128, not 130: 64 on each node$"),
    ],
)
def test_wrong_nodes_and_levels_are_named(changes: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        CollectiveConfig(**changes)


def test_one_node_leaves_the_key_as_it_was():
    plain = to_plain(CollectiveConfig())
    before = {name: value for name, value in plain.items() if name not in ("nodes", "level")}
    assert config_hash("collective", plain) == config_hash("collective", before)
    assert config_hash("collective", {**plain, "nodes": 2}) != config_hash("collective", plain)
    assert config_hash("my.module:WORK", {"nodes": 1}) != config_hash("my.module:WORK", {}), "a user's own field"

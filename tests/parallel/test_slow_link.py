"""Two pretend nodes of two ranks: network namespaces joined by a link of limited speed, on which groups of ranks save time."""

import itertools
import json
from pathlib import Path

import pytest

import slow_link_ranks
from slow_link_nodes import nodes, on_both_nodes
from slow_link_ranks import KINDS, RANKS_OF_NODE, expected
from trainstep.costs.gradient_sync import wire_bytes
from trainstep.costs.rank_groups import Level

__all__ = ["nodes"]
RANKS = 2 * RANKS_OF_NODE
RATES = (("200mbit", 6), ("1gbit", 3))
"""The link's rate, and how many pairs of steps are timed."""


def launched(nodes: tuple[tuple[str, str], ...], result: Path) -> list[list[dict[str, list[tuple[float, int]]]]]:
    """What slow_link_ranks.py wrote on each node."""
    rates = [str(word) for rate in RATES for word in rate]
    script = slow_link_ranks.__file__
    on_both_nodes(nodes, lambda link: (script, str(result), link, *rates), folder=result.parent, timeout_s=120)
    return [json.loads(Path(f"{result}-{number}").read_text()) for number in range(len(nodes))]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_groups_send_less_over_a_slow_link_and_are_faster(nodes: tuple[tuple[str, str], ...], tmp_path: Path):
    of_nodes = launched(nodes, tmp_path / "result")
    messages = {kind: expected(size, RANKS) for kind, size in KINDS.items()}
    across = [message for message in messages["hybrid"] if message.operation.endswith(Level.ACROSS_GROUPS)]
    by_formula = RANKS_OF_NODE * wire_bytes(across, RANKS, RANKS_OF_NODE)
    ring = wire_bytes(messages["plain"], RANKS)  # around all ranks, so one rank of a node sends to the other node
    # gloo may reduce the whole tensor in a reduce-scatter, which sends as much once more
    reduced = [message for message in messages["plain"] if message.operation == "reduce_scatter"]
    most = ring + wire_bytes(reduced, RANKS)
    for steps in itertools.chain.from_iterable(of_nodes):
        for (_, plain_bytes), (_, hybrid_bytes) in zip(steps["plain"], steps["hybrid"], strict=True):
            assert by_formula <= hybrid_bytes <= 1.1 * by_formula  # packets have headers
            assert ring <= plain_bytes <= 1.1 * most
            assert hybrid_bytes <= plain_bytes / 2
    slowest = of_nodes[0][0]
    # The least of six, 2.6 times apart on an idle machine: others' work makes single steps as slow as it likes.
    assert min(step_s for step_s, _ in slowest["hybrid"]) < min(step_s for step_s, _ in slowest["plain"])

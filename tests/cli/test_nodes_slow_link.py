"""torchrun on two pretend nodes, joined by a link of known speed: `trainstep collectives` finds that speed between the nodes."""

import subprocess
from pathlib import Path

import pytest

from slow_link_nodes import nodes, on_both_nodes
from slow_link_ranks import limited_to
from trainstep.records.store import Store
from trainstep.report.kit.rows import rows_of
from trainstep.report.parallel.collectives import fit_of, node_bytes_per_s, series_of
from trainstep.report.parallel.links import links_of

__all__ = ["nodes"]
WITHIN = 0.15
WORDS = ("--level", "across_nodes", "--mib", "0.25,1,4", "--warmups", "2", "--steps", "4", "--out", "c.jsonl")


def collectives(places: tuple[tuple[str, str], ...], folder: Path) -> None:
    """Run `trainstep collectives` on both nodes, two tasks each."""
    on_both_nodes(places, lambda _: ("-m", "trainstep", "collectives", *WORDS), folder=folder, timeout_s=150)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("rate", "bytes_per_s"), [("1gbit", 125e6), ("200mbit", 25e6)])
def test_the_speed_of_the_link_between_nodes_is_found(
    nodes: tuple[tuple[str, str], ...], tmp_path: Path, rate: str, bytes_per_s: float
):
    for namespace, link in nodes:
        limit = ["ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", link, "root", *limited_to(rate)]
        subprocess.run(limit, check=True)
    collectives(nodes, tmp_path)
    rows = rows_of([("c.jsonl", record) for record in Store(tmp_path / "c.jsonl").read()])
    assert all(row.record.failure is None for row in rows)
    found: dict[str, float | None] = {}
    for alike in series_of(rows).values():
        fit = fit_of(alike)
        assert fit is not None
        found[alike[0].record.config["level"]] = node_bytes_per_s(alike[0].record, fit)
        found |= {link.name: link.bytes_per_s for link in links_of(alike)}
    assert found == {name: pytest.approx(bytes_per_s, rel=WITHIN) for name in ("across_nodes", "n1 - n2")}

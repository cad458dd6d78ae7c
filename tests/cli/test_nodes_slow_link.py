"""torchrun on two pretend nodes, joined by a link of known speed: `trainstep collectives` finds that speed between the nodes."""

import subprocess
import time
from pathlib import Path

import pytest

from cell_maker import marked, wait_until
from slow_link_nodes import limit, nodes, on_both_nodes, started_on_both_nodes
from trainstep.records.store import Store
from trainstep.report.kit.rows import rows_of
from trainstep.report.parallel.collectives import fit_of, node_bytes_per_s, series_of
from trainstep.report.parallel.links import links_of

__all__ = ["nodes"]
WITHIN = 0.25
WORDS = ("--level", "across_nodes", "--mib", "0.25,1,4", "--warmups", "2", "--steps", "4", "--out")


def speeds(places: tuple[tuple[str, str], ...], file: Path) -> dict[str, float | None]:
    """Bytes per second of the level and of the link, by `trainstep collectives` on both nodes, two tasks each."""
    words = ("-m", "trainstep", "collectives", *WORDS, file.name)
    on_both_nodes(places, lambda _: words, folder=file.parent, timeout_s=150)
    rows = rows_of([(file.name, record) for record in Store(file).read()])
    assert all(row.record.failure is None for row in rows)
    found: dict[str, float | None] = {}
    for alike in series_of(rows).values():
        fit = fit_of(alike)
        assert fit is not None
        found[alike[0].record.config["level"]] = node_bytes_per_s(alike[0].record, fit)
        found |= {link.name: link.bytes_per_s for link in links_of(alike)}
    return found


@pytest.mark.slow
@pytest.mark.timeout(330)
@pytest.mark.parametrize(("rate", "bytes_per_s"), [("1gbit", 125e6), ("200mbit", 25e6)])
def test_the_speed_of_the_link_between_nodes_is_found(
    nodes: tuple[tuple[str, str], ...], tmp_path: Path, rate: str, bytes_per_s: float
):
    """A second run decides where the first is off: a link saves up what it may send while a busy machine keeps a sender waiting."""
    limit(nodes, rate)
    expected = {name: pytest.approx(bytes_per_s, rel=WITHIN) for name in ("across_nodes", "n1 - n2")}
    if speeds(nodes, tmp_path / "first.jsonl") != expected:
        assert speeds(nodes, tmp_path / "second.jsonl") == expected


CUT_SWEEP = """
timeout_s = 300
[grid]
workload = "parallel"
device = ["cpu"]
model = "tiny"
context = [8]
ranks = [4]
nodes = [2]
sync = "flat"
window_steps = [1]
warmups = [1]
steps = [2, 100000]
"""
"""A short cell, and one that is not over before its node is cut off."""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_host_that_is_cut_off_ends_the_cell_with_its_name(nodes: tuple[tuple[str, str], ...], tmp_path: Path):
    (tmp_path / "cut.toml").write_text(CUT_SWEEP)
    store, mark = Store(tmp_path / "cut.jsonl"), "cut off"
    words = ("-m", "trainstep", "sweep", "cut.toml", "--out", "cut.jsonl")
    with started_on_both_nodes(nodes, lambda _: words, folder=tmp_path, mark=mark) as (first, second):
        assert wait_until(lambda: store.path.exists() and len(store.read()) == 1, 60)
        time.sleep(4)  # the second cell's steps
        namespace, link = nodes[1]
        subprocess.run(["ip", "-n", namespace, "link", "set", link, "down"], check=True)  # no connection is closed
        cut_s = time.monotonic()
        out, _ = first.communicate(timeout=90)
        assert time.monotonic() - cut_s < 60
        second.communicate(timeout=max(60 - (time.monotonic() - cut_s), 1))
    assert first.returncode != 0
    assert "nodes: n2 is lost" in out or "n2" in str(store.read()[-1].failure), out
    finished, cut = store.read()
    assert finished.failure is None
    assert cut.failure is not None
    assert "n2" in cut.failure.message
    assert wait_until(lambda: not marked(mark))

"""Tables of a tuned kernel, and the rows made of them: the tile whose largest distance from the best is least."""

from typing import Any

import pytest

from record_maker import a_record, seconds
from trainstep.records.record import Fact, Record
from trainstep.report.attention.tiles import summary_table, table_rows, tile_tables
from trainstep.report.kit.rows import Row, rows_of
from trainstep.report.kit.tables import all_tables
from trainstep.report.kit.terminal import plain
from trainstep.report.page import page

TILES = [(128, 64, 8, 3, 1), (64, 64, 4, 3, 24), (64, 128, 8, 2, 1)]


def tuned(times_s: list[float | None], key: str = "a", **changes: Any) -> Record:
    """A record of three candidates, of which the last is in use."""
    config = {"kernel": "forward", "head_dim": 64, "arithmetic": "bf16", "mask": "causal", "shape": "4x16x4096"}
    names = ("block_q", "block_k", "num_warps", "num_stages", "heads_together")
    columns: dict[str, list[Any]] = {name: [tile[i] for tile in TILES] for i, name in enumerate(names)}
    best_s = min(time_s for time_s in times_s if time_s is not None)
    best = "x".join(map(str, TILES[times_s.index(best_s)]))
    columns |= {"time_s": times_s, "rounds": [0 if time_s is None else 12 for time_s in times_s]}
    columns |= {name: [1] * 3 for name in ("error", "error_ratio", "registers", "spilled_bytes", "shared_bytes")}
    columns |= {"outcome": ["failed" if time_s is None else "right" for time_s in times_s]}
    columns |= {"reason": ["check: illegal memory access" if time_s is None else "" for time_s in times_s]}
    facts = {"best": best, "in_use": "64x128x8x2x1", "architecture": "sm_90"}
    numbers = {"in_use_time": (times_s[2], "s"), "rate": (1e12, "flop/s"), "flops": (1e9, "flops")}
    return a_record(
        workload="attention_tiles",
        key=key,
        config={**config, **changes},
        samples={"time": seconds([best_s] * 12)},
        facts={name: Fact(value=value) for name, value in facts.items()}
        | {name: Fact(value=value, unit=unit) for name, (value, unit) in numbers.items() if value is not None},
        tables={"candidates": columns},
    )


def rows(*records: Record) -> list[Row]:
    return rows_of([("t.jsonl", record) for record in records])


def test_candidates_are_sorted_by_time():
    (table,) = tile_tables(rows(tuned([None, 1e-3, 2e-3])))
    assert table.title == "Tiles: forward bf16 64 causal 4x16x4096"
    texts = [[entry.text for entry in entries] for entries in table.entries]
    assert [row[:5] for row in texts] == [[str(n) for n in TILES[i]] for i in (1, 2, 0)]
    assert texts[0][5:7] == ["1.000", "1.000"]
    assert texts[1][5:7] + texts[1][-1:] == ["2.000", "2.000", "in use"]
    assert texts[2][-1] == "failed: check: illegal memory access"


def test_the_tile_in_use_is_always_shown():
    (table,) = tile_tables(rows(tuned([2e-3, 1e-3, 3e-3])), most=1)
    assert [entries[-1].text for entries in table.entries] == ["", "in use"]
    assert table.note == "1 more in the record."


def test_a_row_of_the_table_fits_all_lengths():
    """The first tile is best in one cell and twice the best in the other; the second is near the best in both."""
    tuned_rows = rows(tuned([1.0, 1.1, 1.5], "a"), tuned([2.0, 1.0, 1.5], "b", shape="1x16x16384"))
    comment, line = table_rows(tuned_rows, record="results/t.jsonl").splitlines()
    assert line == '    *_rows("sm_90", _HALF, _FORWARD, {64: (64, 64, 4, 3, 24)}, "results/t.jsonl"),'
    assert comment == (
        "    # 64: 64x64x4x3x24 takes 1.000 to 1.100 of the best time, 0.667 to 0.733 of 64x128x8x2x1's, now in use; cells a b"
    )


def test_each_kernel_has_a_line_with_all_its_head_widths():
    tuned_rows = rows(
        tuned([1.0, 2.0, 3.0], "a", head_dim=128),
        tuned([1.0, 2.0, 3.0], "b"),
        tuned([1.0, 2.0, None], "c", kernel="key_gradients"),
    )
    lines = [line.strip() for line in table_rows(tuned_rows, record="r").splitlines() if "#" not in line]
    assert lines == [
        '*_rows("sm_90", _HALF, _FORWARD, {64: (128, 64, 8, 3), 128: (128, 64, 8, 3)}, "r"),',
        '*_rows("sm_90", _HALF, _KEYS, {64: (128, 64, 8, 3)}, "r"),',
    ]


def test_a_width_without_a_common_tile_has_no_row():
    text = table_rows(rows(tuned([1.0, None, None], "a"), tuned([None, 1.0, 1.0], "b", shape="1x1x64")), record="r")
    assert text == "    # 64: no tile was timed in all cells; cells a b"


@pytest.mark.parametrize("others", [[], [a_record()]])
def test_tiles_are_in_reports_and_pages(others: list[Record]):
    tuned_rows = rows(tuned([1.0, 2.0, 3.0]), *others)
    text = plain(all_tables(tuned_rows))
    assert "Attention tiles" in text or not others
    assert "Tiles: forward bf16 64" in text
    assert "Best tiles against those in use" in page(tuned_rows)
    (table,) = summary_table(tuned_rows)
    assert [entry.text for entry in table.entries[0]][5:] == [
        "128x64x8x3x1",
        "1,000",
        "1 TFLOP/s",
        "64x128x8x2x1",
        "0.333",
    ]
    assert not summary_table(rows(*others)) if others else True

"""Tables and page of ops: rates from least bytes and busy time, the share of a copy, errors, failures, and ratios to each peer."""

from collections.abc import Sequence
from typing import Any

import pytest

from op_records import copy_ceiling, op
from trainstep.records.record import Failure, Record
from trainstep.report.kit.rows import Row, rows_of
from trainstep.report.kit.tables import Table, all_tables
from trainstep.report.op.page import op_sections
from trainstep.report.op.rows import named_rows, shape_words, works_of
from trainstep.report.op.tables import op_tables
from trainstep.report.page import sections, title_of

BYTES = 5 * 8192 * 4096 * 2
NOT_INSTALLED = Failure(
    kind="import_error",
    phase="build",
    message="implementation: liger is not installed; pip install liger-kernel==0.8.5 (import liger_kernel.ops: no module)",
)


def rows(records: Sequence[Record]) -> list[Row]:
    return rows_of([("r.jsonl", record) for record in records])


def column(table: Table, title: str) -> list[str]:
    place = [column.title for column in table.columns].index(title)
    return [entries[place].text for entries in table.entries]


PAIR = [op(implementation="trainstep", busy_s=0.8e-4), op(implementation="liger", time_s=2e-4)]


def test_the_table_has_few_columns():
    cells, ratios = op_tables(rows(PAIR))
    assert [column.title for column in cells.brief().columns] == [
        *("op", "shape", "direction", "dtype", "implementation", "time (ms)", "GB/s", "error", "plain PyTorch's"),
        *("peak (MiB)", "doubts"),
    ]
    assert column(cells, "shape") == ["8192 x 4096"] * 2
    assert column(cells, "error") == ["3.0e-03"] * 2
    assert column(cells, "plain PyTorch's") == ["3.5e-03"] * 2
    assert column(ratios, "ours / liger") == ["0.500 [0.500, 0.500]"]


def test_a_rate_is_over_the_busy_time_where_that_is_known():
    cells, _ = op_tables(rows(PAIR))
    assert [row["bytes_per_s"] for row in cells.raw] == pytest.approx([BYTES / 0.8e-4, BYTES / 2.02e-4])
    assert column(cells, "GB/s") == ["4,194", "1,661"]


def test_the_loss_has_a_rate_of_flops():
    (cells,) = op_tables(rows([op(op="linear_cross_entropy", time_s=0.2)]))
    titles = [column.title for column in cells.columns]
    assert "TFLOP/s" in titles
    assert "GB/s" not in titles
    assert column(cells, "shape") == ["32768 x 4096 x 151936"]


def test_a_copy_in_the_report_gives_the_share_of_its_rate():
    table = next(table for table in all_tables(rows([*PAIR, copy_ceiling(2 * BYTES / 0.8e-4)])) if table.title == "Ops")
    assert column(table, "of a copy (%)")[0] == "50.0"
    assert table.raw[0]["copy_ratio"] == pytest.approx(0.5)
    elsewhere = {
        **vars(copy_ceiling(1.0)),
        "environment": op().environment.__class__(**{**vars(op().environment), "gpu": "A100"}),
    }
    table = next(table for table in all_tables(rows([*PAIR, Record(**elsewhere)])) if table.title == "Ops")
    assert "of a copy (%)" not in [column.title for column in table.columns]


def test_a_missing_package_is_a_word_and_its_sentence():
    cells, ratios = op_tables(rows([PAIR[0], op(implementation="liger", failure=NOT_INSTALLED)]))
    assert column(cells, "time (ms)")[1] == "not installed"
    assert "pip install liger-kernel==0.8.5" in column(cells, "doubts")[1]
    assert column(ratios, "ours / liger") == ["not installed"]


def test_a_wrong_result_is_doubted():
    (cells,) = op_tables(rows([op(facts={"has_nan": 1})]))
    assert column(cells, "doubts")[0].startswith("NaN or infinity")


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"op": "rotary"}, "8192 x 32 x 128"),
        ({"op": "rotary", "key_heads": 8}, "8192 x 32 + 8 x 128"),
        ({"op": "adamw", "dtype": "fp32"}, "500000000"),
    ],
)
def test_a_shape_is_one_word(fields: dict[str, Any], shape: str):
    assert shape_words(op(**fields)) == shape


def test_timed_passes_are_no_part_of_the_work():
    cells = [op(implementation="trainstep", steps=steps, time_s=time_s) for steps, time_s in ((10, 2e-4), (20, 1e-4))]
    (work,) = works_of(named_rows(rows(cells)))
    assert work.left_aside == 1
    assert work.cells["trainstep"].record.config["steps"] == 20, "the fastest"


def test_the_page_has_one_chart_of_ratios():
    (section,) = op_sections(rows(PAIR))
    (chart,) = section.charts
    assert chart.title == "Time, relative to each peer"
    assert len(section.tables) == 2
    (alone,) = op_sections(rows(PAIR[:1]))
    assert alone.charts == ()
    assert title_of(rows(PAIR)) == "Ops on NVIDIA H200"
    assert [section.title for section in sections(rows(PAIR))] == ["Ops"]

"""Numerics in a report: tables, sentences and charts, from records with numbers defined here."""

from collections.abc import Sequence
from typing import Any

import pytest

from record_maker import a_record, seconds
from trainstep.config.parsing import build_config, config_hash, to_plain
from trainstep.records.record import Fact, Failure, Record
from trainstep.report.kit.frames import csv, json_text, latex, markdown
from trainstep.report.kit.rows import Row, rows_of
from trainstep.report.kit.tables import Table, all_tables
from trainstep.report.numerics.page import cost_chart, error_chart, numerics_sections
from trainstep.report.numerics.tables import numerics_tables, share_words
from trainstep.report.page import page, sections, title_of

DTYPES = {
    "module": ["fc1", "norm", "(logits)"],
    "kind": ["Linear", "LayerNorm", ""],
    "parameters": ["fp32", "fp32", "–"],
    "output_gradient": ["fp32", "fp32", "–"],
    "gradient": ["fp32", "fp32", "–"],
}
RANGES = {
    "of": ["parameters", "outputs"],
    "layer": ["fc1", "fc1"],
    "elements": [100, 300],
    "zero_unscaled": [0.2, 0.0],
    "subnormal_unscaled": [0.4, 0.0],
    "zero_scaled": [0.0, 0.0],
    "subnormal_scaled": [0.04, 0.0],
    "overflow_at_twice": [0.01, 0.0],
}
SUMS = {
    "what": ["mean of squares"],
    "values": ["activations"],
    "numbers": ["fp16"],
    "accumulator": ["fp16"],
    "error_median": [None],
    "error_max": [None],
    "overflow_share": [1.0],
}


def numerics(precision: str, *, step: float = 0.1, error: float = 1e-6, **changes: Any) -> Record:
    """A cell of the toy model whose gradients have the error `error` in the median and ten times that at worst."""
    config = to_plain(build_config("numerics", {"model": "toy", "precision": precision, "device": "cuda"}))
    half = precision == "fp16_autocast"
    outputs = ["fp16", "fp32", "fp16"] if half else ["fp32"] * 3
    facts: dict[str, Fact] = {
        "error_logits": Fact(value=error, unit="ratio"),
        "error_loss": Fact(value=0.0, unit="ratio"),
        "error_gradient_median": Fact(value=error, unit="ratio"),
        "error_gradient_max": Fact(value=10 * error, unit="ratio"),
        "reference": Fact(value="fp64"),
    }
    tables: dict[str, Any] = {
        "dtypes": {**DTYPES, "output": outputs},
        "gradients": {
            "parameter": ["fc1.weight", "fc2.weight"],
            "relative_error": [10 * error, None],
            "reference_norm": [2.0, 0.0],
            "elements": [200, 50],
        },
        "accumulation": {"how": ["fp16 into fp16"], "total": [9.953125], "error": [0.0046875]},
        "reductions": SUMS,
    }
    if half:
        facts["settled_scale"] = Fact(value=2.0**20)
        tables["ranges"] = RANGES
    fields = {"facts": facts, "tables": tables, "samples": {"step": seconds([step] * 3)}, **changes}
    return a_record(workload="numerics", key=config_hash("numerics", config), config=config, **fields)


def rows(*records: Record) -> list[Row]:
    return rows_of([("runs/made.jsonl", record) for record in records])


@pytest.fixture
def two_rows() -> list[Row]:
    return rows(numerics("fp32"), numerics("fp16_autocast", step=0.05, error=1e-3))


def table(tables: Sequence[Table], title: str) -> Table:
    [match] = [candidate for candidate in tables if candidate.title == title]
    return match


def texts(shown: Table) -> list[list[str]]:
    return [[entry.text for entry in row] for row in shown.entries]


def test_each_precision_has_its_error_and_cost(two_rows: list[Row]):
    shown = table(numerics_tables(two_rows), "Error and cost of each precision")
    titles = [column.title for column in shown.columns]
    first, second = (dict(zip(titles, row, strict=True)) for row in texts(shown))
    assert first["of fp32's time"] == "1.00"
    assert second["of fp32's time"] == "0.500"
    assert second["error of gradients, median"] == "1.0e-03"
    assert second["error of gradients, worst"] == "1.0e-02"
    assert second["error of loss"] == "0"
    assert second["reference"] == "fp64"


def test_dtypes_have_a_column_for_each_precision(two_rows: list[Row]):
    shown = table(numerics_tables(two_rows), "Dtypes: toy 256")
    assert [column.title for column in shown.columns] == ["module", "kind", "parameters", "fp32", "fp16_autocast"]
    assert texts(shown)[:2] == [
        ["fc1", "Linear", "fp32", "fp32", "fp16"],
        ["norm", "LayerNorm", "fp32", "fp32", "fp32"],
    ]
    assert "fp16_autocast leaves in fp32: LayerNorm." in shown.note


def test_the_note_says_why_autocast_had_no_effect():
    plain = numerics("bf16_autocast")
    without_effect = numerics(
        "bf16_autocast", facts={**plain.facts, "no_effect": Fact(value="autocast had no effect: it is off")}
    )
    shown = table(numerics_tables(rows(without_effect)), "Dtypes: toy 256")
    assert "bf16_autocast: autocast had no effect: it is off." in shown.note
    assert "leaves in fp32" not in shown.note


def test_the_range_of_fp16_has_hand_computed_shares(two_rows: list[Row]):
    """20 % and 40 % of 100 elements, and none of 300."""
    shown = table(numerics_tables(two_rows), "fp16's range: toy 256")
    assert "5.0 % become zero without a scale, and 10.0 % are subnormal" in shown.note
    assert "with the loss times 1,048,576, 0 % and 1.0 %" in shown.note
    assert texts(shown)[0] == ["parameters", "fc1", "100", "20.0", "40.0", "0", "4.0", "1.0"]


def test_sums_have_their_tables(two_rows: list[Row]):
    tables = numerics_tables(two_rows)
    assert texts(table(tables, "Accumulation")) == [["fp16 into fp16", "9.9531", "4.7e-03"]]
    assert texts(table(tables, "Sums in 16 bits: toy 256")) == [
        ["mean of squares", "activations", "fp16", "fp16", "–", "–", "100.0"]
    ]


def test_the_worst_gradients_are_listed(two_rows: list[Row]):
    cells = texts(table(numerics_tables(two_rows), "Worst gradients"))
    assert cells[2] == ["toy 256", "fp16_autocast", "fc1.weight", "1.0e-02", "2.0e+00"]
    assert cells[3][3] == "–"


def test_a_failed_cell_is_a_row_of_the_table(two_rows: list[Row]):
    failure = Failure(kind="out_of_memory", phase="reference", message="ran out of memory in reference")
    tables = numerics_tables(rows(numerics("fp32"), numerics("bf16", failure=failure, facts={}, tables={}, samples={})))
    assert "OOM" in texts(tables[0])[1]
    assert error_chart(rows(numerics("bf16", failure=failure))) is None


def test_the_chart_of_errors_is_logarithmic(two_rows: list[Row]):
    chart = error_chart(two_rows)
    assert chart is not None
    assert chart.layout["yaxis"]["type"] == "log"
    traces = {trace["name"]: trace for trace in chart.data}
    assert traces["error of gradients, worst"]["y"] == [pytest.approx(1e-5), pytest.approx(1e-2)]
    assert traces["error of loss"]["y"] == []  # a logarithmic axis has no zero
    low, high = chart.layout["yaxis"]["range"]
    assert low < -6
    assert high > -2


def test_cost_is_a_ratio_to_fp32():
    """Twenty steps each, of 100 and 103 ms: a difference of 3 % is visible."""
    steps = {"fp32": [0.1] * 20, "bf16": [0.103] * 20}
    records = [numerics(name, samples={"step": seconds(times)}) for name, times in steps.items()]
    chart = cost_chart(rows(*records))
    assert chart is not None
    (marks,) = chart.data
    assert (marks["y"], marks["text"]) == (["bf16"], ["1.030"])
    low, high = chart.layout["xaxis"]["range"]
    assert (1.03 - 1) / (high - low) > 0.2
    assert cost_chart(rows(records[1])) is None


def test_numerics_are_in_pages_and_every_format(two_rows: list[Row]):
    assert [section.title for section in sections(two_rows)] == [
        section.title for section in numerics_sections(two_rows)
    ]
    assert title_of(two_rows) == "Numerics: toy on NVIDIA H200"
    text = page(two_rows)
    assert "Numerics: why sums stay in fp32" in text
    tables = all_tables(two_rows)
    assert "fp16 into fp16" in [line.strip("|").split("|")[0].strip() for line in markdown(tables).splitlines()]
    assert "tabular" in latex(tables)
    assert csv(tables).count("\n") == 3
    assert '"error_gradient_max": 0.01' in json_text(tables)


def test_other_records_have_no_numerics():
    others = rows(a_record(config={"model": {"name": "tiny"}}))
    errors = "Error and cost of each precision"
    assert errors not in [table.title for table in all_tables(others)]
    assert not any(section.title.startswith("Numerics") for section in sections(others))


@pytest.mark.parametrize(("share", "words"), [(0.0, "0"), (0.25, "25.0"), (2e-5, "2.0e-03")])
def test_shares_are_written_as_percents(share: float, words: str):
    assert share_words(share) == words

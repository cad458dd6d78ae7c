"""What is told of numerics: tables, sentences and the chart, from records whose numbers stand here."""

from collections.abc import Sequence
from typing import Any

import pytest

from record_maker import a_record, seconds
from trainstep.config.parsing import build_config, config_hash, to_plain
from trainstep.records.record import Fact, Failure, Record
from trainstep.report.all_tables import all_tables
from trainstep.report.frames import csv, json_text, latex, markdown
from trainstep.report.numerics_page import cost_chart, error_chart, numerics_sections
from trainstep.report.numerics_tables import numerics_tables, share_words, trade_sentences
from trainstep.report.page import page, sections, title_of
from trainstep.report.rows import Row, rows_of
from trainstep.report.tables import Table

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
    """A cell of the toy; its gradients are off by `error` in the median and ten times that at worst."""
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
    given = {"facts": facts, "tables": tables, "samples": {"step": seconds([step] * 3)}, **changes}
    return a_record(workload="numerics", key=config_hash("numerics", config), config=config, **given)


def rows(*records: Record) -> list[Row]:
    return rows_of([("runs/made.jsonl", record) for record in records])


@pytest.fixture
def made() -> list[Row]:
    return rows(numerics("fp32"), numerics("fp16_autocast", step=0.05, error=1e-3))


def table(tables: Sequence[Table], title: str) -> Table:
    [found] = [one for one in tables if one.title == title]
    return found


def texts(found: Table) -> list[list[str]]:
    return [[entry.text for entry in row] for row in found.entries]


def test_error_and_cost_side_by_side(made: list[Row]):
    found = table(numerics_tables(made), "Error and cost of each precision")
    titles = [column.title for column in found.columns]
    first, second = (dict(zip(titles, row, strict=True)) for row in texts(found))
    assert first["of fp32's time"] == "1.00"
    assert second["of fp32's time"] == "0.500"
    assert second["error of gradients, median"] == "1.0e-03"
    assert second["error of gradients, worst"] == "1.0e-02"
    assert second["error of loss"] == "0"
    assert second["reference"] == "fp64"


def test_the_trade_in_a_sentence(made: list[Row]):
    [said] = trade_sentences(made)
    assert "fp16_autocast: 0.500 of fp32's time, gradients off by 0.1 % in the median, 1,000 times fp32's error" in said


def test_dtypes_stand_by_precision(made: list[Row]):
    found = table(numerics_tables(made), "Dtypes: toy 256")
    assert [column.title for column in found.columns] == ["module", "kind", "parameters", "fp32", "fp16_autocast"]
    assert texts(found)[:2] == [
        ["fc1", "Linear", "fp32", "fp32", "fp16"],
        ["norm", "LayerNorm", "fp32", "fp32", "fp32"],
    ]
    assert "fp16_autocast leaves in fp32: LayerNorm." in found.note


def test_why_autocast_did_nothing_is_said():
    plain = numerics("bf16_autocast")
    told = numerics(
        "bf16_autocast", facts={**plain.facts, "no_effect": Fact(value="autocast had no effect: it is off")}
    )
    found = table(numerics_tables(rows(told)), "Dtypes: toy 256")
    assert "bf16_autocast: autocast had no effect: it is off." in found.note
    assert "leaves in fp32" not in found.note


def test_what_fp16_loses(made: list[Row]):
    """20 % and 40 % of 100 elements, nothing of 300."""
    found = table(numerics_tables(made), "fp16's range: toy 256")
    assert "unscaled, 5.0 % become zero and 10.0 % are subnormal" in found.note
    assert "with the loss times 1,048,576, 0 % and 1.0 %" in found.note
    assert texts(found)[0] == ["parameters", "fc1", "100", "20.0", "40.0", "0", "4.0", "1.0"]


def test_sums(made: list[Row]):
    tables = numerics_tables(made)
    assert texts(table(tables, "Accumulation")) == [["fp16 into fp16", "9.9531", "4.7e-03"]]
    assert texts(table(tables, "Sums in 16 bits: toy 256")) == [
        ["mean of squares", "activations", "fp16", "fp16", "–", "–", "100.0"]
    ]


def test_worst_gradients(made: list[Row]):
    found = texts(table(numerics_tables(made), "Worst gradients"))
    assert found[2] == ["toy 256", "fp16_autocast", "fc1.weight", "1.0e-02", "2.0e+00"]
    assert found[3][3] == "–"


def test_a_failed_cell_stands_in_the_table(made: list[Row]):
    failure = Failure(kind="out_of_memory", phase="reference", message="ran out of memory in reference")
    found = numerics_tables(rows(numerics("fp32"), numerics("bf16", failure=failure, facts={}, tables={}, samples={})))
    assert "OOM" in texts(found[0])[1]
    assert error_chart(rows(numerics("bf16", failure=failure))) is None


def test_chart(made: list[Row]):
    chart = error_chart(made)
    assert chart is not None
    assert chart.layout["yaxis"]["type"] == "log"
    traces = {trace["name"]: trace for trace in chart.data}
    assert traces["error of gradients, worst"]["y"] == [pytest.approx(1e-5), pytest.approx(1e-2)]
    assert traces["error of loss"]["y"] == []  # no zero on a logarithmic axis
    low, high = chart.layout["yaxis"]["range"]
    assert low < -6
    assert high > -2


def test_cost_is_a_ratio_to_fp32():
    """Twenty steps each, of 100 and 103 ms: 3 % stand apart from one."""
    steps = {"fp32": [0.1] * 20, "bf16": [0.103] * 20}
    records = [numerics(name, samples={"step": seconds(times)}) for name, times in steps.items()]
    chart = cost_chart(rows(*records))
    assert chart is not None
    (marks,) = chart.data
    assert (marks["y"], marks["text"]) == (["bf16"], ["1.030"])
    low, high = chart.layout["xaxis"]["range"]
    assert (1.03 - 1) / (high - low) > 0.2
    assert cost_chart(rows(records[1])) is None


def test_page_and_formats(made: list[Row]):
    assert [section.title for section in sections(made)] == [section.title for section in numerics_sections(made)]
    assert title_of(made) == "Numerics: toy on NVIDIA H200"
    text = page(made)
    assert "Numerics: why sums stay in fp32" in text
    tables = all_tables(made)
    assert "| fp16 into fp16" in markdown(tables)
    assert "tabular" in latex(tables)
    assert csv(tables).count("\n") == 3
    assert '"error_gradient_max": 0.01' in json_text(tables)


def test_without_numerics_there_is_nothing():
    others = rows(a_record(config={"model": {"name": "tiny"}}))
    errors = "Error and cost of each precision"
    assert errors not in [table.title for table in all_tables(others)]
    assert not any(section.title.startswith("Numerics") for section in sections(others))


@pytest.mark.parametrize(("share", "words"), [(0.0, "0"), (0.25, "25.0"), (2e-5, "2.0e-03")])
def test_shares(share: float, words: str):
    assert share_words(share) == words

"""Ratios and verdicts as tables: along the axes of train steps, or along any axis of any workload that is named."""

import json
from collections.abc import Callable

from record_maker import a_record, seconds
from trainstep.records.record import Record
from trainstep.report import frames
from trainstep.report.comparison_page import comparison_tables
from trainstep.report.tables import cell_tables

STEADY = (1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0)


def of_own_workload(seconds_each: float) -> Record:
    samples = {"step": seconds(tuple(value * seconds_each for value in STEADY))}
    config = {"seconds": seconds_each, "steps": 10}
    return a_record(workload="package.module:object", key=f"key{seconds_each}", config=config, samples=samples)


def test_a_named_axis_of_any_workload(rows: Callable):
    found = rows([of_own_workload(1.0), of_own_workload(2.0)])
    assert comparison_tables(found) == []
    [table] = comparison_tables(found, "seconds")
    [numbers] = table.raw
    assert (numbers["compared_along"], numbers["against"], numbers["seconds"]) == ("seconds", 1.0, 2.0)
    assert abs(numbers["ratio"] - 2) < 1e-9
    assert numbers["verdict"] == "slower"


def test_an_axis_nobody_varies_gives_no_table(rows: Callable):
    assert comparison_tables(rows([of_own_workload(1.0), of_own_workload(2.0)]), "precision") == []


def test_json_holds_cells_then_verdicts(rows: Callable, precision_pair: list[Record]):
    found = rows(precision_pair)
    plain = json.loads(frames.json_text([*cell_tables(found), *comparison_tables(found)]))["rows"]
    verdicts = [row for row in plain if row.get("verdict")]
    assert len(plain) == len(precision_pair) + len(verdicts)
    assert verdicts
    assert {row["compared_along"] for row in verdicts} == {"precision"}
    assert {row["key"] for row in verdicts} <= {record.key for record in precision_pair}

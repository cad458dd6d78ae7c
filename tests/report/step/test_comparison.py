"""Tables of ratios and verdicts along the axes of train steps, or along a named axis of any workload."""

import json
from collections.abc import Callable

from record_maker import a_record, seconds
from trainstep.records.record import Record
from trainstep.report.kit import frames
from trainstep.report.kit.tables import cell_tables
from trainstep.report.step.comparison import comparison_tables

STEADY = (1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0)


def of_own_workload(seconds_each: float) -> Record:
    samples = {"step": seconds(tuple(value * seconds_each for value in STEADY))}
    config = {"seconds": seconds_each, "steps": 10}
    return a_record(workload="package.module:object", key=f"key{seconds_each}", config=config, samples=samples)


def test_a_named_axis_of_any_workload_is_compared(rows: Callable):
    compared = rows([of_own_workload(1.0), of_own_workload(2.0)])
    assert comparison_tables(compared) == []
    [table] = comparison_tables(compared, "seconds")
    [numbers] = table.raw
    assert (numbers["compared_along"], numbers["against"], numbers["seconds"]) == ("seconds", 1.0, 2.0)
    assert abs(numbers["ratio"] - 2) < 1e-9
    assert numbers["verdict"] == "slower"


def test_an_axis_that_does_not_vary_gives_no_table(rows: Callable):
    assert comparison_tables(rows([of_own_workload(1.0), of_own_workload(2.0)]), "precision") == []


def test_json_holds_cells_then_verdicts(rows: Callable, precision_pair: list[Record]):
    compared = rows(precision_pair)
    plain = json.loads(frames.json_text([*cell_tables(compared), *comparison_tables(compared)]))["rows"]
    verdicts = [row for row in plain if row.get("verdict")]
    assert len(plain) == len(precision_pair) + len(verdicts)
    assert verdicts
    assert {row["compared_along"] for row in verdicts} == {"precision"}
    assert {row["key"] for row in verdicts} <= {record.key for record in precision_pair}

"""Memory's answer and first tables: whose bytes a graph keeps, and columns and notes without content."""

from typing import Any

from record_maker import a_record
from trainstep.records.facts import facts_of
from trainstep.report.answers import answers
from trainstep.report.kit.rows import rows_of
from trainstep.report.memory.tables import ledger_table, peaks_table
from trainstep.traces.ledger import MOMENTS

POOL = "of that, the graph's pool"


def a_cell(**facts: Any) -> Any:
    lines = ["parameters", "allocated", "reserved", "driver", "driver, unexplained", POOL]
    ledger = {"line": lines} | {moment: [None] * len(lines) for moment in MOMENTS}
    ledger |= {"after step": [2**30, 2**30, 2**31, 3 * 2**30, 0, 2**29], "peak": [2**30] * 5 + [None]}
    config = {"device": "cuda", "mode": "step", "model": "small"}
    every_fact = facts_of(peak_allocated_bytes=2**30, **facts)
    return a_record(workload="memory", key="a", config=config, facts=every_fact, tables={"ledger": ledger})


def row_of_cell(**facts: Any) -> Any:
    return rows_of([("r.jsonl", a_cell(**facts))])[0]


def test_the_graphs_pool_is_a_part_of_the_drivers_bytes():
    [answer] = answers([row_of_cell(driver_bytes=3 * 2**30, captured="step", capture_pool_bytes=2**29)])
    assert "The driver counts 3.00 GiB. Of the 3.00 GiB, the graph keeps 0.50 GiB between launches." in answer.verdict
    assert "can save at most" in answer.suggestion


def test_the_ledger_has_the_graphs_pool_under_reserved():
    lines = [row[0].text for row in ledger_table(row_of_cell()).entries]
    assert lines[lines.index("reserved") + 1] == POOL
    assert lines[-1] == "driver, unexplained"


def test_a_column_without_values_and_a_note_on_a_hidden_one_are_not_shown():
    table = peaks_table([row_of_cell(driver_bytes=3 * 2**30)])
    titles = [column.title for column in table.columns]
    assert "driver" in titles
    assert "resident" not in titles
    assert "Resident" not in table.note
    assert "Unexplained" in table.note
    assert "Unexplained" not in table.brief().note
    assert table.brief().note.endswith("Driver: what nvidia-smi would show for this process.")

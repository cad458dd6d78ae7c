"""The curve of a run with a budget is a table, and the choice a sentence of the answer."""

import dataclasses

from record_maker import RECOMPUTE_CURVE
from trainstep.records.facts import facts_of
from trainstep.report.kit.tables import all_tables
from trainstep.report.step.answer import step_answer
from trainstep.report.step.recomputation import curve_tables, recomputation_sections

BLOCKS = {
    "kind": [0, 0],
    "blocks": [12, 12],
    "mode": ["none", "selective"],
    "kept_bytes": [2 * 2**30, 2**30],
    "backward_bytes": [3 * 2**30, 3 * 2**30],
    "added_s": [0.0, 0.0015],
}
FACTS = facts_of(
    recompute_choice="4 none, 8 selective",
    recompute_peak_bytes=20 * 2**30,
    recompute_measured_peak_bytes=20.5 * 2**30,
    recompute_added_s=0.0125,
)


def test_the_curve_and_the_blocks_are_tables(make, rows):
    tables = {"recompute_curve": RECOMPUTE_CURVE, "recompute_blocks": BLOCKS}
    record = dataclasses.replace(make(recompute_budget_gib=21.0), tables=tables)
    curve, blocks = curve_tables(rows([record]))
    assert [[entry.text for entry in row][-7:] for row in curve.entries] == [
        ["20.0", "12.50", "4", "8", "0", "0", "chosen"],
        ["30.0", "0", "12", "0", "0", "0", ""],
    ]
    assert [row[-1].text for row in blocks.entries] == ["0", "1.500"]
    assert curve.title in [table.title for table in all_tables(rows([record]))]
    [section] = recomputation_sections(rows([record]))
    assert [table.entries for table in section.tables] == [curve.entries, blocks.entries]


def test_runs_without_a_budget_have_no_such_table(make, rows):
    assert curve_tables(rows([make()])) == []
    assert recomputation_sections(rows([make()])) == []


def test_the_answer_says_what_was_chosen(make, rows):
    record = make(recompute_budget_gib=21.0, facts={name: fact.value for name, fact in FACTS.items()})
    answer = step_answer(rows([record]))
    assert answer is not None
    assert (
        "Within 21 GiB the blocks recompute: 4 none, 8 selective. That adds 12.50 ms; the peak is 20.00 GiB by prediction "
        "and 20.50 GiB as measured."
    ) in answer.text

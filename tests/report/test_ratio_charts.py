"""Ratios as marks around one: few percent apart, whiskers where there is an interval, failures as words."""

import re
from pathlib import Path

import pytest

from trainstep.records.compare import Comparison
from trainstep.records.record import Failure
from trainstep.report.charts import chart_table
from trainstep.report.parallel_page import parallel_sections
from trainstep.report.parallel_tables import parallel_tables
from trainstep.report.ratio_charts import ratio_axis, ratio_chart
from trainstep.report.ratios import Ratio
from trainstep.report.rows import Row, read_rows

RECORDS = Path(__file__).resolve().parents[2] / "results" / "h200"


@pytest.fixture
def ratio(make, rows):
    """Makes the ratio of two rows that came to these numbers."""
    base, row = rows([make(context=64), make(context=128)])

    def made(middle: float | None, ends: tuple[float, float] | None = None, verdict: str = "cannot tell") -> Ratio:
        low, high = ends or (None, None)
        found = Comparison(verdict=verdict, reason="too few pairs", ratio=middle, low=low, high=high)
        return Ratio(base=base, row=row, found=found, trouble="" if middle else "too few pairs")

    return made


def drawn(named):
    chart = ratio_chart("Cost", "", "time ÷ none's", {"step": named})
    assert chart is not None
    return chart


def test_three_percent_is_seen(ratio):
    chart = drawn([("bucketed", ratio(1.03, (1.02, 1.04), "slower")), ("flat", ratio(0.98, (0.97, 0.99), "faster"))])
    low, high = chart.layout["xaxis"]["range"]
    assert low < 0.97
    assert high > 1.04
    assert (1.03 - 1.0) / (high - low) > 0.15
    (marks,) = chart.data
    assert marks["marker"]["symbol"] == ["circle", "circle"]
    assert marks["error_x"]["array"] == pytest.approx([0.01, 0.01])
    assert marks["error_x"]["arrayminus"] == pytest.approx([0.01, 0.01])
    assert (chart.layout["shapes"][0]["x0"], chart.layout["shapes"][0]["x1"]) == (1, 1)


def test_a_ratio_of_few_pairs_has_a_mark_and_no_whisker(ratio):
    """As rounds of whole processes leave it: two pairs give a ratio, and nobody can tell how far the next one is off."""
    (marks,) = drawn([("bucketed", ratio(1.13))]).data
    assert (marks["x"], marks["text"], marks["marker"]["symbol"]) == ([1.13], ["1.130"], ["circle-open"])
    assert "error_x" not in marks
    assert marks["hovertext"][0].endswith("1.130<br>cannot tell<br>too few pairs")


def test_records_made_in_rounds_show_the_ratios_of_the_readme():
    """Two rounds of whole processes: two pairs, so a ratio without an interval, and each round's beside it."""
    found = read_rows([RECORDS / "ddp_xl.jsonl"])
    way, ratio, each = ([row[place].text for row in parallel_tables(found)[0].entries] for place in (2, 4, 5))
    readme = (RECORDS.parents[1] / "README.md").read_text(encoding="utf-8")
    for name, shown in (("bucketed", "bucketed"), ("sharded_flat", "flat shards, optimizer sharded"), ("fsdp", "FSDP")):
        place = way.index(name)
        rounds = [f"{float(one):.2f}" for one in each[place].removeprefix("pairs ").split(", ")]
        assert re.search(
            rf"^\| {shown}[^|]*\|[^|]*\| {float(ratio[place]):.2f} \({', '.join(rounds)}\) \|", readme, re.M
        )
    chart = parallel_sections(found)[0].charts[0]
    assert dict(zip(chart.data[0]["y"], chart.data[0]["text"], strict=True))["bucketed"] == ratio[way.index("bucketed")]
    assert "of pairs" in chart.data[0]["hovertext"][0]


def test_a_whisker_over_everything_leaves_the_marks_apart(ratio):
    low, high = ratio_axis([ratio(1.1, (0.2, 1e8)), ratio(1.2, (1.1, 1.3))])["range"]
    assert high - low < 0.6


def test_ratios_far_from_one_are_logarithmic(ratio):
    assert ratio_axis([ratio(0.5), ratio(12.0)])["type"] == "log"
    assert "type" not in ratio_axis([ratio(0.02), ratio(1.1)])


def test_what_failed_is_a_word_in_its_line(ratio, rows, end_to_end):
    small, *_, failed = rows(end_to_end)
    assert isinstance(failed.record.failure, Failure)
    marks, words = drawn([("a", ratio(1.1, (1.0, 1.2))), ("b", Ratio(base=small, row=failed, trouble="OOM"))]).data
    assert marks["y"] == ["a"]
    assert (words["y"], words["text"], words["x"]) == (["b"], ["<b>OOM</b>"], [1.0])


def test_no_ratio_no_chart(ratio):
    assert ratio_chart("Cost", "", "time", {"step": [("a", ratio(None))]}) is None
    assert ratio_chart("Cost", "", "time", {"step": []}) is None


def test_many_are_cut_and_counted(ratio):
    chart = drawn([(f"cell {number}", ratio(1 + number / 1000)) for number in range(50)])
    assert len(chart.data[0]["x"]) == 40
    assert "The first 40 of 50; the table has all." in chart.caption


def test_the_table_beside_it_reads_names_across(ratio):
    table = chart_table(drawn([("bucketed", ratio(1.13, (1.1, 1.2), "slower"))]))
    assert [entry.text for entry in table.entries[0]] == ["bucketed", "1.13 (1.1 to 1.2)"]


def test_rows_are_told_by_their_own_label(ratio):
    row: Row = ratio(1.0).row
    (marks,) = drawn([("x", ratio(1.0))]).data
    assert marks["hovertext"][0].startswith(row.label())

"""Ratios as marks around one: differences of few percent are visible, intervals are whiskers, failures are words."""

import re
from pathlib import Path

import pytest

from trainstep.records.compare import Comparison
from trainstep.records.record import Failure
from trainstep.report.kit.charts import chart_table
from trainstep.report.kit.ranking import Ratio
from trainstep.report.kit.ratio_charts import ratio_axis, ratio_chart
from trainstep.report.kit.rows import Row, read_rows
from trainstep.report.parallel.page import parallel_sections
from trainstep.report.parallel.tables import parallel_tables

RECORDS = Path(__file__).resolve().parents[3] / "results" / "h200"


@pytest.fixture
def ratio(make, rows):
    """A function that makes the ratio of two rows with these numbers."""
    base, row = rows([make(context=64), make(context=128)])

    def make_ratio(
        middle: float | None, ends: tuple[float, float] | None = None, verdict: str = "cannot tell"
    ) -> Ratio:
        low, high = ends or (None, None)
        comparison = Comparison(verdict=verdict, reason="too few pairs", ratio=middle, low=low, high=high)
        return Ratio(base=base, row=row, comparison=comparison, trouble="" if middle else "too few pairs")

    return make_ratio


def drawn(named):
    chart = ratio_chart("Cost", "", "time ÷ none's", {"step": named})
    assert chart is not None
    return chart


def test_a_difference_of_three_percent_is_visible(ratio):
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
    """Two rounds of whole processes give two pairs: enough for a ratio, too few for an interval."""
    (marks,) = drawn([("bucketed", ratio(1.13))]).data
    assert (marks["x"], marks["text"], marks["marker"]["symbol"]) == ([1.13], ["1.130"], ["circle-open"])
    assert "error_x" not in marks
    assert marks["hovertext"][0].endswith("1.130<br>cannot tell<br>too few pairs")


def test_records_of_rounds_give_the_ratios_of_the_readme_and_results():
    """The records hold two rounds of whole processes: a ratio without an interval, and the ratio of each round beside it."""
    rows = read_rows([RECORDS / "ddp_xl.jsonl"])
    names, ratio, pairs = ([row[place].text for row in parallel_tables(rows)[0].entries] for place in (2, 4, 5))
    results = (RECORDS.parent / "README.md").read_text(encoding="utf-8")
    readme = (RECORDS.parents[1] / "README.md").read_text(encoding="utf-8")
    for name, shown in (("bucketed", "bucketed"), ("sharded_flat", "flat shards, optimizer sharded"), ("fsdp", "FSDP")):
        place = names.index(name)
        rounds = [f"{float(round_ratio):.2f}" for round_ratio in pairs[place].removeprefix("pairs ").split(", ")]
        ratio_and_rounds = f"| {float(ratio[place]):.2f} ({', '.join(rounds)}) |"
        assert re.search(rf"^\| {shown}[^|]*\|[^|]*{re.escape(ratio_and_rounds)}", results, re.M)
        assert ratio_and_rounds in readme
    chart = parallel_sections(rows)[0].charts[0]
    assert (
        dict(zip(chart.data[0]["y"], chart.data[0]["text"], strict=True))["bucketed"] == ratio[names.index("bucketed")]
    )
    assert "of pairs" in chart.data[0]["hovertext"][0]


def test_a_very_long_whisker_does_not_squeeze_the_marks(ratio):
    low, high = ratio_axis([ratio(1.1, (0.2, 1e8)), ratio(1.2, (1.1, 1.3))])["range"]
    assert high - low < 0.6


def test_ratios_far_from_one_are_logarithmic(ratio):
    assert ratio_axis([ratio(0.5), ratio(12.0)])["type"] == "log"
    assert "type" not in ratio_axis([ratio(0.02), ratio(1.1)])


def test_a_failure_is_a_word_in_its_line(ratio, rows, end_to_end):
    small, *_, failed = rows(end_to_end)
    assert isinstance(failed.record.failure, Failure)
    marks, words = drawn([("a", ratio(1.1, (1.0, 1.2))), ("b", Ratio(base=small, row=failed, trouble="OOM"))]).data
    assert marks["y"] == ["a"]
    assert (words["y"], words["text"], words["x"]) == (["b"], ["<b>OOM</b>"], [1.0])


def test_without_a_ratio_there_is_no_chart(ratio):
    assert ratio_chart("Cost", "", "time", {"step": [("a", ratio(None))]}) is None
    assert ratio_chart("Cost", "", "time", {"step": []}) is None


def test_only_the_first_forty_ratios_are_drawn(ratio):
    chart = drawn([(f"cell {number}", ratio(1 + number / 1000)) for number in range(50)])
    assert len(chart.data[0]["x"]) == 40
    assert "Only the first 40 of 50 are drawn; the table has all." in chart.caption


def test_the_table_of_the_chart_has_names_and_intervals(ratio):
    table = chart_table(drawn([("bucketed", ratio(1.13, (1.1, 1.2), "slower"))]))
    assert [entry.text for entry in table.entries[0]] == ["bucketed", "1.13 (1.1 to 1.2)"]


def test_hover_texts_begin_with_the_label_of_the_row(ratio):
    row: Row = ratio(1.0).row
    (marks,) = drawn([("x", ratio(1.0))]).data
    assert marks["hovertext"][0].startswith(row.label())

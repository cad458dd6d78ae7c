"""Charts: figures that plotly accepts, with the numbers of the records, failures as words, and labels as plain text."""

import plotly.graph_objects as go
import pytest

from trainstep.report.kit.charts import (
    Chart,
    Panels,
    bar,
    chart_table,
    label,
    logarithmic,
    plain_text,
    short_labels,
)
from trainstep.report.page import sections
from trainstep.report.step.comparison import comparison_sections
from trainstep.report.step.phases import phases_charts


def named(chart, name):
    return [trace for trace in chart.data if trace["name"] == name]


@pytest.mark.parametrize("fixture", ["end_to_end", "warmup_sweep", "precision_pair", "compile_sweep"])
def test_plotly_accepts_every_figure(fixture, rows, request):
    def without_themes(value):
        if isinstance(value, dict):
            return {name: without_themes(item) for name, item in value.items() if name != "horizontal"}
        if isinstance(value, list):
            return [without_themes(item) for item in value]
        return "black" if isinstance(value, str) and value.startswith("theme:") else value

    charts = [chart for section in sections(rows(request.getfixturevalue(fixture))) for chart in section.charts]
    assert charts
    for chart in charts:
        go.Figure(without_themes({"data": list(chart.data), "layout": dict(chart.layout)}))


def test_phases_are_stacked_by_size_and_context(rows, end_to_end):
    [chart] = phases_charts(rows(end_to_end))
    small, large = named(chart, "backward")
    assert (small["x"], small["y"]) == (["256", "512"], pytest.approx([120, 240]))
    assert large["y"] == [pytest.approx(660), None]
    assert named(chart, "total step, median")[0]["y"] == pytest.approx([200, 400])
    assert named(chart, "total step, median")[0]["error_y"]["array"] == pytest.approx([1, 0])
    assert small["hovertext"][0] == "small 256<br>backward: 120.0 ± 0.6 ms"
    assert chart.layout["barmode"] == "stack"
    assert "(ms)" in chart.layout["yaxis"]["title"]["text"]


def test_a_failed_cell_is_a_word_at_its_position(rows, end_to_end):
    (failed,) = named(phases_charts(rows(end_to_end))[0], "failed")
    assert (failed["x"], failed["text"]) == (["512"], ["<b>OOM</b>"])
    assert "asked for 2.00 GiB" in failed["hovertext"][0]


def test_precision_is_compared_with_its_first_value(rows, precision_pair):
    (section,) = comparison_sections(rows(precision_pair))
    assert "1 faster" in section.paragraphs[0]
    (marks,) = section.charts[0].data
    assert marks["x"] == pytest.approx([0.5])
    assert (marks["y"], marks["text"], marks["marker"]["symbol"]) == (["bf16_autocast"], ["0.500"], ["circle"])
    assert "faster" in marks["hovertext"][0]
    titles = [column.title for column in section.tables[0].columns]
    row = dict(zip(titles, (entry.text for entry in section.tables[0].entries[0]), strict=True))
    assert (row["precision"], row["against"], row["ratio"], row["verdict"]) == (
        "bf16_autocast",
        "fp32",
        "0.500",
        "faster",
    )
    assert row["total step (ms)"].startswith("101.0")
    assert row["was (ms)"].startswith("202.0")


def test_a_timed_out_compile_is_shown_as_a_time_out(rows, compile_sweep):
    (section,) = comparison_sections(rows(compile_sweep))
    block, whole = section.charts[0].data
    assert (block["x"], block["y"]) == (pytest.approx([0.8]), ["block"])
    assert (whole["x"], whole["y"], whole["text"]) == ([1.0], ["model"], ["<b>time-out</b>"])
    assert [entry.text for entry in section.tables[0].entries[1]][4:7] == ["time-out"] * 3


def test_a_failed_base_gives_no_chart(rows, compile_sweep):
    base_failed = [compile_sweep[2], compile_sweep[1]]
    (section,) = comparison_sections(rows(base_failed))
    assert section.charts == ()
    assert "time-out" in section.tables[0].entries[0][4].text


def test_contexts_and_warmups_are_not_compared(rows, end_to_end, warmup_sweep):
    assert not comparison_sections(rows(end_to_end))
    assert not comparison_sections(rows(warmup_sweep))


def test_cells_of_different_machines_are_not_compared(rows, make, cpu_record):
    assert not comparison_sections(rows([make(model="tiny", context=64), cpu_record]))


def test_labels_escape_markup():
    assert label("<b>a</b>\n&amp; x") == "&lt;b&gt;a&lt;/b&gt; &amp;amp; x"


def test_shortened_labels_stay_distinct():
    texts = ["a" * 20 + "x" * 50 + "b" * 20, "a" * 20 + "y" * 50 + "b" * 20, "short"]
    shortened = short_labels(texts)
    assert len(set(shortened)) == 3
    assert max(map(len, shortened)) < 40
    assert short_labels(["a_b", "a_b"]) == ["a_b", "a_b"]


def test_logarithmic_ticks_are_plain_numbers():
    axis = logarithmic([3.0, 1500.0])
    assert axis["ticktext"][:4] == ["1", "2", "5", "10"]
    assert "1,000" in axis["ticktext"]


def test_a_chart_has_its_numbers_as_a_table(rows, end_to_end):
    table = chart_table(phases_charts(rows(end_to_end))[0])
    assert table.title == "Numbers of this chart: time of a step (ms)"
    titles = ["panel", "context (tokens)", "forward", "backward", "optimizer", "total step, median", "failed"]
    assert [column.title for column in table.columns] == titles
    texts = [[entry.text for entry in entries] for entries in table.entries]
    assert texts[0] == ["small", "256", "60", "120", "20", "200 ± 1", "–"]
    assert texts[3][:3] == ["2.7B", "512", "–"]
    assert texts[3][-1] == "OOM"
    assert table.entries[0][3].sort == pytest.approx(120)


def test_plain_text_reverses_label():
    text = "<b>a</b> &amp; <script> 10<sup>x</sup>"
    assert plain_text(f"<b>{label(text)}</b>") == text
    assert plain_text("one<br>two") == "one two"


def test_no_number_of_a_label_is_cut():
    text = "rotary 8192 x 32 x 128 forward and backward bf16"
    assert short_labels([text]) == ["rotary 8192 x 32 x 128 forward<br>and backward bf16"]


def test_a_chart_of_one_panel_fits_a_narrow_screen_and_names_get_their_room():
    def chart(names: list[str]) -> Chart:
        panels = Panels(titles=[""], columns=1, x_title="", y_title="")
        panels.add(0, bar("b", [1.0] * len(names), names, colour="theme:blue", hover=names, orientation="h"))
        return panels.chart("", "")

    assert chart(["a", "b"]).least_px <= 360
    assert chart(["rotary 8192 x 32 x 128 forward<br>and"]).least_px > 480

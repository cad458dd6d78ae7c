"""Attention on the page: figures that plotly accepts, a line for each implementation, failures as marks, and sentences."""

import json
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from attention_records import OURS, PEERS, attention, lengths, tiles
from trainstep.records.record import Failure, Record
from trainstep.report.attention.charts import MAXIMUM_GROUPS
from trainstep.report.attention.page import attention_sections
from trainstep.report.page import page, sections

HOSTILE = '<script>alert(1)</script></script><!--"><img src=x onerror=document.title="taken"><b>'
SHAPES = [(1, 16, 16384, 64), (4, 16, 4096, 128), (4, 32, 4096, 64), (16, 16, 1024, 128)]


def section(page_sections, title: str):
    return next(part for part in page_sections if part.title == title)


def charts(page_sections) -> dict:
    return {chart.title: chart for part in page_sections for chart in part.charts}


def grid() -> list[Record]:
    shapes = [{"batch": b, "heads": h, "seq": s, "head_dim": d} for b, h, s, d in SHAPES]
    return [
        attention(implementation=name, direction=direction, **shape)
        for direction in ("forward", "backward")
        for shape in shapes
        for name in ("flex", OURS)
    ]


def without_themes(value):
    if isinstance(value, dict):
        return {name: without_themes(item) for name, item in value.items() if name != "horizontal"}
    if isinstance(value, list):
        return [without_themes(item) for item in value]
    return "black" if isinstance(value, str) and value.startswith("theme:") else value


@pytest.mark.parametrize("make", [pytest.param(lengths, marks=pytest.mark.slow), tiles, grid])
def test_plotly_accepts_every_figure(rows, make):
    drawn = charts(sections(rows(make())))
    assert drawn
    for chart in drawn.values():
        go.Figure(without_themes({"data": list(chart.data), "layout": dict(chart.layout)}))


def test_each_implementation_has_a_line_and_ours_is_thick(rows):
    drawn = charts(attention_sections(rows(lengths(dtypes=("bf16",)))))
    assert list(drawn) == [
        "trainstep against each peer by length",
        "Time by length",
        "Achieved rate by length",
        "Peak memory by length",
        "Memory held before backward by length",
    ]
    time = drawn["Time by length"]
    names = [trace["name"] for trace in time.data if trace["showlegend"]]
    assert set(names) == {*PEERS, OURS, "did not run"}
    widths = {trace["name"]: trace["line"]["width"] for trace in time.data if "line" in trace}
    assert widths[OURS] > 2 * max(width for name, width in widths.items() if name != OURS)
    styles = {(t["line"]["color"], t["line"]["dash"], t["marker"]["symbol"]) for t in time.data if "line" in t}
    assert len(styles) == len(PEERS) + 1
    assert time.layout["xaxis"]["type"] == time.layout["yaxis"]["type"] == "log"
    assert time.layout["xaxis3"]["title"]["text"] == "length S (tokens)"
    assert time.layout["yaxis"]["title"]["text"] == "time (ms)"
    titles = [annotation["text"] for annotation in time.layout["annotations"]]
    assert titles == [
        f"<b>{direction}, head dim {width}</b>" for direction in ("forward", "backward") for width in (64, 128)
    ]


def test_charts_hold_the_numbers_of_the_records(rows):
    records = [attention(seq=seq, time_s=[seconds] * 5) for seq, seconds in ((2048, 0.004), (1024, 0.001))]
    (line,) = charts(attention_sections(rows(records)))["Time by length"].data
    assert (line["x"], line["y"]) == ([1024, 2048], [1, 4])
    assert line["hovertext"][0] == "trainstep: 1024 64<br>1.000 ± 0.000 ms"


def test_a_cell_that_ran_out_of_memory_is_a_mark_with_its_reason(rows):
    time = charts(attention_sections(rows(lengths(dtypes=("bf16",)))))["Time by length"]
    stopped = next(trace for trace in time.data if trace["name"] == "did not run")
    assert stopped["x"] == [65536]
    assert "plain: OOM (needs " in stopped["hovertext"][0]
    assert "hover for why" in time.caption
    assert (
        "hover" not in charts(attention_sections(rows(lengths(seqs=(256, 1024), dtypes=("bf16",)))))[time.title].caption
    )


def test_the_forward_has_no_panel_of_memory_held_before_backward(rows):
    memory_chart = charts(attention_sections(rows(lengths(dtypes=("bf16",)))))["Memory held before backward by length"]
    assert [annotation["text"] for annotation in memory_chart.layout["annotations"]] == [
        "<b>backward, head dim 64</b>",
        "<b>backward, head dim 128</b>",
    ]


def test_a_list_of_shapes_is_one_chart_of_marks(rows):
    drawn = charts(attention_sections(rows(grid())))
    time = drawn["Time by shape"]
    assert time.data[0]["mode"] == "markers"
    assert "4 × 16<br>4096 × 128" in time.data[0]["x"]
    assert [annotation["text"] for annotation in time.layout["annotations"]] == ["<b>forward</b>", "<b>backward</b>"]


def test_dtypes_have_charts_of_their_own_up_to_a_limit(rows):
    drawn = charts(attention_sections(rows(lengths(seqs=(256, 1024)))))
    assert {"Time by length: bf16", "Time by length: fp32"} <= set(drawn)
    many = [attention(seq=seq, seed=seed) for seed in range(MAXIMUM_GROUPS + 2) for seq in (256, 1024)]
    overview = attention_sections(rows(many))[0]
    assert sum(chart.title.startswith("Time") for chart in overview.charts) == MAXIMUM_GROUPS
    assert (
        f"Charts show the first {MAXIMUM_GROUPS} of {MAXIMUM_GROUPS + 2} groups; tables have all."
        in overview.paragraphs
    )


def test_ratios_have_intervals_and_a_line_at_one(rows):
    records = [attention(seq=seq, implementation=name) for seq in (1024, 4096) for name in ("flex", OURS)]
    records[1] = attention(seq=1024, time_s=[s * 0.5 for s in records[0].samples["time_s"].values])
    page_sections = attention_sections(rows(records))
    chart = charts(page_sections)["trainstep against each peer by length"]
    (line,) = chart.data
    assert line["name"] == "flex"
    assert line["y"][0] == pytest.approx(0.5)
    assert line["error_y"]["arrayminus"][0] >= 0
    (level,) = chart.layout["shapes"]
    assert (level["y0"], level["y1"]) == (1, 1)
    assert (
        "as fast as flex (2 configurations)"
        in section(page_sections, "Attention: trainstep against each peer").paragraphs[0]
    )


def test_tiles_are_a_map_with_crosses_for_illegal_tiles(rows):
    page_sections = attention_sections(rows(tiles([1024, 4096])))
    assert [part.title for part in page_sections] == ["Attention: tiles", "Attention: every cell"]
    heat, crosses, *_ = page_sections[0].charts[0].data
    assert (heat["x"], heat["y"]) == (["16", "32", "64", "128"], ["16", "32", "64", "128"])
    assert heat["z"][3][2] == 1  # 128 queries and 64 keys are the fastest
    assert heat["z"][3][3] is None
    assert heat["text"][3][2].startswith("<b>")
    assert (crosses["x"], crosses["y"]) == (["128"], ["128"])
    assert "needs 196,608 bytes of shared memory" in crosses["hovertext"][0]
    assert "block_q 128, block_k 64, num_warps 4" in heat["hovertext"][3][2]


def test_sentences_name_the_fastest_and_the_wrong_implementations(rows):
    records = [
        attention(implementation="flex", time_s=[0.002] * 5, facts={"has_nan": 1}),
        attention(implementation="plain", time_s=[0.003] * 5, facts={"deterministic": 0}),
        attention(time_s=[0.001] * 5),
    ]
    comparison, *errors = attention_sections(rows(records))[0].paragraphs
    assert comparison.startswith("trainstep is, in the geometric mean, 3.00 times as fast as plain")
    assert errors == [
        "1 of 3 cells gave NaN or infinity: flex 1.",
        "1 of 3 cells were not deterministic: plain 1.",
    ]


def test_every_chart_has_a_table_in_its_section(rows):
    for records in (lengths(), tiles(), grid()):
        for part in attention_sections(rows(records)):
            assert part.tables or not part.charts


def test_other_workloads_keep_their_sections_beside_attention(rows, make):
    titles = [part.title for part in sections(rows([make(), attention(), attention(implementation="flex")]))]
    assert titles[0] == "All cells"
    assert titles[1:3] == ["Attention: trainstep against each peer", "Attention"]
    assert "<h1>Attention on NVIDIA H200</h1>" in page(rows([attention()]))


def test_a_failure_is_a_short_cell_with_its_details_once(rows):
    oom = Failure(kind="out_of_memory", phase="forward", message="ran out", asked_bytes=2**31)
    text = page(rows([attention(), attention(implementation="plain", failure=oom)]))
    assert text.count('<details class="failure">') == 1
    assert text.count(">OOM (needs ") >= 3


def test_hostile_names_are_text(rows):
    records = lengths(seqs=(256, 1024), head_dims=(64,), dtypes=("bf16",), implementations=("flex", "plain", OURS))
    failure = Failure(kind="unsupported", phase=HOSTILE, message=f"illegal tile: {HOSTILE}", last_lines=(HOSTILE,))
    hostile = [
        replace(
            record, config={**record.config, "implementation": HOSTILE, "mask": HOSTILE, "direction": f"{HOSTILE}{i}"}
        )
        for i, record in enumerate(records[:3])
    ]
    failed = [replace(record, failure=failure, samples={}, key=str(i)) for i, record in enumerate(hostile)]
    words = [
        replace(record, config={**record.config, "seq": HOSTILE, "block_q": HOSTILE, "block_k": i})
        for i, record in enumerate(records)
    ]
    text = page(rows([*records, *hostile, *failed, *words, *tiles([1024])]))
    assert "<script>alert" not in text
    assert "<img" not in text
    drawn = text.split('<script type="application/json" id="charts">')[1].split("</script>")[0]
    for chart in json.loads(drawn):
        assert "<script" not in json.dumps(chart)
        assert "<img" not in json.dumps(chart)


def test_a_hostile_name_that_ran_out_of_memory_is_text_in_its_hover(rows):
    oom = Failure(kind="out_of_memory", phase="forward", message="ran out")
    failed = attention(seq=4096, implementation="flex", failure=oom)
    hostile = replace(failed, config={**failed.config, "implementation": HOSTILE})
    drawn = charts(attention_sections(rows([attention(seq=1024), attention(seq=4096), hostile])))
    stopped = next(trace for trace in drawn["Time by length"].data if trace["name"] == "did not run")
    assert "&lt;script&gt;" in stopped["hovertext"][0]
    assert "<script" not in stopped["hovertext"][0]


def test_the_fastest_number_of_warps_of_a_tile_is_shown(rows):
    records = [
        attention(block_q=64, block_k=key, num_warps=warps, time_s=[time_s] * 5)
        for key, warps, time_s in ((32, 4, 0.004), (64, 4, 0.003), (64, 8, 0.001))
    ]
    (tile_section, *_) = [part for part in attention_sections(rows(records)) if part.title == "Attention: tiles"]
    assert tile_section.charts[0].data[0]["text"] == [["4.000", "<b>1.000</b>"]]
    assert [entry.text for entry in tile_section.tables[0].entries[0]][-2:] == ["4.000", "1.000"]
    assert "the fastest" in tile_section.tables[0].note

"""Profiles in a report: tables from records alone, shares side by side, failures as rows, hover on the page."""

from typing import Any

import pytest

from record_maker import a_record, seconds
from trace_maker import EAGER
from trainstep.records.record import Fact, Failure, Record
from trainstep.report.all_tables import all_tables
from trainstep.report.page import page
from trainstep.report.profile_charts import kernels_chart, phases_by_class, shares_chart
from trainstep.report.profile_columns import HELP
from trainstep.report.profile_page import profile_sections
from trainstep.report.profile_tables import class_shares, profile_tables, row_tables, sentences, shares_tables
from trainstep.report.rows import rows_of
from trainstep.traces.kineto import read_trace
from trainstep.traces.profile import profile_of

PROFILE = profile_of(read_trace(EAGER))


def profiled(mode: str = "step", **changes: Any) -> Record:
    config = {
        "model": {"name": "tiny", "layers": 2},
        "context": 64,
        "mode": mode,
        "device": "cuda",
        "precision": "fp32",
    }
    facts = {
        "verdict": Fact(value=PROFILE.verdict.kind),
        "verdict_reason": Fact(value=PROFILE.verdict.reason),
        "idle_s": Fact(value=PROFILE.idle_s[0], unit="s"),
        "pieces": Fact(value=PROFILE.pieces, unit="count"),
        "profiler_slowdown": Fact(value=1.5, unit="ratio"),
        "fallback_share": Fact(value=0.0, unit="ratio"),
        "stall": Fact(value=PROFILE.stall),
    }
    samples = {"step": seconds([0.01, 0.01]), "busy": seconds(PROFILE.busy_s)}
    given = {"workload": "profile", "key": mode, "config": config, "facts": facts, "samples": samples}
    return a_record(**{**given, "tables": PROFILE.tables, **changes})


def failed(mode: str) -> Record:
    failure = Failure(kind="out_of_memory", phase="backward", message="out of memory", asked_bytes=2**30)
    return profiled(mode, failure=failure, tables={}, facts={}, samples={})


def rows_for(*records: Record):
    return rows_of([("f.jsonl", record) for record in records])


def test_one_cell():
    tables = {table.title: table for table in profile_tables(rows_for(profiled()))}
    assert list(tables)[:2] == ["What limits each step", "Kernels by phase"]
    kernels = tables["Kernels by phase"]
    assert all(column.help for column in kernels.columns)
    assert sum(row["share"] for row in kernels.raw) == pytest.approx(1)
    assert kernels.raw[0]["model"] == "tiny"
    assert "Layers by phase" not in tables, "the page has it"
    limits = [entry.text for entry in tables["What limits each step"].entries[0]]
    assert "launch-bound" in limits


def test_modes_side_by_side_and_failures_are_rows():
    rows = rows_for(profiled("forward"), profiled("step"), failed("forward_backward"))
    [shares] = shares_tables(rows)
    assert len(shares.entries) == 2
    for row in shares.raw:
        assert sum(
            value for name, value in row.items() if name not in ("model", "context", "mode", "table", "idle")
        ) == (pytest.approx(1))
    limits = profile_tables(rows)[0]
    assert "OOM in backward" in limits.entries[2][-1].text


def test_attention_is_held_against_the_data_sheet():
    tables = {table.title: table for table in row_tables(rows_for(profiled())[0])}
    titles = [column.title for column in tables["Attention: matmuls and softmax"].columns]
    assert titles[-2:] == ["of peak (%)", "of memory (%)"]


def test_class_shares_by_hand():
    columns = {"phase": ["forward"] * 3, "class": ["matmul", "softmax", "idle"], "time_s": [3.0, 1.0, 4.0]}
    assert class_shares(columns) == {"matmul": 0.75, "softmax": 0.25, "idle": 0.5}
    assert class_shares(columns, ["backward"]) == {}


def test_sentences():
    said = sentences(profiled().fact)
    assert said[0].startswith("Launch-bound: ")
    assert any("1.50 times an unprofiled one" in sentence for sentence in said)
    assert sentences(failed("step").fact) == []


def test_many_cells_show_no_kernels_on_a_terminal():
    rows = rows_for(*(profiled(mode) for mode in ("a", "b", "c", "d", "e")))
    assert [table.title for table in profile_tables(rows)] == ["What limits each step", "Share of device time by class"]


def test_all_tables_have_them_once():
    titles = [table.title for table in all_tables(rows_for(profiled()))]
    assert titles.count("Kernels by phase") == 1
    assert "Kernels by phase" not in [table.title for table in all_tables(rows_for(profiled()), compared=False)]


def test_the_page():
    text = page(rows_for(profiled("forward"), profiled("step")))
    for words in ("Where the time goes", "Profile of tiny 64 step", "Longest kernels", "Layers by phase"):
        assert words in text, words
    assert f'title="{HELP["launch_s"]}"' in text


def test_charts_hold_the_tables_numbers():
    [row] = rows_for(profiled())
    stacked = phases_by_class(row)
    columns = row.record.tables["classes"]
    assert sum(sum(trace["y"]) for trace in stacked.data) == pytest.approx(1e3 * sum(columns["time_s"]))
    longest = kernels_chart(row)
    shown = sum(sum(trace["x"]) for trace in longest.data)
    kernels = row.record.tables["kernels"]
    inside = [
        time for phase, time in zip(kernels["phase"], kernels["time_s"], strict=True) if phase != "outside phases"
    ]
    assert shown == pytest.approx(1e3 * sum(inside))
    assert shares_chart([row]) is None
    pair = shares_chart(rows_for(profiled("forward"), profiled("step")))
    assert pair is not None
    assert sum(trace["y"][0] for trace in pair.data) == pytest.approx(100)


def test_no_profiles_no_section():
    assert profile_sections(rows_for(a_record())) == []
    assert profile_tables(rows_for(a_record())) == []

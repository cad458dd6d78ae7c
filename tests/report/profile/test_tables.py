"""Profiles in a report: tables and sentences made from records alone, failures as rows, and charts on the page."""

from typing import Any

import pytest

from record_maker import a_record, seconds
from trace_maker import EAGER
from trainstep.records.record import Fact, Failure, Record
from trainstep.report.kit.rows import rows_of
from trainstep.report.kit.tables import all_tables
from trainstep.report.page import page, sections
from trainstep.report.profile.answer import sentences
from trainstep.report.profile.page import kernels_chart, phases_by_class, shares_chart
from trainstep.report.profile.tables import HELP, class_shares, profile_tables, row_tables, shares_table, verdict_table
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
        "idle_s": Fact(value=PROFILE.idle_s[0], unit="s"),
        "pieces": Fact(value=PROFILE.pieces, unit="count"),
        "profiler_slowdown": Fact(value=1.5, unit="ratio"),
        "assigned_share": Fact(value=PROFILE.assigned_share, unit="ratio"),
        "fallback_share": Fact(value=0.0, unit="ratio"),
    }
    samples = {"step": seconds([0.01, 0.01]), "busy": seconds(PROFILE.busy_s)}
    given = {"workload": "profile", "key": mode, "config": config, "facts": facts, "samples": samples}
    return a_record(**{**given, "tables": PROFILE.tables, **changes})


def failed(mode: str) -> Record:
    failure = Failure(kind="out_of_memory", phase="backward", message="out of memory", asked_bytes=2**30)
    return profiled(mode, failure=failure, tables={}, facts={}, samples={})


def rows_for(*records: Record):
    return rows_of([("f.jsonl", record) for record in records])


def test_one_cell_has_its_verdict_and_kernels():
    tables = {table.title: table for table in profile_tables(rows_for(profiled()))}
    assert list(tables)[:2] == ["What limits each step", "Kernels by phase"]
    kernels = tables["Kernels by phase"]
    assert all(column.help for column in kernels.columns)
    assert sum(row["share"] for row in kernels.raw) == pytest.approx(1)
    assert kernels.raw[0]["model"] == "tiny"
    assert "Layers by phase" not in tables, "that table is on the page only"
    limits = [entry.text for entry in tables["What limits each step"].entries[0]]
    assert "launch-bound" in limits


def test_modes_have_shares_and_failures_are_rows():
    rows = rows_for(profiled("forward"), profiled("step"), failed("forward_backward"))
    shares = shares_table(rows)
    assert len(shares.entries) == 2
    for row in shares.raw:
        assert sum(
            value for name, value in row.items() if name not in ("model", "context", "mode", "table", "idle")
        ) == (pytest.approx(1))
    limits = profile_tables(rows)[0]
    assert "OOM in backward" in limits.entries[2][-1].text


def test_attention_is_compared_with_the_data_sheet():
    tables = {table.title: table for table in row_tables(rows_for(profiled())[0])}
    titles = [column.title for column in tables["Attention: matmuls and softmax"].columns]
    assert titles[-2:] == ["of peak (%)", "of memory (%)"]


def test_shares_of_classes_agree_with_hand_computed_numbers():
    columns = {"phase": ["forward"] * 3, "class": ["matmul", "softmax", "idle"], "time_s": [3.0, 1.0, 4.0]}
    assert class_shares(columns) == {"matmul": 0.75, "softmax": 0.25, "idle": 0.5}
    assert class_shares(columns, ["backward"]) == {}


def test_sentences_state_verdict_stall_slowdown_and_assignment():
    record = profiled()
    texts = sentences(record.tables, record.fact)
    assert texts[0].startswith("Launch-bound: the GPU works ")
    assert any(sentence.startswith("The host does not stall") for sentence in texts)
    assert any("1.50 times as long as an unprofiled step" in sentence for sentence in texts)
    assert any("100.0 % of all device time is assigned to a phase, 0.0 % only" in sentence for sentence in texts)
    assert sentences({}, failed("step").fact) == []


LIMIT = {"on_device": True, "profiled_step": False, "step_s": 1e-3, "busy_s": 4e-4, "enqueue_s": 0.95e-3}
SHARES = {"exposed_share": 0.1, "matmul_share": 0.25, "overhead_share": 0.6}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {},
            "Launch-bound: the GPU works for 40.0 % of a step of 1.000 ms and waits for the host, which launches for",
        ),
        ({"enqueue_s": 5e-4}, "see where it is blocked"),
        ({"profiled_step": True, "enqueue_s": None}, "in part because the profiler slows the host"),
        ({"on_device": False}, "Launch-bound: on the CPU 60.0 % of the profiled step passes between ops"),
        ({"exposed_share": 0.4}, "Communication-bound: 40.0 % of the step is exposed communication"),
        (
            {"busy_s": 9e-4, "enqueue_s": 5e-4, "matmul_share": 0.8},
            "Compute-bound: the GPU works for 90.0 % of a step of 1.000 ms; 80.0 % of what it computes is matmuls",
        ),
        (
            {"on_device": False, "overhead_share": 0.3},
            "Memory-bound: on the CPU 70.0 % of the step passes in ops; only 25.0 % of what it computes is matmuls",
        ),
        (
            {"busy_s": 7.4e-4, "enqueue_s": 8e-4},
            "Near the line between launch-bound and memory-bound: the GPU works for 74.0 % of a step of 1.000 ms (under "
            "70.0 % it waits), the host launches for 80.0 %.",
        ),
        ({"exposed_share": 0.31}, "31.0 % of the step is exposed communication, and the line is at 30.0 %."),
        ({"on_device": False, "overhead_share": 0.52}, "52.0 % of the step passes between ops"),
        (
            {"busy_s": 9e-4, "enqueue_s": 5e-4, "matmul_share": 0.52},
            "Near the line between compute-bound and memory-bound: 52.0 % of what it computes is matmuls and fused attention",
        ),
    ],
)
def test_every_verdict_states_its_reason(changes: dict[str, Any], words: str):
    limit = {"kind": "recorded by an older rule", **LIMIT, **SHARES, **changes}
    [sentence] = sentences({"verdict": {name: [value] for name, value in limit.items()}}, {}.get)
    assert words in sentence


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("blocked", "0.2100 ms pass on the host; for 0.1900 ms of it a synchronisation blocks the host"),
        ("allocation", "0.2100 ms pass on the host, 50.0 µs of it in cudaMalloc"),
        ("queue full", "was full for 1.000 ms of the step"),
        (
            "none",
            "does not stall between backward and optimizer: 0.2100 ms pass on it, and the GPU is 3.00 µs behind",
        ),
    ],
)
def test_every_stall_is_a_sentence(kind: str, words: str):
    times = {"gap_s": 210e-6, "blocked_s": 190e-6, "allocation_s": 50e-6, "behind_s": 3e-6, "queue_full_s": 1e-3}
    [sentence] = sentences({"stall": {"kind": [kind], **{name: [time_s] for name, time_s in times.items()}}}, {}.get)
    assert words in sentence


def test_equal_forward_and_backward_times_are_explained():
    columns = {
        "phase": ["forward", "backward"],
        "time_s": [4.3e-3, 4.7e-3],
        "pieces": [700.0, 1300.0],
        "device_s": [5e-5, 1e-4],
    }
    [sentence] = sentences({"alike": columns}, {}.get)
    assert "(4.300 ms and 4.700 ms)" in sentence
    assert "(700 and 1,300 pieces of work)" in sentence
    assert "50.0 µs and 0.1000 ms" in sentence


def test_a_graph_replay_is_one_sentence():
    facts = {"graph_replay_s": 2e-3, "graph_replay_kernels_s": 2.02e-3, "graph_replay_phases": "forward, backward"}
    left_out = "The optimizer is left out: so."
    [sentence] = sentences({}, {**facts, "graph_replay_left_out": left_out}.get)
    assert sentence == (
        "Kernels of forward, backward: 2.020 ms; replayed as one CUDA graph: 2.000 ms (ratio 1.010). "
        "The optimizer is left out: so."
    )
    assert sentences({}, {"graph_replay_failed": "it waits"}.get) == ["No CUDA graph was replayed: it waits"]


def test_only_three_outliers_are_shown_on_a_terminal():
    many = 17
    columns = {
        "phase": ["forward"] * many,
        "span": [f"span {number}" for number in range(many)],
        "layer": [""] * many,
        "step": [1] * many,
        "time_s": [2e-3] * many,
        "median_s": [1e-3] * many,
        "cause": ["the host came late"] * many,
    }
    [row] = rows_for(profiled(tables={**PROFILE.tables, "outliers": columns}))
    shown = next(table for table in row_tables(row) if table.title.startswith("Outliers"))
    assert (len(shown.entries), len(shown.raw)) == (3, many)
    assert shown.note == "And 14 more: the page and --json have them."
    whole = next(table for table in row_tables(row, whole=True) if table.title.startswith("Outliers"))
    assert (len(whole.entries), whole.note) == (many, "")


def test_json_has_the_numbers_of_the_verdict():
    [numbers, failure] = verdict_table(rows_for(profiled("step"), failed("forward"))).raw
    assert numbers["kind"] == "launch-bound"
    assert 0 < numbers["busy_s"] < numbers["step_s"]
    assert (numbers["assigned_share"], numbers["fallback_share"]) == (1, 0)
    assert failure["failure"] == "out_of_memory"


def test_many_cells_show_no_kernels_on_a_terminal():
    rows = rows_for(*(profiled(mode) for mode in ("a", "b", "c", "d", "e")))
    assert [table.title for table in profile_tables(rows)] == ["What limits each step", "Share of device time by class"]


def test_all_tables_have_the_kernels_once():
    titles = [table.title for table in all_tables(rows_for(profiled()))]
    assert titles.count("Kernels by phase") == 1
    assert "Kernels by phase" not in [table.title for table in all_tables(rows_for(profiled()), compared=False)]


def test_the_page_has_its_sections_and_help():
    text = page(rows_for(profiled("forward"), profiled("step")))
    for words in ("Where the time goes", "Profile of tiny 64 step", "Longest kernels", "Layers by phase"):
        assert words in text, words
    assert f'title="{HELP["launch_s"]}"' in text


def test_charts_hold_the_numbers_of_the_tables():
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


def test_without_profiles_there_is_no_section():
    shown = {section.title for section in sections(rows_for(a_record(), profiled()))}
    alone = {section.title for section in sections(rows_for(a_record()))}
    assert {"Where the time goes"} <= shown - alone
    assert not any("What limits" in table.title for table in all_tables(rows_for(a_record())))

"""Records of memory on the terminal, in files and on the page: their numbers, and the sentences made of them."""

import json
import re
from typing import Any

import pytest

from record_maker import a_record
from trainstep.config.memory import MemoryConfig
from trainstep.config.model import size
from trainstep.config.parsing import from_plain, to_plain
from trainstep.records.record import Fact, Failure, Record
from trainstep.report.kit.frames import json_text, markdown
from trainstep.report.kit.rows import Row, rows_of
from trainstep.report.kit.tables import all_tables
from trainstep.report.kit.terminal import plain
from trainstep.report.memory.page import _COLOURS, memory_sections, timeline_chart
from trainstep.report.memory.tables import doubts, headroom_bytes, memory_tables
from trainstep.report.page import page
from trainstep.traces.ledger import HELD

GIB = 2**30
LINES = (
    *("parameters", "activations", "rounding", "allocated", "allocated, unexplained", "cache and fragmentation"),
    *("reserved", "context", "driver", "driver, unexplained"),
)
LEDGER = {
    "line": list(LINES),
    "init": [2 * GIB, 0, 0, 2 * GIB, 0, GIB, 3 * GIB, GIB, 4 * GIB, 0],
    "after forward": [2 * GIB, 4 * GIB, 0, 6 * GIB, 0, GIB, 7 * GIB, GIB, 8 * GIB, 0],
    "after backward": [2 * GIB, 0, 0, 2 * GIB, 0, 5 * GIB, 7 * GIB, GIB, 8 * GIB, 0],
    "after step": [2 * GIB, 0, 0, 2 * GIB, 0, 5 * GIB, 7 * GIB, GIB, 8 * GIB, 0],
    "peak": [2 * GIB, 4 * GIB, 0, 6 * GIB, 0, GIB, 7 * GIB, None, None, None],
}
TABLES = {
    "ledger": LEDGER,
    "peaks": {
        "phase": ["forward", "backward"],
        "requested_bytes": [5 * GIB, 2 * GIB],
        "allocated_bytes": [6 * GIB, 2 * GIB],
        "reserved_bytes": [7 * GIB, None],
        "driver_bytes": [8 * GIB, None],
    },
    "layers": {"layer": ["embedding", "layer 0", "layer 1", "layer 2"], "bytes": [GIB, GIB, GIB, GIB]},
    "timeline": {
        "time_s": [0.0, 0.001, 0.002, 0.003],
        "phase": ["before the step", "forward", "forward", "backward"],
        "parameters": [2 * GIB] * 4,
        "activations": [0, GIB, 4 * GIB, 0],
        "temporaries": [0, 0, 0, 0],
    },
    "allocations": {
        "bytes": [GIB],
        "count": [4],
        "category": ["activations"],
        "phase": ["forward"],
        "layer": ["3 layers"],
        "stack": ["forward (<b>linear</b>.py:1)"],
    },
}
FACTS = {
    "peak_allocated_bytes": 6 * GIB,
    "peak_requested_bytes": 6 * GIB,
    "timeline_peak_bytes": 6 * GIB,
    "peak_reserved_bytes": 7 * GIB,
    "driver_bytes": 8 * GIB,
    "context_bytes": GIB // 2,
    "kernels_bytes": GIB // 2,
    "residual_stream_bytes": 65_536,
    "parameter_bytes_each": 4.0,
    "gradient_bytes_each": 4.0,
    "optimizer_state_bytes_each": 8.0000001,
    "allocated_residual_share": 0.0,
    "driver_residual_share": 0.002,
}


def a_cell(facts: dict[str, Any] | None = None, tables: Any = TABLES, **changes: Any) -> Record:
    fields = {"batch_size": 4, "context": 256, **changes.pop("config", {})}
    config = to_plain(from_plain(MemoryConfig, {"model": size("tiny"), **fields}))
    record_facts = {name: Fact(value=value, unit="bytes") for name, value in {**FACTS, **(facts or {})}.items()}
    words = {"timeline_peak_phase": "forward", "residual_stream": "batch 4 x context 256 x d_model 16 x 4 bytes"}
    record_facts |= {name: Fact(value=value) for name, value in words.items()}
    record_fields = {
        "workload": "memory",
        "key": str(fields),
        "config": config,
        "samples": {},
        "tables": tables,
        "facts": record_facts,
    }
    return a_record(**{**record_fields, **changes})


def rows(*records: Record) -> list[Row]:
    return rows_of([("memory.jsonl", record) for record in records])


def failed(**config: Any) -> Record:
    failure = Failure(kind="out_of_memory", phase="backward", message="ran out of memory in backward", asked_bytes=GIB)
    return a_cell(tables={}, failure=failure, config=config)


def test_one_cell_has_tables_with_hand_computed_numbers():
    printed = [re.split(r" {2,}", line.strip()) for line in plain(all_tables(rows(a_cell())), every=True).splitlines()]

    def rows_with(*cells: str) -> list[int]:
        """The lines that hold these cells side by side."""
        return [
            number
            for number, row in enumerate(printed)
            if any(tuple(row[place : place + len(cells)]) == cells for place in range(len(row)))
        ]

    [step] = rows_with("tiny", "256", "6.00", "7.00", "8.00")
    assert rows_with("0.2", "4 + 4 + 8 = 16", "forward") == [step]
    [forward] = rows_with("tiny", "256", "forward", "5.00", "6.00", "7.00", "8.00")
    assert rows_with("backward", "2.00", "2.00", "–", "–") == [forward + 1]
    assert rows_with("layer 0 to layer 2", "1.00 GiB", "3", "3.00 GiB")
    assert rows_with("activations", "0 B", "4.00 GiB", "0 B", "0 B", "4.00 GiB")
    assert rows_with("1.00 GiB", "4", "activations", "forward", "3 layers")


def test_many_cells_have_no_tables_of_their_own():
    many = [a_cell(config={"context": context}) for context in (128, 256, 512)]
    assert [table.title for table in memory_tables(rows(*many))] == [
        "Memory of a step",
        "Peak by phase (GiB)",
        "Held at the peak (GiB)",
    ]
    assert len(memory_tables(rows(*many[:2]))) == 3 + 2 * 3


def two_ranks(**config: Any) -> Record:
    """A record of two ranks, of which rank 1 holds one GiB more of activations."""
    ranks = [
        {"rank_facts": [("peak_allocated_bytes", peak * GIB), ("expected_peak_bytes", 6 * GIB), ("nccl_bytes", GIB)]}
        for peak in (6, 7)
    ]
    fuller = [size if size is None else size + GIB for size in LEDGER["after forward"]]
    ledgers = [LEDGER, {**LEDGER, "after forward": fuller, "peak": fuller}]
    expected = {"line": ["parameters"], "init": [2 * GIB], "after forward": [GIB]}
    tables = {
        name: {"rank": [rank for rank in (0, 1) for _ in next(iter(table.values()))]}
        | {column: [*values, *values] for column, values in table.items()}
        for name, table in {**TABLES, "expected": expected}.items()
    }
    tables["ledger"] |= {column: [size for ledger in ledgers for size in ledger[column]] for column in LEDGER}
    rows_of_facts = [
        (rank, name, size, "bytes") for rank, facts in enumerate(ranks) for name, size in facts["rank_facts"]
    ]
    tables["rank_facts"] = {
        name: [row[place] for row in rows_of_facts] for place, name in enumerate(("rank", "fact", "value", "unit"))
    }
    facts = {"fullest_rank": 1, "expected_peak_bytes": 6 * GIB, "expected_peak_point": "after_forward"}
    return a_cell(facts, tables=tables, config={"ranks": 2, "sync": "fsdp", **config})


def test_ranks_have_a_table_and_the_fullest_is_shown():
    titled = {table.title: table for table in memory_tables(rows(two_ranks()))}
    peaks = titled["Peak of each rank"]
    assert [column.title for column in peaks.columns] == [
        *("model", "context", "sync", "rank", "allocated", "by formula", "NCCL", "peaks in"),
    ]
    assert [[entry.text for entry in entries[2:7]] for entries in peaks.entries] == [
        ["fsdp", "0", "6.00", "6.00", "1.00"],
        ["fsdp", "1", "7.00", "6.00", "1.00"],
    ]
    held_bytes = titled["Held by each rank"]
    texts = [[entry.text for entry in entries] for entries in held_bytes.entries]
    assert [text[:2] for text in texts][:2] == [["0", "init"], ["0", "after forward"]]
    assert texts[0][2] == "2.00"  # the formula gives the same
    assert texts[1][2] == "2.00 (1.00)"
    assert texts[6][2] == "3.00 (1.00)"
    ledger = titled["Ledger of rank 1, the fullest of 2"]
    assert [entries[0].text for entries in ledger.entries] == list(LINES)  # the lines of a single rank
    assert "Ledger" not in titled


def test_json_has_a_row_for_every_rank():
    cell, *ranks = json.loads(json_text(memory_tables(rows(two_ranks()))))["rows"]
    assert (cell["workload"], cell["fullest_rank"]) == ("memory", 1)
    assert [rank["workload"] for rank in ranks] == ["memory_rank"] * 2
    assert [rank["peak_allocated_bytes"] for rank in ranks] == [6 * GIB, 7 * GIB]
    assert ranks[1]["parameters_after_forward_bytes"] == 3 * GIB
    assert ranks[1]["parameters_after_forward_expected_bytes"] == GIB


def test_the_page_shows_the_fullest_rank_first():
    [_, section] = memory_sections(rows(two_ranks()))
    assert section.paragraphs[0] == (
        "2 ranks, synchronised by fsdp: rank 1, shown first, held most, 7.00 GiB at its peak; rank 0 held least, "
        "6.00 GiB. By formula its peak is 6.00 GiB, after forward."
    )
    assert [chart.title for chart in section.charts] == [
        "Memory over one step of rank 1, the fullest of 2",
        "Memory over one step of rank 0",
    ]
    assert [table.title for table in section.tables][:2] == ["Ledger of rank 1, the fullest of 2", "Held by each rank"]
    assert section.tables[-1].title == "Ledger of rank 0"
    assert section.tables[-1].folded
    assert "Peak of each rank" in page(rows(two_ranks(), a_cell()))


def test_each_rank_has_its_share_of_the_limit_on_a_cpu():
    facts = {"driver_bytes": None, "peak_reserved_bytes": None, "memory_limit_bytes": 6 * GIB}
    alone = a_cell({**facts, "process_data_bytes": GIB})
    both = a_cell({**facts, "process_data_bytes": GIB}, config={"ranks": 2})
    assert (headroom_bytes(alone), headroom_bytes(both)) == (5 * GIB, 2 * GIB)


def test_out_of_memory_is_a_row_of_the_table():
    text = plain(memory_tables(rows(a_cell(), failed(context=512))))
    assert "OOM in backward: asked for 1.00 GiB" in text


def test_json_has_bytes():
    [cell] = json.loads(json_text(memory_tables(rows(a_cell()))))["rows"]
    assert cell["activations_after_forward_bytes"] == 4 * GIB
    assert cell["driver_unexplained_init_bytes"] == 0
    assert cell["peak_reserved_bytes"] == 7 * GIB
    lines = markdown(memory_tables(rows(a_cell()))).splitlines()
    assert "parameters" in [line.strip("|").split("|")[0].strip() for line in lines]


def test_sentences_state_the_peak_and_its_parts():
    [_, section] = memory_sections(rows(a_cell()))
    peak, three, stream = section.paragraphs
    assert peak == "The step peaks in forward at 6.00 GiB: activations 4.00 GiB (67 %), parameters 2.00 GiB (33 %)."
    assert "6.00 GiB at most (allocated)" in three
    assert "the difference of 1.00 GiB is blocks" in three
    assert "nvidia-smi would show 8.00 GiB" in three
    assert "batch 4 × context 256 × d_model 16 × 4 bytes = 64.0 KiB" in stream


def test_a_cpu_has_two_numbers_of_memory():
    record = a_cell()
    facts = {name: fact for name, fact in record.facts.items() if name not in ("peak_reserved_bytes", "driver_bytes")}
    cpu = a_record(
        workload="memory",
        config=record.config,
        tables=TABLES,
        samples={},
        facts={**facts, "peak_rss_bytes": Fact(value=9 * GIB, unit="bytes")},
    )
    [_, section] = memory_sections(rows(cpu))
    assert any("Two numbers on a CPU" in text and "9.00 GiB" in text for text in section.paragraphs)


def test_the_chart_stacks_categories_and_marks_phases():
    chart = timeline_chart(rows(a_cell())[0])
    assert [trace["name"] for trace in chart.data] == ["parameters", "activations"]  # empty series are left out
    assert list(chart.data[1]["y"]) == [0, 1, 4, 0]
    assert {trace["stackgroup"] for trace in chart.data} == {"held"}
    texts = [note["text"] for note in chart.layout["annotations"]]
    assert texts == ["forward", "backward", "peak 6.00 GiB"]
    assert [shape["x0"] for shape in chart.layout["shapes"]] == [1.0, 3.0]


def test_the_page_has_the_chart_and_escapes_names():
    text = page(rows(a_cell(), failed(context=512)))
    assert "Memory over one step" in text
    assert "<b>linear</b>" not in text
    assert "All cells" not in text


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"history_full": True}, "history full"),
        ({"allocation_retries": 3}, "3 allocation retries"),
        ({"timeline_peak_bytes": 5 * GIB}, "differs from the allocator's by 1.00 GiB"),
        ({"allocated_residual_share": 0.02}, "has no category"),
        (
            {"driver_residual_share": 0.02, "driver_residual_bytes": GIB},
            "1.00 GiB of the driver's figure are unexplained",
        ),
    ],
)
def test_each_doubt_is_named(facts: dict[str, Any], word: str):
    assert word in doubts(a_cell(facts))
    assert doubts(a_cell()) == ""


def test_small_residuals_of_the_driver_are_no_doubt():
    assert doubts(a_cell({"driver_residual_share": 0.02, "driver_residual_bytes": 2**26})) == ""


def test_a_search_names_the_largest_size_that_fits():
    trials = [a_cell({"fit_of": "batch_size"}, config={"batch_size": count}) for count in (4, 8, 12)]
    trials += [
        a_cell(tables={}, failure=failed().failure, facts={"fit_of": "batch_size"}, config={"batch_size": count})
        for count in (16, 13)
    ]
    table = memory_tables(rows(*trials))[0]
    assert table.title == "What fits"
    [[_, searched, largest, smallest, allocated, _, count, ended]] = table.entries
    assert [searched.text, largest.text, smallest.text, allocated.text, count.text, ended.text] == [
        "batch size",
        "12",
        "13",
        "6.00",
        "5",
        "",
    ]


def test_a_search_that_reached_its_bound_says_so():
    trials = [a_cell({"fit_of": "batch_size"}, config={"batch_size": count}) for count in (2048, 4096)]
    [[_, _, largest, smallest, *_, ended]] = memory_tables(rows(*trials))[0].entries
    assert (largest.text, smallest.text, ended.text) == ("at least 4,096", "–", "the bound of the search")


def test_a_search_ended_by_a_crash_says_so():
    """A crash says nothing about memory, so it is not the smallest size that does not fit."""
    crash = Failure(kind="crash", phase="build", message="its process was killed by signal 9")
    trials = [
        a_cell({"fit_of": "batch_size"}, config={"batch_size": 4}),
        a_cell(tables={}, failure=crash, facts={"fit_of": "batch_size"}, config={"batch_size": 8}),
    ]
    [[_, _, largest, smallest, *_, ended]] = memory_tables(rows(*trials))[0].entries
    assert (largest.text, smallest.text) == ("at least 4", "–")
    assert "killed by signal 9" in ended.text


def test_headroom_on_a_cpu_is_limit_minus_process_data():
    facts = {
        "driver_bytes": None,
        "peak_reserved_bytes": None,
        "memory_limit_bytes": 3 * GIB,
        "peak_rss_bytes": 4 * GIB,
    }
    assert headroom_bytes(a_cell({**facts, "process_data_bytes": 2 * GIB})) == GIB


@pytest.mark.parametrize(("group", "word"), [("none", "no process group"), ("nccl", "process group (nccl)")])
def test_an_unmeasured_size_of_nccl_is_left_out(group: str, word: str):
    [table] = [table for table in memory_tables(rows(a_cell({"process_group": group}))) if table.title == "Ledger"]
    assert word in table.note
    assert "NCCL" not in [entries[0].text for entries in table.entries]


def test_every_line_that_is_held_has_a_colour():
    assert set(_COLOURS) == set(HELD)


@pytest.mark.parametrize(("residual_bytes", "words"), [(-3 * GIB, "-3.00 GiB"), (-300, "-300 B"), (0, "0 B")])
def test_a_residual_may_be_negative(residual_bytes: int, words: str):
    place = LEDGER["line"].index("allocated, unexplained")
    changed = [residual_bytes if index == place else size for index, size in enumerate(LEDGER["peak"])]
    record = a_cell(tables={**TABLES, "ledger": {**LEDGER, "peak": changed}})
    [table] = [table for table in memory_tables(rows(record)) if table.title == "Ledger"]
    [line] = [entries for entries in table.entries if entries[0].text == "allocated, unexplained"]
    assert line[-1].text == words

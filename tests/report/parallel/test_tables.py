"""Tables and page of parallel strategies, from records with known numbers."""

import dataclasses
from typing import Any

import pytest

from record_maker import ENVIRONMENT, RECOMPUTE_CURVE, a_record, seconds
from trainstep.config.parsing import build_config, config_hash, to_plain
from trainstep.records.record import Fact, Failure, Record, Samples
from trainstep.report.answers import answers
from trainstep.report.kit.rows import Row, rows_of
from trainstep.report.kit.tables import Table, all_tables
from trainstep.report.kit.terminal import plain
from trainstep.report.page import page, sections
from trainstep.report.parallel.page import parallel_sections
from trainstep.report.parallel.tables import strategies_of

MIB, GIB = 2**20, 2**30
STEP_S = {"none": 0.100, "bucketed": 0.110, "sharded": 0.130, "sharded_flat": 0.105, "torch_ddp": 0.112}
"""Medians of ten steps: rank 1 takes this time, rank 0 a millisecond less."""
GRADIENTS = 100 * MIB


def cell(sync: str, *, failure: Failure | None = None, facts: dict[str, Any] | None = None, **changes: Any) -> Record:
    step_s = changes.pop("step_s", STEP_S[sync])
    values = {"model": "small", "device": "cuda", "ranks": 2, "sync": sync, **changes}
    config = to_plain(build_config("parallel", values))
    values_of_facts = {
        "wire_bytes": (0 if sync == "none" else GRADIENTS * (2 if sync == "sharded" else 1), "bytes"),
        "expected_wire_bytes": (0 if sync == "none" else GRADIENTS, "bytes"),
        "communication_s": (0.020, "s"),
        "waiting_s": (0.004, "s"),
        "transfer_s": (0.016, "s"),
        "exposed_s": (0.005, "s"),
        "context_bytes": (GIB // 2, "bytes"),
        "nccl_bytes": (GIB // 4, "bytes"),
        "peak_allocated_bytes": (3 * GIB, "bytes"),
        "tokens": (1024, "count"),
        "interleaving": ("rounds", ""),
        "interleaving_group": ("g", ""),
        "turn_steps": (1, "count"),
    } | (facts or {})
    return a_record(
        workload="parallel",
        key=config_hash("parallel", config),
        config=config,
        samples={} if failure else {"step": around(step_s), "window_step": around(step_s - 0.001)},
        facts={}
        if failure
        else {name: Fact(value=value, unit=unit) for name, (value, unit) in values_of_facts.items()},
        tables={} if failure else tables(sync, step_s),
        failure=failure,
    )


def around(median_s: float) -> Samples:
    """Ten values, one percent below and above the median in turn."""
    return seconds([median_s * share for share in (0.99, 1.01)] * 5)


def tables(sync: str, step_s: float) -> dict[str, Any]:
    columns_of: dict[str, Any] = {
        "ranks": {
            "rank": [0, 1],
            "quantity": ["step"] * 2,
            "unit": ["s"] * 2,
            "values": [[step_s - 0.001] * 10, [step_s] * 10],
        },
        "memory_points": memory(sync),
    }
    if sync != "torch_ddp":
        sent = {"none": [], "sharded": ["all_reduce", "broadcast"], "sharded_flat": ["reduce_scatter", "all_gather"]}
        operations = sent.get(sync, ["all_reduce"])
        columns_of["traffic"] = {
            "operation": operations,
            "messages": [4] * len(operations),
            "bytes": [GRADIENTS] * len(operations),
            "expected_messages": [4] * len(operations),
            "expected_bytes": [GRADIENTS - (4 * MIB if sync == "bucketed" else 0)] * len(operations),
        }
    if sync != "none":
        columns_of["communication"] = {
            "rank": [0, 1],
            **{f"{name}_s": [0.020, 0.016] for name in ("communication", "transfer", "tail")},
            "waiting_s": [0.004, 0.0],
            "exposed_s": [0.008, 0.004],
        }
        columns_of["buckets"] = {
            "name": ["all_reduce bucket 0", "all_reduce bucket 1"],
            "phase": ["backward", "grad_sync"],
            "bytes": [GRADIENTS // 2, None],
            "launched_s": [0.050, 0.060],
            "started_s": [0.051, 0.061],
            "finished_s": [0.061, 0.071],
            "waiting_s": [0.004, None],
            "hidden_s": [0.010, 0.005],
            "exposed_s": [0.0, 0.005],
        }
    return columns_of


def memory(sync: str) -> dict[str, Any]:
    """1 GiB of parameters and of gradients and 2 GiB of state; half of these where the strategy shards them."""
    gradients = GIB // 2 if sync == "sharded_flat" else GIB
    state = GIB if sync in ("sharded", "sharded_flat") else 2 * GIB
    bytes_at = {
        "after init": {"parameters": GIB},
        "after forward": {"parameters": GIB, "optimizer state": state, "activations": GIB},
        "after backward": {"parameters": GIB, "gradients": gradients, "optimizer state": state},
        "after step": {"parameters": GIB, "optimizer state": state},
    }
    names = ("parameters", "gradients", "optimizer state", "communication", "activations")
    rows: list[tuple[Any, ...]] = []
    for rank in (0, 1):
        for point, lines in bytes_at.items():
            named = sum(lines.values())
            rows += [(rank, point, name, lines.get(name, 0), lines.get(name, 0)) for name in names]
            rows += [(rank, point, "unnamed", MIB, None), (rank, point, "allocated", named + MIB, None)]
            rows += [(rank, point, "reserved", named + GIB, None), (rank, point, "driver", named + 3 * GIB, None)]
    columns = ("rank", "point", "line", "bytes", "expected_bytes")
    return {name: [row[place] for row in rows] for place, name in enumerate(columns)}


def collective(mib: float, latency_s: float = 1e-3, bytes_per_s: float = 1e9) -> Record:
    """An all-reduce on the same two GPUs."""
    config = build_config("collective", {"backend": "nccl", "device": "cuda", "ranks": 2, "mib": mib})
    time_s = latency_s + config.payload_bytes / bytes_per_s
    sizes = {"payload_bytes": config.payload_bytes, "ring_bytes": config.payload_bytes}
    return a_record(
        workload="collective",
        key=config_hash("collective", to_plain(config)),
        config=to_plain(config),
        samples={"time": seconds([time_s] * 9)},
        facts={name: Fact(value=size, unit="bytes") for name, size in sizes.items()},
    )


def rows(*records: Record) -> list[Row]:
    return rows_of([("p.jsonl", record) for record in records])


def titled(candidates: list[Table], title: str) -> Table:
    return next(table for table in candidates if table.title == title)


def texts(table: Table) -> list[dict[str, str]]:
    titles = [column.title for column in table.columns]
    return [dict(zip(titles, (entry.text for entry in line), strict=True)) for line in table.entries]


def test_a_strategy_has_its_ratio_to_none():
    shown = all_tables(rows(cell("none"), cell("bucketed"), cell("torch_ddp")))
    none, bucketed, torchs = texts(titled(shown, "Parallel strategies"))
    assert (none["sync"], none["ratio"]) == ("none", "–")
    assert (bucketed["step (ms)"], bucketed["ratio"]) == ("110.0 ± 1.1", "1.100")
    assert bucketed["99 % interval"] == "1.100 to 1.100"
    assert bucketed["window's ratio"] == "1.101"  # 109 / 99
    assert (bucketed["slowest rank (ms)"], bucketed["fastest rank (ms)"]) == ("110.0 (rank 1)", "109.0 (rank 0)")
    assert (bucketed["tokens/s"], bucketed["peak"]) == ("9,309", "3.00")
    assert torchs["sync"] == "torch_ddp"
    raw = titled(shown, "Parallel strategies").raw[1]
    assert raw["step_longer_than_none_s"] == pytest.approx(0.010)
    assert (raw["messages"], raw["expected_sent_bytes"]) == (4, GRADIENTS - 4 * MIB)


def test_messages_and_hidden_communication_have_hand_computed_numbers():
    shown = all_tables(rows(cell("none"), cell("bucketed"), cell("torch_ddp")))
    none, bucketed, torchs = texts(titled(shown, "Communication of a step"))
    assert (bucketed["messages"], bucketed["sent (MiB)"]) == ("4", "100 (96.0)")
    assert (bucketed["in flight (ms)"], bucketed["waiting (ms)"]) == ("16.00", "0"), "of the rank that does not wait"
    assert (bucketed["transfer (ms)"], bucketed["exposed (ms)"], bucketed["hidden (%)"]) == ("16.00", "4.000", "75.0")
    for title in ("step longer than none (ms)", "window longer than none (ms)"):
        assert float(bucketed[title]) == pytest.approx(10)
    assert none["step longer than none (ms)"] == torchs["messages"] == "–"
    (line,) = texts(titled(shown, "Messages against the formula"))
    assert (line["operation"], line["messages"], line["by formula"], line["alike"]) == ("all_reduce", "4", "4", "no")


def test_without_none_of_the_same_run_there_is_no_ratio():
    assert strategies_of(rows(cell("none", context=512), cell("bucketed")))[1].ratio("step") is None
    elsewhere = dataclasses.replace(cell("none"), environment=_other())
    ratio = strategies_of(rows(elsewhere, cell("bucketed")))[1].ratio("step")
    assert ratio.known is None
    assert ratio.trouble.startswith("different environments")
    failed = cell("none", failure=Failure(kind="timeout", phase="warmup", message="too long"))
    assert [strategy.base for strategy in strategies_of(rows(failed, cell("bucketed")))] == [None, None]


def test_a_ratio_to_none_of_another_run_is_a_doubt():
    for group, doubt in (("g", ""), ("earlier", "not interleaved with none")):
        all_rows = rows(cell("none", facts={"interleaving_group": (group, "")}), cell("bucketed"))
        none, bucketed = texts(titled(all_tables(all_rows), "Parallel strategies"))
        assert "interleaved" not in none["doubts"]
        assert doubt in bucketed["doubts"]
        assert ("interleaved" in bucketed["doubts"]) == bool(doubt)
        assert bucketed["ratio"] != "–"


def _other() -> Any:
    return dataclasses.replace(ENVIRONMENT, gpu="another")


def test_memory_stands_beside_the_formula_and_the_driver():
    shown = all_tables(rows(cell("none"), cell("sharded_flat")))
    lines = texts(titled(shown, "What a rank holds"))
    assert [line["point"] for line in lines[:4]] == ["after init", "after forward", "after backward", "after step"]
    assert (lines[6]["gradients"], lines[6]["optimizer state"], lines[6]["unnamed"]) == ("0.500", "1.00", "0.000977")
    assert lines[2]["allocated"] == "4.00 (4.00)"
    driver = texts(titled(shown, "What the driver sees"))[0]
    assert {name: driver[name] for name in ("driver", "cached", "context", "NCCL", "rest")} == {
        "driver": "6.00",
        "cached": "0.999",
        "context": "0.500",
        "NCCL": "0.250",
        "rest": "1.25",
    }


def test_interleaved_variants_have_no_memory_of_the_driver():
    live = {"interleaving": ("live", "")}
    shown = all_tables(rows(cell("none", facts=live), cell("bucketed", facts=live)))
    assert "What the driver sees" not in [table.title for table in shown]


def test_each_message_has_a_row():
    (table,) = [
        table for table in all_tables(rows(cell("none"), cell("bucketed"))) if "messages of a step" in table.title
    ]
    first, last = texts(table)
    assert (first["message"], first["launched in"], first["MiB"]) == ("all_reduce bucket 0", "backward", "50.0")
    assert (first["waiting (ms)"], first["hidden (ms)"], first["exposed (ms)"]) == ("4.000", "10.00", "0")
    assert (last["MiB"], last["waiting (ms)"]) == ("–", "–")


def test_each_rank_has_its_waiting_time():
    lines = texts(titled(all_tables(rows(cell("none"), cell("bucketed"))), "Communication by rank"))
    assert [(line["rank"], line["waiting (ms)"], line["transfer (ms)"]) for line in lines] == [
        ("0", "4.000", "20.00"),
        ("1", "0", "16.00"),
    ]


def test_a_failure_is_in_its_row_and_on_the_page():
    failed = cell("bucketed", failure=Failure(kind="divergence", phase="agreement", message="w on rank 1"))
    all_rows = rows(cell("none"), failed)
    line = texts(titled(all_tables(all_rows), "Parallel strategies"))[1]
    assert (line["step (ms)"], line["doubts"]) == ("divergence", "divergence in agreement: w on rank 1")
    assert "w on rank 1" in page(all_rows)
    assert "divergence" in plain(all_tables(rows(failed)))


def test_the_page_says_how_the_sharded_optimizers_differ():
    times, memory_section = parallel_sections(rows(cell("none"), cell("sharded"), cell("sharded_flat")))
    (paragraph,) = memory_section.paragraphs
    assert "200.0 MiB of tensors a step" in paragraph
    assert "together as much as one all-reduce: 100.0 MiB" in paragraph
    assert "holds all gradients, 1.00 GiB; a rank of sharded_flat holds 1/N of them, 0.50 GiB" in paragraph
    assert "Optimizer state is 1.00 GiB and 1.00 GiB" in paragraph
    assert "129.0 ms in sharded and 104.0 ms in sharded_flat" in paragraph
    window = next(trace for trace in times.charts[0].data if trace["name"] == "step of an unsynchronised window")
    assert (window["y"], window["text"]) == (["sharded", "sharded_flat"], ["1.303", "1.051"])
    (chart,) = memory_section.charts
    state = next(trace for trace in chart.data if trace["name"] == "optimizer state")
    assert state["y"] == [2.0, 1.0, 1.0]
    assert times.charts[1].data[0]["y"] == pytest.approx([100, 130, 105])


def test_bucket_sizes_stand_beside_the_prediction_from_all_reduces():
    sizes = {1: 0.22, 10: 0.12, 100: 0.21}
    records = [cell("none"), *(cell("bucketed", bucket_mib=mib, step_s=step_s) for mib, step_s in sizes.items())]
    times, *_ = sections(rows(*records, *map(collective, (1, 10, 100))))
    chart = times.charts[2]
    measured, predicted = chart.data
    assert (measured["name"], predicted["name"]) == ("bucketed", "bucketed, predicted")
    assert list(measured["x"]) == [1, 10, 100]
    assert list(measured["y"]) == pytest.approx([220, 120, 210])
    best_mib = (GRADIENTS * 1e-3 * 1e9) ** 0.5 / MIB
    assert predicted["x"][predicted["y"].index(min(predicted["y"]))] == pytest.approx(best_mib)
    at_one_mib = 0.1 + 100 * 1e-3 + MIB / 1e9
    assert predicted["y"][0] == pytest.approx(1e3 * at_one_mib)
    sentence = next(paragraph for paragraph in times.paragraphs if "sizes tried" in paragraph)
    assert "of the sizes tried, 10.0 MiB has the least median; the prediction is 9.77 MiB" in sentence


def test_bucket_sizes_without_all_reduces_are_not_predicted():
    records = [cell("none"), *(cell("bucketed", bucket_mib=mib) for mib in (1, 10))]
    times, _ = parallel_sections(rows(*records))
    assert [trace["name"] for trace in times.charts[2].data] == ["bucketed"]
    assert any("trainstep collectives" in paragraph for paragraph in times.paragraphs)


def test_sizes_of_flat_shards_are_not_predicted_by_all_reduces():
    records = [
        cell("none"),
        *(cell("sharded_flat", bucket_mib=mib, step_s=step_s) for mib, step_s in ((1, 0.2), (10, 0.1))),
    ]
    times, *_ = sections(rows(*records, *map(collective, (1, 10, 100))))
    assert [trace["name"] for trace in times.charts[2].data] == ["sharded_flat"]
    sentence = next(paragraph for paragraph in times.paragraphs if "sizes tried" in paragraph)
    assert sentence.endswith(
        "of the sizes tried, 10.0 MiB has the least median; the formula of buckets does not describe its messages."
    )


def test_the_page_has_its_charts():
    text = page(rows(cell("none"), cell("bucketed", bucket_mib=25), cell("bucketed", bucket_mib=1), cell("torch_ddp")))
    for words in ("Time of a step by strategy", "Time of a step by bucket size", "What a rank holds by strategy"):
        assert words in text
    assert "Parallel training step: small on NVIDIA H200" in text


CHOICE = {
    "recompute_choice": ("4 none, 8 selective", ""),
    "recompute_peak_bytes": (20.0 * GIB, "bytes"),
    "recompute_measured_peak_bytes": (20.5 * GIB, "bytes"),
    "recompute_added_s": (0.0125, "s"),
}


def within_a_budget(sync: str) -> Record:
    record = cell(sync, facts=CHOICE, recompute_budget_gib=21.0)
    return dataclasses.replace(record, tables={**record.tables, "recompute_curve": RECOMPUTE_CURVE})


def test_the_recomputation_for_a_budget_is_in_the_tables_the_answer_and_the_page():
    cells = rows(within_a_budget("bucketed"), within_a_budget("sharded_flat"))
    curve = next(table for table in all_tables(cells) if table.title.startswith("Recomputation"))
    assert [[entry.text for entry in row[2:]] for row in curve.entries] == [
        ["bucketed", "20.0", "12.50", "4", "8", "0", "0", "chosen"],
        ["bucketed", "30.0", "0", "12", "0", "0", "0", ""],
        ["sharded_flat", "20.0", "12.50", "4", "8", "0", "0", "chosen"],
        ["sharded_flat", "30.0", "0", "12", "0", "0", "0", ""],
    ]
    sentence = "Within 21 GiB the blocks recompute: 4 none, 8 selective."
    [answer] = answers(cells)
    assert answer.verdict.count(sentence) == 1  # the fastest one's
    section = next(section for section in sections(cells) if section.title == "Recomputation within a budget")
    assert [text.partition(sentence)[0] for text in section.paragraphs] == [
        "small 256 bucketed: ",
        "small 256 sharded_flat: ",
    ]

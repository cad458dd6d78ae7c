"""Tables and page of collectives from records with known numbers."""

import dataclasses
from typing import Any

from record_maker import ENVIRONMENT, a_record, seconds
from trainstep.config.parsing import build_config, config_hash, to_plain
from trainstep.costs.collectives import ring_bytes
from trainstep.records.record import Fact, Failure, Record
from trainstep.report.kit.rows import Row, rows_of
from trainstep.report.kit.tables import all_tables
from trainstep.report.kit.terminal import plain
from trainstep.report.page import page
from trainstep.report.parallel.answer import collectives_answer
from trainstep.report.parallel.collectives import collective_sections

ALPHA_S, BETA = 20e-6, 120e9


def cell(mib: float, *, failure: Failure | None = None, **changes: Any) -> Record:
    """A collective that takes ALPHA_S + bytes / BETA on rank 1 and half of that on rank 0."""
    values = {"backend": "nccl", "device": "cuda", "ranks": 4, "mib": float(mib), **changes}
    config = build_config("collective", values)
    time_s = ALPHA_S + config.payload_bytes / BETA
    sent = ring_bytes(config.operation, config.payload_bytes, config.ranks)
    facts = {
        "payload_bytes": Fact(value=config.payload_bytes, unit="bytes"),
        "ring_bytes": Fact(value=sent, unit="bytes"),
    }
    ranks = {"rank": [0, 1], "quantity": ["time"] * 2, "unit": ["s"] * 2, "values": [[time_s / 2] * 9, [time_s] * 9]}
    return a_record(
        workload="collective",
        key=config_hash("collective", to_plain(config)),
        config=to_plain(config),
        samples={} if failure else {"time": seconds([time_s] * 9)},
        facts={} if failure else facts,
        tables={} if failure else {"ranks": ranks},
        failure=failure,
    )


def rows(*records: Record) -> list[Row]:
    return rows_of([("c.jsonl", record) for record in records])


def texts(table: Any) -> list[dict[str, str]]:
    titles = [column.title for column in table.columns]
    return [dict(zip(titles, (entry.text for entry in line), strict=True)) for line in table.entries]


def test_copies_are_series_of_their_own():
    sizes = (0.25, 16, 1024)
    copied = {"transport": "copies"}
    records = [cell(mib, **how) for how in ({}, copied, copied | {"inbox_mib": 64}) for mib in sizes]
    _, fit = all_tables(rows(*records))
    assert [line["transport"] for line in texts(fit)] == ["–", "copies", "copies, inbox 64 MiB"]
    [section] = collective_sections(rows(*records))
    assert section.paragraphs[1].startswith("all_reduce by copies, 4 ranks, fp32: at most 180 GB/s")
    answer = collectives_answer(rows(*records))
    assert "all_reduce of fp32 on 4 ranks by copies, inbox 64 MiB: " in answer.verdict
    assert "transport" not in texts(all_tables(rows(*map(cell, sizes)))[1])[0]


def test_cells_and_the_fit_have_hand_computed_numbers():
    cells, fit = all_tables(rows(*map(cell, (0.25, 16, 1024))))
    last = texts(cells)[-1]
    assert (last["operation"], last["backend"], last["ranks"], last["size"]) == ("all_reduce", "nccl", "4", "1.00 GiB")
    assert last["time (ms)"] == "8.968 ± 0.000"
    assert last["slowest rank (ms)"] == "8.968 (rank 1)"
    assert last["fastest rank (ms)"] == "4.484 (rank 0)"
    assert (last["algorithm (GB/s)"], last["bus (GB/s)"]) == ("120", "180")  # 2 (4 - 1) / 4 times as much
    assert last["of the link (%)"] == "39.9"  # of 450 GB/s
    assert "NVLink in one direction, NVIDIA H200 data sheet" in cells.note
    (line,) = texts(fit)
    assert (line["sizes"], line["latency (µs)"], line["algorithm (GB/s)"], line["R²"]) == ("3", "20.0", "120", "1.000")


def test_an_unknown_link_has_no_column_of_shares():
    unknown = dataclasses.replace(ENVIRONMENT, gpu="another")
    (table,) = all_tables(rows(dataclasses.replace(cell(1), environment=unknown)))
    assert "of the link (%)" not in [column.title for column in table.columns]


def test_series_are_fitted_separately_and_failures_are_rows():
    failed = cell(1024, ranks=8, failure=Failure(kind="timeout", phase="warmup", message="rank 3: killed"))
    all_rows = rows(*map(cell, (1, 4, 16)), *(cell(mib, dtype="bf16") for mib in (1, 4, 16)), failed)
    cells, fit = all_tables(all_rows)
    assert [line["dtype"] for line in texts(fit)] == ["fp32", "bf16"]
    assert texts(cells)[-1]["time (ms)"] == "time-out"
    assert "rank 3: killed" in texts(cells)[-1]["doubts"]
    assert "rank 3: killed" in plain([cells])


def test_the_page_has_a_panel_for_each_operation():
    all_rows = rows(*(cell(mib, ranks=ranks) for ranks in (2, 4) for mib in (1, 4, 16)), cell(1, operation="broadcast"))
    (section,) = collective_sections(all_rows)
    bus, time = section.charts
    assert [trace["name"] for trace in bus.data] == ["2 ranks", "4 ranks", "4 ranks"]
    assert len(bus.layout["annotations"]) == 2  # a panel for each operation
    assert list(bus.data[0]["x"]) == [1, 4, 16]
    assert time.data[0]["y"][0] == (ALPHA_S + 2**20 / BETA) * 1e3
    assert any("the latency of a call is 20.0 µs" in paragraph for paragraph in section.paragraphs)
    text = page(all_rows)
    assert "Collectives on NVIDIA H200" in text
    assert "Bus bandwidth by size" in text


def test_a_page_of_failures_has_no_charts():
    failed = cell(1, failure=Failure(kind="crash", phase="meet", message="rank 1: gone"))
    (section,) = collective_sections(rows(failed))
    assert section.charts == ()
    assert "rank 1: gone" in page(rows(failed))


LINK_ALPHA_S, LINK_BETA = 123e-6, (2.4e9, 1.2e9, 2.4e9)


def across(mib: float) -> Record:
    """A collective across three nodes of two ranks, whose second link has half of the others' speed."""
    record = cell(mib, ranks=6, nodes=3, level="across_nodes", backend="gloo", device="cpu")
    payload_bytes = record.fact("payload_bytes")
    links = {
        "rank": [0, 2, 0],
        "to_rank": [2, 4, 4],
        "bytes": [payload_bytes] * 3,
        "times_s": [[LINK_ALPHA_S + payload_bytes / beta] * 5 for beta in LINK_BETA],
    }
    ranks = {
        "rank": list(range(6)),
        "quantity": ["time"] * 6,
        "unit": ["s"] * 6,
        "values": [[1.0], [1.0], [1.0], [1.5], [1.0], [1.0]],
        "node": ["n1", "n1", "n2", "n2", "n3", "n3"],
    }
    facts = {**record.facts, "node_bytes": Fact(value=4 * payload_bytes, unit="bytes")}
    return dataclasses.replace(record, tables={"links": links, "ranks": ranks}, facts=facts)


def test_levels_have_their_own_fits_and_the_slowest_link_and_rank_are_named():
    all_rows = rows(*map(across, (1, 4, 16)), *(cell(mib, ranks=6, nodes=3) for mib in (1, 4, 16)))
    _, fit, links = all_tables(all_rows)
    assert [(line["level"], line["nodes"]) for line in texts(fit)] == [("across nodes", "3"), ("all nodes", "3")]
    assert texts(fit)[0]["between nodes (GB/s)"] == "480"  # four times the fitted 120
    assert [line["link"] for line in texts(links)] == ["n2 - n3", "n1 - n2", "n1 - n3"]
    assert [line["bandwidth (GB/s)"] for line in texts(links)] == ["1.20", "2.40", "2.40"]
    assert {line["latency (µs)"] for line in texts(links)} == {"123"}
    (section,) = collective_sections(all_rows)
    assert "slowest link n2 - n3: 1.2 GB/s and 0.1230 ms latency; the fastest 2.4 GB/s" in section.paragraphs[0]
    assert "slowest rank 3 (n2), 50.0 % longer than rank" in section.paragraphs[0]
    assert "slowest" not in section.paragraphs[1]


def test_on_one_node_nothing_speaks_of_levels():
    (section,) = collective_sections(rows(*map(cell, (0.25, 16, 1024))))
    titles = [column.title for table in section.tables for column in table.columns]
    assert not {"nodes", "level", "between nodes (GB/s)"} & set(titles)
    assert [table.title for table in section.tables] == ["Collectives", "Latency and bandwidth"]

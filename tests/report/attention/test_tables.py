"""Tables of attention in every format: hand-computed numbers, and failures as short cells with their reasons below."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from attention_records import OURS, attention, lengths, tiles
from trainstep.cli.report import report
from trainstep.records.record import Failure, Record
from trainstep.records.store import Store
from trainstep.report.attention.rows import configurations
from trainstep.report.kit import frames
from trainstep.report.kit.forms import three_digits
from trainstep.report.kit.peers import failure_cell
from trainstep.report.kit.tables import Table, all_tables
from trainstep.report.kit.terminal import plain

GIB = 2**30
OOM = Failure(kind="out_of_memory", phase="forward", message="ran out of memory", asked_bytes=2 * GIB)
INTERLEAVED = {"interleaving": "live", "turn_steps": 1, "interleaving_group": "g"}


def by_title(tables: list[Table]) -> dict[str, Table]:
    return {table.title.removeprefix("Attention: "): table for table in tables}


def texts(table: Table) -> list[dict[str, str]]:
    titles = [column.title for column in table.columns]
    return [dict(zip(titles, (entry.text for entry in row), strict=True)) for row in table.entries]


@pytest.fixture
def pair(rows):
    """SDPA takes 4 ms and ours 2 ms with 8e9 FLOPs; plain ran out of memory; cuDNN refused."""
    refused = Failure(kind="unsupported", phase="build", message="implementation: sdpa_cudnn does not take float32")
    facts = {"flops": 8_000_000_000, "peak_bytes": 3 * GIB, "held_bytes": GIB // 2, **INTERLEAVED}
    return rows(
        [
            attention(implementation="plain", failure=OOM, facts={"needed_bytes": round(68.7 * GIB)}),
            attention(implementation="sdpa_flash", time_s=[0.004] * 6, facts=facts),
            attention(implementation="sdpa_cudnn", failure=refused),
            attention(implementation=OURS, time_s=[0.001, 0.002, 0.002, 0.002, 0.002, 0.009], facts=facts),
        ]
    )


def test_implementations_are_columns_of_each_table(pair):
    tables = by_title(all_tables(pair))
    (times,), (rates,) = texts(tables["time (ms)"]), texts(tables["TFLOP/s"])
    assert times["sdpa_flash"] == "4.000 ± 0.000"
    assert times[OURS] == "2.000 ± 0.000"  # the median, which a single slow call does not change
    assert (rates["sdpa_flash"], rates[OURS]) == ("2.00", "4.00")
    assert texts(tables["peak memory (GiB)"])[0][OURS] == "3.00"
    assert texts(tables["memory held before backward (GiB)"])[0][OURS] == "0.500"
    assert list(times)[-4:] == [OURS, "plain", "sdpa_flash", "sdpa_cudnn"]


def test_failures_are_cells_of_every_table_with_their_reasons_in_the_note(pair):
    for title in ("time (ms)", "TFLOP/s", "peak memory (GiB)", "trainstep against each peer: ratio of times"):
        table = by_title(all_tables(pair))[title]
        cells = [entry.text for entry in table.entries[0]]
        assert "OOM (needs 68.7 GiB)" in cells
        assert "does not take float32" in cells
    times = by_title(all_tables(pair))["time (ms)"]
    assert times.note.count("OOM (needs …): out of memory; ") == 1
    for write in (plain, frames.markdown, frames.latex):
        assert "sdpa_cudnn does not take float32." in write([times]).replace("\\_", "_")


def test_the_ratio_to_each_peer_has_an_interval(pair):
    tables = by_title(all_tables(pair))
    (ratio,) = texts(tables["trainstep against each peer: ratio of times"])
    assert ratio["ours / sdpa_flash"].startswith("0.500 [")
    (mean,) = texts(tables["trainstep against each peer: geometric means"])
    assert (mean["against"], mean["configurations"], mean["time, ours / theirs"]) == ("sdpa_flash", "1", "0.500")
    assert mean["speed, ours / theirs"] == "2.000"
    assert [row["against"] for row in tables["trainstep against each peer: ratio of times"].raw] == [
        "plain",
        "sdpa_flash",
        "sdpa_cudnn",
    ]


def test_geometric_means_over_all_and_over_long_lengths(rows):
    records = []
    for seq, ratio in ((1024, 2.0), (4096, 0.5), (16384, 0.125)):
        records += [attention(implementation="flex", seq=seq, time_s=[1.0] * 5)]
        records += [attention(seq=seq, time_s=[ratio] * 5)]
    means = texts(by_title(all_tables(rows(records)))["trainstep against each peer: geometric means"])
    assert [(row["lengths"], row["time, ours / theirs"]) for row in means] == [("all", "0.500"), ("≥ 4,096", "0.250")]
    assert (means[0]["faster"], means[0]["slower"]) == ("2", "1")


def test_machines_and_too_few_values_give_no_interval(rows):
    peer, ours = attention(implementation="flex"), attention()
    other = replace(ours, environment=replace(ours.environment, triton="3.9.9"))
    assert not any("Ours" in table.title for table in all_tables(rows([peer, other])))
    few = attention(time_s=[1.0, 1.0])
    table = by_title(all_tables(rows([peer, few])))["trainstep against each peer: ratio of times"]
    assert re.fullmatch(r"[\d.]+ \?", texts(table)[0]["ours / flex"])
    assert "No interval: too few values: 2, and at least 5 are needed" in table.note


def test_every_cell_has_its_errors_and_doubts(rows):
    facts = {
        "error_output": 0.0021,
        "error_dq": 0.004,
        "has_nan": 1,
        "deterministic": 0,
        "afterwards_failed": "memory held: no",
        "launch_bound": True,
    }
    records = [attention(facts={**facts, "which_ran": "triton_fwd"}), attention(implementation="plain", failure=OOM)]
    ran, failed = texts(by_title(all_tables(rows(records)))["every cell"])
    assert ran["error of output"] == "2.1e-03"
    assert ran["error of dq"] == "4.0e-03"
    assert (ran["NaN"], ran["deterministic"], ran["which ran"], ran["launch-bound"]) == (
        "yes",
        "no",
        "triton_fwd",
        "yes",
    )
    assert ran["host (ms)"] == "0.0310 ± 0.0000"
    assert ran["doubts"].startswith("NaN or infinity; not measured: memory held: no; ")
    assert failed["time (ms)"].startswith("OOM (needs ")
    assert failed["TFLOP/s"] == "–"
    assert failed["doubts"] == "OOM in forward: asked for 2.00 GiB"


def test_columns_of_missing_facts_are_left_out(rows):
    bare = [replace(record, facts={}) for record in (attention(), attention(implementation="plain"))]
    tables = by_title(all_tables(rows(bare)))
    assert "TFLOP/s" not in tables
    assert "memory accounting" not in tables
    assert "error of output" not in texts(tables["every cell"])[0]


def test_the_accounting_of_memory_lists_its_parts(rows):
    parts = {"inputs_bytes": GIB, "scores_bytes": 64 * GIB, "needed_bytes": 130 * GIB}
    records = [attention(), attention(implementation="plain", failure=OOM, facts=parts)]
    plain_row = texts(by_title(all_tables(rows(records)))["memory accounting"])[1]
    assert (plain_row["inputs (GiB)"], plain_row["scores (GiB)"], plain_row["needed (GiB)"]) == ("1.00", "64.0", "130")
    assert plain_row["peak measured (GiB)"] == "OOM (needs 130 GiB)"


def test_each_query_tile_has_a_row_and_illegal_tiles_a_reason(rows):
    rule = attention(seq=1024, block_q="rule", block_k="rule", time_s=[0.5] * 5)
    table = by_title(all_tables(rows([*tiles([1024]), rule])))["time by tile (ms)"]
    rows_by_tile = {row["query tile"]: row for row in texts(table)}
    assert list(rows_by_tile) == ["16", "32", "64", "128", "rule"]
    assert rows_by_tile["128"]["key tile 128"] == "illegal tile"
    assert rows_by_tile["rule"]["key tile rule"] == "500.0"
    assert rows_by_tile["rule"]["key tile 16"] == "–"
    assert "illegal tile: 128 x 128 needs 196,608 bytes of shared memory" in table.note


def test_the_default_tile_or_else_the_fastest_is_compared(rows):
    tiled = [attention(block_q=64, block_k=key, time_s=[s] * 5) for key, s in ((32, 0.003), (64, 0.001))]
    (configuration,) = configurations(rows(tiled))
    assert configuration.cells[OURS].record.config["block_k"] == 64
    assert configuration.left_aside == 1
    (configuration,) = configurations(rows([*tiled, attention(time_s=[0.002] * 5)]))
    assert configuration.cells[OURS].record.config["block_k"] is None


@pytest.mark.parametrize(
    ("kind", "message", "cell"),
    [
        ("unsupported", "block_q: illegal tile: 128 x 128 (forward, 1 x 2)", "illegal tile: 128 x 128"),
        ("unsupported", "implementation: flex is not for fp32; take bf16", "not for fp32"),
        ("import_error", "implementation: flash_attn is not installed; pip install it", "import error"),
        ("import_error", "implementation: flex is not installed; pip install it", "not installed"),
        ("import_error", "ModuleNotFoundError: No module named 'x'", "import error"),
        ("crash", "RuntimeError: CUDA error: an illegal memory access was encountered", "crash"),
        ("timeout", "not done after 300 s", "time-out"),
        ("unsupported", "w" * 90, "w" * 43 + "…"),
    ],
)
def test_failures_have_short_words(kind, message, cell):
    failure = Failure(kind=kind, phase="build", message=message)
    assert failure_cell(attention(implementation="flex", failure=failure)) == cell


def test_out_of_memory_without_needed_bytes_shows_the_request():
    bare = replace(attention(failure=OOM), facts={})
    assert failure_cell(bare) == "OOM (asked for 2.00 GiB)"
    assert failure_cell(replace(bare, failure=replace(OOM, asked_bytes=None))) == "OOM"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "attention.jsonl"
    for record in [*lengths(seqs=(256, 65536), head_dims=(64,)), *tiles([1024])]:
        Store(path).append(record)
    return path


@pytest.mark.parametrize("format", ["terminal", "markdown", "latex", "csv", "json", "html"])
def test_every_format_holds_every_kind_of_cell(store: Path, tmp_path: Path, format):
    report([store], out=tmp_path / "out", format=format)
    text = (tmp_path / "out").read_text(encoding="utf-8").replace(r"\_", "_")
    kinds = ("out_of_memory", "unsupported") if format in ("csv", "json") else ("OOM (needs ", "does not take float32")
    for part in (*kinds, "illegal tile", "plain_compiled", OURS):
        assert part in text


def test_csv_and_json_are_raw_with_the_whole_config(pair):
    sheet = list(csv.DictReader(io.StringIO(frames.csv(all_tables(pair, compared=False)))))
    assert len(sheet) == 4
    ours = sheet[3]
    assert float(ours["time_median_s"]) == 0.002
    assert float(ours["flops_per_s"]) == 4e12
    assert (ours["heads"], ours["mask"], ours["peak_bytes"]) == ("16", "causal", str(3 * GIB))
    assert float(sheet[0]["needed_bytes"]) == round(68.7 * GIB)
    values = json.loads(frames.json_text(all_tables(pair)))["rows"]
    assert [row["ratio"] for row in values if row.get("against") == "sdpa_flash"] == [pytest.approx(0.5)]


def test_other_workloads_keep_their_table_beside_attention(rows, make):
    tables = all_tables(rows([make(), attention(), attention(implementation="flex")]))
    assert tables[0].title == "Training step"
    assert len(tables[0].entries) == 1


def test_three_digits_are_significant():
    assert [three_digits(value) for value in (68.72, 0.003906, 1024, 0, 12.3456)] == [
        "68.7",
        "0.00391",
        "1,024",
        "0",
        "12.3",
    ]


def test_a_name_is_text_in_markdown_and_on_a_terminal(rows):
    record = attention()
    config = {**record.config, "implementation": "a|b\x1b[31m<i>"}
    hostile = Record(**{**vars(record), "config": config})
    text = frames.markdown(all_tables(rows([hostile, attention(seq=64)])))
    assert r"a\|b" in text
    assert "<i>" not in text
    assert "\x1b" not in plain(all_tables(rows([hostile, attention(seq=64)])))


def test_small_memory_has_a_small_unit(rows):
    facts = {"peak_bytes": 5 * 2**20, "held_bytes": 2**14, "inputs_bytes": 2**20, "needed_bytes": 3 * 2**20}
    records = [attention(implementation=name, facts=facts) for name in ("plain", OURS)]
    tables = by_title(all_tables(rows(records)))
    assert texts(tables["peak memory (MiB)"])[0][OURS] == "5.00"
    assert texts(tables["memory held before backward (KiB)"])[0][OURS] == "16.0"
    cell = texts(tables["every cell"])[0]
    assert (cell["peak (MiB)"], cell["held (KiB)"]) == ("5.00", "16.0")
    parts = texts(tables["memory accounting"])[0]
    assert (parts["inputs (MiB)"], parts["needed (MiB)"], parts["peak measured (MiB)"]) == ("1.00", "3.00", "5.00")


def test_a_table_has_the_unit_of_its_largest_value(rows):
    small, large = attention(facts={"peak_bytes": 2**20}), attention(implementation="plain", facts={"peak_bytes": GIB})
    (row,) = texts(by_title(all_tables(rows([small, large])))["peak memory (GiB)"])
    assert (row[OURS], row["plain"]) == ("0.000977", "1.00")


def test_the_note_says_which_tiles_are_compared(rows):
    peer = attention(implementation="plain")
    tiled = [attention(block_q=size, block_k=64, time_s=[size / 1e3] * 6) for size in (16, 32)]
    without = by_title(all_tables(rows([peer, *tiled])))["time (ms)"]
    assert texts(without)[0][OURS].startswith("16.00")
    with_default = by_title(all_tables(rows([peer, *tiled, attention(time_s=[0.5] * 6)])))["time (ms)"]
    assert texts(with_default)[0][OURS].startswith("500.0")
    assert "this table shows its default tiles, or the fastest if those did not run; 2 more cells" in with_default.note

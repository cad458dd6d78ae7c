"""Every format of the tables agrees, number by number, with values computed by hand."""

import csv
import io
import json

import pytest

from record_maker import a_record
from trainstep.records.record import Fact, Record, Samples
from trainstep.report.kit import frames
from trainstep.report.kit.forms import (
    COLUMN_SIZE,
    COUNT,
    ROUGH_SIZE,
    beside,
    byte_words,
    failure_sentence,
    milliseconds,
    percent,
)
from trainstep.report.kit.rows import quantities, rows_of
from trainstep.report.kit.tables import Column, Line, Table, cell_tables, doubts_column, point_columns
from trainstep.report.kit.terminal import plain


@pytest.fixture
def table(rows, end_to_end) -> Table:
    (cells,) = cell_tables(rows(end_to_end))
    return cells


def texts(table: Table) -> list[dict[str, str]]:
    titles = [column.title for column in table.columns]
    return [dict(zip(titles, (entry.text for entry in row), strict=True)) for row in table.entries]


def test_a_cell_has_hand_computed_numbers(table):
    # 0.198, 0.2, 0.202 s: median and mean 200 ms, quartiles 199 and 201 ms, std 2 ms;
    # phases are 30, 60, 10 % of it. 1,024 tokens in 0.2 s. 19.8 of 198 TFLOP.
    assert texts(table)[0] == {
        "model": "small",
        "context": "256",
        "forward (ms)": "60.00 ± 0.30",
        "backward (ms)": "120.0 ± 0.6",
        "optimizer (ms)": "20.00 ± 0.10",
        "total step (ms)": "200.0 ± 1.0",
        "tokens/s": "5,120",
        "TFLOP/s": "99",
        "MFU (%)": "10.0",
        "peak (GiB)": "3.00",
        "forward, mean ± std (ms)": "60.00 ± 0.60",
        "backward, mean ± std (ms)": "120.0 ± 1.2",
        "optimizer, mean ± std (ms)": "20.00 ± 0.20",
        "total step, mean ± std (ms)": "200.0 ± 2.0",
        "doubts": "few samples",
    }
    assert texts(table)[2]["total step (ms)"] == "1,100 ± 50"


def test_columns_read_a_row_by_name_or_function():
    rows = [{"size": 2**30, "seen": 2**20, "kind": "a"}, {"size": None, "seen": 2**19, "kind": None}]
    columns = [
        Column("kind", help="what it is"),
        Column("of it ({unit})", ROUGH_SIZE, "size"),
        Column("seen", beside(ROUGH_SIZE), lambda row: (row["seen"], row["size"])),
        Column("each ({unit})", COLUMN_SIZE, "seen"),
        Column("nobody has it", get="other", optional=True),
    ]
    table = Table.of("Held ({unit})", rows, columns, note="In {unit}.")
    assert (table.title, table.note) == ("Held (GiB)", "In GiB.")
    assert [(column.title, column.number) for column in table.columns] == [
        ("kind", False),
        ("of it (GiB)", True),
        ("seen", True),
        ("each (MiB)", True),
    ]
    assert [[entry.text for entry in row] for row in table.entries] == [
        ["a", "1.00", "<0.001 (1.00)", "1.00"],
        ["–", "–", "<0.001", "0.500"],
    ]
    assert [[entry.sort for entry in row] for row in table.entries] == [
        [None, 2**30, 2**20, 2**20],
        [None, None, 2**19, 2**19],
    ]


def test_a_misspelt_fact_in_a_column_is_an_error(rows, end_to_end):
    with pytest.raises(KeyError, match="drivers_bytes"):
        Table.of("", rows(end_to_end)[:1], [Column("driver", COUNT, "drivers_bytes")])


def test_a_failed_row_keeps_the_columns_that_name_it(rows, end_to_end):
    failed = rows(end_to_end)[3]
    columns = [*point_columns([failed]), Column("steps", COUNT, lambda row: 1), doubts_column(lambda row: "")]
    table = Table.of("", [Line(failed, {})], [*columns, Column("all the same", get=lambda line: "it", failed=None)])
    [entries] = table.entries
    assert [entry.text for entry in entries][-3:] == ["OOM", failure_sentence(failed.record.failure), "it"]
    assert [entry.failure for entry in entries][-3:] == [failed.record.failure] * 2 + [None]


def test_a_failure_replaces_every_number(table):
    failed = texts(table)[3]
    measured = set(failed) - {"model", "context", "doubts"}
    assert {failed[name] for name in measured} == {"OOM"}
    assert failed["doubts"] == "OOM in backward: asked for 2.00 GiB with 138.00 GiB taken of 140.00 GiB"


@pytest.mark.parametrize(
    ("kind", "word"),
    [("out_of_memory", "OOM"), ("timeout", "time-out"), ("crash", "crash"), ("import_error", "import error")],
)
def test_failures_have_words_in_every_format(rows, make, end_to_end, kind, word):
    failure = type(end_to_end[3].failure)(kind=kind, phase="build", message="it did")
    tables = cell_tables(rows([end_to_end[0], make(model="2.7B", failure=failure)]))
    for write in (plain, frames.markdown, frames.latex):
        assert word in write(tables)
    assert [row["failure"] for row in json.loads(frames.json_text(tables))["rows"]] == [None, kind]
    assert kind in frames.csv(tables)


def test_markdown_has_the_cells_of_the_table(table):
    lines = frames.markdown([table]).splitlines()
    assert [cell.strip() for cell in lines[2].strip("|").split("|")][2:6] == [
        "60.00 ± 0.30",
        "120.0 ± 0.6",
        "20.00 ± 0.10",
        "200.0 ± 1.0",
    ]
    assert len(lines) == 6


def test_markdown_and_latex_escape_names(rows, make):
    record = make(model="small")
    named = Record(**{**vars(record), "config": {**record.config, "model": {"name": "a|b_c<d>"}}})
    tables = cell_tables(rows([named]))
    assert r"a\|b_c&lt;d&gt;" in frames.markdown(tables)
    assert r"a\textbar{}b\_c\textless{}d\textgreater{}" in frames.latex(tables)


def test_latex_has_the_cells_of_the_table(table):
    text = frames.latex([table])
    assert (
        r"small & 256 & 60.00 $\pm$ 0.30 & 120.0 $\pm$ 0.6 & 20.00 $\pm$ 0.10 & 200.0 $\pm$ 1.0 & 5,120 & 99 & 10.0 & 3.00"
        in text
    )
    assert r"MFU (\%)" in text
    assert r"\toprule" in text


def test_csv_is_raw_with_units_in_names(table):
    first, *_, failed = csv.DictReader(io.StringIO(frames.csv([table])))
    expected = {
        "forward_mean_s": 0.06,
        "forward_std_s": 0.0006,
        "backward_mean_s": 0.12,
        "backward_std_s": 0.0012,
        "optimizer_mean_s": 0.02,
        "optimizer_std_s": 0.0002,
        "step_mean_s": 0.2,
        "step_std_s": 0.002,
        "step_median_s": 0.2,
        "tokens_per_s": 5120,
        "mfu_ratio": 0.1,
        "mfu_peak_flops_per_s": 990e12,
        "peak_allocated_bytes": 3 * 2**30,
    }
    assert {name: float(first[name]) for name in expected} == pytest.approx(expected)
    assert first["peak_allocated_bytes"] == "3221225472"
    assert (failed["failure"], failed["failure_asked_bytes"], failed["step_mean_s"]) == (
        "out_of_memory",
        "2147483648",
        "",
    )


def test_json_is_raw_and_strict(table):
    def refuse(name: str) -> None:
        raise AssertionError(name)

    rows = json.loads(frames.json_text([table]), parse_constant=refuse)["rows"]
    assert rows[1]["step_mean_s"] == pytest.approx(0.4)
    assert rows[1]["step_std_s"] == pytest.approx(0.0)
    assert rows[3]["step_mean_s"] is None
    assert (rows[0]["model"], rows[0]["context"], rows[0]["step_samples_count"]) == ("small", 256, 3)


def test_plain_text_keeps_every_number_and_no_control_character(rows, make):
    record = make(model="small")
    hostile = Record(**{**vars(record), "config": {**record.config, "model": {"name": "a\x1b[31mb\nc"}}})
    text = plain(cell_tables(rows([hostile])))
    assert "\x1b" not in text
    assert "200.0 ± 1.0" in text


def test_a_cpu_record_shows_resident_memory_and_no_mfu(rows, cpu_record):
    (table,) = cell_tables(rows([cpu_record]))
    (row,) = texts(table)
    assert row["peak (GiB)"] == "3.00"
    assert "MFU (%)" not in row
    assert row["total step (ms)"] == "11.00 ± 0.50"


def test_mfu_over_one_is_left_out_with_a_doubt(rows, make):
    (table,) = cell_tables(rows([make(facts={"model_flops": 1e15}), make(context=512)]))
    impossible = texts(table)[0]
    assert impossible["MFU (%)"] == "–"
    assert "is impossible" in impossible["doubts"]


def test_a_single_step_has_no_standard_deviation(rows, make):
    (table,) = cell_tables(rows([make(step=(0.2,))]))
    assert texts(table)[0]["total step (ms)"] == "200.0"
    assert table.raw[0]["step_std_s"] is None


def test_phases_a_mode_lacks_are_absent(rows, make):
    whole = make()
    forward = {name: whole.samples[name] for name in ("forward", "step")}
    only = Record(**{**vars(make(mode="forward")), "samples": forward})
    (table,) = cell_tables(rows([whole, only]))
    assert texts(table)[1]["backward (ms)"] == "–"
    assert "grad sync (ms)" not in texts(table)[0]


def test_ceilings_have_a_table_of_their_own(rows, make, end_to_end):
    config = {"kind": "matmul", "dtype": "bf16", "n": 8192}
    facts = {"flops": Fact(value=2 * 8192**3, unit="flops"), "rate": Fact(value=693e12, unit="flop/s")}
    samples = {"time": Samples(unit="s", values=(0.0015, 0.0017))}
    replaced = {"workload": "ceiling", "config": config, "facts": facts, "samples": samples}
    ceiling = Record(**{**vars(make()), **replaced})
    cells, ceilings = cell_tables(rows([*end_to_end, ceiling]))
    assert (cells.title, ceilings.title) == ("Training step", "Ceilings")
    assert texts(ceilings)[0]["rate"] == "693 TFLOP/s"
    assert texts(ceilings)[0]["a call (ms)"] == "1.600 ± 0.050"


@pytest.mark.parametrize(
    ("seconds", "std_s", "text"),
    [
        (0.0621, 0.00031, "62.10 ± 0.31"),
        (1.2345, 0.01, "1,234 ± 10"),
        (0.0000123, 0.000001, "0.0123 ± 0.0010"),
        (0.2, None, "200.0"),
        (-0.0012, None, "\N{MINUS SIGN}1.200"),
        (0.0, 0.0, "0 ± 0"),
    ],
)
def test_milliseconds_are_rounded_to_their_deviation(seconds, std_s, text):
    assert milliseconds(seconds, std_s) == text


def test_percents_and_bytes_are_rounded():
    assert percent(0.1234) == "12.3"
    assert byte_words(2 * 2**30) == "2.00 GiB"
    assert byte_words(2**12) == "4.0 KiB"
    assert byte_words(3 * 2**20) == "3.0 MiB"


def test_undeclared_facts_are_shown_and_replace_no_number():
    """Facts of a user's own workload appear, and none replaces a number that is there already."""
    facts = {"colour": Fact(value="red"), "workload": Fact(value="x"), "tokens": Fact(value=5, unit="count")}
    (row,) = rows_of([("r.jsonl", a_record(workload="mine:W", facts=facts))])
    shown = quantities(row)
    assert (shown["colour"], shown["workload"], shown["tokens"]) == ("red", "mine:W", 5)

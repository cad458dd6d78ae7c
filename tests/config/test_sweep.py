"""Sweep files are read and checked; every mistake is one sentence that names its place."""

from pathlib import Path
from typing import Any

import pytest

from sources import ROOT
from trainstep.config.grid import expand_all, groups_along
from trainstep.config.sweep import load_sweep, sweep_from_document

WHOLE = """
title = "Warm-up"
description = "With and without."
compare = "compile"
timeout_s = 30

[grid]
model = ["tiny", "mini"]
compile = ["none", "block"]
context = 128
"""


def refusal(text: str | bytes, tmp_path: Path) -> str:
    file = tmp_path / "table.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as caught:
        load_sweep(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ") or f"{file} [grid]: " in message
    assert "\n" not in message
    return message


def test_a_sweep_file_is_read(tmp_path: Path):
    (tmp_path / "warmup.toml").write_text(WHOLE)
    sweep = load_sweep(tmp_path / "warmup.toml")
    assert (sweep.name, sweep.title, sweep.description) == ("warmup", "Warm-up", "With and without.")
    assert (sweep.compare, sweep.timeout_s) == ("compile", 30.0)
    assert sweep.grid == {"model": ["tiny", "mini"], "compile": ["none", "block"], "context": [128]}


def test_missing_keys_get_defaults():
    sweep = sweep_from_document({"grid": {"context": 8}}, name="it", where="it.toml")
    assert (sweep.title, sweep.description, sweep.compare, sweep.timeout_s) == ("it", "", None, 600.0)


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.toml")), ids=lambda path: path.stem)
def test_the_published_sweeps_expand(path: Path):
    sweep = load_sweep(path)
    assert groups_along(expand_all(sweep.grids({}), {"device": "cuda"}), sweep.compare)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("titel = 'x'\n[grid]\ncontext = 8", "unknown key 'titel' (did you mean title?); known: title,"),
        ("[grid]\ncontxt = 8", "[grid]: unknown key 'contxt' (did you mean context?)"),
        ("title = 'x'", "needs a table [grid] with at least one field"),
        ("[grid]", "needs a table [grid]"),
        ("grid = 3", "needs a table [grid]"),
        ("[grid\n", "not TOML: "),
        (b"\xff\xfe", "not TOML, which is text in UTF-8: byte 1 is not"),
        ("timeout_s = 0\n[grid]\ncontext = 8", "timeout_s: must be a positive number of seconds, not 0"),
        ("timeout_s = nan\n[grid]\ncontext = 8", "timeout_s: must be a positive number of seconds, not nan"),
        ("timeout_s = true\n[grid]\ncontext = 8", "timeout_s: must be a positive number"),
        ("timeout_s = '1'\n[grid]\ncontext = 8", "timeout_s: must be a positive number of seconds, not '1'"),
        ("title = 3\n[grid]\ncontext = 8", "title: must be text, not 3"),
        (
            "[grid]\ncontext = 2026-01-01",
            "[grid]: context: must be finite numbers, text or true and false, not 2026-01-01",
        ),
        ("[grid]\nworkload = 'mine:IT'\nsides = [1, {a = 2}]", "[grid]: sides: must be finite numbers"),
        ("[grid]\nworkload = 'mine:IT'\nsides = [[1, nan]]", "[grid]: sides: must be finite numbers"),
        ("compare = ['a']\n[grid]\ncontext = 8", "compare: must be text, not ['a']"),
    ],
)
def test_a_mistake_is_refused_with_its_place(text: str | bytes, words: str, tmp_path: Path):
    assert words in refusal(text, tmp_path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"absent\.toml: there is no such sweep file$"):
        load_sweep(tmp_path / "absent.toml")
    with pytest.raises(ValueError, match="cannot be read: "):
        load_sweep(tmp_path)


def test_a_users_workload_may_have_any_key():
    document: dict[str, Any] = {"grid": {"workload": "mine:IT", "anything": [1]}}
    assert sweep_from_document(document, name="it", where="it.toml").grid["anything"] == [1]


def test_each_row_is_combined_with_the_grid():
    document = {
        "grid": {"context": [8, 16], "seed": 3},
        "rows": [{"batch_size": 1}, {"batch_size": [2, 4], "context": 32}],
    }
    sweep = sweep_from_document(document, name="it", where="it.toml")
    assert sweep.grids({}) == [
        {"context": [8, 16], "seed": [3], "batch_size": [1]},
        {"context": [32], "seed": [3], "batch_size": [2, 4]},
    ]
    points = [cell.point for cell in expand_all(sweep.grids({}), {"device": "cpu"})]
    assert points == [{"context": c, "batch_size": b} for c, b in ((8, 1), (16, 1), (32, 2), (32, 4))]
    assert sweep.grids({"context": [8], "batch_size": [1]}) == [{"context": [8], "seed": [3], "batch_size": [1]}]


@pytest.mark.parametrize("rows", [{"context": 8}, [], [{}], [3]])
def test_rows_must_be_tables(rows: object):
    document = {"grid": {"seed": 3}, "rows": rows}
    if rows == []:
        assert not sweep_from_document(document, name="it", where="it.toml").rows
        return
    with pytest.raises(ValueError, match=r"it.toml: rows: must be tables \[\[rows\]\] of fields"):
        sweep_from_document(document, name="it", where="it.toml")


def test_a_row_with_an_unknown_field_is_refused():
    with pytest.raises(ValueError, match=r"\[grid\] with \[\[rows\]\]: unknown key 'contxt' \(did you mean context"):
        sweep_from_document({"grid": {"seed": 3}, "rows": [{"contxt": 8}]}, name="it", where="it.toml")


FLASH = {"workload": "attention", "dtype": ["bf16", "fp32"], "seq": [64, 128]}


def test_overrides_replace_fields_of_the_grid():
    sweep = sweep_from_document({"grid": FLASH}, name="flash", where="flash.toml")
    assert sweep.grids({"dtype": ["fp16"], "heads": [2]}) == [
        {"workload": ["attention"], "dtype": ["fp16"], "seq": [64, 128], "heads": [2]}
    ]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("dtpe", r"sweep flash: unknown key 'dtpe' \(did you mean dtype\?\)$"),
        ("model", "sweep flash: unknown key 'model'"),
    ],
)
def test_overrides_are_fields_of_the_sweeps_own_workload(field: str, words: str):
    sweep = sweep_from_document({"grid": FLASH}, name="flash", where="flash.toml")
    with pytest.raises(ValueError, match=words):
        sweep.grids({field: ["x"]})


def test_overrides_of_a_field_in_rows_select_rows():
    document = {
        "grid": {"workload": "attention", "mask": "causal"},
        "rows": [{"seq": 64, "head_dim": [16, 32]}, {"seq": 128, "head_dim": 32, "mask": ["causal", "full"]}],
    }
    sweep = sweep_from_document(document, name="it", where="it.toml")
    first, second = sweep.grids({})
    assert sweep.grids({"seq": [128]}) == [second]
    assert sweep.grids({"head_dim": [32]}) == [{**first, "head_dim": [32]}, second]
    assert sweep.grids({"mask": ["full"], "batch": [2]}) == [{**second, "mask": ["full"], "batch": [2]}]
    with pytest.raises(ValueError, match=r"seq: no \[\[rows\]\] of sweep it has 256; they have 64, 128"):
        sweep.grids({"seq": [64, 256]})
    with pytest.raises(ValueError, match=r"head_dim, seq: no \[\[rows\]\] of sweep it has these values together"):
        sweep.grids({"head_dim": [16], "seq": [128]})


def test_none_is_kept_as_a_choice():
    """A command line reads `none` as no value, so the field's own choice `none` must come back."""
    sweep = load_sweep(ROOT / "sweeps" / "ddp.toml")
    [grid] = sweep.grids({"model": ["xl"], "context": [512], "sync": [None, "flat"]})
    assert grid["sync"] == ["none", "flat"]

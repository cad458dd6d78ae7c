"""Grids from commas and from lists: each cell is validated, duplicates appear once, and cells form groups to compare."""

from typing import Any

import pytest

from trainstep.config.grid import Cell, check_grid_keys, expand, grid_from_settings, grid_from_text, groups_along
from trainstep.config.parsing import build_config, to_plain


def labels(cells: list[Cell]) -> list[str]:
    return [cell.label for cell in cells]


def refusal(grid: dict[str, list[Any]], **defaults: Any) -> str:
    with pytest.raises(ValueError) as caught:
        expand(grid, defaults)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_commas_separate_the_values_of_a_field():
    options = {"context": "128,256", "model": "small, 2.7B", "clip_grad_norm": "none,1.0", "mode": None}
    assert grid_from_text(options) == {
        "context": [128, 256],
        "model": ["small", "2.7B"],
        "clip_grad_norm": [None, 1.0],
    }
    assert grid_from_text({}) == {}


@pytest.mark.parametrize("text", ["", "1,", ",1", "1,,2", " "])
def test_an_empty_value_is_refused(text: str):
    with pytest.raises(ValueError, match="context: an empty value in"):
        grid_from_text({"context": text})


def test_the_first_field_varies_slowest():
    cells = expand({"model": ["tiny", "mini"], "context": [8, 16]}, {"steps": 3})
    assert labels(cells) == ["tiny, context 8", "tiny, context 16", "mini, context 8", "mini, context 16"]
    assert [dict(cell.point) for cell in cells][1] == {"model": "tiny", "context": 16}
    assert cells[1].config == to_plain(build_config("train_step", {"model": "tiny", "context": 16, "steps": 3}))
    assert {cell.workload for cell in cells} == {"train_step"}


def test_a_cell_has_the_same_key_in_every_grid():
    (alone,) = expand({"model": ["tiny"], "context": [16]}, {})
    cells = expand({"context": [8, 16], "model": ["mini", "tiny"]}, {"compile": "none"})
    assert alone.key in {cell.key for cell in cells}
    assert len({cell.key for cell in cells}) == 4


def test_the_grid_overrides_the_defaults():
    (cell,) = expand({"steps": [7]}, {"steps": 3, "context": 8})
    assert (cell.config["steps"], cell.config["context"]) == (7, 8)


def test_duplicate_cells_appear_once():
    assert len(expand({"context": [8, 8, 16], "clip_grad_norm": [1, 1.0]}, {})) == 2


def test_labels_name_the_fields_that_vary():
    (alone,) = expand({"context": [8]}, {})
    assert alone.label == "train_step"
    cells = expand({"model": ["tiny"], "mode": ["forward"], "context": [8, 16]}, {})
    assert labels(cells) == ["tiny, context 8", "tiny, context 16"]


def test_a_label_names_the_field_of_a_number():
    (cell,) = expand({"model": ["tiny"], "clip_grad_norm": [None], "compile": ["block"]}, {}, named={"clip_grad_norm"})
    assert cell.label == "tiny, clip_grad_norm none"
    assert Cell(workload="x", config={}, point={"a": 1, "b": "word", "c": True}).label == "a 1, word, c True"


@pytest.mark.parametrize(
    ("workload", "field"),
    [("train_step", "attention"), ("memory", "attention"), ("numerics", "attention"), ("attention", "implementation")],
)
def test_both_names_of_our_attention_are_one_cell(workload: str, field: str):
    both = expand({"workload": [workload], field: ["flash", "trainstep", "plain"]}, {"device": "cpu"})
    assert [cell.config[field] for cell in both] == ["trainstep", "plain"], "one cell, one name in records"
    assert [cell.point[field] for cell in both] == ["trainstep", "plain"]


def test_settings_are_lists_of_parsed_values():
    assert grid_from_settings(["dtype=bf16", "head-dim=64,128", "--keys=none"]) == {
        "dtype": ["bf16"],
        "head_dim": [64, 128],
        "keys": [None],
    }


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["dtype"], "set: 'dtype' is not field=value; write it as --set dtype=bf16"),
        (["=bf16"], "set: '=bf16' is not field=value"),
        (["seq=1", "seq=2"], "set: seq is given twice; write its values as --set seq=a,b"),
        (["seq=1,,2"], "seq: an empty value in '1,,2'"),
    ],
)
def test_bad_settings_are_refused(settings: list[str], words: str):
    with pytest.raises(ValueError, match=words):
        grid_from_settings(settings)


def test_other_workloads_have_their_own_configs():
    (matmul,) = expand({"workload": ["ceiling"], "kind": ["matmul"]}, {"device": "cpu"})
    assert (matmul.workload, matmul.config) == ("ceiling", to_plain(build_config("ceiling", {"kind": "matmul"})))
    (user_cell,) = expand({"workload": ["mine.work:IT"], "anything": [[1, 2]]}, {"device": "cpu"})
    assert (user_cell.workload, user_cell.config) == ("mine.work:IT", {"anything": [1, 2], "device": "cpu"})
    assert "workload: 'train' is not known; known: train_step, " in refusal({"workload": ["train"]})


def test_a_refusal_names_the_bad_cell():
    text = refusal({"model": ["tiny", "mini"], "heads": [4, 5]})
    assert text == "heads: 5 does not divide d_model 128; 4 would (in the cell model=tiny, heads=5)"
    assert refusal({"contxt": [8]}).startswith("run: unknown key 'contxt' (did you mean context?)")
    assert refusal({"context": []}) == "context: an empty list makes an empty grid"


def test_groups_hold_the_cells_that_differ_along_an_axis():
    cells = expand({"model": ["tiny", "mini"], "compile": ["none", "block"], "context": [8, 16]}, {})
    groups = groups_along(cells, "compile")
    assert [labels(group) for group in groups] == [
        ["tiny, compile none, context 8", "tiny, block, context 8"],
        ["tiny, compile none, context 16", "tiny, block, context 16"],
        ["mini, compile none, context 8", "mini, block, context 8"],
        ["mini, compile none, context 16", "mini, block, context 16"],
    ]
    assert [labels(group) for group in groups_along(cells, None)] == [[label] for label in labels(cells)]


def test_cells_with_similar_labels_are_in_different_groups():
    cells = expand({"clip_grad_norm": [None, 1.0], "compile": ["none", "block"]}, {})
    assert [len(group) for group in groups_along(cells, "compile")] == [2, 2]


@pytest.mark.parametrize("axis", ["context", "contxt", ""])
def test_an_axis_that_does_not_vary_is_refused(axis: str):
    cells = expand({"model": ["tiny", "mini"], "context": [8]}, {})
    with pytest.raises(ValueError, match=f"compare: the grid does not vary along '{axis}'; it varies along model"):
        groups_along(cells, axis)


def test_unknown_keys_are_refused_for_workloads_of_ours_only():
    check_grid_keys({"context": [1], "layers": [2], "workload": ["train_step"]}, "here")
    check_grid_keys({"workload": ["mine:IT"], "anything": [1]}, "here")
    with pytest.raises(ValueError, match=r"here: unknown key 'presision' \(did you mean precision\?\)"):
        check_grid_keys({"presision": ["fp32"]}, "here")


def test_a_grid_of_millions_is_refused_before_it_is_expanded():
    numbers = list(range(1, 10_001))
    text = refusal({"context": numbers, "batch_size": numbers, "seed": numbers})
    assert text.startswith("the grid has 1,000,000,000,000 cells; the limit is 100,000")


def test_switches_may_be_lists_in_a_sweep_file():
    cells = expand({"cold_compile": [False, True], "nvtx": [False, True]}, {"device": "cuda"})
    assert [(cell.config["cold_compile"], cell.config["nvtx"]) for cell in cells][1:3] == [(False, True), (True, False)]

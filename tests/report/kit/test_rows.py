"""Rows: the files that are read, the fields that vary, and the labels of different machines."""

import dataclasses
from pathlib import Path

import pytest

from record_maker import a_record, seconds
from trainstep.records.facts import facts_of
from trainstep.records.store import Store
from trainstep.report.kit.notes import mixed_machines, notes, summary
from trainstep.report.kit.rows import doubts, host_limit, machines, quantities, read_rows, varying


def test_points_hold_model_context_and_varying_fields(rows, precision_pair):
    read = rows(precision_pair)
    assert [dict(row.point) for row in read] == [
        {"model": "small", "context": 256, "precision": "fp32"},
        {"model": "small", "context": 256, "precision": "bf16_autocast"},
    ]
    assert varying(read) == ["precision"]
    assert read[1].label() == "small 256 bf16_autocast"


def test_the_shape_of_a_named_size_is_not_in_the_point(rows, end_to_end, make):
    assert set(rows(end_to_end)[0].point) == {"model", "context"}
    changed = rows([make(model="small"), make(model="small", layers=6)])
    assert [row.point["layers"] for row in changed] == [12, 6]


def test_a_users_model_is_named_by_its_function(rows, make):
    (row,) = rows([make(model="mine.models:build")])
    assert row.point["model"] == "mine.models:build"


def test_the_last_record_of_a_key_counts_and_folders_are_searched(store, make, tmp_path: Path):
    path = store([make(step=(1.0, 1.0, 1.0)), make(step=(2.0, 2.0, 2.0))])
    Store(tmp_path / "runs" / "deeper" / "more.jsonl").append(make(context=512))
    read = read_rows([tmp_path, path])
    assert [row.point["context"] for row in read] == [512, 256]
    assert read[1].record.samples["step"].values == (2.0, 2.0, 2.0)


def test_the_same_cell_in_two_files_is_labelled_by_file(make, tmp_path: Path):
    for name in ("before", "after"):
        Store(tmp_path / f"{name}.jsonl").append(make())
    read = read_rows([tmp_path / "before.jsonl", tmp_path / "after.jsonl"])
    assert [Path(row.point["file"]).name for row in read] == ["before.jsonl", "after.jsonl"]


@pytest.mark.parametrize("name", ["absent.jsonl", "empty"])
def test_a_missing_file_and_an_empty_folder_are_refused(tmp_path: Path, name: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=name):
        read_rows([tmp_path / name])


def test_an_empty_file_holds_no_records(tmp_path: Path):
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ValueError, match="no records"):
        read_rows([tmp_path / "a.jsonl"])


def test_machines_are_labelled_by_the_fields_that_differ(rows, make, cpu_record):
    first = make()
    other = dataclasses.replace(make(context=512), environment=dataclasses.replace(first.environment, torch="2.12.0"))
    all_rows = rows([first, other, cpu_record])
    assert list(machines(all_rows)) == ["NVIDIA H200, torch 2.13.0", "NVIDIA H200, torch 2.12.0", "Ryzen 7840U"]
    assert [row.point["machine"] for row in all_rows] == list(machines(all_rows))
    (sentence,) = mixed_machines(all_rows)
    assert "3 different environments" in sentence
    assert sentence in notes(all_rows)


def test_nodes_of_one_cluster_are_one_machine(rows, make):
    first, other = make(), make(context=512)
    on_node8 = dataclasses.replace(other, environment=dataclasses.replace(other.environment, hostname="node8"))
    assert not mixed_machines(rows([first, on_node8]))


def test_the_summary_names_cells_machine_and_failures(rows, end_to_end):
    text = summary(rows(end_to_end))
    for part in (
        "4 cells",
        "small and 2.7B",
        "context 256 and 512",
        "NVIDIA H200",
        "torch 2.13.0",
        "1 of 4 cells failed: 1 OOM",
    ):
        assert part in text


def test_notes_state_mfus_convention_peak_and_source(rows, end_to_end):
    text = " ".join(notes(rows(end_to_end)))
    assert "matmuls only" in text
    assert "990 TFLOP/s in bf16 (NVIDIA H200 data sheet, dense)" in text


def test_notes_say_that_backward_holds_updates(rows, end_to_end):
    sentence = "optimizer is what is left of them"
    assert sentence not in " ".join(notes(rows(end_to_end)))
    updated = [dataclasses.replace(record, config={**record.config, "update": "in_backward"}) for record in end_to_end]
    assert sentence in " ".join(notes(rows(updated)))


def test_notes_say_why_a_step_is_not_captured(rows):
    left_out = facts_of(captured="nothing", capture_left_out="train.py:3: `loss.item()`: the host waits")
    records = [a_record(key="a", facts=left_out), a_record(key="b", facts=left_out), a_record(key="c")]
    assert [note for note in notes(rows(records)) if "graph" in note] == [
        "Not in a graph: train.py:3: `loss.item()`: the host waits."
    ]


@pytest.mark.parametrize(
    ("busy_s", "enqueue_s", "phrases"),
    [
        (0.757, 0.965, ("launch-bound",)),
        (0.46, 0.887, ("launch-bound",)),
        (0.73, 0.8, ("near launch-bound",)),
        (0.9, 0.5, ()),
    ],
)
def test_the_host_is_a_doubt_by_the_numbers_and_not_by_the_stored_flag(rows, busy_s, enqueue_s, phrases):
    samples = {"step": seconds([1.0] * 9), "enqueue": seconds([enqueue_s] * 9)}
    record = a_record(samples=samples, facts=facts_of(device_busy_s=busy_s, launch_bound=not phrases))
    assert doubts(record) == phrases
    [row] = rows([record])
    assert quantities(row)["doubts"] == "; ".join(phrases)
    assert quantities(row).get("launch_bound", phrases == ("launch-bound",)) is (phrases == ("launch-bound",))


def test_without_times_the_stored_flag_says_what_limits_a_cell():
    assert host_limit(a_record(facts=facts_of(launch_bound=True))) == "launch-bound"
    assert host_limit(a_record(facts=facts_of(launch_bound=False))) is None

"""A trace of torch's profiler as a row: its habits, its waits for batches, and sentences about what it does not have."""

import gzip
import json
import re
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trace_maker import EAGER
from trainstep.config.script import Part
from trainstep.reading import ReadLimits
from trainstep.report.explain.budgets import explain_answers, explain_rows
from trainstep.report.explain.trace_row import is_trace, rows_of_traces
from trainstep.traces.patterns.pattern import ATTENTION


def a_trace(path: Path, *, shapes: bool) -> Path:
    """A trace of one marked step with attention written out."""
    heads = [torch.randn(2, 4, 48, 16, requires_grad=True) for _ in range(3)]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes) as profiler, record_function("step 1"):
        ((heads[0] @ heads[1].transpose(-2, -1)).softmax(-1) @ heads[2]).sum().backward()
    profiler.export_chrome_trace(str(path))
    return path


def test_a_trace_with_shapes_shows_its_habits(tmp_path: Path):
    [row] = rows_of_traces([a_trace(tmp_path / "trace.json", shapes=True)], ReadLimits())
    assert set(row.record.tables["patterns"]["pattern"]) == {ATTENTION}
    [one], _ = explain_rows([row])
    assert not any("shapes" in note for note in one.budget.notes)
    assert "attention_kernel" in {finding.cause for finding in one.budget.findings}


def test_without_shapes_the_longest_phase_is_named_and_what_to_record(tmp_path: Path):
    path = a_trace(tmp_path / "trace.json", shapes=False)
    explained, _ = explain_rows(rows_of_traces([path], ReadLimits()))
    assert any("record it with record_shapes=True" in note for note in explained[0].budget.notes)
    [answer] = explain_answers(explained)
    assert re.search(r"nothing is explained; .+ takes [\d.]+ %\.$", answer.verdict)
    assert answer.suggestion == (
        f"Record it with record_shapes=True, so that habits can be seen; `trainstep profile --from {path}` shows the ops."
    )


def test_a_loaders_ranges_are_the_wait_for_data(tmp_path: Path):
    events = json.loads(gzip.decompress(EAGER.read_bytes()))
    marks = [event for event in events["traceEvents"] if str(event.get("name")).startswith("step ")]
    wait = {**marks[0], "name": "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "dur": 250.0}
    events["traceEvents"].append(wait)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    [row] = rows_of_traces([path], ReadLimits())
    assert max(row.record.samples[Part.DATA.value].values) == pytest.approx(250e-6)


def test_the_rate_of_its_matmuls_is_told_where_their_shapes_are_known(tmp_path: Path):
    """A trace of an H200, to whose matmuls shapes are given here."""
    events = json.loads(gzip.decompress(EAGER.read_bytes()))
    for event in events["traceEvents"]:
        if event.get("name") in ("aten::mm", "aten::addmm", "aten::bmm"):
            event["args"] |= {"Input Dims": [[512, 512], [512, 2048]], "Input type": ["c10::BFloat16"] * 2}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    [row] = rows_of_traces([path], ReadLimits())
    flops, time_s = row.record.fact("matmul_flops"), row.record.fact("matmul_flops_s")
    assert flops % (2 * 512 * 512 * 2048) == 0
    assert time_s == pytest.approx(
        sum(
            t
            for t, kind in zip(*(row.record.tables["classes"][name] for name in ("time_s", "class")), strict=True)
            if kind == "matmul"
        ),
        rel=0.2,
    )
    [one], _ = explain_rows([row])
    assert any(
        note.startswith(f"The step's 16-bit matmuls reach {flops / time_s / 1e12:,.0f} TFLOP/s, ")
        for note in one.budget.notes
    )


def test_a_broken_file_is_one_sentence_that_names_it(tmp_path: Path):
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [')
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        rows_of_traces([path], ReadLimits())
    assert "\n" not in str(caught.value)
    assert is_trace(path)
    assert not is_trace(tmp_path / "records.jsonl")

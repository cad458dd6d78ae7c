"""Rooflines of profiles: hand-computed FLOPs and bytes, ceilings with their source, and sentences that follow the numbers."""

import dataclasses
from typing import Any

import pytest

from record_maker import ENVIRONMENT, a_record, seconds
from trainstep.records.record import Fact, Record
from trainstep.report.kit.rows import rows_of
from trainstep.report.profile.device_page import device_sections
from trainstep.report.profile.device_words import bound_words, device_sentences
from trainstep.report.profile.device_work import ceilings_of, device_time_s, work_of

MODEL = {"name": "one", "d_model": 64, "d_ff": 128, "layers": 1, "heads": 2, "vocab_size": 100}
TOKENS = 32
"""Batch 2, context 16."""
PROJECTIONS = 2 * TOKENS * 64 * (3 * 64 + 64)
MLP = 2 * TOKENS * 64 * 128 * 3
HEAD = 2 * TOKENS * 64 * 100
HEAD_BYTES = 4 * (TOKENS * 64 + 64 * 100 + TOKENS * 100)


def kernels(*rows: tuple[str, str, str, float]) -> dict[str, Any]:
    columns = {name: [row[place] for row in rows] for place, name in enumerate(("phase", "class", "span", "time_s"))}
    return {**columns, "calls": [1.0] * len(rows)}


def profiled(
    *, matmul_s: float = 3e-3, optimizer_s: float = 1e-5, named: bool = True, gpu: str = "NVIDIA H200", **config: Any
) -> Record:
    """A step whose forward is three matmuls of equal time; without `named` the record lacks one of them."""
    third = matmul_s / 3
    rows = [("forward", "matmul", span, third) for span in ("attention projections", "mlp", "head")]
    given = {"model": MODEL, "batch_size": 2, "context": 16, "precision": "fp32", "device": "cuda", "mode": "step"}
    return a_record(
        workload="profile",
        config={**given, **config},
        environment=dataclasses.replace(ENVIRONMENT, gpu=gpu),
        facts={"parameters": Fact(value=1_000_000, unit="count")},
        samples={"step": seconds([0.01]), "busy": seconds([0.009])},
        tables={
            "classes": {
                "phase": ["forward", "forward", "optimizer"],
                "class": ["matmul", "idle", "optimizer"],
                "calls": [3.0, 0.0, 1.0],
                "time_s": [matmul_s, 1e-3, optimizer_s],
                "share": [1.0, 0.2, 1.0],
            },
            "kernels": kernels(*(rows if named else rows[:2])),
        },
    )


def ceiling(rate: float, kind: str, **environment: Any) -> Record:
    config = {"kind": kind, "dtype": "fp32", "device": "cuda"}
    here = dataclasses.replace(ENVIRONMENT, **environment)
    return a_record(workload="ceiling", key=kind, config=config, environment=here, facts={"rate": Fact(value=rate)})


def rows_for(*records: Record):
    return rows_of([("f.jsonl", record) for record in records])


def test_matmuls_and_the_optimizer_have_hand_computed_work():
    work = {part.name: part for part in work_of(profiled())}
    assert list(work) == ["attention projections", "mlp", "head", "AdamW"]
    assert [work[name].flops for name in ("attention projections", "mlp", "head")] == [PROJECTIONS, MLP, HEAD]
    assert work["head"].bytes == HEAD_BYTES
    assert work["head"].flops_per_s == pytest.approx(HEAD / 1e-3)
    assert work["AdamW"].bytes == 28_000_000
    assert work["AdamW"].flops == 14_000_000


def test_spans_are_summed_where_the_record_lacks_kernels():
    matmuls, _ = work_of(profiled(named=False))
    assert (matmuls.name, matmuls.flops, matmuls.time_s) == (
        "matmuls with weights",
        PROJECTIONS + MLP + HEAD,
        pytest.approx(3e-3),
    )


def test_unknown_work_is_left_out():
    assert [part.name for part in work_of(profiled(model={"function": "a:b"}))] == ["AdamW"]
    assert "AdamW" not in [part.name for part in work_of(profiled(clip_grad_norm=1.0))]
    assert "AdamW" not in [part.name for part in work_of(profiled(update="in_backward"))]


def test_the_devices_time_has_no_idle_time_in_it():
    assert device_time_s(profiled(matmul_s=3e-3, optimizer_s=1e-5)) == pytest.approx(3.01e-3)


def test_ceilings_are_measured_or_from_the_data_sheet_or_none():
    record = profiled()
    sheet = ceilings_of(record, rows_for(record))
    assert (sheet.memory.rate, sheet.memory.source) == (4.8e12, "NVIDIA H200 data sheet, dense")
    measured = ceilings_of(record, rows_for(record, ceiling(4.1e12, "copy"), ceiling(5e13, "matmul")))
    assert (measured.memory.rate, measured.memory.source) == (4.1e12, "measured here")
    assert (measured.arithmetic["fp32"].rate, measured.arithmetic["bf16"].rate) == (5e13, 990e12)
    elsewhere = ceilings_of(record, rows_for(record, ceiling(1e12, "copy", gpu="NVIDIA A10")))
    assert elsewhere.memory.rate == 4.8e12
    unknown = profiled(gpu="Somebody's GPU")
    assert ceilings_of(unknown, rows_for(unknown)) is None


def test_each_work_is_compared_with_the_roof_over_it():
    record = profiled()
    ceilings = ceilings_of(record, rows_for(record))
    adamw = work_of(record)[-1]
    assert ceilings.ridge("fp32") == pytest.approx(67e12 / 4.8e12)
    assert ceilings.share(adamw) == pytest.approx(28_000_000 / 1e-5 / 4.8e12)
    assert bound_words(adamw, ceilings) == "under memory's roof"


def test_sentences_follow_the_numbers():
    def text_of(record: Record) -> str:
        return " ".join(device_sentences(record, work_of(record), ceilings_of(record, rows_for(record))))

    text = text_of(profiled())
    assert "SMs and warps: AdamW stays at 58 % of the roof" in text
    assert "Tensor cores" not in text, "memory is the limit at so few FLOPs per byte"
    near = profiled(optimizer_s=7e-6)
    assert "Memory bounds AdamW: 0.5 FLOP per byte, 4,000.0 GB/s, 83 % of the roof." in text_of(near)
    assert "Caches: AdamW got 117 %" in text_of(profiled(optimizer_s=5e-6))
    idle = dataclasses.replace(near, samples={"step": seconds([0.01]), "busy": seconds([0.004])})
    assert "is idle for 60 % of it" in text_of(idle)
    assert "idle" not in text_of(near)


def test_a_missing_roof_is_stated():
    record = profiled(gpu="Somebody's GPU")
    (section,) = device_sections(rows_for(record))
    assert "No data sheet of Somebody's GPU is known, so there is no roof" in section.paragraphs[0]
    assert section.charts[0].layout["annotations"] == []
    assert section.tables[0].entries[0][-1].text == "–"


def test_the_chart_has_units_a_roof_and_every_mark():
    (section,) = device_sections(rows_for(profiled()))
    (chart,) = section.charts
    assert chart.layout["xaxis"]["title"]["text"] == "FLOP per byte moved"
    assert chart.layout["yaxis"]["title"]["text"] == "achieved TFLOP/s"
    marks = [trace for trace in chart.data if trace["mode"] == "markers+text"]
    assert [trace["text"][0] for trace in marks] == ["attention projections", "mlp", "head", "AdamW"]
    roof = chart.data[0]
    assert roof["y"][-1] == pytest.approx(67)
    assert roof["x"][1] == pytest.approx(67 / 4.8)


def test_many_cells_have_a_table_and_no_chart():
    records = [dataclasses.replace(profiled(context=16 * n), key=str(n)) for n in range(1, 7)]
    (section,) = device_sections(rows_for(*records))
    assert section.charts == ()
    assert len(section.tables[0].entries) == 6 * 4

"""The parts of the first step's extra time, and the sentences made of them, agree with numbers computed by hand."""

import pytest

from sources import ROOT
from trainstep.records.record import Record
from trainstep.report.kit.rows import of_workload, read_rows
from trainstep.report.step.warmup import warmup_sections
from trainstep.report.step.warmup_charts import first_step


def test_the_extra_time_of_the_first_step_has_hand_computed_parts(warmup_sweep):
    split = first_step(warmup_sweep[3])
    assert split.steady_s == 0.2
    assert split.extra_s == pytest.approx(1.8)
    assert split.compile_s == 0.7
    assert split.allocation_s == pytest.approx(0.3)  # 0.5 s with an empty cache against 0.2
    assert split.clock_s == pytest.approx(0.2)  # at 1 GHz instead of 2 it takes twice the time
    assert split.rest_s == pytest.approx(0.6)
    assert (split.context_s, split.allocations) == (0.3, 40)


def test_the_first_steady_step_and_the_bias_are_computed(warmup_sweep):
    split = first_step(warmup_sweep[3])
    assert split.settled == 4
    assert split.bias_after(0) == pytest.approx((2.0 + 0.5 + 0.25 + 7 * 0.2) / 10 / 0.2 - 1)
    assert split.bias_after(2) == pytest.approx((0.25 + 9 * 0.2) / 10 / 0.2 - 1)


def test_without_warmups_the_first_step_is_a_timed_one(warmup_sweep):
    split = first_step(warmup_sweep[0])
    assert (split.first_s, split.steady_s) == (2.0, 0.2)


def test_unmeasured_parts_are_none(cpu_record):
    split = first_step(cpu_record)
    assert (split.compile_s, split.allocation_s, split.clock_s, split.context_s) == (None, None, None, None)
    assert split.rest_s == pytest.approx(0.05 - 0.011)


def test_windows_and_failures_have_no_first_step(make, end_to_end):
    assert first_step(make(sync=5, steps=10)) is None
    assert first_step(end_to_end[3]) is None


def test_only_the_first_process_of_rounds_counts(make):
    """Three rounds of whole processes are joined, so the record holds three first steps."""
    facts = {"interleaving": "rounds", "interleaving_group": "g", "turn_steps": 4}
    record = make(warmups=(2.0, 0.3) * 3, step=[0.2, 0.2, 0.2, 0.21] * 3, facts=facts)
    split = first_step(record)
    assert split.steps_s == (2.0, 0.3, 0.2, 0.2, 0.2, 0.21)
    assert (split.warmups, split.steady_s) == (2, 0.2)
    assert first_step(make(warmups=(2.0,) * 3, facts={**facts, "turn_steps": "x"})) is None
    assert first_step(make(warmups=(2.0,) * 3, step=[0.2] * 12, facts={**facts, "compile_s": 1.0})) is None


def test_only_the_first_of_interleaved_processes_counts(make):
    facts = {"interleaving": "live", "interleaving_group": "g", "turn_steps": 1, "process_steps": 4}
    split = first_step(make(warmups=(2.0, 0.3) * 3, step=[0.2, 0.2, 0.2, 0.21] * 3, facts=facts))
    assert split.steps_s == (2.0, 0.3, 0.2, 0.2, 0.2, 0.21)


def test_parts_that_exceed_the_extra_time_leave_a_negative_rest(make):
    record = make(warmups=(0.3, 0.2), facts={"reallocated_step_s": 0.5})
    split = first_step(record)
    assert split.rest_s == pytest.approx(0.1 - 0.3)


def test_the_section_states_parts_and_bias(rows, warmup_sweep):
    [section] = warmup_sections(rows(warmup_sweep))
    text = " ".join(section.paragraphs)
    assert section.title == "Warming up: why one or two steps are not enough"
    assert "took 2.00 s, 10 times the steady 200.0 ms" in text
    assert "38.9 % compiling" in text
    assert "33.3 % the rest: lazy loading of kernels and libraries" in text
    assert "16.7 % device memory (cudaMalloc, 40 calls)" in text
    assert "11.1 % SM clock still climbing" in text
    assert "CUDA context took another 300.0 ms" in text
    assert "small 256 needs up to 3: loading, allocating and raising the clock" in text
    # Means of ten timed steps: 415 ms at w = 0, 235 at 1, 205 at 2, 200 at 5.
    assert "+107.5 % with w = 0; +17.5 % with w = 1; +2.5 % with w = 2" in text


def test_tables_of_the_section_hold_the_numbers_of_its_charts(rows, warmup_sweep):
    [section] = warmup_sections(rows(warmup_sweep))
    split, by_w, every_step = section.tables
    titles = [column.title for column in split.columns]
    row = dict(zip(titles, (entry.text for entry in split.entries[0]), strict=True))
    assert row["compiling (ms)"] == "700.0"
    assert row["the rest: lazy loading of kernels and libraries (ms)"] == "600.0"
    assert row["cudaMalloc calls"] == "40"
    assert row["CUDA context (ms), before"] == "300.0"
    assert [entry[-2].text for entry in by_w.entries] == [
        "415.0 ± 564.7",
        "235.0 ± 94.4",
        "205.0 ± 15.8",
        "200.0 ± 0.0",
    ]
    assert [entry.text for entry in every_step.entries[0]][2:6] == ["2,000", "500.0", "250.0", "200.0"]
    curve, mean, _ = section.charts
    assert list(curve.data[0]["y"])[:4] == [2000, 500, 250, 200]
    assert curve.data[0]["marker"]["symbol"][4:6] == ["circle-open", "circle"]
    assert mean.data[0]["y"][1:] == pytest.approx([235, 205, 200])


def test_one_warmup_is_enough_if_the_second_step_is_steady(rows, make):
    [section] = warmup_sections(rows([make(warmups=(1.0, 0.2, 0.2), step=[0.2] * 5)]))
    assert section.title == "Warming up"
    assert "one warm-up is enough" in " ".join(section.paragraphs)


def test_noise_is_not_explained_as_warming_up(rows, make):
    """Steps of the demo on a busy machine: the first takes no longer than the later ones."""
    steps = [2.6, 1.8, 1.0, 3.4, 2.2, 2.9, 4.8, 2.1, 3.0, 2.4]
    [section] = warmup_sections(rows([make(warmups=(3.6, 6.8, 7.8, 5.6, 4.7), step=steps)]))
    assert section.title == "Warming up"
    text = " ".join(section.paragraphs)
    assert "these steps do not show whether a warm-up is needed" in text
    assert "lazy loading" not in text


def test_two_pages_of_one_machine_agree():
    """Steps vary by a few percent; earlier versions called two warm-ups enough on one page and too few on the other."""
    for name in ("warmup", "end_to_end"):
        [section] = warmup_sections(of_workload(read_rows([ROOT / f"results/h200/{name}.jsonl"]), "train_step"))
        assert "two warm-ups are enough for all" in " ".join(section.paragraphs)
        assert section.title == "Warming up"


def test_a_cell_that_needs_more_warmups_is_named(rows, make):
    steady = [make(context=context, warmups=(1.0, 0.2, 0.2), step=[0.2] * 5) for context in (128, 256)]
    slow = make(context=512, warmups=(1.0, 0.5, 0.5, 0.2), step=[0.2] * 5)
    [section] = warmup_sections(rows([*steady, slow]))
    assert section.title == "Warming up"
    assert "one warm-up is enough for 2 of 3 cells; small 512 needs up to 3: " in " ".join(section.paragraphs)


def test_without_warmups_there_is_no_section(rows, end_to_end):
    assert not warmup_sections(rows(end_to_end))


def test_cells_that_all_failed_make_no_section(rows, end_to_end):
    failed: Record = end_to_end[3]
    assert not warmup_sections(rows([failed]))

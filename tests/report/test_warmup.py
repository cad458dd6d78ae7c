"""The split of the first step's extra time and the sentences made of it, against numbers worked out by hand."""

import pytest

from sources import ROOT
from trainstep.records.record import Record
from trainstep.report.rows import of_workload, read_rows
from trainstep.report.warmup_charts import first_step
from trainstep.report.warmup_page import warmup_sections


def test_the_parts_of_the_first_steps_extra_time(warmup_sweep):
    found = first_step(warmup_sweep[3])
    assert found.steady_s == 0.2
    assert found.extra_s == pytest.approx(1.8)
    assert found.compile_s == 0.7
    assert found.allocation_s == pytest.approx(0.3)  # 0.5 s with an empty cache against 0.2
    assert found.clock_s == pytest.approx(0.2)  # at 1 GHz instead of 2 it takes twice the time
    assert found.rest_s == pytest.approx(0.6)
    assert (found.context_s, found.allocations) == (0.3, 40)


def test_from_which_step_on_times_are_steady(warmup_sweep):
    found = first_step(warmup_sweep[3])
    assert found.settled == 4
    assert found.bias_after(0) == pytest.approx((2.0 + 0.5 + 0.25 + 7 * 0.2) / 10 / 0.2 - 1)
    assert found.bias_after(2) == pytest.approx((0.25 + 9 * 0.2) / 10 / 0.2 - 1)


def test_without_warmups_the_first_timed_step_is_the_first(warmup_sweep):
    found = first_step(warmup_sweep[0])
    assert (found.first_s, found.steady_s) == (2.0, 0.2)


def test_what_was_not_measured_is_no_part(cpu_record):
    found = first_step(cpu_record)
    assert (found.compile_s, found.allocation_s, found.clock_s, found.context_s) == (None, None, None, None)
    assert found.rest_s == pytest.approx(0.05 - 0.011)


def test_windows_and_failures_have_no_first_step(make, end_to_end):
    assert first_step(make(sync=5, steps=10)) is None
    assert first_step(end_to_end[3]) is None


def test_of_rounds_the_first_process_alone(make):
    """Three rounds of whole processes stand end to end: every fourth warm-up is a first step."""
    facts = {"interleaving": "rounds", "interleaving_group": "g", "turn_steps": 4}
    record = make(warmups=(2.0, 0.3) * 3, step=[0.2, 0.2, 0.2, 0.21] * 3, facts=facts)
    found = first_step(record)
    assert found.steps_s == (2.0, 0.3, 0.2, 0.2, 0.2, 0.21)
    assert (found.warmups, found.steady_s) == (2, 0.2)
    assert first_step(make(warmups=(2.0,) * 3, facts={**facts, "turn_steps": "x"})) is None
    assert first_step(make(warmups=(2.0,) * 3, step=[0.2] * 12, facts={**facts, "compile_s": 1.0})) is None


def test_of_several_processes_that_took_turns_the_first_alone(make):
    facts = {"interleaving": "live", "interleaving_group": "g", "turn_steps": 1, "process_steps": 4}
    found = first_step(make(warmups=(2.0, 0.3) * 3, step=[0.2, 0.2, 0.2, 0.21] * 3, facts=facts))
    assert found.steps_s == (2.0, 0.3, 0.2, 0.2, 0.2, 0.21)


def test_parts_that_exceed_the_extra_time_leave_a_negative_rest(make):
    record = make(warmups=(0.3, 0.2), facts={"reallocated_step_s": 0.5})
    found = first_step(record)
    assert found.rest_s == pytest.approx(0.1 - 0.3)


def test_the_section_answers_from_the_numbers(rows, warmup_sweep):
    [section] = warmup_sections(rows(warmup_sweep))
    said = " ".join(section.paragraphs)
    assert section.title == "Warming up: why one or two steps are not enough"
    assert "took 2.00 s, 10 times the steady 200.0 ms" in said
    assert "38.9 % compiling" in said
    assert "33.3 % the rest: lazy loading of kernels and libraries" in said
    assert "16.7 % device memory (cudaMalloc, 40 calls)" in said
    assert "11.1 % SM clock still climbing" in said
    assert "CUDA context took another 300.0 ms" in said
    assert "small 256 needs up to 3: what is loaded, allocated and clocked up" in said
    # Means of ten timed steps: 415 ms at w = 0, 235 at 1, 205 at 2, 200 at 5.
    assert "+107.5 % with w = 0; +17.5 % with w = 1; +2.5 % with w = 2" in said


def test_its_tables_hold_the_numbers_of_its_charts(rows, warmup_sweep):
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


def test_one_warmup_is_enough_where_it_is(rows, make):
    [section] = warmup_sections(rows([make(warmups=(1.0, 0.2, 0.2), step=[0.2] * 5)]))
    assert section.title == "Warming up"
    assert "one warm-up is enough" in " ".join(section.paragraphs)


def test_noise_is_not_explained_as_warming_up(rows, make):
    """The demo on a busy machine: its first step is well within what its later ones take."""
    steps = [2.6, 1.8, 1.0, 3.4, 2.2, 2.9, 4.8, 2.1, 3.0, 2.4]
    [section] = warmup_sections(rows([make(warmups=(3.6, 6.8, 7.8, 5.6, 4.7), step=steps)]))
    assert section.title == "Warming up"
    said = " ".join(section.paragraphs)
    assert "nothing can be told of warming up" in said
    assert "lazy loading" not in said


def test_two_studies_of_one_machine_agree():
    """One page said that two warm-ups are enough, another that they are not, of steps that vary by a few percent."""
    for name in ("warmup", "end_to_end"):
        [section] = warmup_sections(of_workload(read_rows([ROOT / f"results/h200/{name}.jsonl"]), "train_step"))
        assert "two warm-ups are enough for all" in " ".join(section.paragraphs)
        assert section.title == "Warming up"


def test_one_slow_cell_is_named_beside_the_others(rows, make):
    quick = [make(context=context, warmups=(1.0, 0.2, 0.2), step=[0.2] * 5) for context in (128, 256)]
    late = make(context=512, warmups=(1.0, 0.5, 0.5, 0.2), step=[0.2] * 5)
    [section] = warmup_sections(rows([*quick, late]))
    assert section.title == "Warming up"
    assert "one warm-up is enough for 2 of 3 cells; small 512 needs up to 3: " in " ".join(section.paragraphs)


def test_no_section_where_nothing_was_warmed_up(rows, end_to_end):
    assert not warmup_sections(rows(end_to_end))


def test_cells_that_all_failed_make_no_section(rows, end_to_end):
    failed: Record = end_to_end[3]
    assert not warmup_sections(rows([failed]))

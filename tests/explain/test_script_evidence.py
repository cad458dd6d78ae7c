"""A run of a script: what it waits for is found, with the line of the user's code."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from run_records import COMPILED, WAITS, a_run, records_of, watched
from trainstep.config.script import Part
from trainstep.explain.budget import AS_THEY_RUN, step_budget
from trainstep.explain.evidence import taken_from
from trainstep.explain.script_changes import ScriptPlace, script_candidates
from trainstep.explain.script_evidence import script_evidence
from trainstep.records.record import Record
from trainstep.traces.patterns.pattern import ATTENTION, FP32_ATTENTION, ODD_SIZES, OPTIMIZER, PRECISION, SLICES


def parts(**ms: float) -> dict[Part, float]:
    return {part: ms.get(part.name.lower(), 0.0) for part in Part}


def test_a_slow_loader_is_found_and_the_rest_is_work_as_it_runs():
    budget = step_budget(script_evidence([a_run(parts_ms=parts(data=20.0, forward=3.0, backward=4.0))]), None)
    assert [finding.cause for finding in budget.findings] == ["data"]
    assert budget.findings[0].excess.time_s == pytest.approx(0.02)
    assert budget.floor == {AS_THEY_RUN: pytest.approx(0.007)}
    assert budget.explained_share == pytest.approx(1.0)


def test_workers_are_expected_to_gain_what_their_number_makes_room_for():
    """Two cores: two workers have a batch of 20 ms ready every 10, and the rest of the step takes 7."""
    run = a_run(parts_ms=parts(data=20.0, forward=3.0, backward=4.0), facts={"loader_workers": 0})
    assert run.environment.cores == 2
    (finding,) = step_budget(script_evidence([run]), None).findings
    assert finding.gain.time_s == pytest.approx(0.017)
    assert (finding.gain.low_s, finding.gain.high_s) == (0.0, pytest.approx(0.02))


@pytest.mark.parametrize("file", ["<string>", "", "<stdin>"])
def test_generated_code_is_no_place(file: str):
    """A dataclass's `__init__` is in `<string>`; what somebody typed is a place."""
    of_file, longer = {**COMPILED, "file": [file] * 2}, {**COMPILED, "time_s": [2.0, 2.0], "file": [file] * 2}
    runs = a_run(tables={"compilations": of_file}), a_run(tables={"compilations": longer})
    own = a_run(tables={"compilations": COMPILED}, first_step=21)
    places = [script_evidence(records).places.get("recompiles") for records in ([runs[0]], [runs[1], own])]
    expected = ["<stdin>:3"] * 2 if file == "<stdin>" else ["None", "/x/project/train.py:3"]
    assert [str(place) for place in places] == expected


def test_recompiles_every_few_steps_are_found_with_their_line():
    [run] = [a_run(parts_ms=parts(forward=60.0, backward=4.0), tables={"compilations": COMPILED})]
    finding = step_budget(script_evidence([run]), None).findings[0]
    assert finding.cause == "recompiles"
    assert finding.excess.time_s == pytest.approx(1.0 / 20), "one second of a second compilation, over 20 steps"
    assert str(finding.place) == "/x/project/train.py:3"


def test_a_value_read_each_step_is_found_on_a_gpu_with_its_line():
    facts = {"inspected_step": 5, "exposed_s": 0.0}
    classes = {"phase": ["forward"], "class": ["matmul"], "calls": [1.0], "time_s": [0.005], "share": [1.0]}
    run = a_run(tables={"waits": WAITS, "classes": classes}, facts=facts, device="cuda")
    finding = step_budget(script_evidence([run]), None).findings[0]
    assert finding.cause == "synchronisations"
    assert finding.excess.time_s == pytest.approx(0.003), "of 5 ms without work, the loader has 2 and the line the rest"
    assert str(finding.place) == "/x/project/train.py:12"


@pytest.mark.parametrize(
    ("busy_ms", "host_ms", "outside_ms", "late_ms"),
    [(40.0, 20.0, 0.0, 10.0), (20.0, 35.0, 0.0, 15.0), (20.0, 20.0, 25.0, 5.0), (49.0, 60.0, 0.0, 0.0)],
)
def test_launching_late_after_a_wait_is_the_waits_and_not_the_launches(
    busy_ms: float, host_ms: float, outside_ms: float, late_ms: float
):
    """A step of 50 ms: without the wait it takes as long as the GPU's work or the host's own, the longer of the two."""
    classes = {"phase": ["forward"], "class": ["matmul"], "calls": [1.0], "time_s": [busy_ms / 1e3], "share": [1.0]}
    phases = ("forward", "backward", "optimizer", "outside phases")
    host = {
        "phase": list(phases),
        "host_s": [host_ms / 2e3, host_ms / 2e3, 0.0, 0.020 + outside_ms / 1e3],
        "blocked_s": [0.0, 0.0, 0.0, 0.020],
        **dict.fromkeys(("device_s", "idle_s", "launches", "launch_s", "lead_s"), [0.0] * 4),
        **dict.fromkeys(("allocations", "allocation_s", "queue_full", "queue_full_s"), [0.0] * 4),
    }
    usual = parts(forward=host_ms / 2, backward=host_ms / 2, other=50 - host_ms) if host_ms < 50 else None
    ran = a_run(
        parts_ms=usual or parts(forward=25.0, backward=25.0),
        tables={"waits": {**WAITS, "time_s": [None]}, "classes": classes, "host": host},
        facts={"inspected_step": 5},
        device="cuda",
    )
    found = {finding.cause: finding.excess.time_s for finding in step_budget(script_evidence([ran]), None).findings}
    assert found.get("synchronisations", 0.0) == pytest.approx(late_ms / 1e3)
    no_waits = replace(ran, tables={name: table for name, table in ran.tables.items() if name != "waits"})
    causes = [finding.cause for finding in step_budget(script_evidence([no_waits]), None).findings]
    assert causes == ["host_launches"]


def test_a_collector_is_found_and_two_records_are_one_run():
    records = [a_run(collection_ms=3.0), a_run(collection_ms=3.0, first_step=21)]
    finding = next(
        finding
        for finding in step_budget(script_evidence(records), None).findings
        if finding.cause == "garbage_collector"
    )
    assert finding.excess.time_s == pytest.approx(0.003)


def test_a_run_of_warm_ups_alone_is_refused():
    with pytest.raises(ValueError, match="only warm-ups"):
        script_evidence([a_run(steps=0)])


class SlowSamples(Dataset[torch.Tensor]):
    """Samples that each take 10 ms to make."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.full((8,), float(index))


@pytest.mark.slow
def test_a_real_slow_loader_is_found(tmp_path: Path):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(tmp_path) as watch:
        for batch in DataLoader(SlowSamples(), batch_size=1):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    budget = step_budget(script_evidence(records_of(watch)), None)
    assert budget.findings[0].cause == "data"
    assert budget.findings[0].excess.time_s > 0.01
    assert budget.explained_share >= 0.95


def patterns(**changes: Any) -> dict[str, list[Any]]:
    """A table with one pattern: 30 ms of a backward of 40 ms under the profiler, of which 10 ms at least."""
    row = {"pattern": ATTENTION, "phase": "backward", "calls": 4.0, "time_s": 0.03, "least_s": 0.01, "gap_s": 0.0}
    row |= {"ranges": 0.0, "of_s": 0.04, "of_ranges": 0.0, "what": "scores"} | changes
    return {name: [value] for name, value in row.items()}


def inspected(table: dict[str, list[Any]], **more: Any) -> Record:
    return a_run(
        parts_ms=parts(forward=10.0, backward=20.0, optimizer=2.0),
        tables={"patterns": table},
        facts={"inspected_step": 5, **more},
    )


def test_a_habit_is_scaled_to_the_usual_phase_and_its_gain_is_all_of_it():
    finding = step_budget(script_evidence([inspected(patterns())]), None).findings[0]
    assert finding.cause == "attention_kernel"
    assert finding.excess.time_s == pytest.approx(0.01), "(30 - 10) ms of 40 are half of the usual 20"
    assert finding.gain.time_s == finding.excess.time_s


def test_what_the_profiler_adds_to_each_range_is_taken_off_first():
    table = patterns(
        pattern=OPTIMIZER, phase="optimizer", time_s=0.006, least_s=0.0, of_s=0.006, ranges=1000.0, of_ranges=1000.0
    )
    finding = step_budget(script_evidence([inspected(table)]), None).findings[0]
    assert finding.cause == "optimizer"
    assert finding.excess.time_s == pytest.approx(0.002), "4 us a range are the profiler's"


def test_clipping_before_an_update_is_no_part_of_it():
    table = patterns(
        pattern=OPTIMIZER, phase="optimizer", time_s=0.002, least_s=0.0005, least_is_timed=True, of_s=0.002
    )
    finding = step_budget(script_evidence([inspected(table, update_share=0.6)]), None).findings[0]
    assert finding.excess.time_s == pytest.approx(0.6 * 0.002 - 0.0005), (
        "of 2 ms 40 % are between backward and the update"
    )


def test_slices_take_the_middle_between_the_phases_proportion_and_all_of_what_the_profiler_adds():
    """Backward: 40 ms under the profiler for the usual 20, 30 of them slices. Forward takes 10 ms as usual."""
    rows = [
        patterns(pattern=SLICES, least_s=0.0, ranges=0.0, of_ranges=0.0),
        patterns(pattern=SLICES, phase="forward", time_s=0.002, least_s=0.0, of_s=0.01),
    ]
    table = {name: [*rows[0][name], *rows[1][name]] for name in rows[0]}
    finding = step_budget(script_evidence([inspected(table)]), None).findings[0]
    in_proportion, all_theirs = 0.03 * 20 / 40, 0.03 - (0.04 - 0.02)
    assert finding.excess.time_s == pytest.approx((in_proportion + all_theirs) / 2 + 0.002)


def test_slices_whose_ranges_explain_all_of_the_lengthening_are_in_proportion():
    """4,000 ranges of 4 us are 16 of the 36 ms; forward's ranges cost nothing, which must not matter then."""
    rows = [
        patterns(pattern=SLICES, time_s=0.03, least_s=0.0, ranges=3000.0, of_s=0.036, of_ranges=4000.0),
        patterns(pattern=SLICES, phase="forward", time_s=0.002, least_s=0.0, of_s=0.01),
    ]
    table = {name: [*rows[0][name], *rows[1][name]] for name in rows[0]}
    finding = step_budget(script_evidence([inspected(table)]), None).findings[0]
    assert finding.excess.time_s == pytest.approx(0.03 - 3000 * 4e-6 + 0.002)


def test_what_was_timed_alone_is_not_scaled():
    table = patterns(least_s=0.003, least_is_timed=True)
    finding = step_budget(script_evidence([inspected(table)]), None).findings[0]
    assert finding.excess.time_s == pytest.approx(0.015 - 0.003), "30 ms of 40 are 15 of the usual 20"


def test_what_was_timed_grows_with_a_step_that_had_less_to_do_than_usual():
    """An inspected batch of half the usual time: attention and what would be in its place are of the short batch both."""
    table = patterns(least_s=0.003, least_is_timed=True, of_s=0.01, time_s=0.008)
    finding = step_budget(script_evidence([inspected(table)]), None).findings[0]
    assert finding.excess.time_s == pytest.approx(2 * (0.008 - 0.003))


def test_the_least_is_taken_off_all_phases_together():
    """Forward's 10 ms of 20 under the profiler are 5 of the usual 10, less than its part of the least; backward's stay 18."""
    rows = [
        patterns(phase=phase, least_s=0.008, least_is_timed=True, of_s=0.02, time_s=time_s)
        for phase, time_s in (("forward", 0.01), ("backward", 0.018))
    ]
    table = {name: [*rows[0][name], *rows[1][name]] for name in rows[0]}
    finding = step_budget(script_evidence([inspected(table)]), None).findings[0]
    assert finding.excess.time_s == pytest.approx(0.005 - 0.008 + 0.018 - 0.008)


def test_an_inspection_that_failed_takes_no_part():
    good, failed = inspected(patterns(), profiled_step_s=0.04), inspected({}, trace_failed="KeyError: 'ts'")
    alone, beside = (step_budget(script_evidence(runs), None) for runs in ([good], [good, failed, failed]))
    assert [finding.excess for finding in beside.findings] == [finding.excess for finding in alone.findings] != []


def test_the_median_of_the_quicker_inspected_steps_counts_and_an_unknown_pattern_is_left_out():
    quick = [
        inspected(table, profiled_step_s=0.035)
        for table in (patterns(), patterns(time_s=0.01), patterns(pattern="new"))
    ]
    slow = [inspected(patterns(), profiled_step_s=0.08)] * 2
    assert step_budget(script_evidence([*quick, *slow]), None).findings == ()
    assert step_budget(script_evidence([*slow, *quick[1:]]), None).findings == ()
    assert step_budget(script_evidence([quick[0], quick[0], *slow, *quick[1:]]), None).findings != ()


@pytest.mark.parametrize(("waited_s", "others", "found"), [(0.45, 0.6, True), (0.45, 0.01, False), (0.03, 0.6, False)])
def test_another_process_is_named_where_threads_waited_and_others_computed(waited_s: float, others: float, found: bool):
    run = inspected(patterns(time_s=0.0), core_wait_s=waited_s, others_cpu_share=others)
    budget = step_budget(script_evidence([run]), None)
    assert [finding.cause for finding in budget.findings] == ["another_process"] * found
    if found:
        assert budget.findings[0].excess.time_s == pytest.approx(0.3 * 0.032), "0.45 of the record's 1.5 s"
    assert sum(budget.floor.values()) + sum(f.excess.time_s for f in budget.findings) == pytest.approx(0.032)


def test_a_record_without_a_step_takes_no_part():
    """A part of a run in which no step was timed has no samples."""
    run = inspected(patterns(time_s=0.0), core_wait_s=0.45, others_cpu_share=0.6)
    alone, beside = (step_budget(script_evidence(runs), None) for runs in ([run], [run, replace(run, samples={})]))
    assert [finding.excess for finding in beside.findings] == [finding.excess for finding in alone.findings]


def test_a_start_in_which_nobody_took_anything_takes_no_part():
    """The first record has imports, warm-ups and a few steps; a process that others disturb later is no less disturbed."""
    run = inspected(patterns(time_s=0.0), core_wait_s=0.45, others_cpu_share=0.6)
    early = {name: replace(column, warmups=(9.0,)) for name, column in run.samples.items()}
    start = replace(run, samples=early, duration_s=20.0, facts={"steps_seen": run.facts["steps_seen"]})
    alone, beside = (step_budget(script_evidence(runs), None) for runs in ([run], [start, run]))
    assert [finding.excess for finding in beside.findings] == [finding.excess for finding in alone.findings]


def test_where_most_steps_are_in_the_record_of_the_start_it_counts():
    """A last record with a few steps and the script's end says little about the others."""
    run = inspected(patterns(time_s=0.0), core_wait_s=0.45, others_cpu_share=0.6)
    early = {name: replace(column, warmups=(9.0,)) for name, column in run.samples.items()}
    late = {name: replace(column, values=column.values[:2]) for name, column in run.samples.items()}
    records = [
        replace(run, samples=early),
        replace(run, samples=late, facts={"inspected_step": run.facts["inspected_step"]}),
    ]
    assert [finding.cause for finding in step_budget(script_evidence(records), None).findings] == ["another_process"]


@pytest.mark.parametrize(("others", "share", "found"), [(2, 0.5, True), (2, 0.01, False), (0, 0.5, False)])
def test_on_a_gpu_the_multiprocessors_that_others_used_count(others: int, share: float, found: bool):
    classes = {"phase": ["forward"], "class": ["matmul"], "calls": [1.0], "time_s": [0.004], "share": [1.0]}
    facts = {"inspected_step": 5, "gpu_others": others, "gpu_others_share": share}
    run = a_run(parts_ms=parts(forward=20.0), tables={"classes": classes}, facts=facts, device="cuda")
    findings = {finding.cause: finding for finding in step_budget(script_evidence([run]), None).findings}
    assert ("another_process" in findings) == found
    if found:
        assert findings["another_process"].excess.time_s == pytest.approx(0.5 * 0.02)
        assert findings["another_process"].evidence == "2 other processes used 50 % of the GPU's multiprocessors"


def test_others_on_the_cores_take_nothing_of_the_gpus_work():
    classes = {"phase": ["forward"], "class": ["matmul"], "calls": [1.0], "time_s": [0.015], "share": [1.0]}
    facts = {"inspected_step": 5, "core_wait_s": 0.6, "others_cpu_share": 0.5}
    run = a_run(parts_ms=parts(forward=20.0), tables={"classes": classes}, facts=facts, device="cuda")
    budget = step_budget(script_evidence([run]), None)
    assert budget.floor_s == pytest.approx(0.015)
    assert [finding.cause for finding in budget.findings] == ["another_process"]


@pytest.mark.parametrize(("share", "taken"), [(0.9, 0.5), (0.3, 0.3)])
def test_kernels_that_another_process_interrupted_are_no_work_of_ones_own(share: float, taken: float):
    """They count as running while the other has the GPU, so that the profile shows a busy one."""
    classes = {"phase": ["forward"], "class": ["matmul"], "calls": [1.0], "time_s": [0.02], "share": [1.0]}
    facts = {"inspected_step": 5, "gpu_others": 1, "gpu_others_share": share}
    run = a_run(parts_ms=parts(forward=20.0), tables={"classes": classes}, facts=facts, device="cuda")
    [finding] = step_budget(script_evidence([run]), None).findings
    assert (finding.cause, finding.excess.time_s) == ("another_process", pytest.approx(taken * 0.02))


def test_what_ops_that_are_alike_take_longer_was_another_processs_turn():
    """Turns of different lengths: the share of multiprocessors and the number of processes say less."""
    classes = {"phase": ["forward"], "class": ["matmul"], "calls": [1.0], "time_s": [0.02], "share": [1.0]}
    facts = {"inspected_step": 5, "gpu_others": 1, "gpu_others_share": 0.71, "interrupted_share": 0.57}
    run = a_run(parts_ms=parts(forward=20.0), tables={"classes": classes}, facts=facts, device="cuda")
    [finding] = step_budget(script_evidence([run]), None).findings
    assert (finding.cause, finding.excess.time_s) == ("another_process", pytest.approx(0.57 * 0.02))
    alone = a_run(parts_ms=parts(forward=20.0), facts=facts | {"gpu_others": 0}, device="cuda")
    assert not step_budget(script_evidence([alone]), None).findings


@pytest.mark.parametrize(
    ("used", "alike", "taken"),
    [(0.5, 0.0, 0.25), (0.06, 0.4, 0.075), (0.7, 0.57, 0.57)],
    ids=["none", "far more", "as seen"],
)
def test_ops_and_multiprocessors_say_how_far_each_may_be_trusted(used: float, alike: float, taken: float):
    classes = {"phase": ["forward"], "class": ["matmul"], "calls": [1.0], "time_s": [0.02], "share": [1.0]}
    facts = {"inspected_step": 5, "gpu_others": 1, "gpu_others_share": used, "interrupted_share": alike}
    run = a_run(parts_ms=parts(forward=20.0), tables={"classes": classes}, facts=facts, device="cuda")
    [finding] = step_budget(script_evidence([run]), None).findings
    assert (finding.cause, finding.excess.time_s) == ("another_process", pytest.approx(taken * 0.02))


def test_a_host_that_runs_ahead_makes_no_step_shorter():
    """Behind an inspected step the host launches faster than the GPU runs, by whose clock a step takes 20 ms."""
    device = {Part.FORWARD: 6.0, Part.BACKWARD: 12.0, Part.OPTIMIZER: 2.0}
    ahead = a_run(parts_ms=parts(forward=10.0), device="cuda", device_ms=device)
    assert script_evidence([ahead]).measured_s == pytest.approx(0.02)
    late = a_run(parts_ms=parts(forward=30.0), device="cuda", device_ms=device)
    assert script_evidence([late]).measured_s == pytest.approx(0.03)
    assert script_evidence([ahead, late]).measured_s == pytest.approx(0.025), (
        "no mean of the one's host and the other's GPU"
    )


def test_device_times_of_another_number_of_steps_do_not_count():
    """A file from elsewhere may hold anything."""
    run = a_run(parts_ms=parts(forward=10.0), device="cuda", device_ms={Part.FORWARD: 20.0})
    fewer = replace(run.samples["device_forward"], values=(0.02,) * 3)
    run = replace(run, samples={**run.samples, "device_forward": fewer})
    assert script_evidence([run]).measured_s == pytest.approx(0.01)


def test_a_gpu_that_is_behind_makes_up_for_a_late_host():
    """Ten steps are launched in 10 ms each, ten in 30; of 20 ms each on the GPU, all but the last 10 ms are behind the host."""
    run = a_run(parts_ms=parts(forward=10.0), device="cuda", device_ms={Part.FORWARD: 20.0})
    times = [0.01] * 10 + [0.03] * 10
    run = replace(run, samples={**run.samples, "step": replace(run.samples["step"], values=tuple(times))})
    assert script_evidence([run]).measured_s == pytest.approx(max(sum(times), 20 * 0.02) / 20)


@pytest.mark.parametrize(
    ("passes", "elements", "causes"),
    [(80, 4000, ["accumulation_sync", "exposed_messages"]), (80, 1000, ["exposed_messages"])],
)
def test_a_sync_in_each_pass_is_told_from_one_in_the_last(passes: int, elements: int, causes: list[str]):
    facts = {
        "backward_passes": passes,
        "gradient_message_elements": elements,
        "gradient_messages": 8,
        "trained_elements": 1000,
    }
    run = inspected(patterns(time_s=0.0), exposed_s=0.008, profiled_step_s=0.032, **facts)
    budget = step_budget(script_evidence([run]), None)
    assert [finding.cause for finding in budget.findings] == causes
    assert budget.findings[0].excess.time_s == pytest.approx(0.006 if len(causes) == 2 else 0.008)
    assert " on average, counted as fp32" in budget.findings[-1].evidence


@pytest.mark.parametrize(
    ("messages", "elements", "fixed_s", "share"),
    [
        (61, 1_000_000, 0.0001, 60 * 0.0001 / 0.008),  # many small ones: the time of each, less that of one
        (31, 10_000_000, 0.0001, 29 * 0.0001 / 0.008),  # in two buckets
        (81, 1_000_000, 0.0002, 1.0),  # no more than is exposed
        (2, 10_000_000, 0.0002, 0.5),  # large ones: their bytes take the time
        (80, 1_000_000, None, 0.5),
    ],
)
def test_many_small_messages_gain_what_fewer_large_ones_leave(
    messages: int, elements: int, fixed_s: float | None, share: float
):
    facts = {
        "gradient_messages": messages,
        "gradient_message_elements": elements,
        "trained_elements": elements,
        **({} if fixed_s is None else {"gradient_message_fixed_s": fixed_s}),
    }
    run = inspected(patterns(time_s=0.0), exposed_s=0.008, profiled_step_s=0.032, **facts)
    [finding] = step_budget(script_evidence([run]), None).findings
    assert finding.gain.time_s == pytest.approx(share * finding.excess.time_s)


@pytest.mark.parametrize(("cores", "exposed_ms"), [(2, 2.0), (4, 1.0)])
def test_on_a_cpu_without_a_spare_core_half_of_what_is_hidden_counts(cores: int, exposed_ms: float):
    """Two ranks; of 6 ms under way, 2 are exposed, in a profiled step that takes twice as long; the median of three counts."""
    runs = [
        inspected(
            patterns(time_s=0.0),
            exposed_s=ms / 1e3,
            communication_s=0.006,
            profiled_step_s=0.064,
            gradient_messages=4,
        )
        for ms in (0.5, 2.0, 6.0)
    ]
    runs = [
        replace(run, config={**run.config, "ranks": 2}, environment=replace(run.environment, cores=cores))
        for run in runs
    ]
    [finding] = step_budget(script_evidence(runs), None).findings
    assert finding.excess.time_s == pytest.approx(exposed_ms / 1e3)


@pytest.mark.parametrize(
    ("gpu", "precision", "share"),
    [
        ("NVIDIA H200", "highest", 67 / 990),
        ("NVIDIA L40S", "highest", 91.6 / 362),
        ("a new one", "highest", 1 / 15),
        ("NVIDIA H200", "high", 1 / 2),
    ],
)
def test_work_in_fp32_on_a_gpu_is_measured_against_16_bits_by_the_data_sheet(gpu: str, precision: str, share: float):
    """Attention comes as near to it as was measured, with TF32 as matmuls do."""
    classes = {
        "phase": ["forward"] * 2, "class": ["matmul", "attention"], "calls": [1.0] * 2, "time_s": [0.014, 0.009],
        "share": [0.6, 0.4],
    }  # fmt: skip
    tables = [
        patterns(pattern=name, time_s=s, least_s=0.0) for name, s in ((PRECISION, 0.014), (FP32_ATTENTION, 0.009))
    ]
    table = {column: [*tables[0][column], *tables[1][column]] for column in tables[0]}
    facts = {"inspected_step": 5, "matmul_precision": precision}
    tabled = {"patterns": table, "classes": classes}
    run = a_run(parts_ms=parts(forward=25.0), tables=tabled, facts=facts, device="cuda")
    run = replace(run, environment=replace(run.environment, gpu=gpu))
    left_s = {"matmul": 0.014 * share, "attention": 0.009 * share * (1.55 if precision == "highest" else 1.0)}
    budget = step_budget(script_evidence([run]), None)
    assert budget.findings[0].cause == "precision"
    assert budget.findings[0].excess.time_s == pytest.approx(0.023 - sum(left_s.values()))
    assert budget.as_they_run_s == pytest.approx(left_s), "what is found is not told twice"


def test_matmuls_of_odd_sizes_cost_what_the_others_rate_would_save():
    classes = {
        "phase": ["forward"] * 2, "class": ["matmul", "element-wise"], "calls": [4.0] * 2, "time_s": [0.020, 0.009],
        "share": [0.7, 0.3],
    }  # fmt: skip
    what = "16-bit matmuls with a size of 50,257, no multiple of 8, take 5.0 times as long as others"
    tables = {
        "patterns": patterns(pattern=ODD_SIZES, time_s=0.015, least_s=0.003, what=what),
        "classes": classes,
    }
    run = a_run(parts_ms=parts(forward=40.0), tables=tables, facts={"inspected_step": 5}, device="cuda")
    budget = step_budget(script_evidence([run]), None)
    finding = budget.findings[0]
    assert (finding.cause, finding.evidence) == ("matmul_shapes", what)
    assert finding.excess.time_s == pytest.approx(0.012)
    assert budget.as_they_run_s["matmul"] == pytest.approx(0.008), "what is found is not told twice"
    place = ScriptPlace(on_gpu=True, ranks=1, cores=16, precision="bf16_autocast")
    [whole] = [tried for tried in script_candidates(budget, place, []) if tried.cause == "matmul_shapes"]
    assert (whole.fields, whole.gain) == ({"compile": "module"}, finding.gain)


@pytest.mark.parametrize(
    ("gpu", "known_s", "said"), [("NVIDIA H200", 0.010, True), ("NVIDIA H200", 0.005, False), (None, 0.010, False)]
)
def test_how_fast_matmuls_are_is_said_where_most_of_them_are_known(gpu: str | None, known_s: float, said: bool):
    classes = {"phase": ["forward"], "class": ["matmul"], "calls": [1.0], "time_s": [0.010], "share": [1.0]}
    facts = {"inspected_step": 5, "matmul_flops": 495e12 * known_s, "matmul_flops_s": known_s}
    run = a_run(parts_ms=parts(forward=20.0), tables={"classes": classes}, facts=facts, device="cuda")
    run = replace(run, environment=replace(run.environment, gpu=gpu))
    budget = step_budget(script_evidence([run]), None)
    sentence = "The step's 16-bit matmuls reach 495 TFLOP/s, 50 % of the data sheet's 990."
    assert (sentence in budget.notes) == said
    assert budget.as_they_run_s == {"matmul": pytest.approx(0.010)}


def test_time_is_taken_from_its_group_first_and_then_from_the_longest():
    groups = {"matmul": 5.0, "attention": 1.0, "casts": 2.0}
    assert taken_from(groups, "attention", 0.5) == {"matmul": 5.0, "attention": 0.5, "casts": 2.0}
    assert taken_from(groups, "attention", 3.0) == {"matmul": 3.0, "casts": 2.0}
    assert taken_from(groups, "optimizer", 7.5) == {"attention": 0.5}


def test_only_copies_from_pageable_memory_are_found():
    kernel = {"phase": "forward", "class": "copies", "span": "", "layers": "", "calls": 1.0, "share": 0.5}
    for kind, causes in (("Pageable", ["host_copies"]), ("Pinned", [])):
        row = (
            kernel
            | {"name": f"Memcpy HtoD ({kind} -> Device)"}
            | dict.fromkeys(("time_s", "mean_s", "min_s", "max_s"), 0.01)
        )
        classes = {"phase": ["forward"], "class": ["copies"], "calls": [1.0], "time_s": [0.01], "share": [1.0]}
        tables = {"classes": classes, "kernels": {name: [value] for name, value in row.items()}}
        run = a_run(parts_ms=parts(forward=10.0), tables=tables, facts={"inspected_step": 5}, device="cuda")
        assert [finding.cause for finding in step_budget(script_evidence([run]), None).findings] == causes


@pytest.mark.parametrize(
    ("kind", "calls", "read_s", "late"),
    [
        ("Pageable", 3, None, {"host_copies": 0.012}),
        ("Pageable", 6, 1e-4, {"host_copies": 0.007, "synchronisations": 0.005}),  # half of the waits are others
        (
            "Pageable",
            3,
            0.008,
            {"host_copies": 0.002, "synchronisations": 0.010},
        ),  # a read has waited for the work before it
        ("Pinned", 3, None, {"synchronisations": 0.010}),
        (
            "Pageable",
            0,
            None,
            {"host_copies": 0.008, "host_launches": 0.004},
        ),  # asked not to block: no line waits, the driver does
        ("Pinned", 0, None, {"host_launches": 0.010}),
    ],
)
def test_who_waits_for_a_copy_from_pageable_memory_would_not_with_pinned(
    kind: str, calls: int, read_s: float | None, late: dict[str, float]
):
    """A step of 20 ms, of which the GPU works for 10, and the host's own time is 4: what is launched late takes 10."""
    kernels = {"phase": ["forward"] * 2, "class": ["matmul", "copies"], "span": [""] * 2, "layers": [""] * 2}
    kernels |= {"name": ["gemm", f"Memcpy HtoD ({kind} -> Device)"], "calls": [1.0, 3.0], "share": [0.8, 0.2]}
    kernels |= {name: [0.008, 0.002] for name in ("time_s", "mean_s", "min_s", "max_s")}
    classes = {name: kernels[name] for name in ("phase", "class", "calls", "time_s", "share")}
    host = {"phase": ["forward"], "host_s": [0.004], "blocked_s": [0.0], "allocation_s": [0.0], "idle_s": [0.006]}
    waits = {"file": ["t.py"] * 2, "line": [1, 2], "source": ["loss.item()", "x.to()"], "calls": [1, calls]}
    waits |= {"why": ["read", "waits"], "time_s": [read_s, None]}
    if read_s is None:
        waits = {name: column[1:] for name, column in waits.items()}
    tables = {"classes": classes, "kernels": kernels, "host": host} | ({"waits": waits} if calls else {})
    run = a_run(parts_ms=parts(forward=20.0), tables=tables, facts={"inspected_step": 5}, device="cuda")
    found = {finding.cause: finding.excess.time_s for finding in step_budget(script_evidence([run]), None).findings}
    assert found == pytest.approx(late, abs=2e-4)

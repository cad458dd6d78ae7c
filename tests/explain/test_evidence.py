"""Evidence from records made by hand: each kernel is in one group, and what a record says of others and clocks is read."""

from typing import Any

import pytest

from record_maker import a_record, seconds
from trainstep.explain.evidence import ATTENTION_MATMUL, CASTS, HOST_COPIES, MEMORY, evidence_of, work_of
from trainstep.records.facts import facts_of
from trainstep.records.record import Failure
from trainstep.traces.kernel_classes import ATTENTION, MATMUL, OPTIMIZER

CLASSES = [
    ("forward", "matmul", 10.0),
    ("forward", "softmax", 2.0),
    ("forward", "element-wise", 5.0),
    ("forward", "copies", 4.0),
    ("forward", "communication", 3.0),
    ("optimizer", "element-wise", 1.0),
    ("outside phases", "idle", 9.0),
]
ATTENTION_PARTS = [("forward", "matmuls", 3.0), ("forward", "softmax", 2.0), ("forward", "mask, scale and copies", 2.0)]
COPIES = [
    ("forward", "copies", "attention scores", "direct_copy_kernel", 1.0),
    ("forward", "copies", "", "Memcpy HtoD (Pageable -> Device)", 0.5),
    ("forward", "copies", "mlp", "direct_copy_kernel", 2.5),
]


def columns(names: str, rows: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {name: list(values) for name, values in zip(names.split(), zip(*rows, strict=True), strict=True)}


TABLES = {
    "classes": columns("phase class time_s", CLASSES),
    "attention": columns("phase part time_s", ATTENTION_PARTS),
    "kernels": columns("phase class span name time_s", COPIES),
}


def test_each_kernel_is_in_one_group():
    work = work_of(TABLES)
    assert work == {
        MATMUL: 7.0,
        ATTENTION_MATMUL: 3.0,
        ATTENTION: 4.0,
        MEMORY: 4.0,
        OPTIMIZER: 1.0,
        HOST_COPIES: 0.5,
        CASTS: 2.5,
    }
    assert sum(work.values()) == 10 + 2 + 5 + 4 + 1, "all classes but communication and idle time"


def test_a_profile_without_tables_has_no_work():
    assert work_of({}) == {}


def test_windows_of_steps_come_before_single_steps():
    record = a_record(samples={"step": seconds([2, 2, 2]), "window_step": seconds([1, 1])})
    assert evidence_of(record).measured_s == 1


def test_who_else_used_the_machine_and_what_lowered_the_clock_is_read():
    facts = facts_of(gpu_busy_before=0.4, gpu_other_processes=1, sm_clock_max_hz=2e9, throttle_reasons="power cap")
    record = a_record(facts=facts, samples={"step": seconds([1, 1]), "sm_clock": seconds([1e9, 1e9])})
    evidence = evidence_of(record)
    assert evidence.others == "1 other process on the GPU, which used 40 % of it just before"
    assert evidence.clock == 0.5


def test_a_fragmenting_allocator_costs_what_a_step_after_an_emptied_cache_costs():
    facts = facts_of(allocation_retries=3, reallocated_step_s=1.5)
    record = a_record(facts=facts, samples={"step": seconds([1, 1]), "device_allocations": seconds([4, 4])})
    assert evidence_of(record).allocator_s == pytest.approx(0.5)


def test_a_clock_that_nothing_lowered_is_full():
    record = a_record(
        facts=facts_of(sm_clock_max_hz=2e9, throttle_reasons=""),
        samples={"step": seconds([1, 1]), "sm_clock": seconds([1e9, 1e9])},
    )
    assert evidence_of(record).clock == 1


def test_a_failed_cell_and_a_record_without_steps_are_refused():
    with pytest.raises(ValueError, match="no step to explain"):
        evidence_of(a_record(failure=Failure(kind="crash", phase=None, message="dead")))
    with pytest.raises(ValueError, match="no time of a step"):
        evidence_of(a_record(samples={"time": seconds([1])}))


@pytest.mark.parametrize("step_s", [0.0, -1.0])
def test_times_that_no_step_takes_are_refused(step_s: float):
    with pytest.raises(ValueError, match="no time of a step"):
        evidence_of(a_record(samples={"step": seconds([1.0, step_s])}))

"""What a trace alone shows of a step: its median, its messages, its copies, its phases, and what it does not tell."""

from dataclasses import replace
from typing import Any

import pytest

from record_maker import a_record, seconds
from trainstep.config.script import Part
from trainstep.explain.budget import step_budget
from trainstep.explain.evidence import CASTS, HOST_COPIES
from trainstep.explain.trace_evidence import is_of_trace, trace_evidence
from trainstep.records.record import Record
from trainstep.traces.patterns.pattern import PRECISION

TF32_NOTE = "A trace does not say whether TF32 was on; it is assumed to be on."


def classes(**times_s: float) -> dict[str, list[Any]]:
    """A table of classes with a row for each `phase__class`."""
    parts = [name.split("__") for name in times_s]
    return {
        "phase": [phase for phase, _ in parts],
        "class": [kind.replace("_", " ") for _, kind in parts],
        "time_s": [*times_s.values()],
    }


def kernels(name: str, kind: str, time_s: float) -> dict[str, list[Any]]:
    return {"name": [name], "class": [kind], "phase": ["forward"], "span": [""], "time_s": [time_s]}


def a_trace(*times_s: float, device: str = "cuda", **tables: Any) -> Record:
    samples = {"profiled_step": seconds(times_s or (0.02,))}
    return a_record(workload="profile", config={"device": device}, samples=samples, tables=tables)


def fp32(kernel: str) -> Record:
    habit = {"pattern": PRECISION, "phase": "forward", "calls": 4.0, "time_s": 0.016, "least_s": 0.0, "gap_s": 0.0}
    habit |= {"ranges": 4.0, "of_s": 0.016, "of_ranges": 4.0, "what": "matmuls of fp32"}
    return a_trace(
        classes=classes(forward__matmul=0.016),
        kernels=kernels(kernel, "matmul", 0.016),
        patterns={name: [value] for name, value in habit.items()},
    )


def test_the_step_is_the_median_and_messages_are_their_share_of_it():
    record = a_trace(0.01, 0.02, 0.09, verdict={"exposed_share": [0.25]})
    evidence = trace_evidence(record)
    assert (evidence.measured_s, evidence.exposed_s) == (0.02, 0.005)
    assert is_of_trace(record)
    assert not is_of_trace(replace(record, samples={**record.samples, "step": seconds([0.01])}))


@pytest.mark.parametrize("times_s", [(0.0,), (0.0, 0.0, 0.01)])
def test_steps_without_time_are_refused(times_s: tuple[float, ...]):
    with pytest.raises(ValueError, match="trace: its steps take no time"):
        trace_evidence(a_trace(*times_s))


def test_copies_between_host_and_device_count_with_casts():
    record = a_trace(
        classes=classes(forward__matmul=0.004, forward__copies=0.003),
        kernels=kernels("Memcpy HtoD (Pinned -> Device)", "copies", 0.002),
    )
    evidence = trace_evidence(record)
    assert evidence.work[CASTS] == pytest.approx(0.003)
    assert HOST_COPIES not in evidence.work
    assert evidence.busy_s == pytest.approx(0.007)


def test_on_a_cpu_all_but_waits_is_work_and_phases_add_up_to_it():
    table = classes(forward__matmul=0.03, backward__matmul=0.06, backward__communication=0.5)
    record = a_trace(device="cpu", classes=table, verdict={"exposed_share": [0.1]})
    evidence = trace_evidence(replace(record, samples={**record.samples, Part.DATA.value: seconds([0.003])}))
    assert not evidence.work
    assert evidence.busy_s == pytest.approx(0.015)
    assert evidence.phases_s == pytest.approx({"forward": 0.005, "backward": 0.01})


@pytest.mark.parametrize(
    ("kernel", "excess_s", "is_noted"),
    [
        ("a_kernel_of_ones_own", 0.008, True),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16", 0.008, False),
        ("cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4", 0.008, False),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8", 0.016 * (1 - 67 / 990), False),
        ("cutlass_80_simt_sgemm_128x32_8x5_nn_align1", 0.016 * (1 - 67 / 990), False),
    ],
)
def test_tf32_counts_as_on_unless_kernels_show_otherwise(kernel: str, excess_s: float, is_noted: bool):
    budget = step_budget(trace_evidence(fp32(kernel)), None)
    [precision] = [finding for finding in budget.findings if finding.cause == "precision"]
    assert precision.excess.time_s == pytest.approx(excess_s)
    assert precision.gain.high_s == precision.excess.time_s, "all of it, and no more"
    assert (TF32_NOTE in budget.notes) == is_noted

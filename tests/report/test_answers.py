"""The answers: each rule on constructed records, then the answers of every file of records in results/."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from record_maker import COMMUNICATION_BY_RANK, ENVIRONMENT, a_record, seconds
from sources import ROOT
from trainstep.cli.report import report
from trainstep.records.facts import facts_of
from trainstep.records.record import Failure
from trainstep.report.answers import answers
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.rows import read_rows, rows_of

CRASH = Failure(kind="crash", phase="build", message="no")
OOM = Failure(kind="out_of_memory", phase="backward", message="no", asked_bytes=2**30)
FASTER, SLOWER = [1.0, 1.01, 1.02, 1.0, 1.01] * 4, [2.0, 2.01, 2.02, 2.0, 2.01] * 4
NOISY = [0.8, 1.4, 1.0, 1.2, 0.9] * 4
RESULTS = sorted((ROOT / "results").rglob("*.jsonl"))


def answer_of(*records: Any, axis: str | None = None) -> Answer:
    (answer,) = answers(rows_of([("r.jsonl", record) for record in records]), axis)
    return answer


def a_cell(workload: str, name: str, **changes: Any) -> Any:
    config = {"context": name, **changes.pop("config", {})}
    return a_record(workload=workload, key=name, config=config, **changes)


def custom(*times: Sequence[float]) -> Answer:
    """The answer of a user's workload, whose cells a, b, c took these times."""
    return answer_of(
        *(a_cell("mine:W", "abcdef"[i], samples={"time": seconds(cell_times)}) for i, cell_times in enumerate(times))
    )


def test_a_cell_is_fastest_if_the_interval_excludes_one():
    assert custom(SLOWER, FASTER).text.startswith(
        "Fastest: b, 1.01 s a call; a takes 1.990 times as long (99 % interval 1.9"
    )


def test_a_very_wide_interval_gives_no_verdict():
    wild = [0.2, 5.0, 0.1, 3.0, 0.4, 2.0, 0.3, 4.0]
    verdict = custom([1.0] * 8, wild).verdict
    assert "no verdict on" in verdict
    assert "No difference" not in verdict


def test_intervals_that_overlap_make_no_cell_the_fastest():
    """An earlier version called 104.1 ± 20.9 ms fastest against 104.8 ± 15.5 ms."""
    verdict = custom(NOISY, [time * 1.03 for time in NOISY[::-1]], SLOWER).verdict
    assert verdict.startswith("No difference measured between a and b: 1.00 s and 1.03 s a call, ratio 1.")
    assert "Fastest" not in verdict


def test_few_samples_give_no_verdict():
    verdict = custom(SLOWER[:4], FASTER[:4]).verdict
    assert verdict.startswith("Cannot tell which is fastest: b takes 1.00 s a call; no verdict on a (")


def test_different_environments_give_no_verdict():
    first = a_cell("mine:W", "a", samples={"time": seconds(FASTER)})
    second = a_cell("mine:W", "b", samples={"time": seconds(SLOWER)}, environment=replace(ENVIRONMENT, torch="9.9"))
    assert "different environments: torch" in answer_of(first, second).verdict


def test_an_answer_names_a_failure_and_a_remedy():
    ran, failed = a_step("a", 10, busy=9.9, enqueue=5), a_step("b", 10, failure=OOM, config={"model": "xl"})
    answer = answer_of(ran, failed)
    assert "1 of 2 cells failed: 1 OOM (" in answer.verdict
    assert "OOM in backward: asked for 1.00 GiB" in answer.verdict
    assert "`trainstep memory --model xl --fit batch_size` finds the largest batch" in answer.suggestion


def test_a_missing_package_is_named_once_and_in_few_words():
    """On a narrow screen the answer's end was below the first screen: the cell's name and Python's words took four lines."""
    message = (
        "implementation: quack is not installed; pip install quack-kernels (import quack: No module named 'quack')"
    )
    missing = Failure(kind="import_error", phase="build", message=message)
    verdict = answer_of(a_step("a", 10), a_step("b", 10, failure=missing), a_step("c", 10, failure=missing)).verdict
    assert "failed: 2 import error (implementation: quack is not installed; pip install quack-kernels)." in verdict


@pytest.mark.parametrize(
    "workload", ["train_step", "parallel", "memory", "numerics", "profile", "attention_tiles", "ceiling", "mine:W"]
)
def test_without_a_finished_cell_the_failure_is_the_answer(workload: str):
    answer = answer_of(a_cell(workload, "a", failure=CRASH, config={"sync": "none"}))
    assert answer.verdict == "1 of 1 cells failed: 1 crash (crash in build: no)."
    assert answer.suggestion


def a_step(name: str, step_ms: float, *, busy: float = 0, enqueue: float = 0, **changes: Any) -> Any:
    """A cell whose step on a GPU takes these milliseconds."""
    facts = facts_of(device_busy_s=busy / 1e3 if busy else None, **changes.pop("facts", {}))
    samples = {"step": seconds([step_ms / 1e3] * 10), "enqueue": seconds([enqueue / 1e3] * 10)}
    config = {"model": "small", "precision": "fp32", "device": "cuda", **changes.pop("config", {})}
    return a_cell("train_step", name, samples=samples, facts=facts, config=config, **changes)


def test_a_launch_bound_step_gets_the_advice_to_capture_it():
    answer = answer_of(a_step("a", 22, busy=6.6, enqueue=21.4))
    assert (
        answer.verdict
        == "Launch-bound: the GPU works for 30.0 % of a step of 22.00 ms, the host launches for 97.3 % of it."
    )
    assert answer.suggestion.startswith("`--capture auto` can make ")
    assert "at most 3.33 times as fast: from 22.00 ms to the 6.600 ms that the GPU works" in answer.suggestion


def test_enqueue_equal_to_the_step_is_launch_bound_whatever_the_gpu_works():
    assert answer_of(a_step("a", 37.3, busy=26.2, enqueue=36.9)).verdict.startswith("Launch-bound: ")
    assert answer_of(a_step("a", 37.3, busy=33.0, enqueue=36.9)).verdict.startswith("Launch-bound: ")


@pytest.mark.parametrize(("busy", "enqueue"), [(36, 36.9), (26.2, 30)])
def test_a_step_near_the_line_states_both_shares(busy: float, enqueue: float):
    verdict = answer_of(a_step("a", 37.3, busy=busy, enqueue=enqueue)).verdict
    assert verdict.startswith("Near the line between launch-bound and limited by the GPU: the GPU works for ")
    assert f"{enqueue / 37.3:.1%}".replace("%", " %") in verdict


def test_steps_without_gpu_times_get_the_advice_to_profile():
    assert "trainstep profile" in answer_of(a_step("a", 22), a_step("b", 30)).suggestion


def test_a_step_that_cannot_be_captured_gets_no_advice_to_capture_it():
    assert "--capture" not in answer_of(a_step("a", 22, busy=6.6, enqueue=21.4, config={"adamw": "loop"})).text
    captured = a_step("a", 22, busy=6.6, enqueue=21.4, config={"capture": "auto"}, facts={"capture_left_out": "a sync"})
    assert answer_of(captured).suggestion == "The graph does not contain the whole step: a sync."


def test_an_fp32_step_gets_the_advice_to_use_16_bits():
    facts = {"model_flops": 0.67 * 67e12 * 0.1, "flops_dtype": "fp32"}
    fp32 = a_step("a", 100, busy=99, enqueue=50, facts=facts)
    answer = answer_of(fp32)
    assert answer.verdict.endswith("works for 99.0 % of a step of 100.0 ms, at 67.0 % of its peak in fp32 (MFU).")
    assert "`--precision bf16_autocast` should make " in answer.suggestion
    assert "2.66 times as fast or more" in answer.suggestion
    bf16 = a_step("a", 40, busy=39, enqueue=20, config={"precision": "bf16_autocast"})
    both = answer_of(fp32, bf16)
    assert "bf16_autocast" not in both.suggestion
    assert both.verdict.startswith(
        "Against precision fp32: `--precision bf16_autocast` is faster: it takes 0.400 (99 % interval 0.400"
    )


def test_several_steps_are_counted_by_their_limit():
    verdict = answer_of(a_step("a", 22, busy=6.6, enqueue=21.4), a_step("b", 22, busy=21, enqueue=8)).verdict
    assert verdict == (
        "1 of 2 steps is launch-bound (small a: the GPU works for 30.0 % of it); 1 is limited by the GPU (small b: the GPU works "
        "for 95.5 % of it)."
    )


def test_the_compared_axis_comes_first():
    cells = [
        a_record(workload="mine:W", key=name, config={"how": name}, samples={"time": seconds(times)})
        for name, times in (("a", SLOWER), ("b", FASTER))
    ]
    assert answer_of(*cells, axis="how").verdict.startswith("Against how a: b is faster: it takes 0.502 (99 % interval")


def test_of_several_values_the_fastest_of_each_cell_is_named():
    def cells(how: str, *times: Sequence[float]) -> list[Any]:
        return [
            a_record(
                workload="mine:W",
                key=f"{how}{index}",
                config={"how": how, "size": index},
                samples={"time": seconds(cell_times)},
            )
            for index, cell_times in enumerate(times)
        ]

    slowest = [2 * time for time in SLOWER]
    records = [*cells("a", slowest, slowest), *cells("b", SLOWER, NOISY), *cells("c", FASTER, NOISY[::-1])]
    assert "Fastest: c in 1 of 2 cells (0) and b or c in 1 (1)." in answer_of(*records, axis="how").verdict
    assert "of 2 cells (0)" not in answer_of(*records[:4], axis="how").verdict, "two values: the ratio says it"


def a_strategy(sync: str, times: Sequence[float], **changes: Any) -> Any:
    """`windows`: times of windows of steps; `tables`: tables of the record."""
    facts = facts_of(peak_allocated_bytes=changes.pop("peak", 2**30), exposed_s=0.2, communication_s=0.5)
    windows, tables = changes.pop("windows", None), changes.pop("tables", {})
    samples = {"step": seconds(times)} | ({"window_step": seconds(windows)} if windows else {})
    config = {"sync": sync, "ranks": 2, "reduce_dtype": "own", "precision": "fp32", "compile": "none", **changes}
    return a_record(workload="parallel", key=sync, config=config, samples=samples, facts=facts, tables=tables)


def test_the_answer_has_the_fastest_strategy_and_its_cost_of_communication():
    answer = answer_of(
        a_strategy("none", FASTER), a_strategy("bucketed", SLOWER), a_strategy("flat", [2 * time for time in SLOWER])
    )
    assert answer.verdict.startswith("Fastest: bucketed, 2.01 s a step; flat takes 2.000 times as long")
    assert "Communication costs bucketed 49.8 % of its step: its step takes 1.990 times as long" in answer.verdict
    assert answer.suggestion.startswith(
        "`--reduce-dtype bf16` halves the bytes of gradients: it can take at most 500.0 ms"
    )


def test_three_combinations_get_a_sentence_and_the_rest_are_counted():
    def of(models: str) -> str:
        rows = [
            replace(
                a_strategy(sync, times, model=model, context=64, batch_size=1),
                key=f"{sync}{model}",
            )
            for model in models
            for sync, times in (("none", FASTER), ("bucketed", SLOWER))
        ]
        return answer_of(*rows).verdict

    assert of("abc").count("2.01 s a step") == 3
    assert "more" not in of("abc")
    assert of("abcde").count("2.01 s a step") == 3
    assert of("abcde").endswith("The tables have 2 more.")


def test_a_cost_that_windows_of_steps_do_not_show_is_said_to_be_so():
    answer = answer_of(a_strategy("none", FASTER, windows=NOISY), a_strategy("bucketed", SLOWER, windows=NOISY[::-1]))
    assert "Communication costs bucketed 49.8 % of its step" in answer.verdict
    assert "Windows of several steps, without a wait between them, show no certain cost: " in answer.verdict
    both = answer_of(a_strategy("none", FASTER, windows=FASTER), a_strategy("bucketed", SLOWER, windows=SLOWER))
    assert "windows" not in both.verdict


def test_of_equally_fast_strategies_the_one_with_less_memory_is_advised():
    strategies = [a_strategy("bucketed", NOISY, peak=2 * 2**30), a_strategy("sharded_flat", NOISY[::-1])]
    answer = answer_of(*strategies)
    assert answer.verdict.startswith("No difference measured between bucketed and sharded_flat: ")
    assert answer.suggestion.startswith("Take sharded_flat: 1.00 GiB at the peak where bucketed has 2.00 GiB")


def test_ranks_limited_by_the_host_get_the_advice_to_capture():
    def strategy(sync: str, **changes: Any) -> Any:
        config = {"sync": sync, "ranks": 2, "capture": "none", "precision": "fp32", **changes}
        samples = {"step": seconds(FASTER), "enqueue": seconds([0.97] * 20)}
        facts = facts_of(device_busy_s=0.25, transfer_s=0.5)
        return a_record(workload="parallel", key=sync, config=config, samples=samples, facts=facts)

    suggestion = answer_of(strategy("none"), strategy("bucketed")).suggestion
    assert suggestion.startswith(
        "The host limits bucketed, launching for 96.0 % of its step: `--capture auto` can make it at most 2.02 times as fast"
    )
    assert "--capture" not in answer_of(strategy("none", capture="auto"), strategy("bucketed", capture="auto")).text


def test_without_none_the_trace_gives_exposed_communication():
    assert (
        "in flight for 500.0 ms; 200.0 ms was exposed, with no computation"
        in answer_of(a_strategy("bucketed", FASTER)).verdict
    )
    late = answer_of(a_strategy("bucketed", FASTER, tables={"communication": COMMUNICATION_BY_RANK})).verdict
    assert "in flight for 300.0 ms (100.0 ms of it waiting for the slowest rank); 100.0 ms was exposed" in late, (
        "of the rank that waits least"
    )


def test_memory_has_its_peak_its_largest_part_and_a_remedy():
    ledger = {
        "line": ["parameters", "optimizer state", "activations", "allocated"],
        "peak": [2**30, 2**30, 6 * 2**30, 8 * 2**30],
    }
    config = {"recompute": "none", "compile": "none", "mode": "step", "model": {"name": "mine", "layers": 4}}
    facts = facts_of(peak_allocated_bytes=2**33, residual_stream_bytes=2**27)
    answer = answer_of(a_cell("memory", "a", config=config, facts=facts, tables={"ledger": ledger}))
    assert "holds 8.00 GiB at the peak: 75.0 % activations (6.00 GiB)." in answer.verdict
    assert answer.suggestion == (
        "`--recompute block` (a third more arithmetic) can save at most 4.00 GiB, 50.0 % of the peak. Over 2 ranks, "
        "`--ranks 2 --sync fsdp` (each rank holds 1/2 of parameters, gradients and state) can save at most 1.00 GiB, "
        "12.5 % of the peak."
    )
    of_optimizer = {"phase": ["optimizer"], "allocated_bytes": [7 * 2**30]}
    answer = answer_of(
        a_cell("memory", "a", config=config, facts=facts, tables={"ledger": ledger, "peaks": of_optimizer})
    )
    assert "at most 1.00 GiB, 12.5 %" in answer.suggestion, "recomputation does not lower the peak of the optimizer"


def test_a_tape_is_not_taken_for_a_graph():
    def on(device: str) -> Answer:
        facts = facts_of(peak_allocated_bytes=2**30, captured="step", capture_pool_bytes=2**29)
        config = {"model": "small", "device": device, "mode": "step", "capture": "step"}
        ledger = {"line": ["optimizer state"], "peak": [2**29]}
        return answer_of(a_cell("memory", "a", facts=facts, config=config, tables={"ledger": ledger}))

    assert "a tape stands in for the graph" in on("cpu").verdict
    assert on("cpu").suggestion == ""
    assert "The graph keeps 0.50 GiB between launches." in on("cuda").verdict


def test_a_trial_that_does_not_fit_is_no_failure():
    trials = [
        a_record(workload="memory", key=str(size), config={"batch_size": size}, **trial)
        for size, trial in (
            (4, {"facts": facts_of(fit_of="batch_size", peak_allocated_bytes=2**30)}),
            (8, {"facts": facts_of(fit_of="batch_size"), "failure": OOM}),
        )
    ]
    answer = answer_of(*trials)
    assert answer.verdict.startswith("The largest batch_size that fits is 4 (8 does not).")
    assert "failed" not in answer.text
    assert answer_of(trials[1]).text == "No batch_size that was tried fits, not even 8."


def a_profile(name: str, *, facts: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A profiled step of one second: 0.6 s in matmuls, 0.3 s element-wise."""
    shares = {"exposed_share": 0.0, "matmul_share": 0.8, "overhead_share": 0.0}
    limit = {
        "kind": "old",
        "on_device": True,
        "profiled_step": False,
        "step_s": 1.0,
        "busy_s": 0.9,
        "enqueue_s": 0.5,
    } | shares
    limit |= {key: changes.pop(key) for key in list(changes) if key in limit}
    times = {"matmul": 0.6, "element-wise": 0.3, "idle": 5.0}
    tables = {
        "verdict": {key: [value] for key, value in limit.items()},
        "classes": {
            "phase": ["forward"] * 3,
            "class": list(times),
            "calls": [1.0] * 3,
            "time_s": list(times.values()),
            "share": [0.1] * 3,
        },
    }
    config = {"precision": "fp32", "compile": "none", "adamw": "fused", **changes}
    return a_cell("profile", name, config=config, tables=tables, facts=facts_of(**(facts or {})))


def test_a_launch_bound_profile_gets_the_time_of_its_replay():
    replayed = a_profile("a", busy_s=0.7, enqueue_s=0.98, facts={"graph_replay_s": 0.75})
    answer = answer_of(replayed)
    assert answer.verdict.startswith(
        "Launch-bound: the GPU works for 70.0 % of a step of 1,000 ms and waits for the host"
    )
    assert "should make the step 1.33 times as fast: from 1,000 ms to the 750.0 ms that its replay" in answer.suggestion
    assert "at most 1.43 times as fast" in answer_of(a_profile("a", busy_s=0.7, enqueue_s=0.98)).suggestion


def test_a_compute_bound_profile_gains_from_16_bits_or_from_fusion():
    answer = answer_of(a_profile("a"))
    assert answer.verdict.startswith("Compute-bound: the GPU works for 90.0 % of a step of 1,000 ms")
    assert (
        "`--precision bf16_autocast` can make it at most 2.27 times as fast: fp32's matmuls are 60.0 %"
        in answer.suggestion
    )
    fused = answer_of(a_profile("a", precision="bf16_autocast")).suggestion
    assert fused.startswith("`--compile model` can make it at most 1.43 times as fast: element-wise work")
    assert answer_of(a_profile("a", precision="bf16_autocast", compile="model")).suggestion == ""
    in_backward = answer_of(a_profile("a", precision="bf16_autocast", update="in_backward")).suggestion
    assert in_backward == fused.replace("--compile model", "--compile block")


def test_shares_on_a_cpu_are_of_the_profiled_time():
    answer = answer_of(a_profile("a", on_device=False, overhead_share=0.1))
    assert "`--compile model` can make it at most 1.50 times as fast" in answer.suggestion
    between = answer_of(a_profile("a", on_device=False, overhead_share=0.75))
    assert "A larger --batch-size, or `--compile model`" in between.suggestion


def test_several_profiles_are_counted_with_advice_for_each_kind():
    answer = answer_of(a_profile("a"), a_profile("b", busy_s=0.2, enqueue_s=0.98))
    assert answer.verdict.startswith(
        "Of 2 steps, 1 is compute-bound and 1 is launch-bound: a is compute-bound (the GPU works"
    )
    assert "a: `--precision bf16_autocast`" in answer.suggestion
    assert "b: `trainstep bench --capture auto` can make the step at most 5.00 times as fast" in answer.suggestion


def test_numerics_state_each_precisions_error_and_whether_it_saves_time():
    def cell(precision: str, times: Sequence[float], error: float, **changes: Any) -> Any:
        facts = facts_of(reference="fp64", error_gradient_median=error, error_gradient_max=2 * error)
        samples, config = {"step": seconds(times)}, {"precision": precision}
        return a_record(workload="numerics", key=precision, config=config, samples=samples, facts=facts, **changes)

    fp32, bf16 = cell("fp32", SLOWER, 1e-6), cell("bf16", FASTER, 0.01)
    answer = answer_of(fp32, bf16)
    assert answer.verdict == (
        "Gradients of numerics differ from fp64, in the median over parameters, by 1.0e-04 % in fp32 (at worst 2.0e-04 %) and "
        "1.00 % in bf16 (at worst 2.00 %)."
    )
    assert answer.suggestion.startswith("On numerics take bf16 where its error is allowed: bf16 takes 0.502 (99 %")
    assert "Not compared" not in answer.suggestion
    swapped = answer_of(cell("fp32", FASTER, 1e-6), cell("bf16", SLOWER, 0.01))
    assert swapped.suggestion.startswith("On numerics stay with fp32: ")
    elsewhere = cell("fp16_autocast", FASTER, 0.02, environment=replace(ENVIRONMENT, torch="9.9"))
    assert "Not compared in time: fp16_autocast, of another machine" in answer_of(fp32, bf16, elsewhere).suggestion


def test_tiles_in_use_are_compared_with_the_best():
    def cell(name: str, best_s: float) -> Any:
        facts = facts_of(best="b", in_use="a", in_use_time=1.0)
        return a_cell("attention_tiles", name, facts=facts, tables={"candidates": {"time_s": [best_s, 1.0, None]}})

    answer = answer_of(cell("x", 0.99), cell("y", 0.5))
    assert answer.verdict.startswith("The tiles in use are within 2 % of the fastest in 1 of 2 cells.")
    assert answer.suggestion.startswith("y should gain most: b takes 50.0 % less time than a")


def test_collectives_state_bandwidth_latency_and_message_size():
    def cell(mib: float, operation: str = "all_reduce", latency_s: float = 1e-3) -> Any:
        size = round(mib * 2**20)
        config = {
            "operation": operation,
            "backend": "gloo",
            "ranks": 2,
            "dtype": "fp32",
            "device": "cpu",
            "mib": mib,
        }
        facts = facts_of(payload_bytes=size, ring_bytes=size)
        samples = {"time": seconds([latency_s + size / 1e9] * 5)}
        return a_record(workload="collective", key=f"{operation}{mib}", config=config, samples=samples, facts=facts)

    answer = answer_of(*map(cell, (0.01, 1, 4, 64)))
    assert answer.verdict == (
        "all_reduce of fp32 on 2 ranks by gloo: 1.0 GB/s on the bus at 64.0 MiB, plus 1.000 ms latency per call."
    )
    assert answer.suggestion.startswith(
        "Send messages of 1.00 MiB or more (`--bucket-mib 1`, if the default is not larger), the first size here at which half "
    )
    assert answer.suggestion.endswith(": all_reduce 51.9 %, and at 4.00 MiB 82.0 % or more.")
    slower = [cell(mib, "all_gather", 3e-3) for mib in (0.01, 1, 4, 64)]
    assert answer_of(*map(cell, (0.01, 1, 4, 64)), *slower).suggestion == (
        "Send messages of 4.00 MiB or more (`--bucket-mib 4`, if the default is not larger), the first size here at which half of "
        "the best rate is reached: all_reduce 82.0 % and all_gather 60.9 %."
    )


def test_a_size_that_is_fast_by_chance_is_not_advised():
    """1 MiB is fast, 4 MiB slow again: half of the best rate is safe from 64 MiB on alone."""

    def cell(mib: float, bytes_per_s: float) -> Any:
        size = round(mib * 2**20)
        config = {
            "operation": "all_reduce",
            "backend": "gloo",
            "ranks": 2,
            "dtype": "fp32",
            "device": "cpu",
            "mib": mib,
        }
        facts, samples = facts_of(payload_bytes=size, ring_bytes=size), {"time": seconds([size / bytes_per_s] * 5)}
        return a_record(workload="collective", key=f"{mib}", config=config, samples=samples, facts=facts)

    suggestion = answer_of(cell(0.1, 1e7), cell(1, 6e8), cell(4, 2e8), cell(64, 9e8), cell(256, 1e9)).suggestion
    assert suggestion.startswith("Send messages of 64.0 MiB or more")


def test_ceilings_are_compared_with_the_data_sheet():
    cell = a_cell("ceiling", "a", config={"kind": "matmul", "dtype": "bf16"}, facts=facts_of(rate=495e12, flops=1.0))
    assert answer_of(cell).verdict == "This machine reaches 495 TFLOP/s in bf16 matmuls (50.0 % of the data sheet)."


def an_attention(implementation: str, times: Sequence[float], seq: int = 1024) -> Any:
    config = {"implementation": implementation, "seq": seq, "head_dim": 64}
    samples, facts = {"time_s": seconds(times)}, facts_of(error_output=2e-3 if implementation == "trainstep" else 4e-3)
    return a_record(workload="attention", key=f"{implementation}{seq}", config=config, samples=samples, facts=facts)


def test_our_attention_is_compared_with_the_fastest_peer():
    peers = [an_attention("plain", [10.0] * 20), an_attention("sdpa", SLOWER)]
    answer = answer_of(*peers, an_attention("trainstep", FASTER))
    assert answer.verdict.startswith("trainstep is faster than sdpa, the fastest peer: 0.502 (99 % interval")
    assert answer.verdict.endswith("Largest error against the reference: 2.0e-03; plain's is 4.0e-03.")
    slower = answer_of(*peers, an_attention("trainstep", [3.0] * 20))
    assert slower.suggestion == "Take sdpa where trainstep is slower: 1.49 times as fast."
    several = answer_of(
        *peers,
        an_attention("trainstep", NOISY),
        *(an_attention(name, times, 64) for name, times in (("sdpa", NOISY), ("trainstep", NOISY[::-1]))),
    )
    assert "of each of 2 configurations, trainstep is faster in 1; cannot tell in 1" in several.verdict


def test_a_peer_with_wrong_results_is_not_compared():
    peer = an_attention("sdpa", FASTER)
    wrong = replace(peer, facts={**peer.facts, **facts_of(error_dq=1.1, error_same_dtype_dq=0.01)})
    answer = answer_of(wrong, an_attention("plain", SLOWER), an_attention("trainstep", FASTER))
    assert answer.verdict.startswith("trainstep is faster than plain, the fastest peer: ")
    assert "Results of sdpa are wrong in 1 and not compared there" in answer.verdict
    assert "sdpa" in answer_of(peer, an_attention("plain", SLOWER), an_attention("trainstep", FASTER)).verdict


def test_implementations_without_ours_are_compared_with_the_first():
    cells = [
        an_attention(name, times, seq) for seq in (64, 128) for name, times in (("plain", SLOWER), ("sdpa", FASTER))
    ]
    assert answer_of(*cells).verdict.startswith(
        "Against implementation plain: sdpa is faster in 2 of 2 cells (0.502 of the time)."
    )


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: str(path.relative_to(ROOT / "results")))
def test_every_published_record_has_an_answer_with_a_number(path: Path):
    for answer in answers(read_rows([path])):
        assert re.search(r"\d", answer.verdict), answer
        assert answer.verdict.endswith("."), answer
        assert not re.search(r"\bnan\b|None|  |\.\.", answer.text), answer
        assert "commit" not in answer.text


@pytest.mark.parametrize("path", RESULTS[::7], ids=lambda path: path.stem)
def test_every_format_begins_with_the_answer(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, *_ = all_answers = answers(read_rows([path]))
    report([path])
    assert capsys.readouterr().out.startswith(first.text)
    report([path], format="markdown")
    assert capsys.readouterr().out.startswith("**")
    report([path], format="json")
    assert json.loads(capsys.readouterr().out)["answer"] == [
        {"workload": answer.workload, "verdict": answer.verdict, "suggestion": answer.suggestion or None}
        for answer in all_answers
    ]
    report([path], out=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.index('class="answer"') < page.index("<table") if "<table" in page else page.index('class="answer"')

"""The budget adds up, and ranks the true cause first: in planted slowdowns, and in what was recorded on an H200."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from sources import ROOT
from trainstep.config.parallel import RanksConfig, SyncConfig
from trainstep.config.parsing import build_run
from trainstep.config.run import RunConfig
from trainstep.explain.budget import AS_THEY_RUN, Budget, step_budget
from trainstep.explain.causes import CAUSES
from trainstep.explain.evidence import ATTENTION_MATMUL, CASTS, HOST_COPIES, MEMORY, Evidence, evidence_of
from trainstep.explain.floor import changed
from trainstep.plan.step_memory import alone
from trainstep.plan.time.calibration import Calibration, shipped
from trainstep.plan.time.step_time import step_time
from trainstep.records.record import Record
from trainstep.records.store import Store
from trainstep.traces.kernel_classes import ATTENTION, MATMUL, OPTIMIZER, OTHER

RESULTS = ROOT / "results" / "h200"


@pytest.fixture(scope="module")
def h200() -> Calibration:
    calibration = shipped("NVIDIA H200")
    assert calibration is not None
    return calibration


def a_config(**changes: Any) -> RanksConfig:
    fast = {"precision": "bf16_autocast", "attention": "trainstep", "compile": "block", "adamw": "trainstep"}
    return alone(build_run({"model": "medium", "context": 512, "device": "cuda", **fast, **changes}))


def a_step(h200: Calibration, *, idle_s: float = 0.0, more: dict[str, float] | None = None, **changes: Any) -> Evidence:
    """A step whose kernels take what plan says of its config, with `more` time in some groups, and `idle_s` without a kernel."""
    config = a_config(**changes)
    classes = step_time(config, h200).classes
    work = {name: classes[name] for name in (MATMUL, ATTENTION, MEMORY, OPTIMIZER)}
    work |= {name: work.get(name, 0.0) + time_s for name, time_s in (more or {}).items()}
    return Evidence(
        measured_s=sum(work.values()) + idle_s, work=work, busy_s=sum(work.values()), config=config, pieces=1000
    )


def assert_adds_up(budget: Budget) -> None:
    total_s = budget.floor_s + sum(finding.excess.time_s for finding in budget.findings) + budget.unexplained_s
    assert total_s == pytest.approx(budget.measured_s)
    assert budget.unexplained_s >= -1e-12
    times = [finding.excess.time_s for finding in budget.findings]
    assert times == sorted(times, reverse=True)
    assert len({finding.cause for finding in budget.findings}) == len(times)
    for finding in budget.findings:
        assert 0 <= finding.excess.low_s <= finding.excess.time_s <= finding.excess.high_s
        assert 0 <= finding.gain.low_s <= finding.gain.time_s <= finding.gain.high_s
        assert finding.cause in CAUSES
        assert finding.evidence


MUCH_S = 0.05
PLANTED = {
    "host_launches": {"idle_s": MUCH_S},
    "synchronisations": {"idle_s": MUCH_S, "blocked_s": 0.9 * MUCH_S},
    "data": {"idle_s": MUCH_S, "data_s": 0.9 * MUCH_S},
    "recompiles": {"idle_s": MUCH_S, "recompile_s": 0.8 * MUCH_S},
    "allocator": {"idle_s": MUCH_S, "allocator_s": 0.8 * MUCH_S},
    "garbage_collector": {"idle_s": MUCH_S, "collector_s": 0.8 * MUCH_S},
    "another_process": {"idle_s": MUCH_S, "others": "1 other process on the GPU"},
    "exposed_messages": {"idle_s": MUCH_S, "exposed_s": MUCH_S, "messages": 4000, "message_bytes": 4e8},
    "stragglers": {"idle_s": MUCH_S, "exposed_s": MUCH_S, "late_share": 0.9},
    "host_copies": {"more": {HOST_COPIES: MUCH_S}},
    "casts": {"more": {CASTS: MUCH_S}},
    "unfused": {"more": {MEMORY: MUCH_S}},
    "attention_kernel": {"more": {ATTENTION: MUCH_S}},
    "matmul_shapes": {"more": {MATMUL: MUCH_S}},
    "optimizer": {"more": {OPTIMIZER: MUCH_S}},
    "precision": {"precision": "fp32"},
    "recomputation": {"recompute": "block", "model": "xl", "context": 1024},
    "clocks": {"clock": 0.5, "throttle": "power cap", "more": {MATMUL: 0.02}},
}


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_slowdown_is_ranked_first(cause: str, h200: Calibration):
    planted: dict[str, Any] = dict(PLANTED[cause])
    fields = RunConfig.__dataclass_fields__
    of_step = {name: planted.pop(name) for name in tuple(planted) if name in ("idle_s", "more") or name in fields}
    budget = step_budget(replace(a_step(h200, **of_step), **planted), h200)
    assert budget.findings[0].cause == cause
    assert_adds_up(budget)


def test_the_host_launches_kernels_and_times_are_left_to_the_report(h200: Calibration):
    first = step_budget(a_step(h200, idle_s=MUCH_S), h200).findings[0]
    assert first.evidence == "the device has no work for {idle} while the host launches 1,000 kernels"
    assert first.times_s["idle"] == pytest.approx(MUCH_S)


def test_a_captured_step_of_many_small_kernels_has_gaps(h200: Calibration):
    evidence = replace(a_step(h200, idle_s=1.0, capture="step"), pieces=200_000)
    budget = step_budget(evidence, h200)
    [gaps] = [finding for finding in budget.findings if finding.cause == "small_kernels"]
    assert gaps.excess.time_s == pytest.approx(200_000 * h200.gaps["graph"])
    assert_adds_up(budget)


def test_idle_time_of_a_captured_step_beyond_its_launch_is_unexplained(h200: Calibration):
    budget = step_budget(a_step(h200, idle_s=1.0, capture="step"), h200)
    assert budget.unexplained_s > 0.9
    assert budget.explained_share < 0.5
    assert_adds_up(budget)


def test_kernels_of_no_known_class_are_unexplained(h200: Calibration):
    budget = step_budget(a_step(h200, more={OTHER: MUCH_S}), h200)
    assert budget.unexplained_s == pytest.approx(MUCH_S, rel=0.01)
    assert_adds_up(budget)


def test_without_a_calibration_kernels_are_floor_and_waits_are_findings(h200: Calibration):
    evidence = replace(a_step(h200, idle_s=MUCH_S), data_s=MUCH_S)
    budget = step_budget(evidence, None)
    assert budget.floor == {AS_THEY_RUN: pytest.approx(sum(evidence.work.values()))}
    assert [finding.cause for finding in budget.findings] == ["data"]
    assert budget.notes
    assert_adds_up(budget)


def test_profiled_kernels_that_are_longer_than_the_step_are_scaled_to_it(h200: Calibration):
    evidence = a_step(h200)
    budget = step_budget(replace(evidence, measured_s=0.8 * evidence.measured_s), h200)
    assert_adds_up(budget)
    assert budget.unexplained_s < 0.01 * budget.measured_s


def test_plain_attentions_matmuls_share_attentions_floor(h200: Calibration):
    one = step_budget(a_step(h200, more={ATTENTION: MUCH_S}), h200)
    two = step_budget(a_step(h200, more={ATTENTION_MATMUL: MUCH_S}), h200)
    assert one.floor == pytest.approx(two.floor)
    assert two.findings[0].cause == "attention_kernel"


def test_the_change_is_of_the_config_and_a_taken_one_promises_nothing(h200: Calibration):
    eager, fast = (
        step_budget(a_step(h200, more={MEMORY: MUCH_S}, **taken), h200).findings[0]
        for taken in ({"compile": "none"}, {"compile": "block", "ops": "fused"})
    )
    assert (eager.change, fast.change) == ({"compile": "block"}, {"ops": "fused"})
    assert not eager.is_taken
    assert eager.gain.time_s > 0
    assert fast.is_taken
    assert (fast.gain.low_s, fast.gain.time_s) == (0, 0)


def test_a_loop_of_adamw_is_replaced_by_the_fused_one(h200: Calibration):
    budget = step_budget(a_step(h200, adamw="loop", more={OPTIMIZER: MUCH_S}), h200)
    assert budget.findings[0].cause == "optimizer"
    assert budget.findings[0].change == {"adamw": "fused"}


@pytest.mark.parametrize("sync", ["naive", "overlapped"])
def test_messages_of_a_strategy_with_many_go_in_buckets(sync: str, h200: Calibration):
    config = replace(a_config(), ranks=2, sync=SyncConfig(name=sync))
    evidence = replace(a_step(h200, idle_s=MUCH_S), exposed_s=MUCH_S, messages=300, message_bytes=3e8, config=config)
    first = step_budget(evidence, h200).findings[0]
    assert (first.cause, dict(first.change)) == ("exposed_messages", {"sync": "bucketed"})
    assert "300 messages of 0.954 MiB" in first.evidence
    assert first.gain.high_s > 0
    after = changed(config, dict(first.change), h200)
    bucketed = step_time(replace(config, sync=SyncConfig(name="bucketed")), h200)
    assert after is not None
    assert after.step.time_s == bucketed.step.time_s


def recorded(name: str) -> Iterator[Record]:
    for record in Store(RESULTS / name).read():
        if record.failure is None:
            yield record


@pytest.mark.parametrize(
    "name", ["profile.jsonl", "profile_again.jsonl", "profile_captured.jsonl", "profile_graph_replay.jsonl"]
)
def test_the_sum_explains_every_recorded_profile(name: str, h200: Calibration):
    for record in recorded(name):
        budget = step_budget(evidence_of(record), h200)
        assert_adds_up(budget)
        assert 0 < budget.floor_s < budget.measured_s
        assert budget.explained_share >= 0.95


def test_the_phases_of_a_cpu_are_work_and_not_waits_for_messages():
    """A profiled step of gloo is longer than others, and so are its messages: once they took the whole step."""
    [record] = [
        record
        for record in Store(ROOT / "results/cpu/ddp_tiny.jsonl").finished()
        if record.config["sync"] == "naive" and not record.failure
    ]
    budget = step_budget(evidence_of(record), None)
    phases_s = sum(median(record.samples[name].values) for name in ("forward", "backward", "optimizer"))
    assert budget.floor_s == pytest.approx(phases_s)
    assert_adds_up(budget)


def first_cause(name: str, h200: Calibration, **wanted: Any) -> set[str]:
    found = set()
    for record in recorded(name):
        config = {**record.config, "model": record.config["model"]["name"]}
        if wanted.items() <= {key: config[key] for key in wanted}.items():
            budget = step_budget(evidence_of(record), h200)
            assert_adds_up(budget)
            found.add(budget.findings[0].cause)
    return found


def test_fp32_is_the_first_cause_of_large_fp32_steps(h200: Calibration):
    for model in ("large", "xl", "2.7B"):
        assert first_cause("profile.jsonl", h200, model=model) == {"precision"}


def test_a_cause_whose_change_gains_nothing_says_why(h200: Calibration):
    """In 16 bits the small model's kernels are short, and the host launches more of them: by plan the step is no shorter."""
    firsts = {
        record.config["model"]["name"]: step_budget(evidence_of(record), h200).findings[0]
        for record in recorded("profile_again.jsonl")
    }
    assert {first.cause for first in firsts.values()} == {"precision"}
    assert firsts["small"].gain.time_s == 0 < firsts["large"].gain.time_s
    assert firsts["small"].evidence == ("matmuls are computed in fp32; then the host is the limit")
    assert firsts["large"].evidence == "matmuls are computed in fp32"


def test_the_host_is_the_first_cause_of_small_eager_steps(h200: Calibration):
    assert first_cause("profile.jsonl", h200, model="small", context=128) == {"host_launches"}
    assert first_cause("captured.jsonl", h200, model="small", capture="none") == {"host_launches"}


def test_messages_are_of_a_recorded_strategys_first_two_causes(h200: Calibration):
    """Steps of ddp.jsonl are host-bound: without any message xl takes 100 ms, which a captured step needs half of."""
    for record in recorded("ddp.jsonl"):
        if record.config["model"]["name"] == "xl":
            budget = step_budget(evidence_of(record), h200)
            assert_adds_up(budget)
            causes = [finding.cause for finding in budget.findings[:2]]
            sends = record.config["sync"] != "none"
            assert ({"exposed_messages", "stragglers"} & set(causes) != set()) is sends
            assert budget.floor_s > 0.02, "the messages of a slow profiled step leave the work its time"


@pytest.mark.parametrize(
    ("name", "field", "before", "after", "cause", "misses"),
    [
        ("precision.jsonl", "precision", "fp32", "bf16_autocast", "precision", 2),
        ("captured.jsonl", "capture", "none", "step", "host_launches", 0),
    ],
)
def test_predicted_gains_hold_what_was_gained(
    name: str, field: str, before: str, after: str, cause: str, misses: int, h200: Calibration
):
    """A pair of records that differ in one field. Both misses are host-bound steps that autocast makes slower."""
    pairs: dict[str, dict[str, Record]] = {}
    for record in recorded(name):
        rest = repr({key: value for key, value in record.config.items() if key != field})
        pairs.setdefault(rest, {})[record.config[field]] = record
    outside = count = 0
    for pair in pairs.values():
        if {before, after} <= pair.keys():
            budget = step_budget(evidence_of(pair[before]), h200)
            [finding] = [finding for finding in budget.findings if finding.cause == cause]
            gained_s = budget.measured_s - evidence_of(pair[after]).measured_s
            count += 1
            outside += not finding.gain.low_s <= gained_s <= finding.gain.high_s
    assert count >= 4
    assert outside <= misses

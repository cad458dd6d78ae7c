"""The workload `attention` on a CPU: its record, its memory against the formulas, and refusals and failures as cells."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cell_maker import silent
from trainstep.config.attention import DIRECTIONS, AttentionConfig
from trainstep.config.grid import Cell, expand
from trainstep.config.parsing import to_plain
from trainstep.measure.attention.checks import Tensors, random_tensors
from trainstep.measure.attention.peers import attend_named
from trainstep.measure.attention.workload import WORKLOAD, AttentionPass, kernels_chosen
from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.harness.local import run_groups
from trainstep.measure.harness.runner import Limits
from trainstep.measure.harness.workload import Findings, load_workload
from trainstep.ops.flash_attention import choice
from trainstep.records.record import Record

SMALL = {"batch": 2, "heads": 4, "key_heads": 2, "seq": 40, "head_dim": 16, "warmups": 1, "steps": 3}
RUNNING = ("plain", "sdpa_math", "sdpa_flash", "trainstep")


def measured(stages: list[str] | None = None, **fields: Any) -> Findings:
    config = to_plain(AttentionConfig(**{**SMALL, **fields}))
    measurement = WORKLOAD.prepare(config, (stages if stages is not None else []).append)
    measurement.take(2)
    measurement.take(1)
    return measurement.finish()


def refusal(**fields: Any) -> CellFailed:
    with pytest.raises(CellFailed) as caught:
        measured(**fields)
    return caught.value


def test_the_workload_attention_is_found_by_name():
    assert load_workload("attention") is WORKLOAD
    assert WORKLOAD.shares_worker


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("implementation", RUNNING)
def test_a_record_has_times_errors_flops_and_bytes(implementation: str, direction: str):
    stages: list[str] = []
    findings = measured(stages, implementation=implementation, direction=direction)
    assert stages == ["build", "first pass", "warmup", direction, "afterwards"]
    for name in ("time_s", "host_s"):
        samples = findings.samples[name]
        assert (samples.unit, len(samples.values), len(samples.warmups)) == ("s", 3, 1)
        assert all(value > 0 for value in (*samples.values, *samples.warmups))
    facts = {name: fact.value for name, fact in findings.facts.items()}
    assert "afterwards_failed" not in facts
    forward = (
        2 * 4 * 2 * 40 * 40 * 16
    )  # heads, a multiplication and an addition, two matmuls, of which the mask leaves half
    assert facts["flops"] == {"forward": forward, "backward": 2.5 * forward, "both": 3.5 * forward}[direction]
    assert (facts["has_nan"], facts["deterministic"]) == (0, 1)
    gradients = {"error_dq", "error_dk", "error_dv"}
    assert gradients & set(facts) == (set() if direction == "forward" else gradients)
    errors = {name: value for name, value in facts.items() if name.startswith("error_") and name != "error_checked"}
    assert all(0 < error < 1e-5 for error in errors.values()), errors
    assert ("error_lse" in facts) == (implementation == "trainstep")
    assert facts["error_checked"] == "4 of 4 key heads against float64"
    assert facts["timing"] == "host_clock"
    assert facts["needed_bytes"] == sum(
        facts[f"{part}_bytes"] for part in ("inputs", "scores", "softmax", "lse", "output", "gradients")
    )


def test_cpu_tensors_run_the_algorithm():
    assert measured(implementation="trainstep").facts["which_ran"].value == "algorithm.py (tiled PyTorch)"
    assert "sdpa_flash" in measured(implementation="sdpa_flash").facts["which_ran"].value


@pytest.mark.parametrize("layout", ["BHSD", "BSHD", "BSD"])
@pytest.mark.parametrize("implementation", RUNNING)
def test_errors_are_small_in_every_layout(implementation: str, layout: str):
    heads = {"heads": 1, "key_heads": 1} if layout == "BSD" else {}
    facts = measured(implementation=implementation, layout=layout, **heads).facts
    assert max(facts[f"error_{name}"].value for name in ("output", "dq", "dk", "dv")) < 1e-5


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("keys", [7, 90])
@pytest.mark.parametrize("implementation", ["plain", "trainstep"])
def test_errors_are_small_where_keys_and_queries_differ_in_number(implementation: str, keys: int, alignment: str):
    facts = measured(implementation=implementation, keys=keys, causal_alignment=alignment).facts
    assert max(facts[f"error_{name}"].value for name in ("output", "dq", "dk", "dv")) < 1e-5
    assert facts["has_nan"].value == 0


def test_memory_before_backward_is_what_the_pass_keeps():
    """Plain attention keeps the probabilities (and the mask); trainstep's the output and the log-sum-exp, linear in S."""
    shape = {"batch": 1, "heads": 2, "key_heads": 2, "head_dim": 16}
    plain, doubled = (measured(implementation="plain", seq=seq, **shape).facts for seq in (64, 128))
    assert plain["held_bytes"].value >= plain["softmax_bytes"].value + plain["output_bytes"].value
    assert 3 < doubled["held_bytes"].value / plain["held_bytes"].value <= 4
    trainstep, doubled = (measured(implementation="trainstep", seq=seq, **shape).facts for seq in (64, 128))
    assert trainstep["held_bytes"].value == trainstep["output_bytes"].value + trainstep["lse_bytes"].value
    assert doubled["held_bytes"].value == 2 * trainstep["held_bytes"].value


def test_a_refusal_keeps_the_bytes():
    error = refusal(implementation="sdpa_cudnn")
    assert (error.failure.kind, error.failure.phase) == ("unsupported", "build")
    assert error.failure.message == "implementation: sdpa_cudnn runs on GPUs only"
    assert error.facts["needed_bytes"].value > 0


def test_a_refusal_that_the_first_pass_raises_is_unsupported():
    error = refusal(implementation="trainstep", head_dim=300)
    assert error.failure.kind == "unsupported"
    assert error.failure.message.startswith("implementation: trainstep does not take this case: heads are 300 wide")


@pytest.fixture
def matmul_precisions(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The float32 matmul precision at each softmax."""
    precisions: set[str] = set()
    real = torch.softmax

    def spy(*arguments: Any, **named: Any) -> Any:
        precisions.add(torch.get_float32_matmul_precision())
        return real(*arguments, **named)

    monkeypatch.setattr(torch, "softmax", spy)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield precisions
    assert torch.get_float32_matmul_precision() == "high", "the workload puts it back"
    torch.set_float32_matmul_precision(before)


def test_fp32_is_multiplied_as_fp32(matmul_precisions: set[str]):
    measured(implementation="plain")
    assert matmul_precisions == {"highest"}


def test_a_failure_afterwards_loses_no_sample(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("no reference today")

    monkeypatch.setattr("trainstep.measure.attention.workload.check_values", fail)
    findings = measured(implementation="plain")
    assert findings.facts["afterwards_failed"].value == "values: RuntimeError: no reference today"
    assert len(findings.samples["time_s"].values) == 3


def run(grid: dict[str, list[Any]], **limits: Any) -> list[Record]:
    """Run each cell in real processes, as the command line does."""
    cells = expand({"workload": ["attention"], **grid}, {**SMALL, "device": "cpu"})
    return [
        record for records in run_groups([[cell] for cell in cells], Limits(**limits), silent) for record in records
    ]


def test_cells_share_a_process_and_refusals_do_not_end_it():
    records = run({"implementation": ["plain", "flex", "sdpa_math", "sdpa_cudnn", "trainstep"]})
    assert [record.failure and record.failure.kind for record in records] == [
        *(None, "unsupported", None, "unsupported", None)
    ]
    assert all(record.fact("needed_bytes") for record in records)
    durations = [record.duration_s for record in records]
    assert min(durations[0], 1.0) >= max(durations[1], durations[3]), "only the first imports torch"


def test_an_out_of_memory_failure_says_what_was_needed():
    [record] = run(
        {"implementation": ["plain"], "seq": [16384], "heads": [8], "key_heads": [None]}, memory_limit_bytes=2 * 2**30
    )
    assert record.failure is not None
    assert (record.failure.kind, record.failure.phase) == ("out_of_memory", "first pass")
    matrix_bytes = 2 * 8 * 16384**2 * 4
    assert record.failure.asked_bytes == matrix_bytes
    assert record.fact("scores_bytes") == matrix_bytes
    assert f"the pass needs at least {record.fact('needed_bytes'):,} bytes: inputs " in record.failure.message
    assert f"softmax {matrix_bytes:,}" in record.failure.message


def test_tiles_that_cannot_run_are_unsupported_cells():
    records = run({"block_q": [24, 128, 64], "block_k": [256, 64]})
    messages = [record.failure.message if record.failure else "" for record in records]
    assert {record.failure.kind for record in records if record.failure} == {"unsupported"}
    assert messages[0].startswith("block_q: illegal tile: block_q=24 is not a power of two")
    assert messages[2].startswith("block_q: illegal tile: needs ")
    assert messages[5] == "device: not for a CPU: algorithm.py, which runs there, has tiles of its own"


@pytest.mark.slow
def test_variants_are_interleaved_live():
    cells = expand({"workload": ["attention"], "implementation": ["plain", "trainstep"]}, {**SMALL, "device": "cpu"})
    records = [record for records in run_groups([cells], Limits(), silent) for record in records]
    assert [record.fact("interleaving") for record in records] == ["live", "live"]
    assert [len(record.samples["time_s"].values) for record in records] == [3, 3]


class FakeEvent:
    """A CUDA event that logs when it is recorded; the two of a pass are always a quarter of a second apart."""

    log: ClassVar[list[str]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.log.append("event")

    def synchronize(self) -> None:
        self.log.append("wait for it")

    def elapsed_time(self, _end: "FakeEvent") -> float:
        return 250.0


class FakeCache:
    """The buffer that is filled to make the cache cold."""

    def zero_(self) -> None:
        FakeEvent.log.append("fill the cache")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_timed_pass_on_a_gpu_starts_after_the_untimed_work_is_done(direction: str, monkeypatch: pytest.MonkeyPatch):
    config = AttentionConfig(**{**SMALL, "implementation": "plain", "direction": direction})
    real_attend, real_grad = attend_named(config), torch.autograd.grad

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        log.append("forward")
        return real_attend(*inputs)

    def grad(*arguments: Any) -> tuple[torch.Tensor, ...]:
        log.append("backward")
        return real_grad(*arguments)

    log = FakeEvent.log
    log.clear()
    monkeypatch.setattr(torch.autograd, "grad", grad)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    attention_pass = AttentionPass(
        config=config,
        device=torch.device("cuda"),
        tensors=random_tensors(config, torch.device("cpu")),
        attend=attend,
        cold_cache=FakeCache(),  # type: ignore[arg-type]
    )
    time_s, host_s = attention_pass.time_s()
    assert (time_s, host_s > 0) == (0.25, True)
    untimed = ["forward"] if direction == "backward" else []
    timed = {"forward": ["forward"], "backward": ["backward"], "both": ["forward", "backward"]}[direction]
    assert log == [*untimed, "fill the cache", "synchronize", "event", *timed, "event", "wait for it"]


def test_which_ran_names_the_split_kernels(monkeypatch: pytest.MonkeyPatch):
    """function.py launches them for fp16x3, not the portable ones."""
    monkeypatch.setattr(choice, "why_not_hopper", lambda *_: "torch.float32 is not a 16-bit dtype", raising=False)
    with FakeTensorMode():
        q, k, v, do = torch.empty(4, 1, 2, 64, 16, device="cuda").unbind()
    config = AttentionConfig(device="cuda", dtype="fp32", fp32_precision="fp16x3", heads=2, seq=64, head_dim=16)
    assert kernels_chosen(config, Tensors(q=q, k=k, v=v, do=do)) == "split kernels: fp32_precision is fp16x3"


def test_given_tiles_rule_out_hopper():
    with FakeTensorMode():
        q, k, v = torch.empty(3, 1, 2, 64, 16, device="cuda", dtype=torch.bfloat16).unbind()
    words = choice.describe_choice(q, k, v, backward=False, tiles=object())
    assert words == "portable kernels: tiles were given, and Hopper's kernels take none"


@pytest.mark.slow
def test_plain_attention_compiled_is_as_accurate():
    facts = measured(implementation="plain_compiled").facts
    assert max(facts[f"error_{name}"].value for name in ("output", "dq", "dk", "dv")) < 1e-5
    assert facts["which_ran"].value == "reference.py, compiled"


def test_the_key_names_every_field():
    config = AttentionConfig()
    keys = {Cell(workload="attention", config=to_plain(config), point={}).key}
    for field in dataclasses.fields(AttentionConfig):
        keys.add(Cell(workload="attention", config={**to_plain(config), field.name: "other"}, point={}).key)
    assert len(keys) == len(dataclasses.fields(AttentionConfig)) + 1

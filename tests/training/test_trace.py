"""A traced step keeps and frees what a real step on a CPU does, and what formulas and H200s say of the built-in model."""

from itertools import product
from pathlib import Path

import pytest
import torch

from trainstep.config.model import ModelConfig, UserModel
from trainstep.config.run import Phase, RunConfig
from trainstep.costs.traced_step import EventKind, TracedStep, TracedTensor, kept
from trainstep.costs.transformer import forward_flops
from trainstep.measure.step.live_bytes import live_bytes
from trainstep.plan.activations import kept_by_category, kept_bytes
from trainstep.plan.grade import grade_records
from trainstep.plan.live_tensors import CATEGORIES
from trainstep.plan.step_memory import alone, replay
from trainstep.plan.traced_memory import category_of
from trainstep.records.store import Store
from trainstep.training.build import build_step
from trainstep.training.trace import Tracer, trace_step

RECORDS = Path(__file__).parents[2] / "results/h200"
MODEL = ModelConfig(d_model=32, d_ff=48, layers=2, heads=4, vocab_size=50)
SLOW = pytest.mark.slow


def own(name: str, **options: object) -> RunConfig:
    model = UserModel(function=f"traced_models:{name}")
    options = {"batch_size": 2, "context": 16, "mode": "forward_backward", **options}
    return RunConfig(model=model, **options)  # type: ignore[arg-type]


def kept_tensors(step: TracedStep) -> list[TracedTensor]:
    """What forward keeps for backward: all that is there behind it but the loss."""
    tensors = [step.tensors[number] for number in kept(step)]
    [loss] = [tensor for tensor in tensors if tensor.shape == () and not tensor.saves and tensor.is_logits]
    return [tensor for tensor in tensors if tensor is not loss]


def kept_sum(step: TracedStep) -> int:
    return sum(tensor.nbytes for tensor in kept_tensors(step))


def peaks(step: TracedStep) -> tuple[int, int]:
    """The most bytes alive in forward, and in backward."""
    alive, most = set[int](), []
    for events in (step.forward, step.backward):
        sizes = []
        for event in events:
            if event.kind is EventKind.MADE:
                alive.add(event.tensor)
            elif event.kind is EventKind.FREED:
                alive.discard(event.tensor)
            sizes.append(sum(step.tensors[number].nbytes for number in alive))
        most.append(max(sizes))
    return most[0], most[1]


def real(run: RunConfig) -> tuple[int, int, int]:
    """Bytes that a real forward on this CPU saves for backward, and the most in forward and in backward."""
    assembly = build_step(run)
    [batch] = assembly.micro_batches(0)
    known = {x.untyped_storage().data_ptr() for x in (*assembly.module.parameters(), *assembly.module.buffers())}
    known |= {x.untyped_storage().data_ptr() for x in batch.values()}
    saved: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = assembly.step._forward(batch)
    saved_bytes = sum(saved.values())
    del loss
    most = []

    def mark(phase: Phase) -> None:
        most.append(live.peak())
        live.begin_peak()

    with live_bytes(torch.device("cpu")) as live:
        assembly.step([batch], mark)
    return saved_bytes, most[0], most[1]


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("gpt", "bf16_autocast"),
        *(pytest.param("gpt", precision, marks=SLOW) for precision in ("fp32", "bf16")),
        *(pytest.param("llama", precision, marks=SLOW) for precision in ("fp32", "bf16_autocast", "bf16")),
        *(pytest.param(name, "bf16_autocast", marks=SLOW) for name in ("dropping", "partly_frozen")),
    ],
)
def test_a_traced_step_is_a_real_step_on_a_cpu(name, precision):
    run = own(name, precision=precision)
    step = trace_step(run, on_gpu=False)
    assert (kept_sum(step), *peaks(step)) == real(run)


@pytest.mark.parametrize(
    ("precision", "attention"),
    [
        ("bf16_autocast", "sdpa"),
        *(
            pytest.param(precision, attention, marks=SLOW)
            for precision, attention in product(("fp32", "bf16_autocast", "bf16"), ("plain", "sdpa", "trainstep"))
            if (precision, attention) != ("bf16_autocast", "sdpa")
        ),
    ],
)
def test_the_built_in_model_as_if_it_were_a_users_keeps_what_its_formulas_say(precision, attention):
    run = RunConfig(model=MODEL, batch_size=2, context=40, precision=precision, attention=attention, device="cuda")
    step = trace_step(run)
    assert kept_sum(step) == sum(kept_bytes(run).values())
    sums = dict.fromkeys(CATEGORIES, 0)
    for tensor in kept_tensors(step):
        sums[category_of(tensor)] += tensor.nbytes
    assert {name: sums[name] for name in kept_by_category(run)} == kept_by_category(run)


@SLOW
@pytest.mark.parametrize("recompute", ["selective", "narrow", "block"])
def test_recomputed_blocks_keep_what_their_formulas_say(recompute):
    run = RunConfig(
        model=MODEL, batch_size=2, context=40, precision="bf16_autocast", attention="trainstep", recompute=recompute, device="cuda",
    )  # fmt: skip
    step = trace_step(run)
    assert kept_sum(step) == sum(kept_bytes(run).values())
    assert replay(alone(run), traced=step).peak.allocated_bytes == pytest.approx(
        replay(alone(run)).peak.allocated_bytes, rel=0.01
    )


@SLOW
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_compiled_blocks_keep_what_their_formulas_say(recompute):
    run = RunConfig(
        model=MODEL, batch_size=2, context=40, precision="bf16_autocast", attention="trainstep", compile="block",
        recompute=recompute, device="cuda",
    )  # fmt: skip
    step = trace_step(run)
    assert kept_sum(step) == sum(kept_bytes(run).values())


@SLOW
def test_compiled_blocks_of_a_users_model_keep_less_than_eager_ones():
    eager, compiled = (trace_step(own("gpt", precision="bf16_autocast", compile=name)) for name in ("none", "block"))
    assert kept_sum(compiled) < kept_sum(eager)
    assert compiled.parameters == eager.parameters


@SLOW
def test_a_traced_peak_is_that_of_an_h200():
    grades, _ = grade_records(Store(RECORDS / "numerics.jsonl").read())
    small = [grade for grade in grades if grade.config.run.model.name == "small"]
    for grade in small:
        if grade.config.run.precision in ("bf16_autocast", "fp32"):
            peak = replay(grade.config, traced=trace_step(grade.config.run)).peak
            assert peak.allocated_bytes == pytest.approx(grade.allocated_bytes, rel=0.0005)
            assert peak.reserved_bytes == pytest.approx(grade.reserved_bytes, rel=0.005)


def test_work_is_counted_by_op_and_shape():
    run = RunConfig(model=MODEL, batch_size=2, context=16, precision="bf16", device="cuda")
    step = trace_step(run)
    shape = {"layers": 2, "d_model": 32, "d_ff": 48, "vocab_size": 50, "batch_size": 2, "context": 16}
    flops = sum(forward_flops(**shape).values())
    forward = [work for work in step.work if work.phase == "forward"]
    assert sum(work.times * work.flops for work in forward) == flops
    [qkv] = [work for work in forward if work.module == "blocks.*.attention.qkv" and work.kind == "matmul"]
    assert (qkv.shape, qkv.dtype, qkv.times) == ((1, 32, 96, 32), "bfloat16", 2)
    assert (qkv.read_bytes, qkv.written_bytes) == (2 * (32 * 32 + 32 * 96), 2 * 32 * 96)
    [attention] = [work for work in forward if work.kind == "attention"]
    assert (attention.shape, attention.causal) == ((2, 4, 4, 16, 16, 8), True)
    backward = [work for work in step.work if work.phase == "backward" and work.kind == "matmul"]
    assert sum(work.times * work.flops for work in backward) == 2 * sum(
        work.times * work.flops for work in forward if work.kind == "matmul"
    )
    assert {work.module for work in backward} == {work.module for work in forward if work.kind == "matmul"}


def test_frozen_parameters_have_no_gradients_and_no_state():
    step = trace_step(own("partly_frozen", device="cuda"))
    trained = [parameter for parameter in step.parameters if parameter.trained]
    gradients = [event.name for event in step.backward if event.kind is EventKind.GRADIENT]
    assert sorted(gradients) == sorted(parameter.name for parameter in trained)
    memory = replay(alone(own("partly_frozen", device="cuda", mode="step")), traced=step)
    state = sum(2 * parameter.nbytes + 4 for parameter in trained)
    assert memory.moments[-1].categories["optimizer state"] == state


def test_equal_steps_are_traced_once():
    trace = Tracer()
    assert trace(own("gpt", capture="step", adamw="trainstep")) is trace(own("gpt", accumulation=4, device="cuda"))


def test_what_a_function_of_the_users_hides_is_said():
    assert any("Doubled" in sentence for sentence in trace_step(own("with_function")).unseen)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("branching", {}, r"needs data to be traced: traced_models.py:\d+ looks at a tensor's values"),
        ("reading", {}, r"needs data to be traced: traced_models.py:\d+ reads a tensor's memory"),
        ("misfed", {}, r"cannot be traced: .* raises TypeError: .*unexpected keyword argument 'words'"),
        ("lossless", {}, "model: its forward must return a scalar loss"),
        (
            "ending",
            {},
            r"model: traced_models:ending ends the process, in traced_models.py:\d+, so that it cannot be traced",
        ),
        ("absent", {}, "model: traced_models has no function 'absent'"),
        ("gpt", {"compile": "model"}, "compile: a model compiled whole is not traced; take compile block"),
    ],
)
def test_what_cannot_be_traced_is_one_sentence(name, options, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        trace_step(own(name, **options))
    assert "\n" not in str(caught.value)

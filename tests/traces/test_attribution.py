"""Whose work a kernel is: against a naive reading of real traces, and case by case on traces made by hand."""

import dataclasses
import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from trace_maker import AUTOGRAD, COMPILED, EAGER, MAIN, call, kernel, launched, op, span, trace
from trainstep.traces.attribution import OUTSIDE, Assigned, Attribution
from trainstep.traces.kernel_classes import MATMUL, class_of_kernel
from trainstep.traces.kineto import Trace, read_trace

LAYERS = 2
STEPS = 3
SECOND_KERNELS = ("splitKreduce", "execute_split_k_kernel")
"""A matmul split along k has a second kernel that adds its parts."""


def naive_ns_by_phase(path: Path) -> Counter[str]:
    """Every kernel's time by the phase span around its launch on the main thread; launched elsewhere, it is backward's."""
    events = [event for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if event["ph"] == "X"]
    phases = [event for event in events if event["name"] in ("forward", "backward", "optimizer") and event["tid"] != 7]
    calls = {event["args"]["correlation"]: event for event in events if event["cat"] in ("cuda_runtime", "cuda_driver")}
    found: Counter[str] = Counter()
    for event in events:
        if event["cat"] not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        launch = calls[event["args"]["correlation"]]
        around = [phase["name"] for phase in phases if phase["ts"] <= launch["ts"] <= phase["ts"] + phase["dur"]]
        found[around[0] if around else OUTSIDE] += round(event["dur"] * 1000)
    return found


def assigned(given: Trace) -> list[Assigned]:
    return Attribution(given).assign()


@pytest.mark.parametrize("path", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_phases_agree_with_a_naive_reading(path: Path):
    found: Counter[str] = Counter()
    for one in assigned(read_trace(path)):
        found[one.place.phase] += one.activity.duration_ns
    assert found == naive_ns_by_phase(path)
    assert set(found) == {"forward", "backward", "optimizer", OUTSIDE}


@pytest.mark.parametrize("path", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_everything_has_a_step_and_nothing_falls_back(path: Path):
    found = assigned(read_trace(path))
    assert {one.place.step for one in found} == set(range(STEPS))
    assert {one.place.how for one in found} == {"direct", "joined"}
    assert {one.place.layer for one in found} == {None, *range(LAYERS)}
    each = Counter(one.place.step for one in found)
    assert len(set(each.values())) == 1, "three equal steps"


def test_matmuls_of_the_eager_step():
    """Forward: qkv, out, gate, up, down; backward: two of each; attention: two forward, four backward; the head: 1 and 2."""
    found = [
        one
        for one in assigned(read_trace(EAGER))
        if class_of_kernel(one.activity.name) == MATMUL
        and not any(word in one.activity.name for word in SECOND_KERNELS)
    ]
    counts = Counter((one.place.phase, one.place.layer, one.place.span) for one in found)
    expected = {("forward", None, "head"): 1, ("backward", None, "head"): 2}
    for layer in range(LAYERS):
        for span_, forward in {
            "attention projections": 2,
            "attention scores": 1,
            "attention values": 1,
            "mlp": 3,
        }.items():
            expected[("forward", layer, span_)] = forward
            expected[("backward", layer, span_)] = 2 * forward
    assert counts == {key: STEPS * count for key, count in expected.items()}


def test_softmax_of_the_eager_step_in_its_spans():
    found = [one.place for one in assigned(read_trace(EAGER)) if "softmax" in one.activity.name.lower()]
    counts = Counter((place.phase, place.layer, place.span) for place in found)
    assert counts["forward", 0, "attention softmax"] == counts["backward", 1, "attention softmax"] == STEPS
    assert counts["forward", None, "loss"] == counts["backward", None, "loss"] == STEPS


def test_compiled_blocks():
    found = assigned(read_trace(COMPILED))
    inductor = [one for one in found if one.activity.name.startswith("triton_")]
    assert {one.place.span for one in inductor} == {"compiled"}
    assert all(one.place.compiled for one in inductor)
    assert {(one.place.phase, one.place.layer) for one in inductor} == {
        (phase, layer) for phase in ("forward", "backward") for layer in range(LAYERS)
    }
    eager = {one.place.span for one in found if not one.place.compiled}
    assert {"embedding", "norm", "head", "loss"} <= eager


def one_step(*events: object) -> Trace:
    """A step of 1000 us: forward 0-400, backward 400-800, optimizer 800-1000."""
    spans = [span("step 4", 0, 1000), span("forward", 0, 400), span("backward", 400, 800), span("optimizer", 800, 1000)]
    return trace(*spans, *events)  # type: ignore[arg-type]


def place_of(given: Trace, name: str):
    return next(one.place for one in assigned(given) if one.activity.name == name)


def test_direct():
    place = place_of(one_step(span("layer 3", 10, 100), span("mlp", 20, 90), *launched("k", 30, 500, 510, 1)), "k")
    assert (place.step, place.phase, place.layer, place.span, place.how) == (4, "forward", 3, "mlp", "direct")


def test_the_last_forward_op_with_the_number_made_the_node():
    """`aten::to` in norm changed nothing, saw number 9 coming and left it to the matmul in head."""
    given = one_step(
        *(span("norm", 10, 20), op("aten::to", 11, 12, sequence=9)),
        *(span("head", 30, 60), op("aten::linear", 31, 50, sequence=9), op("aten::mm", 35, 45, sequence=9)),
        op("aten::next_step", 900, 910, sequence=9),
        op("evaluate_function: MmBackward0", 500, 560, AUTOGRAD, sequence=9, forward_thread=1),
        op("aten::mm", 510, 550, AUTOGRAD),
        *launched("gemm", 520, 600, 610, 1, AUTOGRAD),
    )
    place = place_of(given, "gemm")
    assert (place.step, place.phase, place.span, place.how) == (4, "backward", "head", "joined")


def test_recomputation_keeps_the_layer_and_shows_its_own_span():
    given = one_step(
        *(span("layer 1", 10, 90), span("mlp", 40, 60), op("aten::mul", 45, 50, sequence=5)),
        op("MulBackward0", 500, 700, AUTOGRAD, sequence=5, forward_thread=1),
        span("attention scores", 520, 560, AUTOGRAD),
        *launched("again", 530, 600, 610, 1, AUTOGRAD),
        *launched("gradient", 650, 680, 690, 2, AUTOGRAD),
    )
    place = place_of(given, "again")
    assert (place.phase, place.layer, place.span) == ("backward", 1, "attention scores")
    assert place_of(given, "gradient").span == "mlp"


def test_without_a_number_the_main_thread_says_the_phase():
    given = one_step(op("some::op", 500, 520, AUTOGRAD), *launched("add", 505, 600, 610, 1, AUTOGRAD))
    place = place_of(given, "add")
    assert (place.step, place.phase, place.span, place.how) == (4, "backward", "", "fallback")


def test_gradients_are_added_up_outside_every_op():
    node = op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 500, 520, AUTOGRAD)
    assert place_of(one_step(node, *launched("add", 505, 600, 610, 1, AUTOGRAD)), "add").span == "gradient accumulation"


def test_a_collective_names_itself_on_its_thread():
    given = one_step(span("nccl:all_reduce", 500, 520, AUTOGRAD), *launched("nccl", 505, 600, 610, 1, AUTOGRAD))
    place = place_of(given, "nccl")
    assert (place.step, place.phase, place.span, place.how) == (4, "backward", "nccl:all_reduce", "fallback")


def test_modules_of_other_models_are_named_by_path():
    given = one_step(
        *(
            span("transformer.h.11", 10, 90),
            span("transformer.h.11.mlp", 20, 80),
            span("transformer.h.11.mlp.fc", 30, 70),
        ),
        *launched("gemm", 40, 50, 60, 1),
        *(span("encoder", 100, 200), span("encoder.norm", 110, 190), *launched("norm", 120, 130, 140, 2)),
    )
    place = place_of(given, "gemm")
    assert (place.layer, place.span) == (11, "mlp.fc")
    assert (place_of(given, "norm").layer, place_of(given, "norm").span) == (None, "encoder.norm")


def test_a_kernel_whose_launch_was_lost():
    place = place_of(one_step(kernel("lonely", 850, 860, 77)), "lonely")
    assert (place.phase, place.how) == ("optimizer", "fallback")


def test_outside_every_phase():
    given = trace(span("step 0", 0, 100), span("forward", 50, 90), *launched("upload", 10, 20, 30, 1))
    assert place_of(given, "upload").phase == OUTSIDE


def test_a_trace_of_another_program():
    """It names no phases: autograd's work is backward, numbered ops are forward, torch's optimizer names itself."""
    given = trace(
        *(span("ProfilerStep#7", 0, 900), op("aten::mm", 10, 50, sequence=1), *launched("f", 20, 30, 40, 1)),
        op("autograd::engine::evaluate_function: MmBackward0", 100, 200, AUTOGRAD, sequence=1, forward_thread=1),
        *launched("b", 120, 130, 140, 2, AUTOGRAD),
        *(span("Optimizer.step#Adam.step", 300, 400), *launched("o", 310, 320, 330, 3)),
        *(call("cudaMemcpyAsync", 500, 505, 4), kernel("copy", 510, 520, 4)),
    )
    places = {one.activity.name: one.place for one in assigned(given)}
    assert [places[name].phase for name in ("f", "b", "o", "copy")] == ["forward", "backward", "optimizer", OUTSIDE]
    assert {place.step for place in places.values()} == {7}


def test_time_that_is_lost_is_an_error(monkeypatch: pytest.MonkeyPatch):
    given = Attribution(one_step(kernel("k", 10, 20)))
    monkeypatch.setattr(Attribution, "_assigned", lambda self, activity: self_without_phase(given, activity))
    with pytest.raises(RuntimeError, match="0 of 10000 ns"):
        given.assign()


def self_without_phase(attribution: Attribution, activity: object) -> Assigned:
    place = attribution.place(MAIN, 0)
    return Assigned(activity=activity, place=dataclasses.replace(place, phase=""), call=None)  # type: ignore[arg-type]

"""The phase, layer and span of each kernel agree with a naive reading of real traces, and case by case with traces by hand."""

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
    """Nanoseconds of kernels by the phase span around their launch; a launch on another thread belongs to backward."""
    events = [event for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if event["ph"] == "X"]
    phases = [event for event in events if event["name"] in ("forward", "backward", "optimizer") and event["tid"] != 7]
    calls = {event["args"]["correlation"]: event for event in events if event["cat"] in ("cuda_runtime", "cuda_driver")}
    time_ns: Counter[str] = Counter()
    for event in events:
        if event["cat"] not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        launch = calls[event["args"]["correlation"]]
        around = [phase["name"] for phase in phases if phase["ts"] <= launch["ts"] <= phase["ts"] + phase["dur"]]
        time_ns[around[0] if around else OUTSIDE] += round(event["dur"] * 1000)
    return time_ns


def assigned(recorded: Trace) -> list[Assigned]:
    return Attribution(recorded).assign()


@pytest.mark.parametrize("path", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_phases_agree_with_a_naive_reading(path: Path):
    time_ns: Counter[str] = Counter()
    for piece in assigned(read_trace(path)):
        time_ns[piece.place.phase] += piece.activity.duration_ns
    assert time_ns == naive_ns_by_phase(path)
    assert set(time_ns) == {"forward", "backward", "optimizer", OUTSIDE}


@pytest.mark.parametrize("path", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_everything_has_a_step_and_nothing_falls_back(path: Path):
    pieces = assigned(read_trace(path))
    assert {piece.place.step for piece in pieces} == set(range(STEPS))
    assert {piece.place.how for piece in pieces} == {"direct", "joined"}
    assert {piece.place.layer for piece in pieces} == {None, *range(LAYERS)}
    by_step = Counter(piece.place.step for piece in pieces)
    assert len(set(by_step.values())) == 1, "three equal steps"


def test_the_eager_steps_matmuls_have_their_spans():
    """Forward has qkv, out, gate, up, down, two of attention and the head; backward has two matmuls for each of them."""
    matmuls = [
        piece
        for piece in assigned(read_trace(EAGER))
        if class_of_kernel(piece.activity.name) == MATMUL
        and not any(word in piece.activity.name for word in SECOND_KERNELS)
    ]
    counts = Counter((piece.place.phase, piece.place.layer, piece.place.span) for piece in matmuls)
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


def test_the_eager_steps_softmax_has_its_spans():
    places = [piece.place for piece in assigned(read_trace(EAGER)) if "softmax" in piece.activity.name.lower()]
    counts = Counter((place.phase, place.layer, place.span) for place in places)
    assert counts["forward", 0, "attention softmax"] == counts["backward", 1, "attention softmax"] == STEPS
    assert counts["forward", None, "loss"] == counts["backward", None, "loss"] == STEPS


def test_kernels_of_compiled_blocks_have_their_layer():
    pieces = assigned(read_trace(COMPILED))
    inductor = [piece for piece in pieces if piece.activity.name.startswith("triton_")]
    assert {piece.place.span for piece in inductor} == {"compiled"}
    assert all(piece.place.compiled for piece in inductor)
    assert {(piece.place.phase, piece.place.layer) for piece in inductor} == {
        (phase, layer) for phase in ("forward", "backward") for layer in range(LAYERS)
    }
    eager = {piece.place.span for piece in pieces if not piece.place.compiled}
    assert {"embedding", "norm", "head", "loss"} <= eager


def one_step(*events: object) -> Trace:
    """A step of 1000 us: forward 0-400, backward 400-800, optimizer 800-1000."""
    spans = [span("step 4", 0, 1000), span("forward", 0, 400), span("backward", 400, 800), span("optimizer", 800, 1000)]
    return trace(*spans, *events)  # type: ignore[arg-type]


def place_of(recorded: Trace, name: str):
    return next(piece.place for piece in assigned(recorded) if piece.activity.name == name)


def test_a_launch_inside_spans_is_direct():
    place = place_of(one_step(span("layer 3", 10, 100), span("mlp", 20, 90), *launched("k", 30, 500, 510, 1)), "k")
    assert (place.step, place.phase, place.layer, place.span, place.how) == (4, "forward", 3, "mlp", "direct")


def test_the_last_forward_op_with_the_sequence_number_made_the_node():
    """`aten::to` in norm changed nothing, so the sequence number 9 is that of the matmul in head too."""
    recorded = one_step(
        *(span("norm", 10, 20), op("aten::to", 11, 12, sequence=9)),
        *(span("head", 30, 60), op("aten::linear", 31, 50, sequence=9), op("aten::mm", 35, 45, sequence=9)),
        op("aten::next_step", 900, 910, sequence=9),
        op("evaluate_function: MmBackward0", 500, 560, AUTOGRAD, sequence=9, forward_thread=1),
        op("aten::mm", 510, 550, AUTOGRAD),
        *launched("gemm", 520, 600, 610, 1, AUTOGRAD),
    )
    place = place_of(recorded, "gemm")
    assert (place.step, place.phase, place.span, place.how) == (4, "backward", "head", "joined")


def test_recomputation_keeps_the_layer_and_shows_its_own_span():
    recorded = one_step(
        *(span("layer 1", 10, 90), span("mlp", 40, 60), op("aten::mul", 45, 50, sequence=5)),
        op("MulBackward0", 500, 700, AUTOGRAD, sequence=5, forward_thread=1),
        span("attention scores", 520, 560, AUTOGRAD),
        *launched("again", 530, 600, 610, 1, AUTOGRAD),
        *launched("gradient", 650, 680, 690, 2, AUTOGRAD),
    )
    place = place_of(recorded, "again")
    assert (place.phase, place.layer, place.span) == ("backward", 1, "attention scores")
    assert place_of(recorded, "gradient").span == "mlp"


def test_without_a_sequence_number_the_main_thread_gives_the_phase():
    recorded = one_step(op("some::op", 500, 520, AUTOGRAD), *launched("add", 505, 600, 610, 1, AUTOGRAD))
    place = place_of(recorded, "add")
    assert (place.step, place.phase, place.span, place.how) == (4, "backward", "", "fallback")


def test_accumulated_gradients_have_a_span_of_their_own():
    node = op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 500, 520, AUTOGRAD)
    assert place_of(one_step(node, *launched("add", 505, 600, 610, 1, AUTOGRAD)), "add").span == "gradient accumulation"


def test_a_collective_names_itself_on_its_thread():
    recorded = one_step(span("nccl:all_reduce", 500, 520, AUTOGRAD), *launched("nccl", 505, 600, 610, 1, AUTOGRAD))
    place = place_of(recorded, "nccl")
    assert (place.step, place.phase, place.span, place.how) == (4, "backward", "nccl:all_reduce", "fallback")


def test_modules_of_other_models_are_named_by_path():
    recorded = one_step(
        *(
            span("transformer.h.11", 10, 90),
            span("transformer.h.11.mlp", 20, 80),
            span("transformer.h.11.mlp.fc", 30, 70),
        ),
        *launched("gemm", 40, 50, 60, 1),
        *(span("encoder", 100, 200), span("encoder.norm", 110, 190), *launched("norm", 120, 130, 140, 2)),
    )
    place = place_of(recorded, "gemm")
    assert (place.layer, place.span) == (11, "mlp.fc")
    assert (place_of(recorded, "norm").layer, place_of(recorded, "norm").span) == (None, "encoder.norm")


def test_a_kernel_without_its_launch_falls_back_to_the_time():
    place = place_of(one_step(kernel("lonely", 850, 860, 77)), "lonely")
    assert (place.phase, place.how) == ("optimizer", "fallback")


def test_a_launch_between_phases_is_outside_phases():
    recorded = trace(span("step 0", 0, 100), span("forward", 50, 90), *launched("upload", 10, 20, 30, 1))
    assert place_of(recorded, "upload").phase == OUTSIDE


def test_phases_of_another_programs_trace_are_inferred():
    """The trace names no phases: autograd's work is backward, numbered ops are forward, and torch's optimizer names itself."""
    recorded = trace(
        *(span("ProfilerStep#7", 0, 900), op("aten::mm", 10, 50, sequence=1), *launched("f", 20, 30, 40, 1)),
        op("autograd::engine::evaluate_function: MmBackward0", 100, 200, AUTOGRAD, sequence=1, forward_thread=1),
        *launched("b", 120, 130, 140, 2, AUTOGRAD),
        *(span("Optimizer.step#Adam.step", 300, 400), *launched("o", 310, 320, 330, 3)),
        *(call("cudaMemcpyAsync", 500, 505, 4), kernel("copy", 510, 520, 4)),
    )
    places = {piece.activity.name: piece.place for piece in assigned(recorded)}
    assert [places[name].phase for name in ("f", "b", "o", "copy")] == ["forward", "backward", "optimizer", OUTSIDE]
    assert {place.step for place in places.values()} == {7}


def test_lost_time_is_an_error(monkeypatch: pytest.MonkeyPatch):
    recorded = Attribution(one_step(kernel("k", 10, 20)))
    monkeypatch.setattr(Attribution, "_assigned", lambda self, activity: self_without_phase(recorded, activity))
    with pytest.raises(RuntimeError, match="0 of 10000 ns"):
        recorded.assign()


def self_without_phase(attribution: Attribution, activity: object) -> Assigned:
    place = attribution.place_at(MAIN, 0)
    return Assigned(activity=activity, place=dataclasses.replace(place, phase=""), call=None)  # type: ignore[arg-type]

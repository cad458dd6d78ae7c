"""Ways of computing that cost more than another are told by what ops do to which shapes: real traces of small steps on a CPU."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from trace_maker import launched, op, span, trace
from trainstep.traces.kineto import parse_trace, read_trace
from trainstep.traces.patterns.pattern import ATTENTION, MASK, OPTIMIZER, SLICES, Instead
from trainstep.traces.patterns.table import Patterns, find_patterns
from trainstep.traces.work import read_work


@pytest.fixture
def profiled(tmp_path: Path) -> Callable[..., Patterns]:
    """Profile a function as one step, its forward under a range, and find its patterns."""

    def patterns(step: Callable[[], None], *, shapes: bool = True) -> Patterns:
        step()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes) as profiler, record_function("step 1"):
            step()
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
        return find_patterns(read_work(read_trace(tmp_path / "trace.json")))

    return patterns


@pytest.fixture
def seen(profiled: Callable[..., Patterns]) -> Callable[..., dict[str, list]]:
    """The same, as a table."""
    return lambda *arguments, **named: profiled(*arguments, **named).table()


def heads(queries: int = 48) -> list[torch.Tensor]:
    shapes = (2, 4, queries, 16), (2, 4, 48, 16), (2, 4, 48, 16)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def written_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return (query @ key.transpose(-2, -1) * 0.25).softmax(-1) @ value


@pytest.mark.parametrize("queries", [48, 20])
def test_attention_with_its_scores_in_memory_is_found_in_both_passes(seen, queries):
    tensors = heads(queries)
    table = seen(lambda: written_out(*tensors).sum().backward())
    assert set(table["pattern"]) == {ATTENTION}
    assert sum(table["time_s"]) > sum(table["least_s"]) > 0
    assert f"{queries} x 48" in table["what"][0]


@pytest.mark.parametrize("queries", [48, 20])
@pytest.mark.parametrize(
    ("way", "op"), [("bools", "causal"), ("numbers", "masked"), ("baddbmm", "masked"), ("none", "")]
)
def test_the_fused_attention_to_take_instead_has_the_shapes_and_the_mask(profiled, way, op, queries):
    """A square mask of bools is taken to be causal; one of numbers cannot be left out."""
    query, key, value = heads(queries)
    hidden, bias = torch.ones(queries, 48, dtype=torch.bool).triu(1), torch.zeros(1, queries, 48)

    def step() -> None:
        scores = query @ key.transpose(-2, -1) * 0.25 if way != "baddbmm" else None
        if way == "bools":
            scores = scores.masked_fill(hidden, float("-inf"))
        elif way == "numbers":
            scores = scores + bias
        elif way == "baddbmm":
            scores = torch.baddbmm(bias, query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)).view(2, 4, queries, 48)
        (scores.softmax(-1) @ value).sum().backward()

    (pattern,) = profiled(step).patterns
    if (way, queries) == ("bools", 20):
        op = "masked"
    shapes = ((2, 4, queries, 16), (2, 4, 48, 16), (2, 4, 48, 16))
    assert pattern.instead == (Instead(f"{op} attention".strip(), shapes, "float", 1, 1),)


def test_a_forward_alone_is_timed_without_backward(profiled):
    query, key, value = (tensor.detach().flatten(0, 1) for tensor in heads())
    (pattern,) = profiled(lambda: [written_out(query, key, value) for _ in range(3)]).patterns
    assert pattern.instead == (Instead("attention", ((1, 8, 48, 16),) * 3, "float", 3, 0),)


def test_recomputed_attention_runs_forward_twice_and_backward_once(profiled):
    tensors = heads()
    (pattern,) = profiled(lambda: checkpoint(written_out, *tensors, use_reentrant=False).sum().backward()).patterns
    (instead,) = pattern.instead
    assert (instead.forwards, instead.backwards) == (2, 1)


def test_16_bit_attention_is_timed_in_16_bits(profiled):
    tensors = [tensor.detach().bfloat16() for tensor in heads()]
    (pattern,) = profiled(lambda: written_out(*tensors)).patterns
    assert pattern.instead[0].dtype == "c10::BFloat16"


@pytest.mark.parametrize("shape", [(0, 0, 0), (-1, -1, -1), (2, 0, 8)])
def test_shapes_of_nothing_are_no_scores(shape):
    events = [span("step 0", 0, 2000), span("forward", 0, 900)]
    events += [
        replace(op(name, 10 + at, 15 + at), shapes=(shape, shape))
        for at, name in enumerate(["aten::bmm", "aten::_softmax"])
    ]
    assert find_patterns(read_work(trace(*events))).table() == {}


def test_a_timed_least_is_divided_among_phases_as_the_time_is(profiled):
    tensors = heads()
    patterns = profiled(lambda: written_out(*tensors).sum().backward())
    table = patterns.table({ATTENTION: 0.5})
    assert sum(table["least_s"]) == pytest.approx(0.5)
    assert table["least_s"][0] / 0.5 == pytest.approx(table["time_s"][0] / sum(table["time_s"]))
    assert (set(table["least_is_timed"]), set(patterns.table()["least_is_timed"])) == ({True}, {False})


def test_a_fused_attention_and_a_loss_are_no_pattern(seen):
    tensors, logits = heads(), torch.randn(64, 48, requires_grad=True)

    def step() -> None:
        F.scaled_dot_product_attention(*tensors).sum().backward()
        F.cross_entropy(logits, torch.arange(48).repeat(2)[:64] % 48).backward()
        logits.softmax(-1).sum().backward()

    assert seen(step) == {}


@pytest.mark.parametrize(
    ("how", "found"), [({"foreach": False}, True), ({"foreach": True}, True), ({"fused": True}, False)]
)
def test_an_adam_by_tensor_is_found(seen, how, found):
    parameters = [torch.nn.Parameter(torch.randn(64, 32)) for _ in range(10)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    table = seen(torch.optim.AdamW(parameters, **how).step)
    assert table.get("pattern", []) == [OPTIMIZER] * found
    if found:
        assert table["calls"] == [10.0]
        assert table["phase"] == ["optimizer"]
        assert table["time_s"][0] <= table["of_s"][0]


@pytest.mark.parametrize("numbers", [16, 4])
def test_a_foreach_adam_on_a_gpu_is_found_by_its_lists(numbers):
    """16 tensors of 2^20 elements; a kernel takes 100 us for 2 reads and a write, so 28 bytes an element take 233."""
    tensors = ((1024, 1024),) * numbers
    ops = {
        "aten::_foreach_mul_": ((tensors, ()), 67),
        "aten::_foreach_lerp_": ((tensors, tensors, ()), 100),
        "aten::_foreach_addcmul_": ((tensors, tensors, tensors, ()), 150),
        "aten::_foreach_addcdiv_": ((tensors, tensors, tensors, ()), 150),
    }
    events = [span("step 0", 0, 2000), span("optimizer", 0, 1000), span("Optimizer.step#AdamW.step", 10, 900)]
    for place, (name, (shapes, time_us)) in enumerate(ops.items()):
        at = 20 + 200 * place
        events += [
            replace(op(name, at, at + 20), shapes=shapes),
            *launched(name, at + 2, at + 30, at + 30 + time_us, place),
        ]
    table = find_patterns(read_work(trace(*events))).table()
    if numbers < 8:
        assert table == {}
        return
    assert (table["pattern"], table["phase"], table["calls"]) == ([OPTIMIZER], ["optimizer"], [16.0])
    assert table["time_s"][0] == pytest.approx(467e-6)
    assert table["least_s"][0] == pytest.approx(233e-6, rel=0.01)
    assert "by foreach" in table["what"][0]


@pytest.mark.parametrize("short", [0, 10])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_foreach_adam_of_many_tensors_has_no_shapes(name, short):
    """torch writes no shapes of lists with more than 30 tensors; another group of parameters may be shorter."""
    events = [span("step 0", 0, 2000), span("optimizer", 0, 1000), span(f"Optimizer.step#{name}.step", 10, 900)]
    for place, (opened, time_us) in enumerate({"aten::_foreach_mul_": 100, "aten::_foreach_addcdiv_": 200}.items()):
        at = 20 + 200 * place
        events += [
            replace(op(opened, at, at + 20), shapes=((), (), ())),
            *launched(opened, at + 2, at + 30, at + 30 + time_us, place),
        ]
    if short:
        events.append(replace(op("aten::_foreach_addcdiv_", 500, 510), shapes=(((8, 8),) * short, ())))
    events.append(replace(op("aten::mm", 1200, 1210), shapes=((8, 8), (8, 8))))
    table = find_patterns(read_work(trace(*events))).table()
    if name == "SGD":
        assert table == {}
        return
    assert (table["pattern"], table["time_s"]) == ([OPTIMIZER], pytest.approx([300e-6]))
    assert table["least_s"] == pytest.approx([100e-6])
    assert table["what"] == ["more than 30 tensors are updated by foreach, a pass over memory for each op"]


@pytest.mark.parametrize("mask", [(1, 1, 1024, 1024), (16, 1, 1, 1024), (), (1, 1, 1024, 2048)])
@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
def test_a_square_mask_of_a_fused_attention_is_found_in_both_passes(kernel, mask):
    q, none = (16, 16, 1024, 64), ()
    backward = {"cudnn": [q, q, q, q, q, (16, 16, 1024), none, none, mask], "efficient": [q, q, q, q, mask, q]}[kernel]
    name = f"aten::_scaled_dot_product_{kernel}_attention"
    events = [span("step 0", 0, 2000), span("forward", 0, 900), span("backward", 1000, 1900)]
    for place, (at, op_name, shapes, time_us) in enumerate(
        [(10, name, [q, q, q, mask], 300), (1010, f"{name}_backward", backward, 600)]
    ):
        opened = replace(op(op_name, at, at + 20), shapes=tuple(shapes))
        events += [opened, *launched(op_name, at + 2, at + 30, at + 30 + time_us, place)]
    table = find_patterns(read_work(trace(*events))).table()
    if mask != (1, 1, 1024, 1024):
        assert table == {}
        return
    assert (table["pattern"], table["phase"], table["calls"]) == ([MASK] * 2, ["forward", "backward"], [2.0] * 2)
    assert table["time_s"] == pytest.approx([300e-6, 600e-6])
    assert table["least_s"] == pytest.approx([150e-6, 300e-6])
    assert "a mask of 1024 x 1024;" in table["what"][0]


def test_an_sgd_by_tensor_is_not_called_an_adam(seen):
    parameters = [torch.nn.Parameter(torch.randn(64, 32)) for _ in range(10)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    assert seen(torch.optim.SGD(parameters, lr=0.1, foreach=False).step) == {}


def test_slices_that_are_put_together_again_are_found_with_their_backward(seen):
    x = torch.randn(8, 250, requires_grad=True)
    table = seen(lambda: torch.cat([F.gelu(part) for part in x.tensor_split(25, -1)], -1).sum().backward())
    assert set(table["pattern"]) == {SLICES}
    assert table["calls"][0] == 25.0
    assert "25 times in a row" in table["what"][0]
    assert sum(table["ranges"]) > 50, "backward's ops are among them"


def test_a_batch_of_samples_has_nothing_of_the_models_backward(seen):
    samples, weight = torch.randn(16, 64, 64), torch.randn(64, 64, requires_grad=True)

    def step() -> None:
        batch = torch.stack([samples[index] for index in range(16)])
        (batch @ weight).exp().sum().backward()

    table = seen(step)
    assert (table["pattern"], table["phase"]) == ([SLICES], ["forward"])


@pytest.mark.parametrize("in_place", [True, False])
def test_samples_with_a_backward_each_are_read(seen, in_place):
    """Backward's ops lie between those of the loop, with numbers that no op of this thread's forward has."""
    samples, weight = torch.randn(16, 8, 8), torch.randn(8, 8, requires_grad=True)
    before = (weight * 1).exp()

    def step() -> None:
        for index in range(16):
            y = samples[index] @ (weight if in_place else before)
            if in_place:
                y[0].mul_(3.0)
            y.exp().sum().backward(retain_graph=True)

    assert set(seen(step).get("pattern", [])) <= {SLICES}


def test_a_loop_over_rows_is_found(seen):
    x = torch.randn(12, 64)
    table = seen(lambda: torch.stack([x[row].exp().mul(2.0) for row in range(12)]))
    assert table["pattern"] == [SLICES]


@pytest.mark.parametrize("around", ["data_wait", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "mine"])
def test_what_makes_a_batch_is_no_pattern(around):
    """In a loader it is the wait for data; elsewhere outside of the phases no compiled model does it."""
    inner = "forward" if around != "mine" else ""  # autograd numbers a loader's ops as it does those of forward
    events = [span("step 0", 0, 20_000), span(around, 0, 9000), *([span(inner, 1, 8999)] if inner else [])]
    events += [replace(op("aten::select", 10 + 500 * at, 20 + 500 * at), shapes=((64, 8),)) for at in range(16)]
    events += [replace(op("aten::stack", 8100, 8200), shapes=(((8,),) * 16,)), span("forward", 10_000, 12_000)]
    events += [replace(op("aten::mm", 10_100, 11_000), shapes=((16, 8), (8, 8)))]
    patterns = find_patterns(read_work(trace(*events)))
    assert patterns.table() == {}
    assert patterns.of["forward"].time_ns == 2_000_000, "a wait is no time of a phase"


def test_only_pythons_time_between_slices_is_theirs():
    """16 slices of 10 us, 5 us of Python before each, and 3 ms of something else in the middle."""
    events = [span("step 0", 0, 20_000), span("forward", 0, 9000)]
    starts = [15 * at + (3000 if at >= 8 else 0) for at in range(16)]
    events += [replace(op("aten::select", at, at + 10), shapes=((64, 8),)) for at in starts]
    events += [replace(op("aten::stack", starts[-1] + 15, starts[-1] + 25), shapes=(((8,),) * 16,))]
    assert find_patterns(read_work(trace(*events))).table()["time_s"] == pytest.approx([(17 * 10 + 15 * 5) * 1e-6])


def test_what_a_closure_computes_is_not_the_optimizers(seen):
    x = torch.randn(8, 250, requires_grad=True)
    parameters = [torch.nn.Parameter(torch.randn(64, 32)) for _ in range(10)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, foreach=False)

    def closure() -> torch.Tensor:
        with record_function("forward"):
            return torch.cat([F.gelu(part) for part in x.tensor_split(25, -1)], -1).sum()

    def step() -> None:
        with record_function("optimizer"):
            optimizer.step(closure)

    table = seen(step)
    assert dict(zip(table["pattern"], table["phase"], strict=True)) == {OPTIMIZER: "optimizer", SLICES: "forward"}


def test_layers_one_after_the_other_are_no_slices(seen):
    layers = [torch.nn.Linear(16, 16) for _ in range(12)]

    def step() -> None:
        x = torch.randn(4, 16)
        for layer in layers:
            x = layer(x).relu()
        x.sum().backward()

    assert seen(step) == {}


def test_without_shapes_there_are_no_rows(seen):
    tensors = heads()
    assert seen(lambda: written_out(*tensors).sum().backward(), shapes=False) == {}


def test_odd_shapes_in_a_trace_are_read_or_ignored():
    odd = [[], "x", None, [[2, 3], []], [1, [2]]]
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "step 1", "pid": 1, "tid": 1, "ts": 0, "dur": 50},
        *(
            {"ph": "X", "cat": "cpu_op", "name": "aten::bmm", "pid": 1, "tid": 1, "ts": 1 + 5 * index, "dur": 4}
            | {"args": {"Input Dims": [shape], "Input type": shape}}
            for index, shape in enumerate(odd)
        ),
    ]
    text = json.dumps({"traceEvents": events})
    assert find_patterns(read_work(parse_trace(text, "odd.json"))).table() == {}


def test_on_a_cpu_attention_also_costs_what_reaches_its_ops():
    """In us. Forward: 6 of Python before each of two ops, 900 of something else before the third. Backward: autograd's ranges."""
    scores, wide = (16, 48, 48), (16, 48, 8)
    bmm = {"shapes": (wide, (16, 8, 48)), "dtypes": ("float", "float")}
    soft = {"shapes": (scores,), "dtypes": ("float",)}
    events = [
        span("step 0", 0, 10_000),
        span("forward", 0, 4000),
        op("aten::add", 10, 100),
        replace(op("aten::bmm", 106, 206), **bmm),
        replace(op("aten::_softmax", 212, 312), **soft),
        replace(op("aten::mul", 1212, 1312), **soft),
        span("backward", 5000, 9000),
        op("autograd::engine::evaluate_function: SoftmaxBackward0", 5100, 5250),
        op("SoftmaxBackward0", 5110, 5240),
        replace(op("aten::_softmax_backward_data", 5120, 5220), **soft),
    ]
    table = find_patterns(read_work(trace(*events))).table()
    times_us = {phase: 1e6 * time_s for phase, time_s in zip(table["phase"], table["time_s"], strict=True)}
    assert times_us == {"forward": pytest.approx(3 * 100 + 2 * 6), "backward": pytest.approx(100 + 30 + 20)}
    assert dict(zip(table["phase"], table["ranges"], strict=True)) == {"forward": 3, "backward": 3}

"""Spans are recorded under a profiler, cost nothing without one, become NVTX ranges on request, and are always closed."""

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile

from trainstep.config.model import size
from trainstep.config.run import RunConfig
from trainstep.spans import nvtx_spans, span, span_children
from trainstep.training.build import build_step


class Nvtx:
    """A stand-in for torch.cuda.nvtx that logs the ranges it opens and closes."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @contextmanager
    def range(self, message: str) -> Iterator[None]:
        self.log.append(message)
        try:
            yield
        finally:
            self.log.append(f"/{message}")


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    fake = Nvtx()
    monkeypatch.setattr(torch.cuda, "nvtx", fake)
    return fake.log


@pytest.fixture
def no_record_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: object) -> AbstractContextManager[None]:
        if name.startswith("Optimizer."):  # torch records its optimizers itself
            return nullcontext()
        raise AssertionError("record_function without a profiler")

    monkeypatch.setattr(autograd_profiler, "record_function", refuse)
    monkeypatch.setattr(torch.profiler, "record_function", refuse)


def profiled(run: Any) -> Any:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return profiler.events()


def above(event: Any) -> list[str]:
    """Names of the events around this one, nearest first."""
    names = []
    while event.cpu_parent is not None:
        event = event.cpu_parent
        names.append(event.name)
    return names


def test_without_a_profiler_all_spans_are_one_null_context():
    assert span("a") is span("b")
    with span("a") as entered, span("a"):
        assert entered is None


def test_a_span_is_recorded_under_a_profiler_only():
    events = profiled(lambda: span("mine").__enter__())
    assert "mine" in {event.name for event in events}
    assert span("a") is span("b")


def test_nvtx_ranges_are_opened_in_nvtx_spans_only(nvtx: list[str]):
    with span("before"):
        pass
    with nvtx_spans():
        with span("outer"), span("inner"):
            pass
        with nvtx_spans():
            pass
        with span("still"):
            pass
    with span("after"):
        pass
    assert nvtx == ["outer", "inner", "/inner", "/outer", "still", "/still"]


def test_an_error_closes_the_nvtx_range(nvtx: list[str]):
    with pytest.raises(KeyError), nvtx_spans(), span("failing"):
        raise KeyError
    assert nvtx == ["failing", "/failing"]
    assert span("a") is span("b")


def one_step(**fields: Any) -> Any:
    model = dataclasses.replace(size("tiny"), d_model=16, d_ff=32)
    assembly = build_step(RunConfig(model=model, batch_size=1, context=4, attention="plain", **fields))
    return lambda: assembly.step(assembly.micro_batches(0))


def test_a_step_without_a_profiler_records_nothing(no_record_function: None):
    span("not recorded").__enter__()
    with pytest.raises(AssertionError, match="without a profiler"):
        profiled(lambda: span("x"))
    one_step()()


def test_a_step_has_its_spans():
    events = profiled(one_step())
    where = {event.name: above(event) for event in events}
    assert {"forward", "backward", "optimizer"} <= set(where)
    assert "grad_sync" not in where
    for name in ("embedding", "layer 0", "layer 1", "head", "loss"):
        assert where[name] == ["forward"], name
    for name in ("mlp", "rotary", "attention projections", "attention scores", "attention softmax", "attention values"):
        assert where[name] == ["layer 1", "forward"], name
    counts = {name: sum(event.name == name for event in events) for name in ("norm", "mlp", "rotary", "forward")}
    assert counts == {"norm": 5, "mlp": 2, "rotary": 2, "forward": 1}


def test_operators_are_inside_their_spans():
    events = profiled(one_step())
    owners = {
        op: [
            next((name for name in above(event) if not name.startswith("aten::")), None)
            for event in events
            if event.name == op
        ]
        for op in ("aten::embedding", "aten::_softmax", "aten::cross_entropy_loss", "aten::silu")
    }
    assert {op: set(names) for op, names in owners.items()} == {
        "aten::embedding": {"embedding"},
        "aten::_softmax": {"attention softmax"},
        "aten::cross_entropy_loss": {"loss"},
        "aten::silu": {"mlp"},
    }
    assert [above(event)[-1] for event in events if "adamw" in event.name.lower()].count("optimizer") >= 1


def test_the_nvtx_ranges_of_a_step_are_balanced(nvtx: list[str]):
    run = one_step()
    with nvtx_spans():
        run()
    assert nvtx[:2] == ["forward", "embedding"]
    assert nvtx[-1] == "/optimizer"
    stack: list[str] = []
    for name in nvtx:
        assert not name.startswith("/") or stack.pop() == name[1:]
        if not name.startswith("/"):
            stack.append(name)
    assert not stack


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        y = self.activation(self.linear(x))
        if fails:
            raise KeyError("inside")
        return y


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        return self.head(self.inner(x, fails))


def test_child_modules_get_spans_until_removed(nvtx: list[str]):
    model = Outer()
    handles = span_children(model)
    with nvtx_spans():
        model(torch.ones(2))
    assert nvtx == ["inner", "inner.linear", "/inner.linear", "/inner", "head", "/head"]
    for handle in handles:
        handle.remove()
    with nvtx_spans():
        model(torch.ones(2))
    assert len(nvtx) == 6


def test_child_modules_get_spans_under_a_profiler():
    model = Outer()
    span_children(model)
    where = {event.name: above(event) for event in profiled(lambda: model(torch.ones(2)))}
    assert where["inner.linear"] == ["inner"]
    assert "activation" not in where


def test_a_child_that_raises_closes_its_spans(nvtx: list[str]):
    model = Outer()
    span_children(model)
    for _ in range(2):
        nvtx.clear()
        with pytest.raises(KeyError, match="inside"), nvtx_spans():
            model(torch.ones(2), fails=True)
        assert nvtx == ["inner", "inner.linear", "/inner.linear", "/inner"]


@pytest.mark.filterwarnings("error")
def test_a_users_hook_that_raises_leaves_no_span_open(nvtx: list[str]):
    model = Outer()

    def refuse(_module: nn.Module, _inputs: Any) -> None:
        raise KeyError("a hook")

    model.head.register_forward_pre_hook(refuse)
    span_children(model)
    with pytest.raises(KeyError, match="a hook"), nvtx_spans():
        model(torch.ones(2))
    assert nvtx == ["inner", "inner.linear", "/inner.linear", "/inner"]


def test_a_recursive_module_gets_nested_spans(nvtx: list[str]):
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, depth: int) -> Tensor:
            return self.weight if not depth else self(depth - 1)

    model = nn.Module()
    model.child = Recursive()
    span_children(model)
    with nvtx_spans():
        model.child(2)
    assert nvtx == ["child"] * 3 + ["/child"] * 3


@pytest.mark.slow
def test_no_span_breaks_a_graph():
    @torch.compile(fullgraph=True, backend="eager")
    def inside(x: Tensor) -> Tensor:
        with span("vanishes"):
            return x + 1

    run = SimpleNamespace(result=None)
    events = profiled(lambda: setattr(run, "result", inside(torch.ones(1))))
    assert run.result.item() == 2
    assert "vanishes" not in {event.name for event in events}


@pytest.mark.gpu
def test_nvtx_ranges_are_opened_on_a_gpu():
    with nvtx_spans():
        assert type(span("named")) is not type(nullcontext()), "a real range, since ranges are on"
        one_step(device="cuda", nvtx=True)()

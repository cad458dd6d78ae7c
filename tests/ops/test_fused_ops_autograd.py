"""What autograd asks of the fused ops beside first gradients: second derivatives, and outputs that are changed in place.

test_fused_ops.py runs this file in Triton's interpreter.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from numerics import assert_as_accurate_as
from op_check import DEVICES, INTERPRETED, interpret, normal
from trainstep.ops import linear_cross_entropy, reference, rms_norm, rotary, swiglu

ONLY_KERNELS = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="in the interpreter, or on a GPU")),
    DEVICES[1],
]
EPS = 1e-5
TABLES = reference.rotary_tables(5, 16, 1e4, torch.device("cpu"))
Outputs = tuple[Tensor, ...]


def on(x: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin beside x."""
    return TABLES[0].to(x.device), TABLES[1].to(x.device)


def loss(hidden: Tensor, weight: Tensor) -> Outputs:
    return (linear_cross_entropy.linear_cross_entropy(hidden, weight, targets_of(hidden), gradients_in_forward=False),)


def targets_of(hidden: Tensor) -> Tensor:
    return torch.arange(len(hidden), device=hidden.device)


def reference_rotation(*x: Tensor) -> Outputs:
    q, k, *v = x if len(x) == 2 else x[0].unflatten(-1, (5, 16)).transpose(1, 2).split((3, 1, 1), dim=1)
    return reference.rotary(q, *on(q)), reference.rotary(k, *on(k)), *v


OPS: dict[str, tuple[Callable[..., Outputs], Callable[..., Outputs], list[tuple[int, ...]]]] = {
    "rms_norm": (
        lambda x, weight: (rms_norm.rms_norm(x, weight, EPS),),
        lambda x, weight: (reference.rms_norm(x, weight, EPS),),
        [(5, 24), (24,)],
    ),
    "add_rms_norm": (
        lambda x, h, weight: rms_norm.rms_norm(x, weight, EPS, residual=h),
        lambda x, h, weight: (reference.rms_norm(x + h, weight, EPS), x + h),
        [(5, 24), (5, 24), (24,)],
    ),
    "swiglu": (
        lambda x: (swiglu.swiglu(x),),
        lambda x: (reference.swiglu(*x.chunk(2, dim=-1)),),
        [(5, 24)],
    ),
    "swiglu of two": (
        lambda gate, up: (swiglu.swiglu(gate, up),),
        lambda gate, up: (reference.swiglu(gate, up),),
        [(5, 24), (5, 24)],
    ),
    "swiglu_linear": (
        lambda x, weight: (swiglu.swiglu_linear(x, weight),),
        lambda x, weight: (reference.swiglu(*x.chunk(2, dim=-1)) @ weight.T,),
        [(5, 24), (7, 12)],
    ),
    "linear_cross_entropy": (
        loss,
        lambda hidden, weight: (reference.linear_cross_entropy(hidden, weight, targets_of(hidden)),),
        [(5, 24), (30, 24)],
    ),
    "tied weights": (
        # By an eighth no probability is near 1, where subtracting 1 leaves the rounding of lse, by chance more or less.
        lambda weight: loss(weight[:5].sin() / 8, weight),
        lambda weight: (reference.linear_cross_entropy(weight[:5].sin() / 8, weight, targets_of(weight[:5])),),
        [(30, 24)],
    ),
    "rotary": (lambda q, k: rotary.rotary(q, k, *on(q)), reference_rotation, [(2, 3, 5, 16), (2, 1, 5, 16)]),
    "rotary_split": (
        lambda x: rotary.rotary_split(x, *on(x), heads=3, key_heads=1),
        reference_rotation,
        [(2, 5, 80)],
    ),
}
"""Name -> the op, its reference, and the shapes of their inputs."""


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, rms_norm, swiglu, linear_cross_entropy, rotary)


def inputs(shapes: list[tuple[int, ...]], device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [normal(*shape, seed=seed, device=device, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def second_derivatives(op: Callable[..., Outputs], leaves: list[Tensor]) -> Outputs:
    """The gradient of a penalty on the gradients."""
    gradients = torch.autograd.grad([x.square().sum() for x in op(*leaves)], leaves, create_graph=True)
    return torch.autograd.grad([x.square().sum() for x in gradients], leaves)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_second_derivatives_are_as_accurate_as_the_reference(name: str, device: str):
    """They come from the reference: the kernels of backward have no gradient, and would be left out without a word."""
    op, op_reference, shapes = OPS[name]
    results = second_derivatives(op, inputs(shapes, device))
    same_dtype, exact = (
        second_derivatives(op_reference, inputs(shapes, device, dtype)) for dtype in (torch.float32, torch.float64)
    )
    for result, same, truth in zip(results, same_dtype, exact, strict=True):
        assert_as_accurate_as(result, same, truth, f"second derivative of {name}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["rms_norm", "linear_cross_entropy"])
def test_what_is_frozen_has_no_gradient_in_a_graph_either(name: str, device: str):
    op, _, shapes = OPS[name]
    x, weight = inputs(shapes, device)
    (gradient,) = torch.autograd.grad(op(x, weight.detach())[0].sum(), x, create_graph=True)
    assert gradient.requires_grad


@pytest.mark.parametrize("device", ONLY_KERNELS)
def test_gradients_of_forward_refuse_a_graph_of_theirs(device: str):
    hidden, weight = inputs([(5, 24), (30, 24)], device)
    result = linear_cross_entropy.linear_cross_entropy(hidden, weight, targets_of(hidden))
    with pytest.raises(RuntimeError, match="create_graph=True needs gradients_in_forward=False"):
        torch.autograd.grad(result, hidden, create_graph=True)


@pytest.mark.parametrize("device", ONLY_KERNELS)
@pytest.mark.parametrize(
    "name", [name for name in OPS if name not in ("add_rms_norm", "linear_cross_entropy", "tied weights")]
)
def test_outputs_may_be_changed_in_place(name: str, device: str):
    op, _, shapes = OPS[name]

    def gradients(scale: Callable[[Tensor], Tensor]) -> Outputs:
        leaves = inputs(shapes, device)
        return torch.autograd.grad([scale(x).sum() for x in op(*leaves)], leaves)

    for x, expected in zip(gradients(lambda x: x.mul_(2)), gradients(lambda x: x * 2), strict=True):
        torch.testing.assert_close(x, expected, rtol=0, atol=0)


@pytest.mark.parametrize("device", ONLY_KERNELS)
@pytest.mark.parametrize(
    ("name", "backward"), [("swiglu_linear", "swiglu"), ("swiglu", "swiglu"), ("rms_norm", "rms_norm")]
)
def test_compiled_backward_passes_keep_their_kernels(name: str, backward: str, device: str):
    """A compiler traces backward passes while gradients are recorded, which must not look like create_graph=True."""
    op, _, shapes = OPS[name]
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph.code)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(op, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    leaves = inputs(shapes, device)
    torch.autograd.grad(compiled(*leaves)[0].sum(), leaves)
    assert f"trainstep.{backward}_backward.default" in graphs[-1]


class Calls(TorchDispatchMode):
    """Notes the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ONLY_KERNELS)
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "swiglu", "linear_cross_entropy"])
def test_a_mode_sees_the_operators_and_backward_fills_no_zeros(name: str, device: str):
    """Autograd would fill gradients for the outputs that have none, such as those that linear_cross_entropy computes in forward."""
    op, _, shapes = OPS[name]
    if name == "linear_cross_entropy":
        op = lambda hidden, weight: (linear_cross_entropy.linear_cross_entropy(hidden, weight, targets_of(hidden)),)  # noqa: E731
    leaves = inputs(shapes, device)
    with Calls() as forward:
        y = op(*leaves)[0]
    with Calls() as backward:
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert f"trainstep::{name}" in forward.names
    assert not [x for x in backward.names if "zero" in x]


@pytest.mark.parametrize("device", ONLY_KERNELS)
@pytest.mark.parametrize("used", [0, 1])
def test_an_output_may_go_unused(used: int, device: str):
    """Then its gradient is None, not zeros."""
    op, op_reference, shapes = OPS["add_rms_norm"]
    leaves = inputs(shapes, device)
    results = torch.autograd.grad(op(*leaves)[used].square().sum(), leaves, allow_unused=True)
    expected = torch.autograd.grad(op_reference(*leaves)[used].square().sum(), leaves, allow_unused=True)
    for x, y in zip(results, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ONLY_KERNELS)
def test_forward_derivatives_are_refused(device: str):
    """A kernel drops them, and torch would take them for zero."""
    x, weight = (leaf.detach() for leaf in inputs([(5, 24), (24,)], device))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"jvp|forward"):
        rms_norm.rms_norm(forward_ad.make_dual(x, torch.ones_like(x)), weight, EPS)

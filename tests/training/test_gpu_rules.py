"""The rules of a GPU hold inside `gpu_rules` and nowhere else, whatever torch remembers of an op's kernels."""

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from trainstep.training.gpu_rules import gpu_rules


class Named(TorchDispatchMode):
    """The names of the ops inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*arguments, **(options or {}))


def traced() -> list[str]:
    """The ops of an attention in bf16 by the rules of a GPU, traced as by a compiler, so that torch keeps the kernels it finds."""
    with FakeTensorMode(), gpu_rules(), enable_python_dispatcher(), Named() as ops:
        x = torch.empty(1, 2, 4, 8, dtype=torch.bfloat16, requires_grad=True)
        scaled_dot_product_attention(x, x, x, is_causal=True)
    return ops.names


def gradients(compiled: bool) -> list[torch.Tensor]:
    """The gradient of weights in front of an attention."""
    torch.manual_seed(0)
    weights, x = torch.randn(8, 8, requires_grad=True), torch.randn(1, 2, 4, 8)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(x @ weights, x, x, is_causal=True).square().sum()

    torch.compiler.reset()
    return list(torch.autograd.grad((torch.compile(loss, backend=aot_eager) if compiled else loss)(x), [weights]))


def test_what_is_compiled_after_a_trace_has_its_gradients():
    """In an earlier version torch kept the attention of the trace, without a gradient."""
    traced()
    torch.testing.assert_close(gradients(compiled=True), gradients(compiled=False))


def test_a_trace_after_a_compilation_has_the_kernels_of_a_gpu():
    gradients(compiled=True)
    assert "_scaled_dot_product_flash_attention" in traced()

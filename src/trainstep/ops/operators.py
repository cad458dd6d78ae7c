"""Defines our operators with torch.library, so that autograd, torch.compile and modes such as FLOP counters see them.

What the host pays for a call decides how fast a small op is. torch.library's own autograd takes three times an
autograd.Function's time, so each operator has such a function, and calls its kernels past the dispatcher where nothing listens:

    operator(...) -> the function, if a gradient is asked for -> run, or where something listens the overload, which ends at run
    operator(...) -> the overload, while torch.compile traces; the dispatcher then calls the function for the key Autograd

An operator here launches Triton kernels on any device that has_kernel admits. The public functions of an op ask has_kernel
first and take ops/reference.py, with torch's own autograd, where there is no kernel.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

try:
    import triton
except ImportError:  # there is no triton for this platform, and no GPU that it could use
    triton = None

_HERE = nullcontext()
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_library = torch.library.Library("trainstep", "FRAGMENT")


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Any:
    """Define the operator `trainstep::NAME` of a schema `NAME(Tensor x, ...) -> ...`; returns what calls it, by position alone.

    `run` computes it and returns new tensors, `fake` gives their shapes, dtypes and strides. With `backward(ctx, *gradients)`
    it has a gradient, for which `save(ctx, inputs, output)` keeps what it needs. What `backward` calls without a gradient of its
    own has to be avoided where `makes_a_graph()`: torch would leave out the second derivative, with no more than a warning.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"trainstep::{name}", _traced(fake), lib=_library)
    overload = getattr(torch.ops.trainstep, name).default

    def below_autograd(*arguments: Any) -> Any:
        if _nothing_listens(arguments):
            return run(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*arguments)

    autograd = below_autograd
    if save is not None and backward is not None:
        autograd = _with_gradient(name, below_autograd, save, backward)
        _library.impl(name, autograd, "Autograd")

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return overload(*arguments)
        return autograd(*arguments)

    call.__name__ = name
    return call


def _traced(fake: Callable[..., Any]) -> Callable[..., Any]:
    """`fake`, which torch.compile calls while it traces, before Inductor meets the operator.

    For a line of its log, even if nobody reads it, Inductor before torch 2.13 writes out what each argument is made of, and what
    that is made of, once for every path through the graph. With twelve residual blocks in one graph this takes minutes. So
    for these versions Inductor is made to write the names of our operators and nothing more.
    """

    def call(*arguments: Any) -> Any:
        names = sys.modules.get("torch._inductor.exc")
        if names is not None and torch.__version__ < "2.13":
            _name_ours_alone(names.OperatorIssue)
        return fake(*arguments)

    return call


def _name_ours_alone(issue: Any) -> None:
    """Make Inductor write only the names of our operators; a second call changes nothing."""
    written = issue.operator_str
    if hasattr(written, "__wrapped__"):
        return

    @functools.wraps(written)
    def operator_str(target: Any, args: Any, kwargs: Any) -> str:
        return f"  target: {target}" if str(target).startswith("trainstep.") else written(target, args, kwargs)

    issue.operator_str = staticmethod(operator_str)


def _with_gradient(
    name: str, forward: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """`forward` as an autograd.Function where a gradient is asked for."""

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            results = forward(*arguments)
            save(ctx, arguments, results)
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            if all(x is None for x in gradients):  # where `save` set_materialize_grads(False): autograd has none either
                return (None,) * len(ctx.needs_input_grad)
            return backward(ctx, *gradients)

    Gradient.__name__ = Gradient.__qualname__ = "".join(word.capitalize() for word in name.split("_"))  # seen in traces

    def call(*arguments: Any) -> Any:
        wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)
        if wanted or forward_ad._current_level >= 0:  # the function says that it has no forward derivative
            return Gradient.apply(*arguments)  # type: ignore[no-untyped-call]
        return forward(*arguments)

    return call


def _nothing_listens(arguments: Sequence[Any]) -> bool:
    """Whether the dispatcher would only call `run`: there is no subclass, no mode, no profiler that should see the operator."""
    return (
        all(type(x) in (Tensor, nn.Parameter) for x in arguments if isinstance(x, Tensor))
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._autograd._profiler_enabled()
        and not torch._C._are_functorch_transforms_active()
    )


def makes_a_graph() -> bool:
    """Whether the backward pass that runs is to be differentiated too, as by create_graph=True: only then autograd records it."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def gradients_by(
    reference: Callable[..., Any], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs under those of the reference's outputs, with a graph; None where none is needed."""
    # Aliases, because one input may depend on another (tied weights, a saved output): its own graph must not be followed.
    aliases = [x.view_as(x) for x in inputs]
    wanted = [x for x in aliases if x.requires_grad]
    results = iter(torch.autograd.grad(reference(*aliases), wanted, gradients, create_graph=True))
    return tuple(next(results) if x.requires_grad else None for x in aliases)


def has_kernel(*tensors: Tensor) -> bool:
    """Whether Triton kernels can take these tensors: all on the same CUDA device, in fp32, bf16 or fp16."""
    device = tensors[0].device
    if triton is None or device.type != "cuda":
        return False
    return all(x.device == device and x.dtype in KERNEL_DTYPES for x in tensors)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which `device` is the current device, on which Triton launches. It nearly always is: changing costs 10 us."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts the operands of a matmul with x; None where it casts nothing."""
    device_type = x.device.type
    if device_type == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def rows_of(x: Tensor) -> Tensor:
    """(..., C) as (rows, C) without gaps: a view where x has none, else a copy."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()

"""What the host pays for a call of an operator: by torch.library's autograd, by operators.py, and by a bare autograd.Function.

    python results/cpu/operator_cost.py 10 > results/cpu/operator_cost.txt

Stand-ins for kernels return empty tensors, so that nothing but the call takes time. It is the thread's processor time, in turns,
which other work on the machine lengthens less than the time on the clock.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainstep.ops.operators import define

CALLS = 2000
_library = torch.library.Library("operator_cost", "DEF")


def run(x: Tensor, weight: Tensor, _eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0])


def run_backward(_dy: Tensor, x: Tensor, weight: Tensor, _inverse: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.mark_non_differentiable(output[1])


def by_library(schema: str, implementation: Callable[..., Any]) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    return getattr(torch.ops.operator_cost, name).default


_FORWARD = "cost(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)"
_BACKWARD = "cost_backward(Tensor dy, Tensor x, Tensor weight, Tensor inverse) -> (Tensor, Tensor)"
backward_of_library = by_library(_BACKWARD, run_backward)
library = by_library(_FORWARD, run)
torch.library.register_autograd(
    "operator_cost::cost",
    lambda ctx, dy, _: (*backward_of_library(dy, *ctx.saved_tensors), None),
    setup_context=save,
    lib=_library,
)
backward_of_ours = define(_BACKWARD, run_backward, run_backward)
ours = define(
    _FORWARD, run, run, save=save, backward=lambda ctx, dy, _: (*backward_of_ours(dy, *ctx.saved_tensors), None)
)


class Bare(torch.autograd.Function):
    """No operator at all: no torch.compile, no mode sees it."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        results = run(*arguments)
        save(ctx, arguments, results)
        return results

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *run_backward(dy, *ctx.saved_tensors), None


def seconds(call: Callable[[], object]) -> float:
    started_s = time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - started_s) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=int)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    x, weight, dy = torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True), torch.ones(4, 4)
    ways: dict[str, Callable[..., Any]] = {"torch.library": library, "operators.py": ours, "function": Bare.apply}
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            calls = {
                "forward": lambda way=way: way(x, weight, 1e-5),
                "forward and backward": lambda way=way: torch.autograd.grad(way(x, weight, 1e-5)[0], (x, weight), dy),
            }
            for what, call in calls.items():
                found.setdefault(f"{name} {what}", []).append(1e6 * seconds(call))
    for name, values in found.items():
        print(f"{name}: median {statistics.median(values):.1f} us; {' '.join(f'{value:.1f}' for value in values)}")


if __name__ == "__main__":
    main()

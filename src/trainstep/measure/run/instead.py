"""Times the op that could replace a pattern, by itself: `seconds_instead(patterns)` is pattern -> seconds a step.

On a CPU what a fused op takes depends on its caches and on torch's build more than on bytes and FLOPs, so the op is run on random
tensors of the step's shapes and dtype, with as many threads as the script has: the median of five. Larger tensors are left to the
formula of the pattern, and so is everything on a GPU, where no memory may be left beside the model. AdamW's tensors are pushed out
of the caches first, because forward and backward lie between two updates; attention's are not, because they were just computed.

It runs between two steps of a user's script, whose optimizer hooks, modes and random numbers it does not affect.
"""

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch.optim.adamw import adamw
from torch.utils._python_dispatch import _disable_current_modes

from trainstep.traces.patterns.pattern import FUSED_ADAMW, FUSED_CAUSAL_ATTENTION, FUSED_MASKED_ATTENTION, Instead
from trainstep.traces.patterns.table import Patterns

_RUNS = 5
_LONGEST_S = 0.2
"""After this many seconds no third or later run begins, because the script waits meanwhile."""
_MOST_ELEMENTS = 2**23
"""The most elements of all tensors of an op: 32 MiB in fp32, of which AdamW needs four times as much."""
_CACHE_ELEMENTS = 2**23
_DTYPES = {"float": torch.float32, "c10::BFloat16": torch.bfloat16, "c10::Half": torch.float16, "double": torch.float64}
"""Name of a dtype in traces -> dtype."""


def seconds_instead(patterns: Patterns) -> dict[str, float]:
    """Pattern -> seconds a step of the ops that could replace it, unless one of them is too large or cannot be timed."""
    timed: dict[str, float] = {}
    for pattern in patterns.patterns:
        if pattern.instead and all(_is_small(op) and op.dtype in _DTYPES for op in pattern.instead):
            try:
                timed[pattern.name] = sum(_seconds(op) for op in pattern.instead) / patterns.steps
            except Exception:  # noqa: BLE001  (whatever torch refuses here, the formula holds)
                continue
    return timed


def _is_small(instead: Instead) -> bool:
    return 0 < sum(map(math.prod, instead.shapes)) <= _MOST_ELEMENTS


def _seconds(instead: Instead) -> float:
    """The time of all runs in the trace."""
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        _disable_current_modes(),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        if instead.op == FUSED_ADAMW:
            return instead.forwards * _median_s(_adamw(instead), before=_forget)
        forward_s = _median_s(_attention(instead, backward=False))
        both_s = _median_s(_attention(instead, backward=True)) if instead.backwards else 0.0
        return (instead.forwards - instead.backwards) * forward_s + instead.backwards * both_s


def _median_s(run: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
    """The median time of a run, without the first, which is slower."""
    times: list[float] = []
    until_s = time.perf_counter() + _LONGEST_S
    while len(times) <= _RUNS and (len(times) < 2 or time.perf_counter() < until_s):
        before()
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[1:])


def _forget() -> None:
    """Push what the caches hold out of them."""
    torch.ones(_CACHE_ELEMENTS, device="cpu", dtype=torch.float32).add_(1)


def _random(shapes: tuple[tuple[int, ...], ...], dtype: str) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)  # the script's own numbers stay as they are
    return [
        torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(_DTYPES[dtype])
        for shape in shapes
    ]


def _attention(instead: Instead, *, backward: bool) -> Callable[[], None]:
    """A run of fused attention. The heads of a position lie beside each other, as a projection leaves them."""
    rows = tuple((batch, positions, heads, dim) for batch, heads, positions, dim in instead.shapes)
    query, key, value = (part.transpose(1, 2).requires_grad_(backward) for part in _random(rows, instead.dtype))
    mask = None
    if instead.op == FUSED_MASKED_ATTENTION:
        mask = torch.zeros(query.shape[-2], key.shape[-2], device="cpu", dtype=query.dtype)
    is_causal = instead.op == FUSED_CAUSAL_ATTENTION
    gradient = torch.ones_like(query, requires_grad=False)

    def run() -> None:
        # Not the function of torch.nn.functional, which the script may have replaced
        result = torch.ops.aten.scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal)
        if backward:
            torch.autograd.grad(result, (query, key, value), gradient)

    return run


def _adamw(instead: Instead) -> Callable[[], None]:
    """A run of AdamW's function: the step of an optimizer would count as one of the script's, for whoever follows those."""
    parameters, gradients, first, second = (_random(instead.shapes, instead.dtype) for _ in range(4))
    steps = [torch.ones((), device="cpu", dtype=torch.float32) for _ in parameters]
    second = [moment.square_() for moment in second]

    def run() -> None:
        adamw(
            *(parameters, gradients, first, second, [], steps),
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=1e-3,
            weight_decay=1e-2,
            eps=1e-8,
            maximize=False,
        )

    return run

"""Runs one block of a built step alone, on the inputs that a pass gave it, and measures what it costs in each mode.

An output lives on after forward only if the block keeps it, and so does an input, as between two blocks of the model. So the bytes
that blocks keep add up to what the model keeps.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from trainstep.measure.step.live_bytes import live_bytes
from trainstep.plan.recomputation import MODES, BlockCost
from trainstep.training.build import Assembly
from trainstep.training.recompute import RecomputedForward

_ROUNDS = {"cpu": 5, "cuda": 12}
"""Timed rounds over the modes of a kind of block, after one that is not timed. By 5 a GPU's times still differ by a fifth."""
_LEAD_CYCLES = 50_000_000
"""Cycles that the GPU waits while the host launches a block whose device time is measured: about 30 ms."""


@dataclass(kw_only=True)
class BlockNote:
    """A block as the pass met it. `inputs`: its inputs, with those of tensors that want a gradient detached."""

    kind: Any
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None


def note_block(block: torch.nn.Module, inputs: Any, named: Any, kinds: set[Any]) -> BlockNote:
    leaves, structure = tree_flatten((inputs, named))
    shapes = tuple((tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else type(x) for x in leaves)
    parameters = tuple((name, tuple(x.shape), x.dtype, x.requires_grad) for name, x in block.named_parameters())
    kind = (type(block), shapes, parameters)
    if kind in kinds:
        return BlockNote(kind=kind, inputs=None)
    detached = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
    return BlockNote(kind=kind, inputs=tree_unflatten(detached, structure))


def block_cost(assembly: Assembly, forward: RecomputedForward, note: BlockNote) -> BlockCost:
    """The bytes and times of a block, run alone in each mode."""
    kept, backward_bytes, times = {}, {}, {mode: list[float]() for mode in MODES}
    run = _LoneBlock(assembly, forward, note)
    for mode in MODES:
        forward.mode = mode
        run.take()  # compiles, and counts what is kept
        kept[mode], backward_bytes[mode] = run.sizes()
    rounds = _ROUNDS[assembly.device.type]
    for number in range(1 + rounds):
        for mode in MODES:
            forward.mode = mode
            seconds = run.timed(run.take)
            if number:
                times[mode].append(seconds)
    forward.mode = "block"
    forward_s = min(run.timed(run.forward_alone) for _ in range(rounds))
    least = {mode: min(values) for mode, values in times.items()}  # other work of the machine only adds time
    accumulates = assembly.run.accumulation > 1
    gradients = 0 if accumulates else sum(x.nbytes for x in run.parameters)
    return BlockCost(
        kept_bytes=kept,
        backward_bytes=backward_bytes,
        added_s={mode: max(0.0, seconds - least["none"]) for mode, seconds in least.items()},
        forward_s=forward_s,
        gradients_bytes=gradients,
    )


class _LoneBlock:
    """Runs a block's forward and backward on the inputs that it had, without changing a gradient."""

    def __init__(self, assembly: Assembly, forward: RecomputedForward, note: BlockNote) -> None:
        self._assembly = assembly
        self._forward = forward
        self._leaves, self._structure = tree_flatten(note.inputs)
        self.parameters: list[Tensor] = [x for x in forward.block.parameters() if x.requires_grad]
        self._wanted = with_gradients(note.inputs) + self.parameters
        self._gradients: list[Tensor] = []

    def _edges(self) -> list[Any]:
        """Run the forward, and return its outputs as autograd's edges: inputs and outputs live on only if the block keeps them."""
        copies = [x.clone() if isinstance(x, Tensor) and x.requires_grad else x for x in self._leaves]
        inputs, named = tree_unflatten(copies, self._structure)
        with autocast_of(self._assembly):
            outputs = with_gradients(self._forward.run(*inputs, **named))
        self._gradients = self._gradients or [torch.randn_like(x) for x in outputs]
        return [get_gradient_edge(x) for x in outputs]

    def take(self) -> None:
        torch.autograd.grad(self._edges(), self._wanted, self._gradients, allow_unused=True)

    def forward_alone(self) -> None:
        inputs, named = tree_unflatten(self._leaves, self._structure)
        with torch.no_grad(), autocast_of(self._assembly):
            self._forward.run(*inputs, **named)

    def sizes(self) -> tuple[int, int]:
        """Bytes that forward leaves, and the most bytes until backward is over."""
        with live_bytes(self._assembly.device) as live:
            before = live.now()
            edges = self._edges()
            kept = live.now() - before
            live.begin_peak()
            torch.autograd.grad(edges, self._wanted, self._gradients, allow_unused=True)
            return kept, live.peak() - before

    def timed(self, run: Callable[[], None]) -> float:
        if self._assembly.device.type != "cuda":
            began_s = time.perf_counter()
            run()
            return time.perf_counter() - began_s
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if self._assembly.captured is not None:
            torch.cuda._sleep(_LEAD_CYCLES)  # so that the device never waits for the host, as in a graph
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def with_gradients(values: Any) -> list[Tensor]:
    return [x for x in tree_flatten(values)[0] if isinstance(x, Tensor) and x.requires_grad]


def autocast_of(assembly: Assembly) -> AbstractContextManager[Any]:
    autocast = assembly.step.autocast
    return torch.autocast(autocast[0], dtype=autocast[1]) if autocast else nullcontext()

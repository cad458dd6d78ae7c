"""Computes parts of a model's blocks again in backward, so that forward keeps less of them.

    blocks = recomputable(module, draws_random_numbers=False)      # puts a RecomputedForward around the forward of every block
    for block in blocks:
        block.mode = "selective"

    mode        forward keeps of a block                                       backward computes again
    none        all that autograd keeps                                        -
    selective   its input, the results of matmuls and of attention             norms, activations, products, rotation, casts
    narrow      its input, the results of attention and of matmuls that        also matmuls that widen: q, k, v, gate and up
                are no larger than what is multiplied
    block       its input                                                      everything up to the last tensor that is needed

kept_results.py says how results are kept. Blocks with mode `block` may form chains, of which only the first keeps its input
(block_chain.py).

[Note: compiled blocks] torch.compile traces the checkpointed block, so that its partitioner knows what must be kept and puts what
is computed again into the graph of backward, fused. A checkpoint around a compiled block would run the whole forward again, the
last matmul too.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from trainstep.spans import span
from trainstep.training.block_chain import Chain, autocast_states, gpus_of
from trainstep.training.kept_results import TRACED_CONTEXTS, Keeping, Kept
from trainstep.training.user_model import blocks_of

Forward = Callable[..., Any]


def recomputable(
    module: nn.Module, *, draws_random_numbers: bool = True, compile: Callable[[Forward], Forward] | None = None
) -> "list[RecomputedForward]":
    """Put a RecomputedForward, with mode `none`, around the forward of every repeated block, and return them in order.

    `draws_random_numbers`: blocks draw random numbers (dropout), so the state of the generators is kept for the second forward;
    this takes time of the host, and no tape can hold it. `compile`: compiles a block. ValueError for a model without blocks.
    """
    blocks = blocks_of(module, field="recompute", instead="none")
    recomputed = [
        RecomputedForward(block, index, keeps_random_state=draws_random_numbers, compile=compile)
        for index, block in enumerate(blocks)
    ]
    for block, forward in zip(blocks, recomputed, strict=True):
        block.forward = forward
    return recomputed


class RecomputedForward:
    """The forward of a block, which keeps for backward what `mode` says. The mode may change between steps."""

    def __init__(
        self, block: nn.Module, index: int, *, keeps_random_state: bool, compile: Callable[[Forward], Forward] | None
    ) -> None:
        self.block = block
        self.mode = "none"
        self.chain: Chain | None = None
        """The chain to which the block belongs."""
        self.keeps_random_state = keeps_random_state
        self.needed: dict[str, int] = {}
        """Mode -> how many of the results that it would keep backward needs."""
        self.uncompiled = False
        """Whether a compiled block runs uncompiled for now."""
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Makes a context for every forward beside the first: those of backward, and one that counts; not in compiled code."""
        self._plain: Forward = block.forward
        self._compile = compile
        self._name = f"recompute {index}"
        self._compiled: dict[str, Forward] = {}
        """Mode -> the forward, compiled with what it computes again."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self.chain is not None and torch.is_grad_enabled():
            return self.chain.run(self, inputs, named)
        return self.run(*inputs, **named)

    def run(self, *inputs: Any, **named: Any) -> Any:
        """The forward, without regard to a chain."""
        mode = self.mode if torch.is_grad_enabled() else "none"
        if self._compile is not None and not self.uncompiled:
            if mode not in self._compiled:
                self._compiled[mode] = self._compile(_traced(self._plain, mode, self.keeps_random_state))
            return self._compiled[mode](*inputs, **named)
        if torch.compiler.is_compiling():
            return _traced(self._plain, mode, self.keeps_random_state)(*inputs, **named)
        if mode == "none":
            return self._in_span(*inputs, **named) if _in_backward() else self._plain(*inputs, **named)
        context = {} if mode == "block" else {"context_fn": self._contexts(mode, inputs, named)}
        return _checkpointed(self._in_span, self.keeps_random_state, context, inputs, named)

    def _in_span(self, *inputs: Any, **named: Any) -> Any:
        with span(self._name), self.around() if _in_backward() else nullcontext():
            return self._plain(*inputs, **named)

    def _contexts(self, mode: str, inputs: Sequence[Any], named: dict[str, Any]) -> Callable[[], Any]:
        """The contexts of one call's forward and of its second forward."""
        if mode not in self.needed:
            self.needed[mode] = self._count_needed(mode, inputs, named)
        needed = self.needed[mode]

        def contexts() -> tuple[Keeping, Kept]:
            keeping = Keeping(mode, needed)
            return keeping, Kept(keeping)

        return contexts

    def _count_needed(self, mode: str, inputs: Sequence[Any], named: dict[str, Any]) -> int:
        """Run the block once more, without effects, and count the results to keep that exist when it saves its last tensor."""
        leaves, structure = tree_flatten((inputs, named))
        leaves = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
        inputs, named = tree_unflatten(leaves, structure)
        buffers = [(buffer, buffer.clone()) for buffer in self.block.buffers()]
        counting, needed = Keeping(mode, needed=0), 0

        def note(_x: Tensor) -> Any:
            # Keeps nothing: an output that saved itself would live until a garbage collection.
            nonlocal needed
            needed = counting.count

        with ExitStack() as stack:
            stack.enter_context(self.around())
            for kind, enabled, dtype, _ in autocast_states(leaves):
                # Without a cache, in which the call itself would find the casts of this one.
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            stack.enter_context(torch.random.fork_rng(gpus_of(leaves)))
            stack.enter_context(saved_tensors_hooks(note, lambda kept: kept))
            stack.enter_context(counting)
            self._plain(*inputs, **named)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        return needed


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _traced(forward: Forward, mode: str, keeps_random_state: bool) -> Forward:
    """The forward as torch.compile traces it. [Note: compiled blocks]"""
    if mode == "none":
        return forward
    context = {} if mode == "block" else {"context_fn": TRACED_CONTEXTS[mode]}

    def checkpointed(*inputs: Any, **named: Any) -> Any:
        return _checkpointed(forward, keeps_random_state, context, inputs, named)

    return checkpointed


def _checkpointed(
    forward: Forward, keeps_random_state: bool, context: dict[str, Any], inputs: Sequence[Any], named: dict[str, Any]
) -> Any:
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=keeps_random_state, **context, **named)

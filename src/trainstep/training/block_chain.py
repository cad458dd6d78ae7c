"""Chains of recomputed blocks, of which only the first keeps its input: nested checkpointing, for the least memory.

n blocks in chains of sqrt(n) hold 2 sqrt(n) inputs instead of n, for one more forward of all but the last block of each chain:
before the last block is computed again for its backward, the chain runs without autograd from its first block, and what comes out
of each block stays until the next block's backward.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten


class ChainedBlock(Protocol):
    """A block's forward that keeps only its input."""

    chain: "Chain | None"
    keeps_random_state: bool

    def run(self, *inputs: Any, **named: Any) -> Any: ...


def chain_blocks(blocks: Sequence[ChainedBlock]) -> None:
    """Make a chain of consecutive blocks with mode `block`; only what the first gets is kept."""
    chain = Chain()
    for block in blocks:
        block.chain = chain


def unchain_blocks(blocks: Sequence[ChainedBlock]) -> None:
    for block in blocks:
        block.chain = None


class Chain:
    """Consecutive blocks. A block that gets what the block before gave keeps a link to that block's call, and no tensor.

    What else a block gets (rotary tables, a mask, a tensor that was changed in between) it keeps, so that models need not be
    sequential for their gradients to be right.
    """

    def __init__(self) -> None:
        self._last: ref[_Call] | None = None

    def run(self, block: ChainedBlock, inputs: Sequence[Any], named: dict[str, Any]) -> Any:
        call = _Call(block, inputs, named, self._last() if self._last is not None else None)

        def pack(x: Tensor) -> Any:
            return call.link(x) or x

        def unpack(kept: Any) -> Tensor:
            return kept.take() if isinstance(kept, _Link) else kept

        with saved_tensors_hooks(
            pack, unpack
        ):  # of the inputs alone: what the block saves goes to the checkpoint inside
            outputs = block.run(*inputs, **named)
        call.finish(outputs)
        self._last = ref(call)
        if outputs_of(outputs):  # so that the call lives until the next block has come or the outputs are gone
            outputs_of(outputs)[0]._trainstep_call = call  # type: ignore[attr-defined]
        return outputs


class _Call:
    """One call of a block in a chain, which can be run again without autograd."""

    def __init__(
        self, block: ChainedBlock, inputs: Sequence[Any], named: dict[str, Any], before: "_Call | None"
    ) -> None:
        leaves, self._structure = tree_flatten((inputs, named))
        self._block = block
        links = [before.link_to(x) if before is not None and isinstance(x, Tensor) else None for x in leaves]
        self._linked = [(x, link) for x, link in zip(leaves, links, strict=True) if link is not None]
        """While the block runs: inputs that are not kept."""
        self._leaves = [
            link or (x.detach() if isinstance(x, Tensor) else x) for x, link in zip(leaves, links, strict=True)
        ]
        self._autocast = autocast_states(leaves)
        self._gpus = gpus_of(leaves)
        self._random_state = _random_state(self._gpus) if block.keeps_random_state else None
        self._outputs: list[tuple[ref[Tensor], int]] = []
        self._sought: set[int] = set()
        """Indices of the outputs for which there are links."""
        self._again: dict[int, Tensor] = {}
        """Index of such an output -> the output, computed again."""

    def link(self, x: Tensor) -> "_Link | None":
        """The link that stands for an input which is being saved, or None."""
        for tensor, link in self._linked:
            if tensor is x or (
                tensor.data_ptr() == x.data_ptr() and tensor.shape == x.shape and tensor.dtype == x.dtype
            ):
                return link if tensor.stride() == x.stride() else None
        return None

    def finish(self, outputs: Any) -> None:
        self._linked.clear()
        self._outputs = [(ref(x), x._version) for x in outputs_of(outputs)]

    def link_to(self, x: Tensor) -> "_Link | None":
        """A link to the output that this tensor is, if it has not been written to since."""
        for index, (output, version) in enumerate(self._outputs):
            if output() is x and x._version == version:
                self._sought.add(index)
                return _Link(self, index)
        return None

    def take(self, index: int) -> Tensor:
        """An output for backward, which is computed again unless `look` has done so."""
        output = self.look(index)
        del self._again[index]
        return output

    def look(self, index: int) -> Tensor:
        """An output for the forward of the next block. It stays for that block's backward, which comes later."""
        if index not in self._again:
            inputs, named = tree_unflatten(
                [x.look() if isinstance(x, _Link) else x for x in self._leaves], self._structure
            )
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                for kind, enabled, dtype, cached in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
                stack.enter_context(self._with_random_state())
                outputs = outputs_of(self._block.run(*inputs, **named))
            self._again = {sought: outputs[sought] for sought in self._sought}
        return self._again[index]

    def _with_random_state(self) -> AbstractContextManager[Any]:
        if self._random_state is None:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(torch.random.fork_rng(self._gpus))
        _set_random_state(self._random_state, self._gpus)
        return stack


class _Link:
    """Stands for a tensor: an output of the block before."""

    def __init__(self, call: _Call, index: int) -> None:
        self._call = call
        self._index = index

    def take(self) -> Tensor:
        return self._call.take(self._index)

    def look(self) -> Tensor:
        return self._call.look(self._index)


def outputs_of(outputs: Any) -> list[Tensor]:
    return [x for x in tree_flatten(outputs)[0] if isinstance(x, Tensor)]


def autocast_states(leaves: Sequence[Any]) -> list[tuple[str, bool, torch.dtype, bool]]:
    """Each kind of device that the tensors are on: whether autocast is on, its dtype, and whether it caches casts."""
    kinds = sorted({x.device.type for x in leaves if isinstance(x, Tensor)} - {"meta"})
    cached = torch.is_autocast_cache_enabled()
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached) for kind in kinds]


def gpus_of(leaves: Sequence[Any]) -> list[int]:
    return sorted({x.get_device() for x in leaves if isinstance(x, Tensor) and x.is_cuda})


def _random_state(gpus: Sequence[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in gpus)]


def _set_random_state(states: Sequence[Tensor], gpus: Sequence[int]) -> None:
    torch.set_rng_state(states[0])
    for gpu, state in zip(gpus, states[1:], strict=True):
        torch.cuda.set_rng_state(state, gpu)

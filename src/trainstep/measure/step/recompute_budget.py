"""Measures what each block of a built step costs in each mode of recomputation, and sets the modes that fit a budget.

    recomputation = fit_budget(assembly)     # before the first step; sets the modes of assembly.recomputed
    recomputation.facts(), recomputation.tables()

1. The optimizer's state is made first, so that it has memory of its own. Made after the first step's forward, it would lie between
   what the forward left, and the next step's tensors would not find room as large as before.
2. A forward and backward of the first micro-batch, with every block recomputed, gives the bytes before the blocks, at the head and
   behind it, and what is left for the optimizer.
3. Each kind of block runs alone (blocks with equal parameters and inputs are one kind), in each mode. This gives the bytes that it
   keeps, the most that its backward holds, and the time of both passes, in rounds over the modes.
4. plan/recomputation.py chooses.
5. Two passes run with the choice, the second with what the first left in the allocator; where the step is captured, one more in a
   pool of memory of its own, as a graph has. If they held more or less than predicted, the next choice may hold that much less or
   more. On a GPU a choice that reserved more than the budget also fits if the same passes end with the allocator limited to it.

On several ranks every pass sends the messages of a step, so what a strategy gathers and sends is among the bytes. All ranks choose
the same, from the largest bytes and the longest times of any (budget_ranks.py). A rank that runs out of memory within such a pass
ends the run, because the others wait for its messages; so passes are not repeated there with the allocator limited to the budget.

Nothing of this changes a weight, a buffer, a gradient or the random numbers, so losses stay those of a run without a budget. Bytes
are the allocator's: on a GPU those that it reserves, on a CPU (which keeps no count) those of the tensors that operators make.
On a CPU compiled blocks are measured uncompiled. With capture on a GPU, times are the device's.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trainstep.measure.step.budget_passes import (
    base_bytes,
    clear_gradients,
    last_micro_batch,
    live_bytes_of,
    update_bytes,
)
from trainstep.measure.step.budget_ranks import agreed_cost, check_kinds, largest_bytes
from trainstep.measure.step.live_bytes import lone_pool
from trainstep.measure.step.lone_block import BlockNote, block_cost, note_block, with_gradients
from trainstep.parallel.gradient_sync import HookedGradients, ReplicatedGradients
from trainstep.parallel.sharded_flat import ShardedGradients
from trainstep.plan.recomputation import (
    MODES,
    BlockCost,
    BudgetTooSmall,
    Choice,
    StepCost,
    choice_of,
    choose,
    curve,
    lowest,
)
from trainstep.records.facts import Fact, facts_of
from trainstep.training.batches import Batch
from trainstep.training.block_chain import chain_blocks
from trainstep.training.build import Assembly
from trainstep.training.optimizer import make_state
from trainstep.training.recompute import RecomputedForward

_TRIES = 4
"""How often a choice is made, each time with the limit corrected by how far the choice before was off its prediction."""


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """What was measured and chosen."""

    step: StepCost
    choice: Choice
    kinds: tuple[int, ...]
    """For each block the number of its kind."""
    measured_peak_bytes: int

    def facts(self) -> dict[str, Fact]:
        return facts_of(
            recompute_choice=choice_words(self.choice),
            recompute_peak_bytes=self.choice.peak_bytes,
            recompute_measured_peak_bytes=self.measured_peak_bytes,
            recompute_added_s=self.choice.added_s,
        )

    def tables(self) -> dict[str, dict[str, list[Any]]]:
        choices = list(dict.fromkeys([*curve(self.step), self.choice]))
        choices.sort(key=lambda choice: (choice.peak_bytes, -choice.added_s))
        counts = {mode: [choice.count(mode) for choice in choices] for mode in MODES}
        costs = [
            (kind, mode, self.kinds.count(kind), self.step.blocks[self.kinds.index(kind)])
            for kind in dict.fromkeys(self.kinds)
            for mode in MODES
        ]
        return {
            "recompute_curve": {
                "peak_bytes": [choice.peak_bytes for choice in choices],
                "added_s": [choice.added_s for choice in choices],
                **counts,
                "chains": [len(choice.chains) for choice in choices],
                "chosen": [choice == self.choice for choice in choices],
            },
            "recompute_blocks": {
                "kind": [kind for kind, *_ in costs],
                "blocks": [count for _, _, count, _ in costs],
                "mode": [mode for _, mode, _, _ in costs],
                "kept_bytes": [cost.kept_bytes[mode] for _, mode, _, cost in costs],
                "backward_bytes": [cost.backward_bytes[mode] for _, mode, _, cost in costs],
                "added_s": [cost.added_s[mode] for _, mode, _, cost in costs],
            },
        }


def choice_words(choice: Choice) -> str:
    """`12 none, 20 selective, 2 block` with chains, if there are some."""
    words = ", ".join(f"{count} {mode}" for mode in MODES if (count := choice.count(mode)))
    return f"{words} in {len(choice.chains)} chains" if choice.chains else words


def fit_budget(assembly: Assembly) -> Recomputation:
    """Set the modes with the least added time whose step fits into the run's recompute_budget_gib. Raises BudgetTooSmall.

    On several ranks all must call it, and all get the same choice or the same error.
    """
    assert assembly.run.recompute_budget_gib is not None
    budget_bytes = int(assembly.run.recompute_budget_gib * 2**30)
    with _without_effects(assembly), _uncompiled_on_cpu(assembly), _on_stream(assembly):
        if assembly.step.optimizer is not None:
            make_state(assembly.step.optimizer)
        batch = assembly.micro_batches(0)[0]
        moments = _pass_with_notes(assembly, batch)
        notes = moments.notes
        kinds = [list(dict.fromkeys(note.kind for note in notes)).index(note.kind) for note in notes]
        check_kinds(assembly.ranks, kinds, len(assembly.recomputed))
        firsts = [kinds.index(kind) for kind in sorted(set(kinds))]
        costs = [_cost_of(assembly, assembly.recomputed[first], notes[first]) for first in firsts]
        step = agreed_cost(assembly.ranks, _step_cost(assembly, moments, [costs[kind] for kind in kinds]))
        for note in notes:
            note.inputs = None
        choice, measured_bytes = _verified(assembly, batch, step, budget_bytes)
    return Recomputation(step=step, choice=choice, kinds=tuple(kinds), measured_peak_bytes=measured_bytes)


def _verified(assembly: Assembly, batch: Batch, step: StepCost, budget_bytes: int) -> tuple[Choice, int]:
    """Choose, and run passes with the choice. If it held more or less than predicted, the next choice may hold less or more.

    Returns the fastest choice that held at most the budget, and what it held. Raises BudgetTooSmall if none did. Of several ranks
    the one that held most counts.
    """
    ranks, tried = assembly.ranks, dict[Choice, int]()
    most_bytes = budget_bytes
    for _ in range(_TRIES):
        try:
            choice = choose(step, most_bytes)
        except BudgetTooSmall:
            choice = lowest(step)
        if choice in tried:
            break
        set_choice(assembly.recomputed, choice)
        tried[choice] = max(largest_bytes(ranks, _peak_bytes(assembly, batch)), step.optimizer_bytes)
        most_bytes = budget_bytes + choice.peak_bytes - tried[choice]
        if tried[choice] > budget_bytes >= step.optimizer_bytes and assembly.step.gradient_sync is None:
            within_bytes = largest_bytes(ranks, _peak_within(assembly, batch, budget_bytes) or tried[choice])
            tried[choice] = max(within_bytes, step.optimizer_bytes)
            if tried[choice] <= budget_bytes:  # what recomputes more would only be slower
                break
    fitting = [choice for choice, peak_bytes in tried.items() if peak_bytes <= budget_bytes]
    if not fitting:
        least = min(tried, key=lambda choice: tried[choice])
        raise BudgetTooSmall(budget_bytes, replace(least, peak_bytes=tried[least]))
    best = min(fitting, key=lambda choice: (choice.added_s, choice.peak_bytes))
    set_choice(assembly.recomputed, best)
    if assembly.device.type == "cuda":  # so that fragments are given back before they pass the budget
        torch.cuda.empty_cache()
        _reserve_at_most(budget_bytes, assembly.device)
    return best, tried[best]


def set_choice(blocks: Sequence[RecomputedForward], choice: Choice) -> None:
    """Give the blocks the modes and chains of a choice."""
    for block, mode in zip(blocks, choice.modes, strict=True):
        block.mode, block.chain = mode, None
    begin = 0
    for size in choice.chains:
        if size > 1:
            chain_blocks(blocks[begin : begin + size])
        begin += size


# The step with every block recomputed ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Moments:
    """Bytes at moments of a pass with every block recomputed, with the gradients of earlier micro-batches if a step has some."""

    before_blocks: int = 0
    """Without the first block's input, which counts as kept by that block."""
    head_peak: int = 0
    after_head: int = 0
    backward_peak: int = 0
    """The peak from behind the head to the end of gradient synchronisation."""
    after_backward: int = 0
    """With the gradients that the optimizer will read."""
    notes: list[BlockNote] = field(default_factory=list)


def _pass_with_notes(assembly: Assembly, batch: Batch) -> _Moments:
    """Run forward and backward of the last micro-batch with every block recomputed."""
    moments, recomputed = _Moments(), assembly.recomputed
    for block in recomputed:
        block.mode, block.chain = "block", None
    with ExitStack() as stack:
        live = stack.enter_context(live_bytes_of(assembly))

        def enter(block: Any, inputs: Any, named: Any) -> None:
            if not moments.notes:
                moments.before_blocks = live.now() - sum(x.nbytes for x in with_gradients((inputs, named)))
            moments.notes.append(note_block(block, inputs, named, {note.kind for note in moments.notes}))

        def leave(_block: Any, _inputs: Any, outputs: Any) -> None:
            live.begin_peak()
            for x in with_gradients(outputs):
                stack.callback(x.register_hook(head_is_done).remove)

        def head_is_done(_gradient: Tensor) -> None:
            if (
                not moments.head_peak
            ):  # of several outputs the first: the others' gradients come from within the block too
                moments.head_peak, moments.after_head = live.peak(), live.now()
                live.begin_peak()

        def begin() -> None:
            for block in recomputed:
                stack.callback(block.block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(recomputed[-1].block.register_forward_hook(leave).remove)

        def end() -> None:
            moments.backward_peak, moments.after_backward = live.peak(), live.now()

        last_micro_batch(assembly, batch, begin, end)
    return moments


def _cost_of(assembly: Assembly, forward: RecomputedForward, note: BlockNote) -> BlockCost:
    """What a block costs alone, with the part of its gradients that a strategy leaves on this rank."""
    sync: object = assembly.step.gradient_sync
    if not isinstance(sync, HookedGradients):
        return block_cost(assembly, forward, note)
    with sync.gathered(forward.block):
        cost = block_cost(assembly, forward, note)
    if sync.held_tensors().buckets:  # the buckets are there already
        return replace(cost, gradients_bytes=0)
    parts = 1 if isinstance(sync, ReplicatedGradients) else sync.groups.shards.ranks.world_size
    return replace(cost, gradients_bytes=-(-cost.gradients_bytes // parts))


def _step_cost(assembly: Assembly, moments: _Moments, blocks: Sequence[BlockCost]) -> StepCost:
    """What the step costs with these blocks, by the moments of the pass in which each kept its input."""
    base = base_bytes(assembly)
    sync: object = assembly.step.gradient_sync
    after_blocks = moments.before_blocks + sum(block.kept_bytes["block"] for block in blocks)
    step = StepCost(
        blocks=blocks,
        held_bytes=base + moments.before_blocks,
        head_bytes=max(0, moments.head_peak - after_blocks),
        after_head_bytes=max(0, moments.after_head - after_blocks),
        optimizer_bytes=base + moments.after_backward + update_bytes(assembly),
        # What a chain runs again would need parameters that fsdp has freed.
        may_chain=not isinstance(sync, HookedGradients) or isinstance(sync, ReplicatedGradients | ShardedGradients),
    )
    if sync is None:
        return step
    # Beside its blocks a backward holds what it gathers and sends, which no block alone shows.
    alone = choice_of(replace(step, head_bytes=0, optimizer_bytes=0), ["block"] * len(blocks))
    messages_bytes = max(0, base + moments.backward_peak - alone.peak_bytes)
    return replace(step, after_head_bytes=step.after_head_bytes + messages_bytes)


# The chosen step, and what is not there yet ---------------------------------------------------------------------------------------


def _peak_bytes(assembly: Assembly, batch: Batch) -> int:
    """The most bytes that forward and backward hold; on a GPU those that two passes reserve, the second on what the first left."""
    if assembly.device.type != "cuda":
        base = base_bytes(assembly)
        with live_bytes_of(assembly) as live:
            last_micro_batch(assembly, batch, live.begin_peak)
            return base + live.peak()
    reserved_bytes = _reserved_bytes(assembly, batch)
    return torch.cuda.get_device_properties(assembly.device).total_memory if reserved_bytes is None else reserved_bytes


def _peak_within(assembly: Assembly, batch: Batch, budget_bytes: int) -> int | None:
    """`_peak_bytes` of a GPU that may reserve no more, so that it gives fragments back first. None if that is too little."""
    if assembly.device.type != "cuda":
        return None
    _reserve_at_most(budget_bytes, assembly.device)
    try:
        return _reserved_bytes(assembly, batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, assembly.device.index)


def _reserved_bytes(assembly: Assembly, batch: Batch) -> int | None:
    """The most that a GPU's allocator reserves in two forwards and backwards, and in a graph's; None if memory runs out."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(assembly.device)
    try:
        for _ in range(2):
            last_micro_batch(assembly, batch)
        torch.cuda.synchronize()
        if assembly.captured is not None:
            torch.cuda.empty_cache()  # as before each capture
            with lone_pool(assembly.device):
                inputs = {name: x.clone() for name, x in batch.items()}
                last_micro_batch(assembly, inputs)
                del inputs
        return torch.cuda.max_memory_reserved(assembly.device)
    except torch.OutOfMemoryError:
        if assembly.step.gradient_sync is not None:  # the other ranks wait for the messages of the rest of this pass
            raise
        clear_gradients(assembly)
        return None


def _reserve_at_most(budget_bytes: int, device: torch.device) -> None:
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    # By its number: torch refuses a device "cuda" without one here
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total_bytes), device.index)


@contextmanager
def _without_effects(assembly: Assembly) -> Iterator[None]:
    """Restore buffers and random numbers afterwards."""
    buffers = [(buffer, buffer.clone()) for buffer in assembly.module.buffers()]
    gpus = [torch.cuda.current_device()] if assembly.device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def _on_stream(assembly: Assembly) -> AbstractContextManager[None]:
    """Run inside where the steps will run: a captured step on its graph's stream, for which cuBLAS makes another workspace."""
    if assembly.captured is None or assembly.device.type != "cuda":
        return nullcontext()
    return assembly.captured.on_stream()


@contextmanager
def _uncompiled_on_cpu(assembly: Assembly) -> Iterator[None]:
    """Run blocks uncompiled inside, where compiled code hides its tensors."""
    for block in assembly.recomputed:
        block.uncompiled = assembly.device.type == "cpu"
    yield
    for block in assembly.recomputed:
        block.uncompiled = False

"""Measures what each block of a built step costs in each mode of recomputation, and sets the modes that fit a budget.

    recomputation = fit_budget(assembly)     # before the first step; sets the modes of assembly.recomputed
    recomputation.facts(), recomputation.tables()

1. The optimizer's state is made, so that it has memory of its own: made after the first step's forward, it would lie between what
   that left, and the next step's tensors would not find room as large as theirs was.
2. A forward and backward of the first micro-batch, every block recomputed: the bytes before the blocks, at the head, and behind it.
3. Each kind of block alone (blocks with equal parameters and inputs are one kind), in each mode: the bytes that it keeps, the most
   that its backward holds, and the time of both passes, in rounds over the modes.
4. plan/recomputation.py chooses.
5. Two passes with the choice, the second with what the first left in the allocator; where the step is captured, one more in a pool
   of memory of its own, as a graph has. What they held more or less than predicted, the next choice may hold less or more. On a GPU
   a choice that reserved more also fits if the same passes end that may not reserve more.

Nothing of this changes a weight, a buffer, a gradient or the random numbers, so losses stay those of a run without a budget. Bytes
are the allocator's: on a GPU those that it reserves, on a CPU (which keeps no count) those of the tensors that operators make.
On a CPU compiled blocks are measured uncompiled. With capture on a GPU, times are the device's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trainstep.measure.step.live_bytes import live_bytes, lone_pool
from trainstep.measure.step.lone_block import BlockNote, autocast_of, block_cost, note_block, with_gradients
from trainstep.plan.recomputation import MODES, BlockCost, BudgetTooSmall, Choice, StepCost, choose, curve, lowest
from trainstep.records.facts import Fact, facts_of
from trainstep.training.batches import Batch
from trainstep.training.block_chain import chain_blocks
from trainstep.training.build import Assembly
from trainstep.training.optimizer import MasterWeights, make_state
from trainstep.training.recompute import RecomputedForward

_LOSS_BYTES = {"cpu": 4, "cuda": 512}
"""Bytes of the loss of earlier micro-batches: a GPU's allocator gives out multiples of 512."""
_TRIES = 4
"""Times that a choice is made, each with less than the one before has exceeded the budget by."""


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
    """Set the modes with the least added time whose step fits into the run's recompute_budget_gib. Raises BudgetTooSmall."""
    assert assembly.run.recompute_budget_gib is not None
    budget_bytes = int(assembly.run.recompute_budget_gib * 2**30)
    with _without_effects(assembly), _uncompiled_on_cpu(assembly), _on_stream(assembly):
        if assembly.step.optimizer is not None:
            make_state(assembly.step.optimizer)
        batch = assembly.micro_batches(0)[0]
        moments = _pass_with_notes(assembly, batch)
        notes = moments.notes
        kinds = [list(dict.fromkeys(note.kind for note in notes)).index(note.kind) for note in notes]
        firsts = [kinds.index(kind) for kind in sorted(set(kinds))]
        costs = [block_cost(assembly, assembly.recomputed[first], notes[first]) for first in firsts]
        step = _step_cost(assembly, moments, [costs[kind] for kind in kinds])
        for note in notes:
            note.inputs = None
        choice, measured_bytes = _verified(assembly, batch, step, budget_bytes)
    return Recomputation(step=step, choice=choice, kinds=tuple(kinds), measured_peak_bytes=measured_bytes)


def _verified(assembly: Assembly, batch: Batch, step: StepCost, budget_bytes: int) -> tuple[Choice, int]:
    """Choose, and run a step with the choice. What it held more or less than predicted, the next choice may hold less or more.

    The fastest choice that held at most the budget, and what it held. Raises BudgetTooSmall if none did.
    """
    tried: dict[Choice, int] = {}
    most_bytes = budget_bytes
    for _ in range(_TRIES):
        try:
            choice = choose(step, most_bytes)
        except BudgetTooSmall:
            choice = lowest(step)
        if choice in tried:
            break
        set_choice(assembly.recomputed, choice)
        tried[choice] = max(_peak_bytes(assembly, batch), step.optimizer_bytes)
        most_bytes = budget_bytes + choice.peak_bytes - tried[choice]
        if tried[choice] > budget_bytes >= step.optimizer_bytes:
            tried[choice] = max(_peak_within(assembly, batch, budget_bytes) or tried[choice], step.optimizer_bytes)
            if tried[choice] <= budget_bytes:  # what recomputes more would only be slower
                break
    fitting = [choice for choice, held in tried.items() if held <= budget_bytes]
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
    """Bytes at moments of a pass with every block recomputed."""

    began: int = 0
    before_blocks: int = 0
    """Without the first block's input, which is among what that block keeps."""
    head_peak: int = 0
    after_head: int = 0
    notes: list[BlockNote] = field(default_factory=list)


def _pass_with_notes(assembly: Assembly, batch: Batch) -> _Moments:
    """Run forward and backward of a micro-batch with every block recomputed."""
    moments, recomputed = _Moments(), assembly.recomputed
    for block in recomputed:
        block.mode, block.chain = "block", None
    with ExitStack() as stack:
        live = stack.enter_context(live_bytes(assembly.device))
        moments.began = live.now()

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

        for block in recomputed:
            stack.callback(block.block.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.callback(recomputed[-1].block.register_forward_hook(leave).remove)
        _forward_backward(assembly, batch)
    if len(moments.notes) != len(recomputed):
        raise ValueError(
            f"recompute_budget_gib: a forward runs {len(moments.notes)} blocks and the model has {len(recomputed)}; use recompute"
        )
    return moments


def _step_cost(assembly: Assembly, moments: _Moments, blocks: Sequence[BlockCost]) -> StepCost:
    """What the step costs with these blocks, by the moments of the pass in which each kept its input."""
    base = 0 if assembly.device.type == "cuda" else _module_bytes(assembly)
    gradients = sum(x.nbytes for x in _trained(assembly))
    earlier = gradients + _LOSS_BYTES[assembly.device.type] if assembly.run.accumulation > 1 else 0  # and a loss
    after_blocks = moments.before_blocks + sum(block.kept_bytes["block"] for block in blocks)
    return StepCost(
        blocks=blocks,
        held_bytes=base + moments.before_blocks + earlier,
        head_bytes=max(0, moments.head_peak - after_blocks),
        after_head_bytes=max(0, moments.after_head - after_blocks),
        optimizer_bytes=base + moments.began + gradients + _update_bytes(assembly),
    )


# The chosen step, and what is not there yet ---------------------------------------------------------------------------------------


def _peak_bytes(assembly: Assembly, batch: Batch) -> int:
    """The most that forward and backward hold; on a GPU what two of them reserve, the second on what the first left."""
    if assembly.device.type != "cuda":
        with live_bytes(assembly.device) as live:
            _last_micro_batch(assembly, batch, live.begin_peak)
            return _module_bytes(assembly) + live.peak()
    found = _reserved_bytes(assembly, batch)
    return torch.cuda.get_device_properties(assembly.device).total_memory if found is None else found


def _peak_within(assembly: Assembly, batch: Batch, budget_bytes: int) -> int | None:
    """The same where the GPU may reserve no more, so that it gives fragments back before it would. None if that is too little."""
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
            _last_micro_batch(assembly, batch)
        torch.cuda.synchronize()
        if assembly.captured is not None:
            torch.cuda.empty_cache()  # as before each capture
            with lone_pool(assembly.device):
                inputs = {name: x.clone() for name, x in batch.items()}
                _last_micro_batch(assembly, inputs)
                del inputs
        return torch.cuda.max_memory_reserved(assembly.device)
    except torch.OutOfMemoryError:
        assembly.step.clear_gradients()
        return None


def _reserve_at_most(budget_bytes: int, device: torch.device) -> None:
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    # By its number: torch refuses a device "cuda" without one here
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total_bytes), device.index)


def _last_micro_batch(assembly: Assembly, batch: Batch, begin: Callable[[], None] = lambda: None) -> None:
    """Run forward and backward, which find gradients and a loss if the step has several micro-batches. `begin` is called before."""
    if assembly.run.accumulation > 1:
        earlier = _forward_backward(assembly, batch, clear=False)  # noqa: F841
    begin()
    _forward_backward(assembly, batch)


def _forward_backward(assembly: Assembly, batch: Batch, *, clear: bool = True) -> Tensor:
    with autocast_of(assembly):
        output = assembly.step.module(**batch)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    loss = loss.detach()
    del output
    if clear:
        assembly.step.clear_gradients()
    return loss


def _trained(assembly: Assembly) -> list[Tensor]:
    return [x for x in assembly.module.parameters() if x.requires_grad]


def _module_bytes(assembly: Assembly) -> int:
    """Weights, buffers and what the optimizer has from the start."""
    optimizer = assembly.step.optimizer
    states = optimizer.state.values() if optimizer is not None else ()
    state = [x for values in states for x in values.values() if isinstance(x, Tensor)]
    tensors = [*assembly.module.parameters(), *assembly.module.buffers(), *state]
    return sum({id(x): x.nbytes for x in tensors}.values())


def _update_bytes(assembly: Assembly) -> int:
    """Temporary tensors of the update: roots of all second moments or of one; fp32 gradients for masters that are not ours."""
    optimizer, adamw = assembly.step.optimizer, assembly.run.adamw
    if optimizer is None:
        return 0
    masters = isinstance(optimizer, MasterWeights)
    sizes = [x.numel() * (4 if masters else x.element_size()) for x in _trained(assembly)]
    roots = {"foreach": sum(sizes), "loop": 3 * max(sizes, default=0)}.get(adamw, 0)
    return roots + (sum(sizes) if masters and adamw != "trainstep" else 0)


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
    """Where the steps will run: a captured one on its graph's stream, for which cuBLAS makes another workspace."""
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

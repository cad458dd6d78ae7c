"""Chooses what the blocks of a model recompute, so that a step fits into a budget of bytes with the least added time.

    choice = choose(step, budget_bytes)      # of the measured bytes and seconds of each block
    choice.modes                             # a mode of RunConfig.recompute for each block

n blocks; k_i: bytes that forward keeps of block i in its mode; w_i: most bytes held in its backward, k_i and its gradients
included; g_i: its gradients. What is held at each moment:

    head          held + sum of all k + head
    backward i    held + sum of k before i + w_i + after_head + sum of g behind i
    optimizer     optimizer

The sums of k grow along the blocks, so every moment limits a prefix, and a table of the least time for each prefix's bytes finds
the least time of all: exactly for blocks of few kinds. Where every block is different, bytes are rounded up to 1/4096 of what all
keep, so the choice never holds more than it says. Early blocks recompute first, because what they keep is held longest.

If even whole blocks do not fit, blocks form chains, as many as fit (training/block_chain.py): in a chain only the first block's
input is kept, and the chain's others are there only during its backward.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

MODES = ("none", "selective", "narrow", "block")
_EXACT_KINDS = 3
"""With up to this many different kinds of blocks, bytes are not rounded."""
_STEPS = 4096
"""With more kinds, bytes are rounded up to multiples of the total divided by this."""
_State = tuple[int, float, Any]
"""Kept bytes of the blocks so far, their added time, and their modes as a linked list with the last block's first."""
_REMEDIES = {
    "head": "its peak is at the head: ops fused keeps no whole logits; else take a smaller batch_size or context",
    "backward": "take a smaller batch_size or context",
    "optimizer": "its peak is in the optimizer, which no recomputation changes: take 16-bit weights, or several ranks with fsdp",
}


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """What a block costs in each mode."""

    kept_bytes: Mapping[str, int]
    """Mode -> bytes that its forward leaves behind."""
    backward_bytes: Mapping[str, int]
    """Mode -> most bytes held in its backward: kept ones, those computed again, temporary ones and its gradients."""
    added_s: Mapping[str, float]
    """Mode -> seconds of forward and backward over those of `none`."""
    forward_s: float
    """Seconds of a forward without autograd, which a chain adds."""
    gradients_bytes: int = 0
    """Bytes of its parameters' gradients, which stay."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What a step costs: its blocks, and what is held beside them."""

    blocks: Sequence[BlockCost]
    held_bytes: int
    """Always held: weights, optimizer state, batch, gradients that are there before, what is computed before the first block."""
    head_bytes: int
    """Most held between the last block's forward and its backward, beside what the blocks keep."""
    after_head_bytes: int = 0
    """What is left of these during the blocks' backward: the head's gradients, and what a strategy gathers and sends then."""
    optimizer_bytes: int = 0
    """Everything held at the peak of the optimizer."""
    may_chain: bool = True
    """Whether blocks may form chains: not under fsdp, which has freed the parameters that a chain would run again with."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What each block recomputes, with the step's peak and the added seconds that follow from its costs."""

    modes: tuple[str, ...]
    peak_bytes: int
    added_s: float
    moment: str
    """When the peak is: head, backward or optimizer."""
    chains: tuple[int, ...] = ()
    """Number of blocks in each chain, in order; empty without chains."""

    def count(self, mode: str) -> int:
        return self.modes.count(mode)


class BudgetTooSmall(ValueError):
    """No recomputation fits. `minimum`: the choice with the lowest peak."""

    def __init__(self, budget_bytes: int, minimum: Choice) -> None:
        self.minimum = minimum
        super().__init__(
            f"recompute_budget_gib: {budget_bytes / 2**30:.3g} GiB are less than the {minimum.peak_bytes / 2**30:.3g} GiB that "
            f"this step needs when it recomputes all it can; {_REMEDIES[minimum.moment]}"
        )


def slowest_and_largest(steps: Sequence[StepCost]) -> StepCost:
    """The costs of a step on several ranks: each number is the largest on any rank, block by block.

    A choice that fits these bytes fits on every rank, and a step takes as long as on the slowest rank.
    """
    return StepCost(
        blocks=[_most_of_blocks(blocks) for blocks in zip(*(step.blocks for step in steps), strict=True)],
        held_bytes=max(step.held_bytes for step in steps),
        head_bytes=max(step.head_bytes for step in steps),
        after_head_bytes=max(step.after_head_bytes for step in steps),
        optimizer_bytes=max(step.optimizer_bytes for step in steps),
        may_chain=all(step.may_chain for step in steps),
    )


def _most_of_blocks(blocks: Sequence[BlockCost]) -> BlockCost:
    modes = blocks[0].kept_bytes
    return BlockCost(
        kept_bytes={mode: max(block.kept_bytes[mode] for block in blocks) for mode in modes},
        backward_bytes={mode: max(block.backward_bytes[mode] for block in blocks) for mode in modes},
        added_s={mode: max(block.added_s[mode] for block in blocks) for mode in modes},
        forward_s=max(block.forward_s for block in blocks),
        gradients_bytes=max(block.gradients_bytes for block in blocks),
    )


def choose(step: StepCost, budget_bytes: int) -> Choice:
    """The choice with the least added time whose peak is at most the budget; of equal times the lowest peak.

    Raises BudgetTooSmall. With a larger budget the added time is never longer.
    """
    modes = _least_time(step, budget_bytes)
    if modes is not None:
        return choice_of(step, modes)
    fitting = [choice for choice in [*_chained(step), lowest(step)] if choice.peak_bytes <= budget_bytes]
    if not fitting:
        raise BudgetTooSmall(budget_bytes, lowest(step))
    return min(fitting, key=lambda choice: (choice.added_s, choice.peak_bytes))


def choice_of(step: StepCost, modes: Sequence[str], chains: Sequence[int] = ()) -> Choice:
    """The peak and the added time of given modes and chains."""
    peak_bytes, moment = _peak(step, modes, chains)
    added_s = sum(block.added_s[mode] for block, mode in zip(step.blocks, modes, strict=True))
    ends = set(accumulate(chains))
    if chains:
        added_s += sum(block.forward_s for index, block in enumerate(step.blocks) if index + 1 not in ends)
    return Choice(
        modes=tuple(modes),
        peak_bytes=peak_bytes,
        added_s=added_s,
        moment=moment,
        chains=tuple(chains) if chains else (),
    )


def lowest(step: StepCost) -> Choice:
    """The choice with the lowest peak, with or without chains."""
    choices = [choice_of(step, ["block"] * len(step.blocks)), *_chained(step)]
    enough = min(choice.peak_bytes for choice in choices)
    budgets = range(enough)
    first = bisect_left(budgets, True, key=lambda budget: _keeping_least(step, budget) is not None)
    modes = _keeping_least(step, first) if first < enough else None
    if modes is not None:
        choices.append(choice_of(step, modes))
    return min(choices, key=lambda choice: (choice.peak_bytes, choice.added_s))


def curve(step: StepCost, points: int = 20) -> list[Choice]:
    """Choices from the lowest peak to that without recomputation, for budgets at equal distances; equal choices once."""
    whole = choice_of(step, ["none"] * len(step.blocks))
    low, high = lowest(step).peak_bytes, whole.peak_bytes
    budgets = [low + (high - low) * index // points for index in range(points + 1)] if high > low else [high]
    return list(dict.fromkeys(choose(step, budget) for budget in budgets))


def _peak(step: StepCost, modes: Sequence[str], chains: Sequence[int]) -> tuple[int, str]:
    blocks = step.blocks
    kept = [block.kept_bytes[mode] for block, mode in zip(blocks, modes, strict=True)]
    starts = _chain_starts(chains)
    stays = [size if not chains or index == starts[index] else 0 for index, size in enumerate(kept)]
    gradients = _gradients_behind(step)
    prefix = [0, *accumulate(stays)]
    moments = [(step.held_bytes + prefix[-1] + step.head_bytes, "head"), (step.optimizer_bytes, "optimizer")]
    for index, (block, mode) in enumerate(zip(blocks, modes, strict=True)):
        before = prefix[index] + (sum(kept[starts[index] + 1 : index]) if chains else 0)
        held_bytes = step.held_bytes + before + block.backward_bytes[mode] + step.after_head_bytes + gradients[index]
        moments.append((held_bytes, "backward"))
    return max(moments, key=lambda moment: moment[0])


def _chain_starts(chains: Sequence[int]) -> list[int]:
    """For each block the first block of its chain."""
    return [start for start, size in zip([0, *accumulate(chains)], chains, strict=False) for _ in range(size)]


def _gradients_behind(step: StepCost) -> list[int]:
    """For each block the gradients of the blocks behind it, whose backward has run before."""
    sizes = [block.gradients_bytes for block in step.blocks]
    return [sum(sizes[index + 1 :]) for index in range(len(sizes))]


def _keeping_least(step: StepCost, budget_bytes: int) -> list[str] | None:
    """The modes that keep least in each block, of those that fit; None if none fit."""
    if step.optimizer_bytes > budget_bytes:
        return None
    modes, kept = [], 0
    for block, behind in zip(step.blocks, _gradients_behind(step), strict=True):
        free = budget_bytes - step.held_bytes - step.after_head_bytes - behind - kept
        fitting = [mode for mode in block.kept_bytes if block.backward_bytes[mode] <= free]
        if not fitting:
            return None
        modes.append(min(fitting, key=lambda mode: block.kept_bytes[mode]))
        kept += block.kept_bytes[modes[-1]]
    return modes if step.held_bytes + kept + step.head_bytes <= budget_bytes else None


def _least_time(step: StepCost, budget_bytes: int) -> list[str] | None:
    """The modes with the least added time that fit; None if none do."""
    if step.optimizer_bytes > budget_bytes:
        return None
    grid, gradients = _grid(step), _gradients_behind(step)
    states: list[_State] = [(0, 0.0, None)]
    for block, behind in zip(step.blocks, gradients, strict=True):
        free = budget_bytes - step.held_bytes - step.after_head_bytes - behind
        states = _least_times(
            (kept + -(-block.kept_bytes[mode] // grid) * grid, added_s + block.added_s[mode], (mode, modes))
            for kept, added_s, modes in states
            for mode in MODES
            if mode in block.kept_bytes and kept + block.backward_bytes[mode] <= free
        )
    fitting = [state for state in states if step.held_bytes + state[0] + step.head_bytes <= budget_bytes]
    if not fitting:
        return None
    _, _, modes = min(fitting, key=lambda state: (state[1], state[0]))
    names: list[str] = []
    while modes is not None:
        name, modes = modes
        names.append(name)
    return names[::-1]


def _least_times(states: Iterable[_State]) -> list[_State]:
    """The states that no other state beats in both bytes and time, and one of equal ones."""
    best: list[_State] = []
    for state in sorted(states, key=lambda state: state[:2]):
        if not best or state[1] < best[-1][1]:
            best.append(state)
    return best


def _grid(step: StepCost) -> int:
    """The multiple to which kept bytes are rounded up; the same for every budget, so that larger budgets have more choices."""
    kinds = {tuple(sorted(block.kept_bytes.items())) for block in step.blocks}
    if len(kinds) <= _EXACT_KINDS:
        return 1
    return max(1, sum(max(block.kept_bytes.values()) for block in step.blocks) // _STEPS)


def _chained(step: StepCost) -> list[Choice]:
    """Every block recomputed, in each number of chains of about equal length."""
    count = len(step.blocks) if step.may_chain else 0
    return [choice_of(step, ["block"] * count, _sizes(count, chains)) for chains in range(1, count)]


def _sizes(count: int, chains: int) -> list[int]:
    return [count // chains + (index < count % chains) for index in range(chains)]

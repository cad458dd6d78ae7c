"""What several ranks tell each other before they choose the recomputation for a budget: all of them must choose the same.

A rank that recomputes otherwise would take another time than the others, which wait for it in every message, and its blocks would
need their parameters at other moments. So every number that a choice depends on is the largest of all ranks before any rank looks
at it, and ranks run the same passes in the same order. In a single process nothing is sent.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict

from trainstep.parallel.collectives import Collectives
from trainstep.parallel.ranks import Ranks
from trainstep.plan.recomputation import BlockCost, StepCost, slowest_and_largest


def check_kinds(ranks: Ranks, kinds: Sequence[int], blocks: int) -> None:
    """Raise ValueError on every rank unless each forward ran every block once, and all ranks have the same kinds of blocks.

    `kinds`: for each block that this rank's forward ran, the number of its kind. Each kind is measured on all ranks together.
    """
    of_ranks: list[list[int]] = [json.loads(text) for text in Collectives(ranks).gather_texts(json.dumps(list(kinds)))]
    wrong = next((len(of_rank) for of_rank in of_ranks if len(of_rank) != blocks), None)
    if wrong is not None:
        raise ValueError(
            f"recompute_budget_gib: a forward runs {wrong} blocks and the model has {blocks}; use recompute"
        )
    if any(of_rank != of_ranks[0] for of_rank in of_ranks):
        raise ValueError(
            "recompute_budget_gib: blocks that are alike on one rank differ on another, by their inputs or parameters, so ranks "
            "cannot be measured together; use recompute"
        )


def agreed_cost(ranks: Ranks, step: StepCost) -> StepCost:
    """The same cost on every rank: the largest bytes and the longest times of all."""
    texts = Collectives(ranks).gather_texts(json.dumps(asdict(step)))
    return slowest_and_largest([_read(text) for text in texts])


def largest_bytes(ranks: Ranks, byte_count: int) -> int:
    """The largest of all ranks' numbers."""
    return max(int(text) for text in Collectives(ranks).gather_texts(str(byte_count)))


def _read(text: str) -> StepCost:
    values = json.loads(text)  # a float comes back as it was, to the bit
    return StepCost(**{**values, "blocks": [BlockCost(**block) for block in values["blocks"]]})

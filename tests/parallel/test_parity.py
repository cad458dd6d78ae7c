"""Every parallel strategy trains as one process does on all the data.

The 2x rule on parameters after five steps: their distance from fp64 training is at most twice that of one process in fp32,
and a rounding of the largest parameter (reduced in bf16: one process that rounds each rank's gradient to bf16). Bitwise where
sums have one order: two ranks, whose average is exact.
"""

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor

from parallel_strategies import BF16_STRATEGIES, HYBRID_STRATEGIES, NOT_DONE, STRATEGIES, TORCH_STRATEGIES, torch_fsdp2
from parallel_training import OPTIMIZERS, Case, distance, train_alone, train_together
from quick import slow_unless
from ranks import run_ranks
from trainstep.parallel.ranks import Ranks

ALL = {**STRATEGIES, **BF16_STRATEGIES, **TORCH_STRATEGIES}
CASES = {
    "plain": Case(),
    "tied": Case(tied=True),
    "frozen": Case(frozen=True),
    "unused everywhere": Case(unused="everywhere"),
    "unused somewhere": Case(unused="somewhere"),
    "accumulation": Case(accumulation=3),
    "unused somewhere, accumulation, tied": Case(unused="somewhere", accumulation=2, tied=True),
    "clipped": Case(clip=0.05),
}

THREE_RANKS = ("plain", "unused somewhere, accumulation, tied", "clipped")
"""Cases that `make test` takes with three ranks, whose sums have no one order; all are taken with two."""

PAIRS = [
    (strategy, case)
    for strategy in (*STRATEGIES, *TORCH_STRATEGIES)
    for case in CASES
    if (strategy, CASES[case].unused) not in NOT_DONE
]


def alternated(strategy: str, case: str) -> list[str]:
    """The optimizers, in an order that changes from case to case and from strategy to strategy.

    With the first for three ranks and the other for four, each strategy and each case meets each optimizer with both numbers.
    """
    names = [*OPTIMIZERS]
    turn = [*STRATEGIES, *TORCH_STRATEGIES].index(strategy) + [*CASES].index(case)
    return names if turn % 2 else names[::-1]


def to_the_bit(case: str) -> bool:
    """Whether two ranks add up in the order of one process: neither over micro-batches nor for the gradient's norm."""
    return CASES[case].accumulation == 1 and CASES[case].clip is None


def trained(ranks: Ranks, strategy: str, case: Case, optimizer: str) -> list[Tensor]:
    return train_together(ranks, ALL[strategy], case, optimizer)


@pytest.mark.parametrize(
    ("strategy", "case", "optimizer", "world_size"),
    slow_unless(
        lambda strategy, case, optimizer, world_size: world_size == 3 and case in THREE_RANKS,
        [
            (strategy, case, optimizer, world_size)
            for strategy, case in PAIRS
            for optimizer, world_size in zip(alternated(strategy, case), (3, 4), strict=True)
        ]
        + [(strategy, case, alternated(strategy, case)[0], 2) for strategy, case in PAIRS if not to_the_bit(case)]
        + [(strategy, case, alternated(strategy, case)[0], 8) for strategy, case in PAIRS if case == "plain"],
    ),
)
def test_training_is_as_good_as_in_one_process(strategy: str, case: str, optimizer: str, world_size: int):
    """Two ranks of the other cases have no distance at all, below."""
    every_rank = run_ranks(world_size, trained, strategy, CASES[case], optimizer)
    assert_as_good_as_alone(every_rank[0], CASES[case], optimizer, world_size, torch.float32)
    assert all(distance(parameters, every_rank[0]) == 0 for parameters in every_rank)


@pytest.mark.parametrize("case", ["plain", "unused somewhere", "accumulation"])
@pytest.mark.parametrize("strategy", BF16_STRATEGIES)
def test_reducing_in_bf16_is_as_good_as_rounding_gradients(strategy: str, case: str):
    parameters, of_rank_1 = run_ranks(2, trained, strategy, CASES[case], "sgd")
    assert_as_good_as_alone(parameters, CASES[case], "sgd", 2, torch.bfloat16)
    assert distance(parameters, of_rank_1) == 0


def assert_as_good_as_alone(
    parameters: list[Tensor], case: Case, optimizer: str, world_size: int, reduce_dtype: torch.dtype
) -> None:
    exact = train_alone(case, optimizer, world_size, torch.float64)
    single = train_alone(case, optimizer, world_size, torch.float32, reduce_dtype)
    largest = max(float(parameter.abs().max()) for parameter in exact)
    assert distance(parameters, exact) <= 2 * distance(single, exact) + torch.finfo(torch.float32).eps * largest


def distance_from_one_process(ranks: Ranks, strategy: str, case: Case, optimizer: str) -> float:
    """The distance, with both trained in this process, since another number of threads adds up in another order."""
    together = train_together(ranks, ALL[strategy], case, optimizer)
    return distance(together, train_alone(case, optimizer, ranks.world_size, torch.float32))


@pytest.mark.parametrize(
    ("strategy", "case", "optimizer"),
    [(strategy, case, alternated(strategy, case)[0]) for strategy, case in PAIRS if to_the_bit(case)],
)
def test_two_ranks_train_as_one_process_to_the_bit(strategy: str, case: str, optimizer: str):
    assert run_ranks(2, distance_from_one_process, strategy, CASES[case], optimizer) == [0, 0]


IN_GROUPS = {
    **{f"{name} in groups of 2": start(2) for name, start in HYBRID_STRATEGIES.items()},
    **{f"fsdp_units in groups of {size}": HYBRID_STRATEGIES["fsdp_units"](size) for size in (1, 4)},
    "bucketed in groups of 1": HYBRID_STRATEGIES["bucketed"](1),
    "torch_fsdp2 in groups of 2": partial(torch_fsdp2, shard_ranks=2),
}
"""Strategies of four ranks: groups of 1 average everything across groups, groups of 4 nothing."""


def trained_each(ranks: Ranks, names: list[str], case: Case, optimizer: str) -> list[list[Tensor]]:
    return [train_together(ranks, IN_GROUPS[name], case, optimizer) for name in names]


def trained_in_groups(ranks: Ranks, strategy: str, size: int, case: Case) -> list[Tensor]:
    return train_together(ranks, HYBRID_STRATEGIES[strategy](size), case, "adamw")


def assert_groups_as_good_as_alone(names: list[str], case: Case, optimizer: str, reduce_dtype: torch.dtype) -> None:
    for name, *every_rank in zip(names, *run_ranks(4, trained_each, names, case, optimizer), strict=True):
        assert all(distance(parameters, every_rank[0]) == 0 for parameters in every_rank), name
        assert_as_good_as_alone(every_rank[0], case, optimizer, 4, reduce_dtype)


def test_groups_train_as_one_process():
    names = ["bucketed in groups of 2", "sharded_flat_units in groups of 2", "fsdp_units in groups of 2"]
    assert_groups_as_good_as_alone(names, CASES[THREE_RANKS[1]], "adamw", torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "clipped"])
def test_all_groups_train_as_one_process(case: str):
    names = [
        name
        for name in IN_GROUPS
        if "bf16" not in name and (name.partition(" ")[0], CASES[case].unused) not in NOT_DONE
    ]
    assert_groups_as_good_as_alone(names, CASES[case], "adamw", torch.float32)


@pytest.mark.slow
def test_groups_that_reduce_in_bf16_are_as_good_as_rounding_gradients():
    names = [name for name in IN_GROUPS if "bf16" in name]
    assert_groups_as_good_as_alone(names, CASES["unused somewhere"], "sgd", torch.bfloat16)


@pytest.mark.multigpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("strategy", "case"), [*PAIRS, *itertools.product(BF16_STRATEGIES, ["plain", "accumulation"])])
def test_training_on_gpus_is_as_good_as_in_one_process(strategy: str, case: str, optimizer: str):
    parameters, of_rank_1 = run_ranks(2, trained, strategy, CASES[case], optimizer, backend="nccl")
    reduce_dtype = torch.bfloat16 if strategy in BF16_STRATEGIES else torch.float32
    assert_as_good_as_alone(parameters, CASES[case], optimizer, 2, reduce_dtype)
    assert distance(parameters, of_rank_1) == 0


@pytest.mark.multigpu
@pytest.mark.parametrize(("ranks", "size"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("case", THREE_RANKS)
@pytest.mark.parametrize("strategy", [name for name in HYBRID_STRATEGIES if "bf16" not in name])
def test_groups_on_gpus_train_as_one_process(strategy: str, case: str, ranks: int, size: int):
    """Not run yet."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA GPUs")
    every_rank = run_ranks(ranks, trained_in_groups, strategy, size, CASES[case], backend="nccl")
    assert all(distance(parameters, every_rank[0]) == 0 for parameters in every_rank)
    assert_as_good_as_alone(every_rank[0], CASES[case], "adamw", ranks, torch.float32)

"""Collectives by copies have the right results for any size, number of ranks and chunk, and strategies train with them."""

import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_strategies import COPIES_STRATEGIES
from parallel_training import Case, distance, train_alone, train_together
from ranks import run_ranks
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.copies import memory
from trainstep.parallel.copies.messages import CopyEngines, add_up
from trainstep.parallel.ranks import Ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def differences(ranks: Ranks, sizes: list[int], dtype: torch.dtype, options: CopyEngines) -> list[float]:
    """For messages of each size, sent by copies: the largest difference from what every rank's values give exactly."""
    collectives = Collectives(ranks)
    collectives.send_by(options)
    found = []
    for size in sizes:
        values = [numbers(size * ranks.world_size, rank, dtype) for rank in range(ranks.world_size)]
        own = values[ranks.rank].to(ranks.device)
        mean = (sum(value.double() for value in values) / ranks.world_size).to(dtype)
        total, average, gathered = own.clone(), own.clone(), own.new_empty(own.numel() * ranks.world_size)
        shard, in_place = own.new_empty(size), own.clone()
        part = in_place[size * ranks.rank : size * (ranks.rank + 1)]
        sent = [
            collectives.all_reduce(total),
            collectives.all_reduce(average, reduction="average"),
            collectives.all_gather(gathered, own),
            collectives.reduce_scatter(shard, own, reduction="average"),
            collectives.reduce_scatter(part, in_place, reduction="average"),
        ]
        for message in sent:
            message.wait()
        place = slice(size * ranks.rank, size * (ranks.rank + 1))
        pairs = [
            (total, mean * ranks.world_size),
            (average, mean),
            (gathered, torch.cat(values)),
            (shard, mean[place]),
            (part, mean[place]),
        ]
        found += [float((got.cpu().double() - exact.double()).abs().max()) if size else 0.0 for got, exact in pairs]
    return found


def numbers(count: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Multiples of 12, whose sums and means over two to four ranks are exact in every dtype: no wrong chunk hides in rounding."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randint(-16, 16, (count,), generator=generator) * 12).to(dtype)


@settings(max_examples=6, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    slots=st.integers(1, 3),
)
@pytest.mark.parametrize("world_size", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 4, 8))])
def test_every_collective_has_its_result(world_size: int, sizes: list[int], dtype: torch.dtype, slots: int):
    options = CopyEngines(inbox_bytes=768 * slots * world_size, least_bytes=1)
    for found in run_ranks(world_size, differences, sizes, dtype, options):
        assert found == [0] * len(found)


def odd_sizes(ranks: Ranks, options: CopyEngines) -> list[bool]:
    """All-reduces whose parts are unequal, or empty on some ranks."""
    collectives = Collectives(ranks)
    collectives.send_by(options)
    same = []
    for numel in (1, 17, 63, 64, 65, 127, 1000, 12_289):
        tensor = numbers(numel, ranks.rank, torch.float32).to(ranks.device)
        exact = sum(numbers(numel, rank, torch.float32) for rank in range(ranks.world_size))
        collectives.all_reduce(tensor).wait()
        same.append(torch.equal(tensor.cpu(), exact))
    return same


@pytest.mark.parametrize("world_size", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (4, 8))])
def test_an_all_reduce_may_have_any_size(world_size: int):
    for same in run_ranks(world_size, odd_sizes, CopyEngines(inbox_bytes=2**13, least_bytes=1)):
        assert all(same)


def kinds_of_messages(ranks: Ranks) -> tuple[list[bool], dict[str, int]]:
    collectives = Collectives(ranks)
    collectives.send_by(CopyEngines(inbox_bytes=2**12, least_bytes=400))
    copies = collectives._copies
    assert copies is not None
    collectives.traffic.clear()
    large, small = torch.zeros(100), torch.zeros(99)
    taken = [copies.takes(large), copies.takes(small), copies.takes(large, "maximum"), copies.takes(large.long())]
    collectives.all_reduce(large).wait()
    collectives.all_reduce(small).wait()
    return taken, dict(collectives.traffic.payload_bytes)


def test_small_messages_and_other_reductions_go_by_the_library_and_all_are_counted():
    for taken, counted in run_ranks(2, kinds_of_messages):
        assert taken == [True, False, False, False]
        assert counted == {"all_reduce": 400 + 396}


def refusal(ranks: Ranks, options: CopyEngines) -> str:
    try:
        Collectives(ranks).send_by(options)
    except ValueError as error:
        return str(error)
    return ""


def test_an_inbox_that_is_too_small_is_refused():
    words = "inbox_bytes: must be at least 2304 for 3 ranks, not 100"
    assert run_ranks(3, refusal, CopyEngines(inbox_bytes=100)) == [words] * 3


def no_room(ranks: Ranks) -> str:
    def full(_descriptor: int, _first: int, _bytes: int) -> None:
        raise OSError(28, "No space left on device")

    if ranks.rank == 1:
        memory.os = SimpleNamespace(**{**vars(os), "posix_fallocate": full})  # type: ignore[assignment]
    try:
        Collectives(ranks).send_by(CopyEngines())
    except ValueError as error:
        return str(error)
    finally:
        memory.os = os
    return ""


def test_a_rank_without_room_for_its_inbox_ends_all():
    words = run_ranks(2, no_room)
    assert words[0] == words[1]
    assert words[0].endswith(
        "has no room for an inbox of 256 MiB (No space left on device); take a smaller inbox_mib, or library"
    )


def test_a_sum_is_rounded_once():
    own = torch.tensor([1.0, 256.0]).bfloat16()
    slots = torch.tensor([[0.00390625, 1.0, 9.0], [0.00390625, 1.0, 9.0]]).bfloat16()
    into = torch.empty_like(own)
    add_up(own, slots, into, 1.0)
    assert into.tolist() == [1.0078125, 258.0], "each addition rounded by itself gives 1 and 256"


def trained(ranks: Ranks, strategy: str, case: Case) -> list[torch.Tensor]:
    return train_together(ranks, COPIES_STRATEGIES[strategy], case, "adamw")


def trained_beside_one_process(ranks: Ranks, strategy: str, case: Case) -> float:
    alone = train_alone(case, "adamw", ranks.world_size, torch.float32)
    return distance(trained(ranks, strategy, case), alone)


CASES = {
    "plain": Case(),
    "unused, accumulated, tied": Case(unused="somewhere", accumulation=2, tied=True),
    "clipped": Case(clip=0.05),
}


@pytest.mark.parametrize("strategy", [name for name in COPIES_STRATEGIES if "bf16" not in name])
def test_two_ranks_train_as_one_process_to_the_bit(strategy: str):
    assert run_ranks(2, trained_beside_one_process, strategy, CASES["plain"]) == [0, 0]


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", COPIES_STRATEGIES)
def test_training_is_as_good_as_in_one_process(strategy: str, case: str, world_size: int):
    check_as_good_as_alone(run_ranks(world_size, trained, strategy, CASES[case]), strategy, CASES[case])


def check_as_good_as_alone(every_rank: list[list[torch.Tensor]], strategy: str, case: Case) -> None:
    """All ranks have the same parameters, and by the 2x rule those of one process."""
    world_size = len(every_rank)
    exact = train_alone(case, "adamw", world_size, torch.float64)
    reduce_dtype = torch.bfloat16 if "bf16" in strategy else torch.float32
    single = train_alone(case, "adamw", world_size, torch.float32, reduce_dtype)
    largest = max(float(parameter.abs().max()) for parameter in exact)
    bound = 2 * distance(single, exact) + torch.finfo(torch.float32).eps * largest
    assert distance(every_rank[0], exact) <= bound
    assert all(distance(parameters, every_rank[0]) == 0 for parameters in every_rank)


@pytest.mark.multigpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_collective_has_its_result_on_gpus(dtype: torch.dtype):
    options = CopyEngines(inbox_bytes=2**20, least_bytes=1)
    for found in run_ranks(2, differences, [1, 64, 1000, 65_537, 3_000_001], dtype, options, backend="nccl"):
        assert found == [0] * len(found)


@pytest.mark.multigpu
def test_an_all_reduce_on_gpus_may_have_any_size():
    for same in run_ranks(2, odd_sizes, CopyEngines(inbox_bytes=2**12, least_bytes=1), backend="nccl"):
        assert all(same)


@pytest.mark.multigpu
@pytest.mark.parametrize("strategy", COPIES_STRATEGIES)
def test_two_gpus_train_as_one_process(strategy: str):
    every_rank = run_ranks(2, trained, strategy, CASES["plain"], backend="nccl")
    check_as_good_as_alone(every_rank, strategy, CASES["plain"])

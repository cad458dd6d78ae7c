"""Ranks in groups: averages are those of all ranks, messages go in one order, and what cannot be is refused by name.

Parity with one process is in test_parity.py, messages and bytes are in costs/test_gradient_sync.py.
"""

import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel_strategies import SMALL_COPIES
from ranks import run_ranks
from trainstep.costs.rank_groups import Level, at_level, level_of, members
from trainstep.parallel import FSDP, BucketedDDP, ShardedGradients, ShardedOptimizer
from trainstep.parallel.collectives import Collectives, ShardGroups
from trainstep.parallel.copies.messages import CopyEngines
from trainstep.parallel.copies.pieces import Pieces
from trainstep.parallel.liveness.standstill import Progress
from trainstep.parallel.ranks import Ranks, alone


def test_every_rank_is_in_one_group_and_has_one_replica_in_each():
    for ranks, size in ((8, 4), (6, 2), (6, 3), (4, 1), (4, 4)):
        for rank in range(ranks):
            inside = members(Level.IN_GROUPS, rank, ranks, size)
            across = members(Level.ACROSS_GROUPS, rank, ranks, size)
            assert (len(inside), len(across)) == (size, ranks // size)
            assert set(inside) & set(across) == {rank}
            assert all(members(Level.IN_GROUPS, other, ranks, size) == inside for other in inside)
            assert {members(Level.IN_GROUPS, other, ranks, size) for other in across} == {
                range(first, first + size) for first in range(0, ranks, size)
            }
    assert list(members(Level.IN_GROUPS, 5, 8, 4)) == [4, 5, 6, 7]
    assert list(members(Level.ACROSS_GROUPS, 5, 8, 4)) == [1, 5]
    assert list(members(Level.ALL, 5, 8, 4)) == list(members(Level.IN_GROUPS, 5, 8, None)) == list(range(8))


def test_the_level_is_in_a_messages_name():
    for level in Level:
        assert level_of(at_level("all_reduce", level)) is level
        assert level_of(f"{at_level('all_gather', level)} blocks.0") is level
    assert level_of("all_reduce a module called in groups") is Level.ALL


def numbers(count: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Multiples of 12: sums and means over four ranks are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randint(-8, 8, (count,), generator=generator) * 12).to(dtype)


def wrong_averages(ranks: Ranks, sizes: list[int], transport: CopyEngines | None) -> list[tuple[int, int, str]]:
    """Messages whose result is not the average of all ranks. Several are under way at a time, and waited for in another order."""
    wrong = []
    for shard_ranks in (1, 2, 4)[: ranks.world_size.bit_length()]:
        groups = ShardGroups(Collectives(ranks), shard_ranks)
        groups.shards.send_by(transport)
        place = groups.shards.ranks.rank
        pending = []
        for size in sizes:
            for dtype in (torch.float32, torch.bfloat16):
                values = [numbers(size * shard_ranks, rank, dtype).to(ranks.device) for rank in range(ranks.world_size)]
                mean = (sum(value.double() for value in values) / ranks.world_size).to(dtype)
                whole, shard, of_pieces = (
                    values[ranks.rank].clone(),
                    values[0].new_empty(size),
                    values[0].new_empty(size),
                )
                own = slice(place * size, (place + 1) * size)
                pending += [
                    (groups.all_reduce(whole, label="whole"), whole, mean, "all_reduce"),
                    (groups.reduce_scatter(shard, values[ranks.rank], label="shard"), shard, mean[own], "shard"),
                ]
                pieces = Pieces.of([values[ranks.rank]])
                if groups.takes_pieces(pieces):
                    message = groups.reduce_scatter_pieces(of_pieces, pieces, label="pieces")
                    pending.append((message, of_pieces, mean[own], "pieces"))
        for message, result, exact, name in [*pending[::2], *pending[1::2]]:
            message.wait()
            if not torch.equal(result, exact):
                wrong.append((shard_ranks, result.numel(), name))
    return wrong


@pytest.mark.parametrize("transport", [None, SMALL_COPIES], ids=["library", "copies"])
def test_averages_are_those_of_all_ranks(transport: CopyEngines | None):
    assert run_ranks(4, wrong_averages, [1, 8, 130, 700], transport) == [[]] * 4


def wrong_averages_of_a_group(ranks: Ranks) -> list[tuple[int, int, str]]:
    """The same among ranks whose process group is not torch's default group."""
    return wrong_averages(replace(ranks, group=dist.new_group(list(range(ranks.world_size)))), [8], None)


def test_ranks_of_any_process_group_may_be_grouped():
    assert run_ranks(4, wrong_averages_of_a_group) == [[]] * 4


def order_of_messages(ranks: Ranks) -> tuple[list[str], int, dict[str, int]]:
    """The calls of two buckets, as the watch hears of them; those that only groups count; and those counted by name."""
    progress = Progress()
    ranks = replace(ranks, watch=SimpleNamespace(progress=progress))  # type: ignore[arg-type]
    everyone = Collectives(ranks)
    groups = ShardGroups(everyone, 2)
    sent = [groups.all_reduce(torch.ones(4), label=f"bucket {number}") for number in range(3)]
    for message in sent:
        message.wait()
    return [call for _, _, call in progress.recent], progress.in_groups, dict(everyone.traffic.messages)


def test_a_stage_begins_where_the_next_message_has_begun():
    for calls, in_groups, counted in run_ranks(4, order_of_messages):
        assert calls == [
            "reduce_scatter in groups bucket 0",
            "reduce_scatter in groups bucket 1",
            "all_reduce across groups bucket 0",
            "reduce_scatter in groups bucket 2",
            "all_gather in groups bucket 0",
            "all_reduce across groups bucket 1",
            "all_gather in groups bucket 1",
            "all_reduce across groups bucket 2",
            "all_gather in groups bucket 2",
        ]
        assert in_groups == 9
        assert counted == {
            "reduce_scatter in groups": 3,
            "all_reduce across groups": 3,
            "all_gather in groups": 3,
        }


class FakeStream:
    """Stands for the stream of later stages; notes what is done with it beside the names of calls."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._calls.append("enter")

    def __exit__(self, *_: object) -> None:
        self._calls.append("leave")


def calls_on_a_stream(ranks: Ranks) -> tuple[list[str], list[float]]:
    progress, calls = Progress(), []
    ranks = replace(ranks, watch=SimpleNamespace(progress=progress))  # type: ignore[arg-type]
    groups = ShardGroups(Collectives(ranks), 2)
    groups._stream = FakeStream(calls)  # type: ignore[assignment]
    whole = torch.full((8,), float(ranks.rank))
    with (
        patch.object(progress, "called", lambda call, in_group: calls.append(call)),
        patch.object(torch.cuda, "stream", lambda stream: stream),
    ):
        message = groups.all_reduce(whole, label="bucket 0")
        calls.append("returned")
        message.wait()
    return calls, whole.tolist()


def test_a_gpu_is_given_all_stages_at_once_on_a_stream_of_their_own():
    for calls, average in run_ranks(4, calls_on_a_stream):
        assert calls == [
            "reduce_scatter in groups bucket 0",
            "enter",
            "all_reduce across groups bucket 0",
            "all_gather in groups bucket 0",
            "leave",
            "returned",
        ]
        assert average == [1.5] * 8


def average_of_groups_of_one(ranks: Ranks) -> tuple[str, list[float]]:
    """What waits for a message whose groups have one rank each."""
    groups = ShardGroups(Collectives(ranks), 1)
    whole = torch.full((8,), float(ranks.rank), device=ranks.device)
    if ranks.device.type == "cuda":
        torch.cuda._sleep(50_000_000)
        whole.add_(1)  # behind work that is still going on
    message = groups.all_reduce(whole, label="bucket 0")
    waits = type(message).__name__
    message.wait()
    return waits, whole.tolist()


def test_groups_of_one_rank_send_one_message_and_wait_for_it():
    assert run_ranks(4, average_of_groups_of_one) == [("Work", [1.5] * 8)] * 4


@pytest.mark.multigpu
def test_groups_of_one_gpu_wait_for_their_message():
    assert [average for _, average in run_ranks(2, average_of_groups_of_one, backend="nccl")] == [[1.5] * 8] * 2


@pytest.mark.multigpu
@pytest.mark.parametrize("transport", [None, SMALL_COPIES], ids=["library", "copies"])
def test_averages_on_gpus_are_those_of_all_ranks(transport: CopyEngines | None):
    assert run_ranks(2, wrong_averages, [1, 8, 130, 700], transport, backend="nccl") == [[]] * 2


def refusals(ranks: Ranks) -> list[str]:
    """What every rank says of groups that cannot be."""
    sentences = []

    def refused(wrap: Any, **options: Any) -> None:
        with pytest.raises(ValueError) as caught:
            wrap(nn.Linear(8, 8), ranks, **options)
        sentences.append(str(caught.value))

    refused(FSDP, shard_ranks=3)
    refused(ShardedGradients, shard_ranks=0)
    refused(BucketedDDP, shard_ranks=True)
    refused(BucketedDDP, shard_ranks=2, in_place=True)
    refused(FSDP, shard_ranks=2 if ranks.rank else 4)
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    with patch.object(socket, "gethostname", lambda: hosts[ranks.rank]):
        refused(FSDP, shard_ranks=4, transport=SMALL_COPIES)
        FSDP(nn.Linear(8, 8), ranks, shard_ranks=2, transport=SMALL_COPIES)  # each group is on one machine
    return sentences


def test_groups_that_cannot_be_are_refused_on_every_rank():
    for sentences in run_ranks(4, refusals):
        division, zero, boolean, in_place, different, machines = sentences
        assert division == "shard_ranks: 4 ranks cannot be divided into groups of 3; take a divisor of 4"
        assert zero == "shard_ranks: must be a whole number of at least 1, not 0"
        assert boolean == "shard_ranks: must be a whole number of at least 1, not True"
        assert in_place == "in_place: shard_ranks averages slices of a copy; leave one of the two out"
        assert "shard_ranks" in different
        assert "rank 0" in different
        assert machines.startswith("transport: copies go between ranks of one machine, and these are on 2 (a, b")
    with pytest.raises(ValueError, match="shard_ranks: 1 rank cannot be divided into groups of 2"):
        FSDP(nn.Linear(8, 8), alone(), shard_ranks=2)


def shards_of_another_group(ranks: Ranks) -> tuple[bool, str]:
    """A rank's optimizer state is loaded in the other group: by the rank at its place, and by another."""

    def trained() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = ShardedOptimizer.flat(model, torch.optim.AdamW, ranks=ranks, shard_ranks=2)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.gradient_sync.finish_gradient_synchronization()
        optimizer.step()
        return optimizer

    state = trained().state_dict()
    other = {**state, "shard": {**state["shard"], "rank": 1 - ranks.rank % 2}}
    loaded = trained()
    loaded.load_state_dict(state)
    moments = [value["exp_avg"] for value in loaded.state.values()]
    same = all(torch.equal(a, b["exp_avg"]) for a, b in zip(moments, state["state"].values(), strict=True))
    with pytest.raises(ValueError) as caught:
        loaded.load_state_dict(other)
    return same and state["shard"]["rank"] == ranks.rank % 2, str(caught.value)


def test_a_shard_loads_at_the_same_place_of_any_group():
    for rank, (same, sentence) in enumerate(run_ranks(4, shards_of_another_group)):
        assert same
        assert f"is the shard of rank {1 - rank % 2} of 2, and this is rank {rank % 2} of 2" in sentence

"""Collectives, and the messages and bytes that they count."""

import torch

from ranks import run_ranks
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.ranks import Ranks, alone


def everything(ranks: Ranks) -> dict[str, object]:
    collectives = Collectives(ranks)
    values = torch.arange(4.0) + ranks.rank
    shard, gathered = torch.empty(2), torch.empty(8)
    total, mean, maximum = values.clone(), values.clone(), values.clone()
    collectives.all_reduce(total).wait()
    collectives.all_reduce(mean, reduction="average").wait()
    collectives.all_reduce(maximum, reduction="maximum").wait()
    collectives.reduce_scatter(shard, values, reduction="average", label="a name").wait()
    collectives.all_gather(gathered, values).wait()
    collectives.broadcast(values, source=1).wait()
    collectives.barrier()
    results = {"total": total, "mean": mean, "maximum": maximum, "shard": shard, "gathered": gathered, "sent": values}
    return {
        **{name: tensor.tolist() for name, tensor in results.items()},
        "messages": dict(collectives.traffic.messages),
        "bytes": dict(collectives.traffic.payload_bytes),
    }


def test_each_collective_has_its_result_and_is_counted():
    first, second = run_ranks(2, everything)
    assert first["total"] == second["total"] == [1, 3, 5, 7]
    assert first["mean"] == second["mean"] == [0.5, 1.5, 2.5, 3.5]
    assert first["maximum"] == second["maximum"] == [1, 2, 3, 4]
    assert [first["shard"], second["shard"]] == [[0.5, 1.5], [2.5, 3.5]]
    assert first["gathered"] == second["gathered"] == [0, 1, 2, 3, 1, 2, 3, 4]
    assert first["sent"] == second["sent"] == [1, 2, 3, 4]
    assert first["messages"] == {"all_reduce": 3, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1}
    assert first["bytes"] == {"all_reduce": 48, "reduce_scatter": 16, "all_gather": 32, "broadcast": 16}


def in_place(ranks: Ranks) -> tuple[list[float], list[float]]:
    collectives = Collectives(ranks)
    flat = torch.arange(6.0) * (ranks.rank + 1)
    part = flat[2 * ranks.rank : 2 * ranks.rank + 2]
    collectives.reduce_scatter(part, flat).wait()
    reduced = part.tolist()
    collectives.all_gather(flat, part).wait()
    return reduced, flat.tolist()


def test_a_shard_may_be_a_view_of_the_whole():
    results = run_ranks(3, in_place)
    assert [reduced for reduced, _ in results] == [[0, 6], [12, 18], [24, 30]]
    assert all(flat == [0, 6, 12, 18, 24, 30] for _, flat in results)


def test_a_process_on_its_own_sends_nothing():
    collectives = Collectives(alone())
    values, copy = torch.arange(4.0), torch.zeros(4)
    collectives.all_reduce(values, reduction="average").wait()
    collectives.all_gather(copy, values).wait()
    collectives.broadcast(values).wait()
    collectives.barrier()
    assert values.tolist() == copy.tolist() == [0, 1, 2, 3]
    assert not collectives.traffic.messages

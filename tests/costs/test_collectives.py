"""Bytes of collectives agree with rings counted round by round, and bus factors with those that nccl-tests prints."""

from fractions import Fraction

import pytest

from trainstep.costs.collectives import bus_factor, ring_bytes


def sent_in_a_ring(operation: str, chunks: int, ranks: int) -> list[int]:
    """Bytes that each rank sends where a chunk is one byte: in each round, a rank passes a part to the next one."""
    if operation == "broadcast":  # pipelined: the last rank sends nothing
        return [chunks] * (ranks - 1) + [0]
    rounds = (ranks - 1) * (2 if operation == "all_reduce" else 1)
    return [sum(chunks // ranks for _ in range(rounds)) for _ in range(ranks)]


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ring_bytes_are_the_most_that_a_rank_sends(operation: str, ranks: int):
    assert ring_bytes(operation, 48, ranks) == max(sent_in_a_ring(operation, 48, ranks))


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", Fraction(7, 4)),
        ("all_gather", Fraction(7, 8)),
        ("reduce_scatter", Fraction(7, 8)),
        ("broadcast", 1),
    ],
)
def test_factors_of_nccl_tests_for_eight_ranks(operation: str, factor: Fraction):
    assert bus_factor(operation, 8) == factor


def test_parts_of_a_byte_are_rounded_up():
    assert ring_bytes("all_reduce", 10, 3) == 14  # 13 1/3


def test_one_rank_sends_nothing():
    assert ring_bytes("all_reduce", 100, 1) == ring_bytes("broadcast", 100, 1) == 0

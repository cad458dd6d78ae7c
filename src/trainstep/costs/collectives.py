"""Bytes of collectives by the ring algorithm, and the bandwidths that nccl-tests prints.

S: bytes of the whole tensor (what is reduced, gathered or sent), n: ranks, t: seconds. Algorithm bandwidth is S / t. Bus bandwidth
is that times a factor, so that it can be held against one link's speed in one direction, whatever the operation and n
(github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). In a ring the factor is what the busiest rank sends over S. A switch that
reduces by itself sends less, and can come out above its link's speed.
"""

from fractions import Fraction


def bus_factor(operation: str, ranks: int) -> Fraction:
    """Bus bandwidth over algorithm bandwidth: 2 (n - 1) / n of an all-reduce; 0 of a rank on its own."""
    if ranks == 1:
        return Fraction(0)
    factors = {
        "all_reduce": Fraction(2 * (ranks - 1), ranks),  # a reduce-scatter, then an all-gather
        "all_gather": Fraction(ranks - 1, ranks),
        "reduce_scatter": Fraction(ranks - 1, ranks),
        "broadcast": Fraction(1),
    }
    return factors[operation]


def ring_bytes(operation: str, payload_bytes: int, ranks: int) -> int:
    """Bytes that the busiest rank sends for a tensor of `payload_bytes`, rounded up."""
    return -int(-payload_bytes * bus_factor(operation, ranks) // 1)

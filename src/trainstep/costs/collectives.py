"""Bytes of collectives by the ring algorithm, bus bandwidth, and the best size of a bucket of gradients.

S: bytes of the whole tensor (that is reduced, gathered or sent), n: ranks, t: seconds. Algorithm bandwidth is S / t. Bus bandwidth
is that times a factor, so that it can be compared with the speed of one link in one direction, whatever the operation and n
(github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). In a ring, the factor is the bytes that the busiest rank sends, over S. A switch
that reduces by itself sends less, so its bus bandwidth can exceed its link's speed.

The best bucket: P bytes of gradients are sent in buckets of s bytes, and a message of s bytes takes a + s / w (a: latency,
w: bandwidth). We assume that gradients are computed as fast as they are sent. Then backward does not hide the latency of each
message and the transfer of the last bucket:

    overhead(s) = a P / s + s / w        least at s = sqrt(P a w)
"""

import math
from fractions import Fraction


def bus_factor(operation: str, ranks: int) -> Fraction:
    """Bus bandwidth over algorithm bandwidth: 2 (n - 1) / n for an all-reduce; 0 for a single rank.

    `operation`: also with a level (rank_groups.py); `ranks`: those among which it goes.
    """
    if ranks == 1:
        return Fraction(0)
    factors = {
        "all_reduce": Fraction(2 * (ranks - 1), ranks),  # a reduce-scatter, then an all-gather
        "all_gather": Fraction(ranks - 1, ranks),
        "reduce_scatter": Fraction(ranks - 1, ranks),
        "broadcast": Fraction(1),
    }
    return factors[operation.partition(" ")[0]]


def ring_bytes(operation: str, payload_bytes: int, ranks: int) -> int:
    """Bytes that the busiest rank sends for a tensor of `payload_bytes`, rounded up."""
    return -int(-payload_bytes * bus_factor(operation, ranks) // 1)


def bucket_overhead_s(gradient_bytes: float, bucket_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Seconds that buckets of this size add to a step without messages. A bucket has at most all gradients."""
    size = min(bucket_bytes, gradient_bytes)
    return latency_s * gradient_bytes / size + size / bytes_per_s


def best_bucket_bytes(gradient_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """The bucket size with the least overhead. ValueError without a latency: the smallest size would be the best then."""
    if latency_s <= 0:
        raise ValueError(f"latency_s: must be positive for a best size to exist, not {latency_s}")
    return min(math.sqrt(gradient_bytes * latency_s * bytes_per_s), gradient_bytes)

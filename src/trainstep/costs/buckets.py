"""Which tensors share a message, from their sizes: gradients in buckets as backward completes them, parameters by owner."""

import math
from collections.abc import Hashable, Sequence

_SMALLEST_BUCKET_BYTES = 25 * 2**20
_SENT_MEANWHILE_BYTES = 128 * 2**20
"""What a link between GPUs of a machine (0.3 to 0.5 TB/s) carries while the host makes a message ready and starts it: 0.3 to 0.4 ms
in a step, however large it is, hooks and copies included (docs/facts.md)."""
_LEAST_SHARE, _MOST_SHARE = 1 / 16, 1 / 4
"""Of all, in a message of the usual size."""


def bytes_of_mib(name: str, mib: float | None) -> float | None:
    """Of a message's size that somebody asked for, under this name; None where nobody did. math.inf: all in one message.

    ValueError unless it is positive."""
    if mib is not None and not mib > 0:
        raise ValueError(f"{name}: must be positive, not {mib}")
    return None if mib is None else mib * 2**20


def usual_message_bytes(total_bytes: int) -> float:
    """What travels together where no size is asked for: so much that all messages cost the host what the last leaves exposed.

    As bucket_size.py has it, with the host's time for the latency: s = sqrt(P a w), a w being 128 MiB; but a sixteenth of all at
    least (from 32 GiB on) and a quarter at most (up to 2 GiB).
    """
    best = math.sqrt(total_bytes * _SENT_MEANWHILE_BYTES)
    return min(max(best, _LEAST_SHARE * total_bytes), _MOST_SHARE * total_bytes)


def usual_bucket_bytes(total_bytes: int) -> float:
    """A bucket's size where none is asked for: the usual one, but at least 25 MiB."""
    return max(_SMALLEST_BUCKET_BYTES, usual_message_bytes(total_bytes))


def plan_buckets(
    sizes_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    *,
    bucket_bytes: float,
    first_bucket_bytes: float | None = None,
    last_bucket_bytes: float | None = None,
) -> list[list[int]]:
    """Indices of the tensors that share a bucket, in the order in which backward completes them: the reverse of theirs.

    A bucket is closed before it would hold more than `bucket_bytes`; one larger tensor has a bucket of its own. The first to be
    sent may be smaller, so that sending begins early, and the last, so that little is left when backward is over. `kinds`: the
    tensors' dtypes; a bucket has one.
    """
    order = list(range(len(sizes_bytes) - 1, -1, -1))
    last: list[int] = []
    if last_bucket_bytes is not None:
        last = _take(order[::-1], sizes_bytes, last_bucket_bytes)[::-1]
        order = order[: len(order) - len(last)]
    first = _take(order, sizes_bytes, first_bucket_bytes) if first_bucket_bytes is not None else []
    order = order[len(first) :]
    buckets = [first]
    while order:
        buckets.append(_take(order, sizes_bytes, bucket_bytes))
        order = order[len(buckets[-1]) :]
    buckets.append(last)
    return [part for bucket in buckets for part in _by_kind(bucket, kinds)]


def neighbours(
    sizes_bytes: Sequence[int], kinds: Sequence[Hashable], most_bytes: float | None = None
) -> list[list[int]]:
    """Indices of neighbours of one kind that together stay within `most_bytes`, in order; a larger one is alone.

    None: the usual size.
    """
    if most_bytes is None:
        most_bytes = usual_message_bytes(sum(sizes_bytes))
    groups: list[list[int]] = []
    held = 0
    for index, size in enumerate(sizes_bytes):
        if groups and kinds[index] == kinds[groups[-1][-1]] and held + size <= most_bytes:
            groups[-1].append(index)
            held += size
        else:
            groups.append([index])
            held = size
    return groups


def assign_owners(sizes_bytes: Sequence[int], owned_bytes: Sequence[int]) -> list[int]:
    """The rank for each size, on top of what ranks own: the largest first, each to the rank with least.

    The rank with most ends within the largest size of the rank with least, if they began so. Ties go by order.
    """
    totals = list(owned_bytes)
    owners = [0] * len(sizes_bytes)
    for index in sorted(range(len(sizes_bytes)), key=lambda index: -sizes_bytes[index]):
        owners[index] = min(range(len(totals)), key=totals.__getitem__)
        totals[owners[index]] += sizes_bytes[index]
    return owners


def _take(order: Sequence[int], sizes_bytes: Sequence[int], limit_bytes: float) -> list[int]:
    """The first of these that together stay within the limit; at least one."""
    taken: list[int] = []
    held = 0
    for index in order:
        held += sizes_bytes[index]
        if taken and held > limit_bytes:
            break
        taken.append(index)
    return taken


def _by_kind(bucket: Sequence[int], kinds: Sequence[Hashable]) -> list[list[int]]:
    parts: dict[Hashable, list[int]] = {}
    for index in bucket:
        parts.setdefault(kinds[index], []).append(index)
    return list(parts.values())

"""Which tensors share a message, and where each tensor lies in a shared flat buffer, from the tensors' sizes.

    tensors      a        b    c            each starts at a multiple of ALIGNMENT elements
    flat        [aaaaaaaa bbbb ccccccc 0 0]
    shards      [ rank 0  | rank 1  | rank 2 ]   equal parts; the end is padded to make them equal

Buckets, flat shards and FSDP's units have this layout (parallel/flat_buffer.py), which determines what they send and store.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

ALIGNMENT = 8
"""Each tensor starts at a multiple of this many elements: 16 bytes of 16-bit elements, which vectorised loads and stores need.
It is the same for every dtype, so that a buffer in bf16 has the layout of a buffer in fp32."""
_SMALLEST_BUCKET_BYTES = 25 * 2**20
_SENT_MEANWHILE_BYTES = 128 * 2**20
"""Bytes that a link between GPUs of a machine (0.3 to 0.5 TB/s) carries while the host prepares and starts a message: 0.3 to 0.4 ms
in a step, whatever the message's size, including hooks and copies (docs/facts.md)."""
_LEAST_SHARE, _MOST_SHARE = 1 / 16, 1 / 4
"""Limits of a message of the default size, as shares of all bytes."""


def bytes_of_mib(name: str, mib: float | None) -> float | None:
    """The bytes of a message's size in MiB; None stays None. math.inf: everything in one message.

    ValueError, with the option's name, unless the size is positive.
    """
    if mib is not None and not mib > 0:
        raise ValueError(f"{name}: must be positive, not {mib}")
    return None if mib is None else mib * 2**20


def usual_message_bytes(total_bytes: int) -> float:
    """The default size of a message: at this size the host's time for all messages equals the exposed time of the last message.

    As in collectives.py, with the host's time as the latency: s = sqrt(P a w), where a w is 128 MiB; but at least a sixteenth of
    all bytes (from 32 GiB on) and at most a quarter (up to 2 GiB).
    """
    best = math.sqrt(total_bytes * _SENT_MEANWHILE_BYTES)
    return min(max(best, _LEAST_SHARE * total_bytes), _MOST_SHARE * total_bytes)


def usual_bucket_bytes(total_bytes: int) -> float:
    """The default size of a bucket: that of a message, but at least 25 MiB."""
    return max(_SMALLEST_BUCKET_BYTES, usual_message_bytes(total_bytes))


def plan_buckets(
    sizes_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    *,
    bucket_bytes: float,
    first_bucket_bytes: float | None = None,
    last_bucket_bytes: float | None = None,
) -> list[list[int]]:
    """Buckets of gradients, as indices of their tensors, in the order in which backward completes them: last tensor first.

    A bucket never exceeds `bucket_bytes`; only a single larger tensor has a larger bucket. The first bucket may be smaller, so that
    sending begins early, and the last, so that little is left at the end of backward. `kinds`: the tensors' dtypes; the tensors of
    a bucket have the same dtype.
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
    """Groups of neighbours of the same kind that stay within `most_bytes` (None: the default size), as indices in order.

    An item that is larger is a group of its own.
    """
    if most_bytes is None:
        most_bytes = usual_message_bytes(sum(sizes_bytes))
    groups: list[list[int]] = []
    group_bytes = 0
    for index, size in enumerate(sizes_bytes):
        if groups and kinds[index] == kinds[groups[-1][-1]] and group_bytes + size <= most_bytes:
            groups[-1].append(index)
            group_bytes += size
        else:
            groups.append([index])
            group_bytes = size
    return groups


def assign_owners(sizes_bytes: Sequence[int], owned_bytes: Sequence[int]) -> list[int]:
    """The owning rank of each size, given the bytes that each rank owns already.

    The largest size is assigned first, each to the rank with the fewest bytes; ties go by order. If the ranks' totals differed by
    at most the largest size before, they still do afterwards.
    """
    totals = list(owned_bytes)
    owners = [0] * len(sizes_bytes)
    for index in sorted(range(len(sizes_bytes)), key=lambda index: -sizes_bytes[index]):
        owners[index] = min(range(len(totals)), key=totals.__getitem__)
        totals[owners[index]] += sizes_bytes[index]
    return owners


def _take(order: Sequence[int], sizes_bytes: Sequence[int], limit_bytes: float) -> list[int]:
    """The first indices whose sizes together stay within the limit; at least one index."""
    taken: list[int] = []
    total_bytes = 0
    for index in order:
        total_bytes += sizes_bytes[index]
        if taken and total_bytes > limit_bytes:
            break
        taken.append(index)
    return taken


def _by_kind(bucket: Sequence[int], kinds: Sequence[Hashable]) -> list[list[int]]:
    parts: dict[Hashable, list[int]] = {}
    for index in bucket:
        parts.setdefault(kinds[index], []).append(index)
    return list(parts.values())


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """The start of each tensor in a flat tensor, in elements. `numel`: elements of the flat tensor, padding included."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    numel: int

    def shard(self, rank: int, world_size: int) -> tuple[int, int]:
        """First and end element of the rank's shard."""
        part = self.numel // world_size
        return rank * part, (rank + 1) * part

    def piece(self, index: int, rank: int, world_size: int) -> tuple[int, int]:
        """First and end element, counted within tensor `index`, of its part in the rank's shard; equal if there is none."""
        first, end = self.shard(rank, world_size)
        start, size = self.starts[index], self.sizes[index]
        return min(max(first - start, 0), size), min(max(end - start, 0), size)


def lay_out(numels: Sequence[int], *, parts: int = 1, extra: int = 0) -> FlatLayout:
    """A layout for tensors with these numbers of elements, with aligned starts, which divides into `parts` equal, aligned parts.

    `extra`: further elements after the tensors; they start at `numel - extra` only if `parts` is 1.
    """
    starts, end = [], 0
    for numel in numels:
        starts.append(end)
        end += _round_up(numel, ALIGNMENT)
    return FlatLayout(
        starts=tuple(starts),
        sizes=tuple(numels),
        numel=_round_up(end + extra, ALIGNMENT * parts) if parts > 1 else end + extra,
    )


def _round_up(numel: int, step: int) -> int:
    return -(-numel // step) * step

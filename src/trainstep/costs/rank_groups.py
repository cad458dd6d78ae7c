"""Ranks in groups: which ranks hold every shard once, which hold the same shard, and among whom a message goes.

    8 ranks, shard_ranks 4      0 1 2 3 | 4 5 6 7
    a group                     consecutive ranks, usually those of a node: together they hold everything once
    replicas                    0 and 4, 1 and 5, 2 and 6, 3 and 7: the same place in every group, the same shard

Messages in groups stay on the fast links of a node. Those across groups carry 1/shard_ranks of the bytes, each rank its own shard.
"""

from enum import StrEnum


class Level(StrEnum):
    """Among which ranks a message goes. The value follows the operation where messages are counted: `all_gather in groups`."""

    ALL = ""
    IN_GROUPS = "in groups"
    ACROSS_GROUPS = "across groups"


def check_shard_ranks(ranks: int, shard_ranks: object) -> None:
    """ValueError unless this many ranks divide into groups of `shard_ranks`."""
    if not isinstance(shard_ranks, int) or isinstance(shard_ranks, bool) or shard_ranks < 1:
        raise ValueError(f"shard_ranks: must be a whole number of at least 1, not {shard_ranks!r}")
    if ranks % shard_ranks:
        raise ValueError(
            f"shard_ranks: {ranks} rank{'s' * (ranks > 1)} cannot be divided into groups of {shard_ranks}; "
            f"take a divisor of {ranks}"
        )


def at_level(operation: str, level: Level) -> str:
    """The name under which messages of an operation are counted: `all_reduce`, `all_reduce across groups`."""
    return f"{operation} {level}" if level else operation


def level_of(name: str) -> Level:
    """The level in the name of an operation or of a message's span."""
    rest = name.partition(" ")[2]
    return next((level for level in Level if level and rest.startswith(level)), Level.ALL)


def members(level: Level, rank: int, ranks: int, shard_ranks: int | None) -> range:
    """The ranks among which this rank's messages of a level go, itself included."""
    if shard_ranks is None or level is Level.ALL:
        return range(ranks)
    if level is Level.ACROSS_GROUPS:
        return range(rank % shard_ranks, ranks, shard_ranks)
    first = rank // shard_ranks * shard_ranks
    return range(first, first + shard_ranks)

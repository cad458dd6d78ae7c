"""Runs a sweep: the cells that a store does not hold yet, with each record, or part of one, on disk as soon as it is complete.

A group that is killed after some of its records runs again as a whole, and its new records replace the old ones.

[Note: a kill at any moment]
Each part of a comparison in rounds is on disk before the next process begins: after a kill only the process that ran is
run again. A group's file of parts is removed when the group's records are stored. After a kill before that, the group is
pending and all its parts are stored: nothing is run, and the records are made from the parts again. After a kill right
after that, the unused file stays until the sweep next ends.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trainstep.config.grid import Cell, group_name
from trainstep.measure.harness.runner import with_facts
from trainstep.measure.machine.environment import environment
from trainstep.records.record import Environment, Record
from trainstep.records.store import Store

Executor = Callable[[Sequence[Sequence[Cell]]], Iterator[list[Record]]]

QUEUED = "queued"
"""Phase of a failure before the cell had a machine: the environment in its record is the driver's."""
_RESULTS = ("out_of_memory", "unsupported")
"""Failures that would happen again: `retry_failed` does not retry them."""
MUST_MATCH = ("gpu", "torch", "commit", "source")
"""Fields of the environment that must be equal in all records of a sweep."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a sweep is: cells done, also in earlier runs, of all cells, and the records that were just written.

    `whole`: no group is half done; interleaved cells give their records one by one.
    """

    done: int
    of: int
    records: tuple[Record, ...]
    whole: bool = True


def pending(groups: Sequence[Sequence[Cell]], store: Store, *, retry_failed: bool = False) -> list[list[Cell]]:
    """The groups that still have a cell to run. A compared group runs as a whole, because its variants are interleaved."""
    done = {key for key, record in store.latest().items() if is_done(record, retry_failed=retry_failed)}
    return [list(group) for group in groups if any(cell.key not in done for cell in group)]


def is_done(record: Record, *, retry_failed: bool) -> bool:
    """Whether the record's cell need not be measured again."""
    if record.failure is None or record.failure.kind in _RESULTS:
        return True
    return not retry_failed and record.failure.kind != "node_lost"


def run_sweep(
    groups: Sequence[Sequence[Cell]],
    store: Store,
    execute: Executor,
    *,
    here: Environment | None,
    allow_mixed: bool = False,
    retry_failed: bool = False,
    rerun: bool = False,
) -> Generator[Progress, None, None]:
    """Run the pending cells and yield the progress after each stored result.

    `here`: where cells will run; None if only their records tell: each record must then match the store's first.
    `rerun`: measure every cell, whatever the store holds.

    Raises ValueError, unless `allow_mixed`, if the store holds records of another GPU, torch or code, and, after a group
    is stored, if one of these changed during the sweep.
    """
    with store.locked():
        allow_mixed = allow_mixed or rerun
        if here is not None and not allow_mixed:
            check_same_place(store, here)
        first = next(_places(store.latest().values()), None)
        waiting = [list(group) for group in groups] if rerun else pending(groups, store, retry_failed=retry_failed)
        total = sum(map(len, groups))
        left = {cell.key for group in waiting for cell in group}
        yield Progress(done=total - len(left), of=total, records=())
        unchecked: list[Record] = []
        for records in execute(waiting):
            first = first or next(_places(records), None)
            if here is None and first is not None and not allow_mixed:
                check_like_first(store, first, records)
            for record in records:
                store.append(record)
            left -= {record.key for record in records}
            whole = not any(0 < sum(cell.key in left for cell in group) < len(group) for group in waiting)
            yield Progress(done=total - len(left), of=total, records=tuple(records), whole=whole)
            unchecked += records
            # A group is measured to its end before its records are refused.
            if here is not None and not allow_mixed and whole:
                check_unchanged(store, here, unchecked)
                unchecked = []


def check_same_place(store: Store, here: Environment) -> None:
    """Raise ValueError, naming the difference, if the store holds records of another machine or of other code."""
    for place in _places(store.latest().values()):
        if difference := here.difference(place, *MUST_MATCH):
            raise ValueError(
                f"{store.path}: holds records made with {difference} (here against there); "
                "continue with --allow-mixed, or give --out another file"
            )


def check_unchanged(store: Store, here: Environment, records: Sequence[Record]) -> None:
    """Raise ValueError if records that were just stored come from other code than the sweep began with."""
    for _, difference in _differences(records, here):
        raise ValueError(
            f"{store.path}: the code changed during the sweep: its last record was made with {difference} at the start; "
            "the record is stored; continue with --allow-mixed, or give --out another file"
        )


def check_like_first(store: Store, first: Environment, records: Sequence[Record]) -> None:
    """Raise ValueError if records come from another machine or code than the first; their executor keeps them."""
    for place, difference in _differences(records, first):
        raise ValueError(
            f"{store.path}: a cell was measured on {place.hostname} with {difference} in the store's records; its record "
            "is kept beside the store: add it with --allow-mixed, or give --out another file and ask for equal nodes"
        )


def _differences(records: Iterable[Record], known: Environment) -> Iterator[tuple[Environment, str]]:
    """The environments that do not match the known environment, each with the difference."""
    for place in _places(records):
        if difference := place.difference(known, *MUST_MATCH):
            yield place, difference


def _places(records: Iterable[Record]) -> Iterator[Environment]:
    """The environments of records, without those of cells that never had a machine."""
    return (record.environment for record in records if record.failure is None or record.failure.phase != QUEUED)


class RoundParts:
    """Keeps the parts of a store's groups on disk. [Note: a kill at any moment]

    The parts of `runs/ddp.jsonl` lie in `runs/ddp.rounds/`, one file for each group, so that a sweep of other groups
    leaves them alone.

    `retry_failed`: parts that failed do not count, as in a sweep. Hold the store's lock: two processes must not use the
    same parts.
    """

    def __init__(self, store: Store, *, retry_failed: bool = False) -> None:
        self._folder = store.path.with_suffix(".rounds")
        self._retry_failed = retry_failed

    def stored(self, group: Sequence[Cell], rounds: int, visible_devices: str | None) -> dict[tuple[str, int], Record]:
        """(key, round from 0) -> part, for the group's parts that were measured with this code on this machine.

        Parts of another number of rounds do not count: their processes took another number of steps. Raises ValueError
        if the file is corrupt.
        """
        parts = self._store(group).finished()
        if not parts:
            return {}
        here = environment(visible_devices=visible_devices)
        return {
            (part.key, part.fact("round")): with_facts(part, round=None, rounds=None)
            for part in parts
            if part.fact("rounds") == rounds
            and is_done(part, retry_failed=self._retry_failed)
            and not here.difference(part.environment, *MUST_MATCH)
        }

    def add(self, group: Sequence[Cell], rounds: int, index: int, part: Record) -> None:
        """Write the part of round `index` (from 0) to disk."""
        self._store(group).append(with_facts(part, round=index, rounds=rounds))

    def drop(self, groups: Iterable[Sequence[Cell]]) -> None:
        """Remove the parts of groups whose records are stored."""
        for group in groups:
            self._store(group).remove()
        with suppress(OSError):  # the folder is missing, or holds parts of other groups
            self._folder.rmdir()

    def _store(self, group: Sequence[Cell]) -> Store:
        return Store(self._folder / f"{group_name(group)}.jsonl")

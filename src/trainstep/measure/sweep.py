"""A sweep: the cells of a grid that a store does not hold yet, run by an executor, each record on disk as soon as it comes.

A group that is killed after some of its records runs again as a whole, and new records take the place of the old ones.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from trainstep.config.cell import Cell
from trainstep.records.record import Environment, Record
from trainstep.records.store import Store

Executor = Callable[[Sequence[Sequence[Cell]]], Iterator[list[Record]]]

QUEUED = "queued"
"""Phase of a failure that came before the cell had a machine: its record's environment is merely the driver's."""
_RESULTS = ("out_of_memory", "unsupported")
"""Failures that come again: `retry_failed` leaves them."""
MUST_MATCH = ("gpu", "torch", "commit", "source")
"""Fields of the environment in which records of one sweep may not differ."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Cells done (those found done included) of all, and the records just written: a group's, or one of those that took turns.

    `whole`: no group is half done.
    """

    done: int
    of: int
    records: tuple[Record, ...]
    whole: bool = True


def pending(groups: Sequence[Sequence[Cell]], store: Store, *, retry_failed: bool = False) -> list[list[Cell]]:
    """The groups that still have a cell to run. A compared group runs whole, since its variants take turns."""
    done = {key for key, record in store.latest().items() if is_done(record, retry_failed=retry_failed)}
    return [list(group) for group in groups if any(cell.key not in done for cell in group)]


def is_done(record: Record, *, retry_failed: bool) -> bool:
    """Whether what it measured need not be measured again."""
    return record.failure is None or record.failure.kind in _RESULTS or not retry_failed


def run_sweep(
    groups: Sequence[Sequence[Cell]],
    store: Store,
    execute: Executor,
    *,
    here: Environment | None,
    allow_mixed: bool = False,
    retry_failed: bool = False,
    anew: bool = False,
) -> Generator[Progress, None, None]:
    """Run what is pending. ValueError if the store holds records of another GPU, torch or code, unless `allow_mixed`;
    also, once a group is stored, if these changed during the sweep.

    `anew`: measure every cell, whatever the store holds.

    `here`: where cells will run; None if that shows only in their records: then each must be like the store's first.
    """
    with store.locked():
        allow_mixed = allow_mixed or anew
        if here is not None and not allow_mixed:
            check_same_place(store, here)
        first = next(_places(store.latest().values()), None)
        waiting = [list(group) for group in groups] if anew else pending(groups, store, retry_failed=retry_failed)
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
            whole = not _a_group_is_half_done(waiting, left)
            yield Progress(done=total - len(left), of=total, records=tuple(records), whole=whole)
            unchecked += records
            if here is not None and not allow_mixed and whole:
                check_unchanged(store, here, unchecked)
                unchecked = []


def _a_group_is_half_done(groups: Sequence[Sequence[Cell]], left: Set[str]) -> bool:
    """Whether some of a group's cells are done and some are not: it is brought to its end before anything is refused."""
    return any(0 < sum(cell.key in left for cell in group) < len(group) for group in groups)


def check_same_place(store: Store, here: Environment) -> None:
    """Refuse to add to records made elsewhere or by other code, naming the difference."""
    for place in _places(store.latest().values()):
        if difference := here.difference(place, *MUST_MATCH):
            raise ValueError(
                f"{store.path}: holds records made with {difference} (here against there); "
                "go on with --allow-mixed (sweep and tune have it), or give --out another file"
            )


def check_unchanged(store: Store, here: Environment, records: Sequence[Record]) -> None:
    """Refuse to go on after records, stored already, of other code than the sweep began with."""
    for _, difference in _unlike(records, here):
        raise ValueError(
            f"{store.path}: the code changed during the sweep: its last record was made with {difference} at the start; "
            "it is kept: go on with --allow-mixed, or give --out another file"
        )


def check_like_first(store: Store, first: Environment, records: Sequence[Record]) -> None:
    """Refuse records from a machine or code unlike the first's. They stay with the executor that brought them."""
    for place, difference in _unlike(records, first):
        raise ValueError(
            f"{store.path}: a cell was measured on {place.hostname} with {difference} of the records there; it is kept: "
            "take it with --allow-mixed, or give --out another file and ask for nodes alike"
        )


def _unlike(records: Iterable[Record], known: Environment) -> Iterator[tuple[Environment, str]]:
    """Where records were made, if not as the known ones were, with what differs."""
    for place in _places(records):
        if difference := place.difference(known, *MUST_MATCH):
            yield place, difference


def _places(records: Iterable[Record]) -> Iterator[Environment]:
    """Where records were made; those of cells that never had a machine left out."""
    return (record.environment for record in records if record.failure is None or record.failure.phase != QUEUED)

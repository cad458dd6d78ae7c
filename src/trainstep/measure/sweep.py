"""A sweep: the cells of a grid that a store does not hold yet, run by an executor, each record on disk before the next begins."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trainstep.config.cell import Cell
from trainstep.records.record import Environment, Record
from trainstep.records.store import Store

Executor = Callable[[Sequence[Sequence[Cell]]], Iterator[list[Record]]]

_MUST_MATCH = ("gpu", "torch", "commit", "source")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """After a group: cells done (those found done included) of all, and the records just written."""

    done: int
    of: int
    records: tuple[Record, ...]


def pending(groups: Sequence[Sequence[Cell]], store: Store, *, retry_failed: bool = False) -> list[list[Cell]]:
    """The groups that still have a cell to run. A compared group runs whole, since its variants take turns."""
    done = {
        key
        for key, record in store.latest().items()
        if record.failure is None or (record.failure.kind == "out_of_memory" or not retry_failed)
    }
    return [list(group) for group in groups if any(cell.key not in done for cell in group)]


def run_sweep(
    groups: Sequence[Sequence[Cell]],
    store: Store,
    execute: Executor,
    *,
    here: Environment,
    allow_mixed: bool = False,
    retry_failed: bool = False,
) -> Iterator[Progress]:
    """Run what is pending. ValueError if the store holds records of another GPU, torch or code, unless `allow_mixed`."""
    with store.locked():
        if not allow_mixed:
            check_same_place(store, here)
        waiting = pending(groups, store, retry_failed=retry_failed)
        total = sum(map(len, groups))
        done = total - sum(map(len, waiting))
        yield Progress(done=done, of=total, records=())
        for records in execute(waiting):
            for record in records:
                store.append(record)
            done += len(records)
            yield Progress(done=done, of=total, records=tuple(records))


def check_same_place(store: Store, here: Environment) -> None:
    """Refuse to add to records made elsewhere or by other code, naming the difference."""
    for record in store.latest().values():
        difference = here.difference(record.environment, *_MUST_MATCH)
        if difference is not None:
            raise ValueError(
                f"{store.path}: holds records made with {difference} (here against there); "
                "resume with --allow-mixed, or give --out another file"
            )

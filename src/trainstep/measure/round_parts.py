"""What variants gave in rounds of whole processes, on disk until their group's records are: a killed sweep goes on behind it.

`runs/ddp.jsonl` keeps them in `runs/ddp.rounds/`, a file a group, so that a sweep of other groups leaves them alone.

[Note: a kill at any moment]
A part is on disk before the next process begins; killed in between, only the process that ran is run again. A group's file is
removed when its records are stored. Killed before that, the group is pending and its parts are all there: nothing is run, its
records are made of them again. Killed right after storing, the file stays, needed by nobody, until the sweep next ends.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from trainstep.config.cell import Cell, group_name
from trainstep.measure.environment import environment
from trainstep.measure.runner import with_facts
from trainstep.measure.sweep import MUST_MATCH, is_done
from trainstep.records.record import Record
from trainstep.records.store import Store


class RoundParts:
    """The parts of one store's groups. A part: the record of one variant's process in one round.

    `retry_failed`: parts that failed do not count, as in a sweep. Not for two processes at once: hold the store's lock.
    """

    def __init__(self, store: Store, *, retry_failed: bool = False) -> None:
        self._folder = store.path.with_suffix(".rounds")
        self._retry_failed = retry_failed

    def found(self, group: Sequence[Cell], rounds: int, visible_devices: str | None) -> dict[tuple[str, int], Record]:
        """(key, round from 0) -> the group's parts of this code and machine. The group and the number of rounds say how many
        steps a round has. ValueError if the file is corrupt.
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
        """Have the part of round `index` (from 0) on disk before returning."""
        self._store(group).append(with_facts(part, round=index, rounds=rounds))

    def drop(self, groups: Iterable[Sequence[Cell]]) -> None:
        """Remove the parts of groups whose records are stored."""
        for group in groups:
            self._store(group).remove()
        with suppress(OSError):  # it is not there, or other groups' parts are
            self._folder.rmdir()

    def _store(self, group: Sequence[Cell]) -> Store:
        return Store(self._folder / f"{group_name(group)}.jsonl")

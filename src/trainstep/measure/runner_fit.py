"""The largest batch or context that fits: trials in fresh processes, doubling until one runs out of memory, then halving the gap.

    for record in largest_fit(cell, "batch_size", run): ...     # every trial's record, as soon as it is there

Found by trial alone: no formula knows the allocator's fragmentation or a library's workspaces. A trial that fails otherwise
(a time-out, a crash) ends the search, since it says nothing of memory. A search also ends at its field's bound in LARGEST_TRIED,
or at its own start where that is larger: a small model on a large machine would grow for hours.
"""

from collections.abc import Callable, Iterator

from trainstep.config.cell import Cell
from trainstep.config.memory import LARGEST_TRIED, MemoryConfig
from trainstep.config.parsing import from_plain, to_plain
from trainstep.records.record import Record

_RESOLUTION = 64
"""The gap left is at most this part of the value: exact below twice that."""


def largest_fit(cell: Cell, field: str, run: Callable[[Cell], Record]) -> Iterator[Record]:
    """Records of all trials, from the cell's own value on to the bound."""
    value = int(cell.config[field])
    most = max(LARGEST_TRIED[field], value)
    fits, fails = 0, most + 1
    while fails - fits > max(1, fits // _RESOLUTION):
        record = run(at(cell, field, value))
        yield record
        if record.failure is not None and record.failure.kind != "out_of_memory":
            return
        if record.failure is None:
            fits = value
        else:
            fails = value
        if fails > most:
            value = min(2 * fits, most)
        elif not fits:
            value = fails // 2
        else:
            value = (fits + fails) // 2
        if value < 1:
            return


def at(cell: Cell, field: str, value: int) -> Cell:
    """The cell with another value there, checked like any."""
    config = to_plain(from_plain(MemoryConfig, {**cell.config, field: value}))
    return Cell(workload=cell.workload, config=config, point={**cell.point, field: value})

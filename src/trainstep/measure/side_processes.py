"""Cells side by side, each in a process that is kept for the next: for what is not timed, as compiling.

[Note: the threads stay] A cell's process ends with the thread that started it (cell.py), so that the threads, too, are kept.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from trainstep.config.cell import Cell
from trainstep.measure.connection import CellConnection, tell_nobody
from trainstep.measure.runner import CellRun, Limits, run_alone
from trainstep.records.record import Record


class SideProcesses:
    """`count` processes, started when first needed; a failure costs its own process, not the others' cells."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(max_workers=count, thread_name_prefix="side-process")
        self._own = threading.local()

    def run(self, cells: Sequence[Cell], limits: Limits, *, deadline_s: float) -> Iterator[tuple[int, Record | None]]:
        """(position, record) as cells finish; None for one not begun at `deadline_s` of time.monotonic."""
        futures = {
            self._threads.submit(self._run_one, cell, limits, deadline_s): position
            for position, cell in enumerate(cells)
        }
        for future in as_completed(futures):
            yield futures[future], future.result()

    def close(self) -> None:
        """Let the threads go, and their processes with them, once they are done."""
        self._threads.shutdown(wait=False)

    def _run_one(self, cell: Cell, limits: Limits, deadline_s: float) -> Record | None:
        if time.monotonic() > deadline_s:
            return None
        connection: CellConnection | None = getattr(self._own, "connection", None)
        if connection is None or not connection.alive:
            connection = CellConnection(tell_nobody)
        record, again = run_alone(CellRun(cell, limits, connection))
        if not again:
            connection.close()
        self._own.connection = connection if again else None
        return record

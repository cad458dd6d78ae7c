"""Processes of cells that are done, kept for the next cell like theirs: starting one takes seconds."""

from trainstep.config.cell import Cell
from trainstep.measure.connection import Connection, Tell
from trainstep.measure.rank_connection import connect, ranks_of


class IdleProcesses:
    """Processes, or groups of them, that said they can measure another cell of their workload, the longest idle first."""

    def __init__(self, *, forks: bool = True) -> None:
        """`forks`: fresh processes may be forked."""
        self._forks = forks
        self._idle: list[tuple[object, Connection]] = []

    def take(self, cell: Cell, tell: Tell) -> Connection:
        """One for a cell like this, or a fresh one; those of other workloads or numbers of ranks, and the dead, leave."""
        while self._idle:
            known, connection = self._idle.pop(0)
            if known == _kind(cell) and connection.alive:
                return connection
            connection.close()
        return connect(cell, tell, forks=self._forks)

    def give(self, cell: Cell, connection: Connection) -> None:
        """Keep one that its cell is done with."""
        self._idle.append((_kind(cell), connection))

    def close(self) -> None:
        """Let them all leave."""
        while self._idle:
            self._idle.pop()[1].close()

    def kill(self) -> None:
        """End them all, now."""
        while self._idle:
            self._idle.pop()[1].kill()


def _kind(cell: Cell) -> object:
    """What cells must have in common to share processes: those that met over one backend stay with it."""
    return cell.workload, ranks_of(cell), cell.config.get("backend"), cell.config.get("device")

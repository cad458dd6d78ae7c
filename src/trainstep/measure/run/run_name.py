"""Names a run, so that a second run into the same file of records stays a run of its own.

    run_name(Path("a.jsonl"), launch)    # "a", then "a-2", "a-3" ...

Every rank names the run by itself and before the script begins, since there is no process group yet and may never be one. All of
them read the same files and so agree, however many ranks the earlier runs had. Only a rank that is much faster than the others may
have written records of this run by then: its `launch` shows that they are no earlier run.
"""

import itertools
from pathlib import Path

from trainstep.measure.run.show import files_of, rank_path
from trainstep.records.record import Record
from trainstep.records.store import Store


def run_name(path: Path, rank: int = 0, launch: str = "") -> str:
    """The first of `a`, `a-2`, `a-3` ... that no earlier run in `a.jsonl` and in the files of other ranks beside it has.

    `launch`: a word that the ranks of this launch share and no other launch has; empty for one rank. A launcher may start several
    runs, so what this rank wrote itself is of an earlier one in any case.
    """
    own = rank_path(path, rank)
    taken = {record.config.get("run") for record in _read(own)}
    for file in files_of(path):
        if file != own:
            taken |= {
                record.config.get("run") for record in _read(file) if not launch or record.fact("launch") != launch
            }
    names = itertools.chain([path.stem], (f"{path.stem}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def _read(file: Path) -> list[Record]:
    """The records; none where the file cannot be read: its own rank says so, or has just removed the empty file it locked."""
    try:
        return Store(file).finished()
    except ValueError:
        return []

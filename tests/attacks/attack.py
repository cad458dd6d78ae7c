"""An attack: seeded cases of one subject, what may not come of a case, and the sums of many cases.

A case is known by its subject, a seed and a number: `draws` then gives it the same random numbers everywhere, so that
`python tests/attacks/full.py SUBJECT --seed SEED --only NUMBER` does again what a test has done.
"""

import random
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

BREACHES = ("traceback", "lost", "left", "folders", "memory", "time", "other")
"""What may not come of a case. Each is a field of Outcome; the empty text says that it did not happen."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one case."""

    case: str
    """What was done, for a person who wants to do it by hand."""
    traceback: str = ""
    """The last frame of ours and the error, or an exit code that no user's mistake may have."""
    lost: str = ""
    """Files or records of the user that are gone, changed, or not what was written."""
    left: str = ""
    """Processes that are still there."""
    folders: str = ""
    """Temporary folders and parts of files that are still there."""
    memory: str = ""
    """The peak of a reader that took more than it may."""
    time: str = ""
    """The seconds of something that took longer than it may."""
    other: str = ""
    """Code of a stranger that ran, a sentence that is none, a terminal's escape, damage that nobody noticed."""

    @property
    def breaches(self) -> list[str]:
        """What happened that may not."""
        return [name for name in BREACHES if getattr(self, name)]


class Subject(Protocol):
    """A kind of attack, carried out many times, each time in an empty folder."""

    name: str
    full: int
    """Cases of a run at full size."""

    def attack(self, draw: random.Random, folder: Path) -> Outcome: ...
    def afterwards(self) -> Iterable[Outcome]:
        """What only shows when all cases are over, such as processes that stayed; ends what the subject has started."""
        ...


def draws(subject: str, seed: int, number: int) -> random.Random:
    """The random numbers of one case."""
    return random.Random(f"{subject} {seed} {number}")


def outcomes(subject: Subject, seed: int, numbers: Iterable[int]) -> Iterator[tuple[int, Outcome]]:
    """Attack; the number of each case and what came of it, as soon as it is known. -1: what showed afterwards."""
    for number in numbers:
        outside = Path(tempfile.mkdtemp(prefix="trainstep-attack-"))
        folder = outside / "user"
        folder.mkdir()
        try:
            yield number, subject.attack(draws(subject.name, seed, number), folder)
        finally:
            _remove(outside)
    for outcome in subject.afterwards():
        yield -1, outcome


def check(subject: Subject, count: int, seed: int = 0) -> None:
    """Attack so many times; AssertionError that names each case of which something came that may not."""
    broken = [
        f"case {number}: {breach}: {getattr(outcome, breach)}\n    {outcome.case}"
        for number, outcome in outcomes(subject, seed, range(count))
        for breach in outcome.breaches
    ]
    again = f"again: python tests/attacks/full.py {subject.name} --seed {seed} --only NUMBER"
    assert not broken, "\n".join([f"{subject.name}: {count} cases of seed {seed}; {again}", *broken])


@dataclass
class Sums:
    """How often each breach came, over the cases of one subject."""

    name: str
    cases: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BREACHES, 0))

    def add(self, number: int, outcome: Outcome) -> None:
        self.cases += number >= 0
        for breach in outcome.breaches:
            self.counts[breach] += 1


def _remove(folder: Path) -> None:
    """A folder of the attack's own, with folders in it that nobody may enter."""
    for path in [folder, *folder.rglob("*")]:
        if stat.S_ISDIR(path.lstat().st_mode):
            path.chmod(0o700)
    shutil.rmtree(folder)

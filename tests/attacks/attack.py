"""An attack: seeded cases of one subject, the breaches that a case may cause, and their counts over many cases.

A subject, a seed and a number identify a case: `draws` gives it the same random numbers on every machine, so
`python tests/attacks/full.py SUBJECT --seed SEED --only NUMBER` repeats the case of a test.
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
"""The breaches that no case may cause. Each is a field of Outcome; the empty text means that it did not happen."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one case."""

    case: str
    """What the case did, for a person who wants to repeat it by hand."""
    traceback: str = ""
    """The last frame of our code and the error, or an exit code that no mistake of a user may cause."""
    lost: str = ""
    """Files or records of the user that are missing, changed, or different from what was written."""
    left: str = ""
    """Processes that still run."""
    folders: str = ""
    """Temporary folders and parts of files that still exist."""
    memory: str = ""
    """The peak memory of a reader over its limit."""
    time: str = ""
    """The seconds of a case over its limit."""
    other: str = ""
    """Foreign code that ran, a missing sentence, an escape code on the terminal, or unnoticed damage."""

    @property
    def breaches(self) -> list[str]:
        """The names of the breaches that happened."""
        return [name for name in BREACHES if getattr(self, name)]


class Subject(Protocol):
    """A kind of attack, with many cases, each in an empty folder."""

    name: str
    full: int
    """The number of cases of a run at full size."""

    def attack(self, draw: random.Random, folder: Path) -> Outcome: ...
    def afterwards(self) -> Iterable[Outcome]:
        """Outcomes that are known only after all cases, such as processes that still run; ends what the subject has started."""
        ...


def draws(subject: str, seed: int, number: int) -> random.Random:
    """The random numbers of one case."""
    return random.Random(f"{subject} {seed} {number}")


def outcomes(subject: Subject, seed: int, numbers: Iterable[int]) -> Iterator[tuple[int, Outcome]]:
    """Run the cases; each number with its outcome as soon as it is known. -1: an outcome of `afterwards`."""
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
    """Run `count` cases; AssertionError that names each breach with its case."""
    broken = [
        f"case {number}: {breach}: {getattr(outcome, breach)}\n    {outcome.case}"
        for number, outcome in outcomes(subject, seed, range(count))
        for breach in outcome.breaches
    ]
    again = f"again: python tests/attacks/full.py {subject.name} --seed {seed} --only NUMBER"
    assert not broken, "\n".join([f"{subject.name}: {count} cases of seed {seed}; {again}", *broken])


@dataclass
class Sums:
    """The count of each breach over the cases of one subject."""

    name: str
    cases: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BREACHES, 0))

    def add(self, number: int, outcome: Outcome) -> None:
        self.cases += number >= 0
        for breach in outcome.breaches:
            self.counts[breach] += 1


def _remove(folder: Path) -> None:
    """Remove a folder of an attack, including subfolders without permissions."""
    for path in [folder, *folder.rglob("*")]:
        if stat.S_ISDIR(path.lstat().st_mode):
            path.chmod(0o700)
    shutil.rmtree(folder)

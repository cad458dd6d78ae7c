"""How a verb runs its cells, whatever they are: the options that every verb which runs something has."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from trainstep.cli.options import EveryColumn, check_positive
from trainstep.records.store import Store, new_records_path

_HOW = Group("How to run it", sort_key=4)
_BUDGET_HELP = (
    "Begin no further cell (compared variants: no further group) that would end after so many minutes, by the time of those that "
    "ran; the first always runs. Then what is left is said, with the command that goes on, and the exit code is 4."
)
_CONFIG_HELP = (
    "TOML with options of this verb, as context = [128, 256] (a list is a grid). The command line wins over it, and it wins "
    "over the verb's defaults in ./trainstep.toml."
)


def _switch(help: str) -> Parameter:
    return Parameter(help=help, negative=(), show_default=False)


@Parameter(name="*", group=_HOW)
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `sweep` and `tune` are told of running their cells; those that the file of records holds are always left out."""

    quiet: Annotated[bool, _switch("Show no progress, only the answer at the end; errors are told all the same.")] = (
        False
    )
    dry_run: Annotated[bool, _switch("Show the cells that would run, and about how long; run nothing.")] = False
    budget_minutes: Annotated[float | None, Parameter(help=_BUDGET_HELP)] = None
    every: EveryColumn = False
    defaults_from: Annotated[str | None, Parameter(parse=False)] = None
    """The options that files gave, and which files; None where none did."""

    @property
    def given(self) -> dict[str, object]:
        """The options that make no sense where nothing runs, by name; not given: None or False."""
        return {name: value for name, value in vars(self).items() if name not in ("quiet", "every", "defaults_from")}

    def store(self, out: Path | None, verb: str) -> Store:
        """Where the records go. ValueError for options that are wrong, or make no sense together."""
        check_positive({"budget_minutes": self.budget_minutes})
        return Store(out or new_records_path(verb))


@Parameter(name="*", group=_HOW)
@dataclass(frozen=True, kw_only=True)
class GridOptions(RunOptions):
    """The same of verbs that measure every cell, unless they are told to go on where a file of records ends."""

    resume: Annotated[bool, _switch("Leave out the cells that the file of --out holds already.")] = False
    config: Annotated[Path | None, Parameter(help=_CONFIG_HELP)] = None
    """Read before the other options are, by option_files.py."""

    def store(self, out: Path | None, verb: str) -> Store:
        """The same; to go on, the file must be named."""
        if self.resume and out is None:
            raise ValueError("resume: a new file holds no cell yet; name the file of records with --out")
        return super().store(out, verb)

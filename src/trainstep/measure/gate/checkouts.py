"""Makes the two folders in which a gate runs its command: a revision is checked out, a folder is taken as it is.

    with checked_out(find_source("base", "main"), find_source("head", ".")) as (base, head):
        base.folder, base.environ

A revision is checked out by `git worktree add` into a temporary folder, which goes when the gate ends, also by Ctrl-C or SIGTERM.
After a SIGKILL the next gate removes it (measure/harness/files.py) and git forgets it. The two folders' paths have the same length:
the length of a path, through the size of the environment, can change where memory lies and so the time (Mytkowicz et al. 2009,
"Producing wrong data without doing anything obviously wrong!").

The command imports the checkout's own code, also where the project is installed in editable mode from somewhere else: the checkout
and its src/ stand first in PYTHONPATH.
"""

import hashlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainstep.measure.harness.files import TemporaryFolder, remove_abandoned

_CHECKOUT_S = 600


@dataclass(frozen=True, kw_only=True)
class Source:
    """What the user named as BASE or HEAD. Either `revision` (a commit, of the repository at `top`) or `folder`."""

    side: str
    name: str
    commit: str | None = None
    """The commit of the revision, or the commit that the folder is at; None outside git."""
    changes: str | None = None
    """A hash of what differs from the commit in a folder; None if nothing does."""
    top: Path | None = None
    folder: Path | None = None
    """The folder in which the command runs; None for a revision."""
    inner: Path = Path()
    """The folder below the checkout's top in which the command runs: where the gate was started, below its repository's top."""

    def is_same_code(self, other: "Source") -> bool:
        """Whether both are known to be the same version."""
        own, its = ((source.commit, source.changes, source.folder) for source in (self, other))
        return own == its and (self.commit is not None or self.folder is not None)

    @property
    def words(self) -> str:
        """`main at 1f0c2a9`, with what differs in a folder."""
        commit = f" at {self.commit[:12]}" if self.commit and not self.commit.startswith(self.name) else ""
        return f"{self.name}{commit}{f' with changes {self.changes}' if self.changes else ''}"


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A folder with one version of the project. `environ`: the environment of the command."""

    side: str
    folder: Path
    environ: Mapping[str, str]


def find_source(side: str, name: str) -> Source:
    """What BASE or HEAD names. ValueError if it is neither a folder nor a revision of the repository here."""
    if not name or "\0" in name:
        raise ValueError(f"{side}: must name a revision or a folder, not {name!r}")
    here = Path.cwd()
    top = _git(here, "rev-parse", "--show-toplevel")
    looks_like_path = name in (".", "..") or os.sep in name
    commit = None
    if top is not None and not name.startswith("-") and not (looks_like_path and Path(name).is_dir()):
        commit = _git(here, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if commit is not None and top is not None:
        prefix = _git(here, "rev-parse", "--show-prefix") or ""
        return Source(side=side, name=name, commit=commit, top=Path(top), inner=Path(prefix))
    folder = Path(name)
    if not folder.is_dir():
        where = "a folder" if top is None else "a folder, or a revision of this repository"
        fetch = "" if top is None else "; in CI fetch the history first (actions/checkout: fetch-depth: 0)"
        raise ValueError(f"{side}: {name!r} is not {where}{fetch}")
    folder = folder.resolve()
    return Source(
        side=side, name=name, commit=_git(folder, "rev-parse", "HEAD"), changes=_changes(folder), folder=folder
    )


@contextmanager
def checked_out(*sources: Source) -> Iterator[tuple[Checkout, ...]]:
    """The checkouts of these sources, in their order. ValueError if git cannot make one; whatever was made is removed."""
    remove_abandoned()
    for top in {source.top for source in sources if source.top}:
        _git(top, "worktree", "prune")
    with TemporaryFolder() as temporary:
        try:
            yield tuple(_checkout(source, temporary) for source in sources)
        finally:
            for source in sources:
                if source.top is not None:
                    _git(source.top, "worktree", "remove", "--force", "--force", str(temporary / source.side))


def _checkout(source: Source, temporary: Path) -> Checkout:
    folder = source.folder
    if folder is None:
        assert source.top is not None and source.commit is not None
        made = temporary / source.side
        # Without the user's hooks, which may install or build things after each checkout; --setup is for that.
        git = ["git", "-C", str(source.top), "-c", f"core.hooksPath={os.devnull}"]
        done = subprocess.run(
            [*git, "worktree", "add", "--detach", "--force", str(made), source.commit],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_CHECKOUT_S,
            env=_environ(),
        )
        if done.returncode:
            last = next(reversed(done.stderr.strip().splitlines()), "no word of git")
            raise ValueError(f"{source.side}: {source.name} cannot be checked out: {last}")
        folder = made / source.inner
        if not folder.is_dir():
            raise ValueError(
                f"{source.side}: {source.name} has no folder {source.inner}, in which the gate was started"
            )
        top = made
    else:
        top = folder
    paths = [str(path) for path in (top / "src", top) if path.is_dir()]
    paths += [path for path in [os.environ.get("PYTHONPATH", "")] if path]
    return Checkout(
        side=source.side,
        folder=folder,
        environ={**_environ(), "PYTHONPATH": os.pathsep.join(paths), "PWD": str(folder)},
    )


def _environ() -> dict[str, str]:
    """The environment without what git sets for its hooks: in a checkout it would lead back to the repository."""
    leading = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
    return {name: value for name, value in os.environ.items() if name not in leading}


def _changes(folder: Path) -> str | None:
    """A short hash of what differs from the commit in a folder of a repository; None if nothing does. New files are left out:
    a gate and its command make some."""
    difference = _git(folder, "diff", "HEAD", "--", ".")
    return hashlib.sha256(difference.encode()).hexdigest()[:8] if difference else None


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails or is missing."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=60,
            env=_environ(),
        )
        return done.stdout.strip() if done.returncode == 0 else None
    return None

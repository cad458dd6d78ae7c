"""The folder of a user, with files of ours and of others and paths that are no files, and its changes after a case."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from record_maker import a_record
from trainstep.records.store import Store

RECORDS, OTHER_RECORDS, PAGE, SWEEP = "good.jsonl", "other.jsonl", "old_page.html", "ok.toml"
SWEEP_TEXT = 'title = "A sweep"\n[grid]\nmodel = "tiny"\ndevice = "cpu"\ncontext = [32, 64]\n'
_FOREIGN = {
    "notes.md": b"# What I think\n",
    "table.md": b"| a | b |\n| --- | --- |\n| mine | 1 |\n",
    "thesis.tex": b"\\section{One}\n",
    "numbers.csv": b"a,b\n1,2\n",
    "data.json": b'{"mine": 1}\n',
    "lines.jsonl": b'{"mine": 1}\n{"mine": 2}\n',
    "site.html": b"<!doctype html><html><body>mine</body></html>\n",
    "notes.txt": b"mine\n",
    "plain": b"mine\n",
    "train.py": b"print('mine')\n",
    "photo.png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "empty.jsonl": b"",
    "binary.jsonl": b"\xff\xfe\x00\n",
    "\udcff.jsonl": b"mine\n",
    "\x1b[31mred.jsonl": b"mine\n",
}
NOT_THERE = (
    "new.html",
    "new.jsonl",
    "new.md",
    "new.csv",
    "new",
    "deep/er/new.html",
    "deep/er/new.jsonl",
    "é.html",
    "new.HTML",
    "new.pdf",
    "~/x",
    "http://localhost/x",
    "a" * 300 + ".html",
    "a/" * 2000 + "x",
    "\x1b[2J.html",
    "a\nb.html",
)
NO_FILES = (
    "folder",
    "folder/",
    ".",
    "..",
    "",
    "/",
    "loop",
    "loop/x",
    "pipe",
    "locked",
    "locked/x",
    "good.jsonl/x",
    "dangling",
)
UNWRITABLE = ("/proc/x", "/proc/version/x", "/sys/x.html")
DEVICES = ("/dev/null", "/dev/full", "/dev/zero", "/proc/self/environ", "/proc/self/mem")
"""Devices for reading only: a page renamed to a device would replace it."""


@dataclass(frozen=True)
class UserFolder:
    """The earlier content of the folder: path -> content, the target of a link, or the kind of path."""

    path: Path
    before: Mapping[str, bytes]

    def lost(self, *, ours: Iterable[str] = (RECORDS, OTHER_RECORDS, PAGE)) -> str:
        """The files that are gone or changed, as text. Records may be appended, and a page may be replaced by a whole page."""
        after = _contents(self.path)
        changed = [
            name
            for name, content in self.before.items()
            if after.get(name) != content and not (name in ours and _is_well(name, content, after.get(name)))
        ]
        return ", ".join(f"{name!a} {'is gone' if name not in after else 'was changed'}" for name in changed)

    def new(self) -> str:
        """The new files, as text; folders do not count."""
        after = _contents(self.path)
        return ", ".join(ascii(name) for name in after if name not in self.before and after[name] != _FOLDER)


_FOLDER = b"(folder)"


def make_user_folder(path: Path, page: bytes) -> UserFolder:
    """Fill an empty folder. `page`: a page that trainstep wrote."""
    for name, content in _FOREIGN.items():
        (path / name).write_bytes(content)
    Store(path / RECORDS).append(a_record())
    Store(path / OTHER_RECORDS).append(a_record(key="other"))
    (path / PAGE).write_bytes(page)
    (path / SWEEP).write_text(SWEEP_TEXT)
    (path / "folder").mkdir()
    (path / "locked").mkdir()
    (path / "locked").chmod(0o500)
    os.symlink("loop", path / "loop")
    os.symlink("nowhere/at/all", path / "dangling")
    os.symlink("train.py", path / "to_train.html")
    os.symlink(RECORDS, path / "to_records.jsonl")
    os.mkfifo(path / "pipe")
    return UserFolder(path, _contents(path))


def names(folder: UserFolder) -> list[str]:
    """Paths to try: existing ones, missing ones, and paths that are no files."""
    return [*(name for name in folder.before if not name.endswith("folder")), *NOT_THERE, *NO_FILES]


def _contents(folder: Path) -> dict[str, bytes]:
    contents = {}
    for above, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(above, name)
            key = path.relative_to(folder).as_posix()
            if path.is_symlink():
                contents[key] = b"-> " + os.fsencode(os.readlink(path))
            elif path.is_dir():
                contents[key] = _FOLDER
            else:
                contents[key] = path.read_bytes() if path.is_file() else b"(no file)"
    return contents


def _is_well(name: str, before: bytes, after: bytes | None) -> bool:
    if after is None:
        return False
    return after.rstrip().endswith(b"</html>") if name == PAGE else after.startswith(before)

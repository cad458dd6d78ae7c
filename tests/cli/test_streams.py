"""Closed and full standard streams, terminals, and Ctrl-C before a verb begins: each ends in a sentence and an exit code."""

import contextlib
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cell_maker import import_path
from record_maker import a_record
from trainstep.records.store import Store

SNAPSHOT = Path(__file__).parents[1] / "traces" / "fixtures" / "snapshot_tiny.pickle.gz"
INTERRUPTED = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test started in the background ignores it

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            exec("os.kill(os.getpid(), signal.SIGINT)")  # as in the `exec` that makes a dataclass
            for _ in range(1000):
                pass

from trainstep.cli.app import main
sys.meta_path.insert(0, Interrupt())
main(sys.argv[2:])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Store(tmp_path / "a.jsonl").append(a_record())
    return tmp_path


def in_a_shell(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": import_path(), "CUDA_VISIBLE_DEVICES": ""}
    line = f"{sys.executable} -m trainstep {command}"
    return subprocess.run(["bash", "-c", line], cwd=folder, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("report a.jsonl >&-", 2, "standard output is closed"),
        ("report a.jsonl >&- 2>&-", 2, ""),
        ("report a.jsonl 2>&-", 0, ""),
        ("report nowhere.jsonl 2>&-", 2, ""),
        ("report a.jsonl >/dev/full", 2, "standard output: No space left on device"),
        ("--help >/dev/full", 2, "standard output: No space left on device"),
        ("compare a.jsonl a.jsonl --json 1</dev/null", 2, "standard output: Bad file descriptor"),
    ],
)
def test_a_stream_that_cannot_be_written_is_named(folder: Path, command: str, code: int, words: str):
    done = in_a_shell(folder, command)
    assert done.returncode == code
    assert words in done.stderr
    assert done.stderr.count("\n") == bool(words), "one line"
    assert [path.name for path in folder.iterdir()] == ["a.jsonl"]


def test_a_closed_stream_leaves_its_descriptor_to_no_file(folder: Path):
    """Otherwise a file of records could get descriptor 2, to which child processes print."""
    program = (
        "from trainstep.cli.streams import open_streams; import os; open_streams(); "
        "print([os.path.realpath(f'/proc/self/fd/{number}') for number in (0, 2)])"
    )
    line = f'{sys.executable} -c "{program}" <&- 2>&-'
    environ = {**os.environ, "PYTHONPATH": import_path()}
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['/dev/null', '/dev/null']"


def test_a_terminal_gets_colours_and_no_escape_codes_from_file_names(folder: Path):
    shutil.copy(SNAPSHOT, folder / "\x1b[7m.pickle.gz")
    seen, terminal = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": import_path(), "TERM": "xterm", "COLUMNS": "200"}
    command = [sys.executable, "-m", "trainstep", "memory", "--from", "\x1b[7m.pickle.gz"]
    process = subprocess.Popen(command, cwd=folder, env=environ, stdout=terminal, stderr=terminal)
    os.close(terminal)
    text = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(seen, 65536):
            text += chunk
    os.close(seen)
    assert process.wait() == 0
    assert b"\x1b[1mSnapshot" in text
    assert rb"\x1b" not in text
    assert b"\x1b[7m" not in text


@pytest.mark.parametrize("module", ["trainstep.cli.streams", "cyclopts", "tabulate"])
def test_ctrl_c_during_an_import_is_an_interrupt(folder: Path, module: str):
    command = [sys.executable, "-c", INTERRUPTED, module, "report", "a.jsonl"]
    environ = {**os.environ, "PYTHONPATH": import_path()}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "trainstep: interrupted\n")


def test_importing_the_command_line_imports_nothing_else():
    """Modules that take time are imported later, where Ctrl-C is handled."""
    program = "import sys; known = set(sys.modules); import trainstep.cli.app; print(*sorted(set(sys.modules) - known))"
    environ = {**os.environ, "PYTHONPATH": import_path()}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.startswith("trainstep")} == {
        "trainstep",
        "trainstep.cli",
        "trainstep.cli.app",
    }
    assert loaded & {"typing", "enum", "re", "cyclopts", "rich"} == set()

"""How a script ends is its own: whatever it does to its streams, in a thread or in a forked child, code and output are Python's.

These scripts import no torch, so that a process takes a fraction of a second; `trainstep run` ends them in the same way.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cell_maker import import_path, run_python

SLOW = pytest.mark.slow


def ended(folder: Path, text: str, *command: str) -> tuple[int, str, str]:
    """The exit code, output and errors of a script under a command of Python."""
    (folder / "train.py").write_text(text)
    done = run_python(folder, *command, "train.py")
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nwith open('log', 'w') as log:\n    sys.stdout = log\nsys.exit(3)\n",
        "import sys\nsys.stdout = None\n",
        pytest.param("import sys\nprint('done')\nsys.stdout.close()\n", marks=SLOW),
        "import sys\nprint('done')\nsys.stderr.close()\n",
        "import sys\nsys.stderr.close()\nsys.exit('no data')\n",
        "import sys\nsys.stderr = None\nsys.exit('no data')\n",
        pytest.param("import sys\nwith open('log', 'w') as log:\n    sys.stderr = log\n", marks=SLOW),
        pytest.param("import os\nprint('done')\nos.close(2)\n", marks=SLOW),
    ],
)
def test_streams_that_a_script_replaces_or_closes_do_not_change_its_exit_code(text: str, tmp_path: Path):
    code, out, errors = ended(tmp_path, text)
    ours = ended(tmp_path, text, "-m", "trainstep", "run")
    assert ours[:2] == (code, out)
    assert ours[2].startswith(f"{errors.lstrip()}trainstep: ")
    assert ours[2].endswith("the script never imported torch, so there is no step to time\n")


def test_a_forked_child_ends_with_its_own_code_and_says_nothing_of_ours(tmp_path: Path):
    text = (
        "import atexit, os, sys\n"
        "atexit.register(lambda: print('atexit', flush=True))\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    sys.exit(5)\n"
        "print('child', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
    )
    code, out, errors = ended(tmp_path, text, "-m", "trainstep", "run")
    assert (code, out) == ended(tmp_path, text)[:2] == (0, "atexit\nchild 5\natexit\n")
    assert errors.count("trainstep:") == 1


def test_threads_that_go_on_are_awaited_before_the_end_is_shown(tmp_path: Path):
    """A worker of an executor, which Python tells to end only after this, is not."""
    text = (
        "import concurrent.futures, sys, threading, time\n"
        "concurrent.futures.ThreadPoolExecutor(1).submit(int)\n"
        "threading.Timer(0.3, lambda: print('thread', file=sys.stderr)).start()\n"
        "print('main', file=sys.stderr)\n"
    )
    assert ended(tmp_path, text, "-m", "trainstep", "run")[2].splitlines() == [
        "main",
        "thread",
        "trainstep: the script never imported torch, so there is no step to time",
    ]


def test_ctrl_c_while_threads_go_on_shows_the_end(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=lambda: [time.sleep(0.3), print('thread', flush=True), time.sleep(5)]).start()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "trainstep", "run", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": import_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "thread\n"
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert errors == "trainstep: the script never imported torch, so there is no step to time\n"
    assert process.returncode == 0


@SLOW
def test_standard_error_on_a_full_disk_does_not_change_the_exit_code(tmp_path: Path):
    (tmp_path / "train.py").write_text("print('done')\n")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "trainstep", "run", "train.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": import_path()},
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, "done\n")

"""Processes that start together: each waits when it is ready, works alone in its turn, and never waits for somebody who is gone."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from cell_maker import wait_until
from sources import ROOT
from trainstep.measure.run.changed.turns import End, Turn, in_turn

WAITING = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "src")!r})
from trainstep.measure.run.changed.turns import Turn
name, descriptor = sys.argv[1], sys.argv[2]
say = lambda word: open("said", "a").write(f"{{name}} {{word}}\\n")
say("ready")
if descriptor != "None" and not Turn(int(descriptor)).wait():
    sys.exit("nobody is there")
say("begins")
time.sleep(0.05)
say("ends")
print(name)
"""


def run(
    folder: Path, *texts: str, turns: Sequence[int] | None = None, timeout_s: float = 60.0
) -> list[tuple[int, End | None]]:
    def command(place: int, text: str, turn: int | None) -> Sequence[str]:
        return [sys.executable, "-c", text, str(place), str(turn)]

    commands = [partial(command, place, text) for place, text in enumerate(texts)]
    order = range(len(texts)) if turns is None else turns
    return list(in_turn(commands, order, folder=str(folder), environment=dict(os.environ), timeout_s=timeout_s))


def test_all_are_ready_before_the_first_begins_and_one_works_at_a_time(tmp_path: Path):
    ends = run(tmp_path, WAITING, WAITING, WAITING)
    assert ends == [(place, End(code=0, said=str(place))) for place in range(3)]
    said = (tmp_path / "said").read_text().splitlines()
    assert sorted(said[:3]) == ["0 ready", "1 ready", "2 ready"]
    assert said[3:] == ["0 begins", "0 ends", "1 begins", "1 ends", "2 begins", "2 ends"]


WORKING = (
    WAITING[: WAITING.index("if descriptor")]
    + """
turn, work = Turn(int(descriptor)), 0
while turn.wait():
    work += 1
    say(f"works {work}")
    time.sleep(0.05)
    if (name, work) == ("1", 2):
        sys.exit("enough")
print(f"{work} turns")
"""
)


def test_a_process_has_as_many_turns_as_it_is_given(tmp_path: Path):
    ends = run(tmp_path, WORKING, WORKING, turns=[0, 1, 1, 0, 0, 1])
    assert ends == [
        *((0, None), (1, None)),
        (1, End(code=1, said="enough")),  # and has no third one
        *((0, None), (0, End(code=0, said="3 turns"))),
    ]
    said = (tmp_path / "said").read_text().splitlines()
    assert said[2:] == ["0 works 1", "1 works 1", "1 works 2", "0 works 2", "0 works 3"]


def test_one_alone_may_have_several_turns(tmp_path: Path):
    assert run(tmp_path, WORKING, turns=[0, 0]) == [(0, None), (0, End(code=0, said="2 turns"))]


def test_who_is_late_in_a_later_turn_is_ended(tmp_path: Path):
    late = WORKING.replace("time.sleep(0.05)", "time.sleep(600 if work == 2 else 0)")
    ends = run(tmp_path, late, WORKING, turns=[0, 1, 0, 1], timeout_s=5)
    assert ends[2] == (0, End(code=None, said="it printed nothing"))
    assert ends[3] == (1, End(code=1, said="enough"))


def test_one_alone_has_no_turn(tmp_path: Path):
    assert run(tmp_path, WAITING) == [(0, End(code=0, said="0"))]


WORKER = """RuntimeError: Caught FileNotFoundError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "x.py", line 1, in f
FileNotFoundError: [Errno 2] no such file: 'data/a.bin'
"""
TORCHRUN = """[rank1]: Traceback (most recent call last):
[rank1]:   File "x.py", line 1, in <module>
[rank1]: torch.OutOfMemoryError: no room
E1128 failed (exitcode: 1)
Traceback (most recent call last):
  File "torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
====
x.py FAILED
"""


WRITES = "import sys\nsys.stderr.write({0!r})\nsys.exit(1)"
CHAINED = "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('a') from e"
LONG = "class Long(Exception): pass\nraise Long('backend raised:\\nOutOfMemoryError: no room\\nhint')"
CAUGHT = """import sys, traceback
try:
    1 / 0
except Exception:
    traceback.print_exc()
print("no data in data/")
sys.exit(2)
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('step 1'); raise ValueError('no data')", "ValueError: no data"),
        (CHAINED, "KeyError: 'a'"),
        (LONG, "Long: backend raised: OutOfMemoryError: no room"),
        (
            WRITES.format(f"Traceback (most recent call last):\n  x\n{WORKER}"),
            "FileNotFoundError: [Errno 2] no such file: 'data/a.bin'",
        ),
        (WRITES.format(TORCHRUN), "torch.OutOfMemoryError: no room"),
        (CAUGHT, "no data in data/"),
    ],
    ids=["raised", "chained", "message of several lines", "in a loader's worker", "under torchrun", "caught"],
)
def test_an_end_says_what_was_raised(tmp_path: Path, text: str, said: str):
    ((place, end),) = run(tmp_path, text)
    assert (place, end.said.replace("__main__.", "")) == (0, said)


def test_what_ends_early_or_never_gets_ready_does_not_stop_the_others(tmp_path: Path):
    texts = ["raise SystemExit(3)", "import time; print('slow', flush=True); time.sleep(600)", WAITING]
    first, second, third = run(tmp_path, *texts, timeout_s=5)
    assert first == (0, End(code=3, said="it printed nothing"))
    assert second == (1, End(code=None, said="slow"))
    assert third == (2, End(code=0, said="2"))


def test_who_waits_ends_when_its_starter_is_gone(tmp_path: Path):
    ours, theirs = socket.socketpair()
    waiting = subprocess.Popen(
        [sys.executable, "-c", WAITING, "0", str(theirs.fileno())], cwd=tmp_path, pass_fds=[theirs.fileno()]
    )
    theirs.close()
    assert ours.recv(1)
    ours.close()
    assert waiting.wait(30) == 1


def test_workers_stand_still_while_their_process_waits(tmp_path: Path):
    text = f"""
import sys, time, multiprocessing, os
sys.path.insert(0, {str(ROOT / "src")!r})
from trainstep.measure.run.changed.turns import Turn
def count():
    while True:
        with open("counted", "a") as file: file.write(".")
        time.sleep(0.01)
worker = multiprocessing.get_context("fork").Process(target=count, daemon=True)
worker.start()
while not os.path.exists("counted"): time.sleep(0.01)
Turn(int(sys.argv[1])).wait()
time.sleep(0.5)
"""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", text, str(theirs.fileno())], cwd=tmp_path, pass_fds=[theirs.fileno()]
    )
    theirs.close()
    counted = tmp_path / "counted"
    with ours:
        assert ours.recv(1)
        time.sleep(0.1)
        before = counted.stat().st_size
        time.sleep(0.3)
        assert counted.stat().st_size == before
        ours.sendall(b".")
        assert wait_until(lambda: counted.stat().st_size > before, 20)
    assert process.wait(30) == 0


def test_who_gives_up_leaves_nobody(tmp_path: Path):
    commands = [lambda turn: [sys.executable, "-c", WAITING, "0", str(turn)]] * 2
    ends = in_turn(commands, [0, 1], folder=str(tmp_path), environment=dict(os.environ), timeout_s=60)
    next(ends)
    ends.close()  # as an exception in the loop over it does
    assert not [pid for pid in os.listdir("/proc") if pid.isdecimal() and _is_in(pid, tmp_path)]


def _is_in(pid: str, folder: Path) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/cwd") == str(folder)
    except OSError:
        return False


def test_who_is_given_up_may_end_what_has_a_session_of_its_own(tmp_path: Path):
    """As torchrun ends its ranks, when it is asked to end."""
    text = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: (child.kill(), sys.exit(1)))
open("started", "w").close()
time.sleep(600)
"""
    ends = run(tmp_path, text, timeout_s=5)
    assert (tmp_path / "started").exists()
    assert ends == [(0, End(code=None, said="it printed nothing"))]
    assert wait_until(lambda: not [pid for pid in os.listdir("/proc") if pid.isdecimal() and _is_in(pid, tmp_path)], 10)


def test_a_number_that_is_no_socket_is_refused():
    with pytest.raises(ValueError, match="turn: 0 is not a socket"):
        Turn(0)

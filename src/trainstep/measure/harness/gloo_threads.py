"""Waits until gloo's threads sleep, which must precede the end of a torch profiler.

[Note: ended after it was awaited] gloo's thread first says that a message has arrived, which wakes whoever waits for the future
(DistributedDataParallel does), and only then notes the end of the message's range in the profiler's memory. If the profiler
ends between the two, the note goes into memory that is free again, and malloc ends the process at once or later: rare, and
made certain by results/cpu/gloo_profiler.py (torch 2.13). Nothing in torch waits for the second step. But a thread that has not
taken it runs, or waits for a core, while one without work sleeps, and Linux says which.
"""

import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"
_ELSEWHERE_S = 0.02
"""Slept where no /proc tells what threads do."""


def wait_for_gloo_threads(timeout_s: float = 1.0, name: str = _NAME) -> bool:
    """Return as soon as every thread with this name sleeps, at most after `timeout_s`; whether they do.

    Whoever ends a profiler does so even if they do not: a script cannot wait for ever, and the end is seldom fatal. A message
    that is still under way does not count: its thread sleeps too, until the network wakes it. Wait for such yourself.
    """
    if not _THREADS.exists():
        time.sleep(_ELSEWHERE_S)
        return False
    stats = [thread / "stat" for thread in _THREADS.iterdir() if _read(thread / "comm").strip() == name]
    deadline_s = time.monotonic() + timeout_s
    asleep = 0
    while stats and asleep < 2:  # twice, because a thread that waits for a lock sleeps for a moment too
        if time.monotonic() > deadline_s:
            return False
        asleep = 0 if any(_runs(_read(stat)) for stat in stats) else asleep + 1
        time.sleep(0.0002)
    return True


def _runs(stat: str) -> bool:
    """Whether a thread runs or waits for a core: its state is the first field behind its name, which is in parentheses."""
    return stat.rpartition(")")[2].strip().startswith("R")


def _read(path: Path) -> str:
    """The file's text; empty if its thread has ended."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

"""Before torch's profiler ends, gloo's threads must sleep: one that has yet to note a message's end writes into freed memory."""

import threading
from pathlib import Path

import pytest

from cell_maker import run_python
from trainstep.measure.harness.gloo_threads import wait_for_gloo_threads

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc says what threads do")
_NAME = "ts_test_thread"

FUTURES = """
import os, torch
import torch.distributed as dist
from trainstep.measure.harness.gloo_threads import wait_for_gloo_threads

dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meeting", rank=0, world_size=1)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
early = late = 0
for _ in range(3000):
    message = dist.all_reduce(torch.randn(16), async_op=True)
    message.get_future().wait()
    early += not message.is_completed()
    wait_for_gloo_threads()
    late += not message.is_completed()
print(early, late)
os._exit(0)
"""


class Thread:
    """A thread with our name, which runs until `rest` and then sleeps until `end`."""

    def __init__(self) -> None:
        self._rests, self._ends, named = threading.Event(), threading.Event(), threading.Event()

        def run() -> None:
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(_NAME)
            named.set()
            while not self._rests.is_set():
                pass
            self._ends.wait()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        named.wait()

    def rest(self) -> None:
        self._rests.set()

    def end(self) -> None:
        self._rests.set()
        self._ends.set()
        self._thread.join()


def test_a_thread_that_runs_is_waited_for_and_one_that_sleeps_is_not():
    thread = Thread()
    try:
        assert not wait_for_gloo_threads(0.2, _NAME)
        thread.rest()
        assert wait_for_gloo_threads(20.0, _NAME)
    finally:
        thread.end()


def test_without_such_threads_nothing_is_waited_for():
    assert wait_for_gloo_threads(0.0, "no such name")


@pytest.mark.slow
def test_after_it_every_message_of_gloo_has_ended(tmp_path: Path):
    (tmp_path / "futures.py").write_text(FUTURES)
    done = run_python(tmp_path, "futures.py")
    assert done.returncode == 0, done.stderr
    early, late = map(int, done.stdout.split())  # where no future is early, this shows nothing
    assert late == 0, f"{late} of 3000 messages had not ended; without waiting {early}"

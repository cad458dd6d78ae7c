"""Fixtures for all tests: GPU tests are skipped without a GPU, children receive signals, and Slurm and bad input have fixtures."""

import atexit
import functools
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import pytest

from quick import mark_family
from slurm_cluster import slurm_cluster, slurm_daemons

__all__ = ["slurm_cluster", "slurm_daemons"]


@functools.cache
def gpu_count() -> int:
    """GPUs that torch sees; asked only when a test needs one, since it imports torch."""
    import torch

    return torch.cuda.device_count()


@pytest.fixture(scope="session", autouse=True)
def _children_take_signals() -> Iterator[None]:
    """Give ignored signals a handler: under nohup or in a background job, children would otherwise ignore them, too.

    A program inherits that a signal is ignored, and no handler. With a handler that does nothing this process continues to ignore
    the signal, and its children begin with the default.
    """
    ignored = [
        number
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)
        if signal.getsignal(number) == signal.SIG_IGN
    ]
    for number in ignored:
        signal.signal(number, _do_nothing)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def _do_nothing(_number: int, _frame: object) -> None:
    pass


@pytest.fixture(scope="session", autouse=True)
def _code_is_read_once() -> Iterator[None]:
    """Find the commit and the hash of the sources once: each verb that a test runs in this process asks for them (0.02 s).

    The code does not change meanwhile. Cells are other processes and read it themselves; tests of both functions call these.
    """
    from trainstep.measure.machine import environment

    with pytest.MonkeyPatch.context() as patch:
        for name in ("git_state", "source_hash"):
            patch.setattr(environment, name, functools.cache(getattr(environment, name)))
        yield


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody asks
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker a core, and for the fast tests one more, because those often wait for the processes that they start.

    With one more the slow tests ran a Slurm job out of its time: compilers and browsers beside it leave no core free.
    """
    # A container or taskset may leave this process fewer cores than the machine has
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + ("not slow" in config.option.markexpr)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collected tests and imported modules live to the end: no later search for garbage walks through them (0.4 s each time).

    Nor does one come as often as in other programs: it walks through what tests have imported since (0.05 s), and finds little.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(10 * gc.get_threshold()[0], *gc.get_threshold()[1:])
        atexit.register(_thaw)


def _thaw() -> None:
    """When Python ends, let it free all objects in one search: a library that counts its own would call them lost."""
    gc.unfreeze()
    gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, object, object]:
    """Sample a large family where all of it is at hand: before `-k`, `--lf` or the ids of single tests choose from it."""
    made = yield
    if isinstance(made, list) and all(isinstance(item, pytest.Item) for item in made):
        mark_family(made)
    return made


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
    if needed and gpu_count() < needed:
        pytest.skip(f"needs {needed} CUDA GPU{'s' if needed > 1 else ''}; this machine has {gpu_count()}")


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Sequence[str], str], None]:
    """A check that `trainstep` ends with exit code 2 and one sentence with these words, and leaves no file; no GPU is visible."""

    def check(command: Sequence[str], words: str) -> None:
        from trainstep.cli import app

        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert app.run(list(command)) == 2
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1
        assert list(tmp_path.iterdir()) == []

    return check

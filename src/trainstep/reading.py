"""Read files from outside within limits of bytes, memory and time, because they may be made to do harm.

    data = read_file(path)                                          # a regular file, unpacked; ValueError if it is too large
    tables = read_within(limits, path, lambda: tables_of(path))     # in a child process that is killed at its limits

A gzip file of 1 MB can unpack to 1 GB, a pickle of a few bytes can make Python allocate 64 GB or end the process that loads it, and
an SQLite view may never end. A reader cannot foresee all of that, so the operating system limits the process that reads.
"""

import contextlib
import faulthandler
import gzip
import math
import multiprocessing
import os
import resource
import signal
import stat
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection  # importing it takes 10 ms, which reading records does not need

Result = TypeVar("Result")

LARGEST_BYTES = 10**9
"""The largest file that is read by default, in unpacked bytes."""
_CHUNK_BYTES = 2**20
_GZIP = b"\x1f\x8b"
_INTERPRETER_BYTES = 2**27
"""Memory of Python and its libraries before they read, which counts as the reader's memory."""
_ALLOW_MEMORY = "record fewer steps, or allow more with --memory-limit-gib"
_READER = "trainstep reader"
"""Name of the child process, by which it recognises itself."""


@dataclass(frozen=True, kw_only=True)
class ReadLimits:
    """Limits for reading one file. `memory_bytes`: memory of the whole process that reads it; `time_s`: wall-clock time."""

    memory_bytes: int = 2 * 10**9
    time_s: float = 60.0

    @property
    def file_bytes(self) -> int:
        """The largest file in unpacked bytes: half of the memory, because text exists twice while it is decoded."""
        return self.memory_bytes // 2


def read_file(path: Path, *, largest_bytes: int = LARGEST_BYTES, way_out: str = _ALLOW_MEMORY) -> bytes:
    """The content of a regular file, unpacked if it is compressed by gzip.

    ValueError, in one sentence, for a file that cannot be read or is larger. `way_out`: the remedy for a larger file.
    """
    check_regular(path)
    try:
        with open(path, "rb") as file:
            zipped = file.read(len(_GZIP)) == _GZIP
            file.seek(0)
            return _at_most(gzip.GzipFile(fileobj=file) if zipped else file, largest_bytes, path, way_out)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path}: the compressed file is cut off or damaged ({error}); copy or record it again"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def check_regular(path: Path) -> None:
    """ValueError unless the path is a regular file: a device such as /dev/zero has no end, and a pipe may never begin."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except OSError as error:  # a loop of symbolic links, a name that is too long
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        actual = "a folder" if stat.S_ISDIR(mode) else "not a regular file; save its content as a regular file"
        raise ValueError(f"{path}: cannot be read: it is {actual}")


def read_within(limits: ReadLimits, path: Path, read: Callable[[], Result]) -> Result:
    """Run `read` in a child process with these limits, and return its result; its errors are raised here.

    ValueError, in one sentence that names the file and the limit, if a limit is reached or the child is ended. The child is a
    fork, so `read` may be any closure; its result is sent as a pickle and should be small. Imports that start threads (NumPy's)
    belong before the call, so that their memory does not count as the reader's. Inside such a child, `read` runs directly.
    """
    if multiprocessing.current_process().name == _READER:
        return read()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_read_in_child, args=(read, limits, path, sender), name=_READER, daemon=True
    )
    child.start()
    sender.close()
    try:
        if not receiver.poll(limits.time_s):
            raise ValueError(_too_long(limits, path))
        result, error = receiver.recv()
    except (EOFError, OSError):  # the child ended before or while it sent its answer
        child.join()
        if child.exitcode == -signal.SIGXCPU:
            raise ValueError(_too_long(limits, path)) from None
        raise ValueError(
            f"{path}: the process that read it ended ({_how_it_ended(child.exitcode)}); the file is made to do that, or another "
            "process ended it"
        ) from None
    finally:
        child.kill()
        child.join()
        receiver.close()
    if error is not None:
        raise error
    answer: Result = result
    return answer


@contextlib.contextmanager
def limited_here(limits: ReadLimits, files: str) -> Iterator[None]:
    """Limit the memory and time of this process itself in a block: for records, which are needed as a whole in this process.

    ValueError, with the names `files`, at a limit. Time is limited in the main thread only, because signals arrive there.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    _limit_memory(limits)
    try:
        with _alarm(limits.time_s):
            yield
    except MemoryError:
        raise ValueError(
            f"{files}: reading takes more than {_size(limits)} of memory; give fewer files, or allow more with --memory-limit-gib"
        ) from None
    except _AlarmError:
        raise ValueError(
            f"{files}: reading takes more than {limits.time_s:g} s; give fewer files, or allow more with --timeout-s"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


class _AlarmError(BaseException):
    """The time is over. It is a BaseException, so that no `except Exception` takes it for an error in the file."""


@contextlib.contextmanager
def _alarm(time_s: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_number: int, _frame: object) -> None:
        raise _AlarmError

    handler = signal.signal(signal.SIGALRM, ring)
    remaining_s, interval_s = signal.setitimer(signal.ITIMER_REAL, time_s)
    start = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining_s:  # restart another alarm that was set before, so that it rings at its time
            signal.setitimer(signal.ITIMER_REAL, max(0.001, remaining_s - (time.monotonic() - start)), interval_s)


def _read_in_child(read: Callable[[], Any], limits: ReadLimits, path: Path, sender: "Connection") -> None:
    """Send (result, None) or (None, error)."""
    faulthandler.disable()  # if a file ends this process, the user gets a sentence, not a dump of the stack
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes, and the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _limit_memory(limits)
    _lower(resource.RLIMIT_CPU, 1 + math.ceil(2 * limits.time_s))  # for a child that its parent can no longer end
    _lower(resource.RLIMIT_CORE, 0)
    result: Any = None
    error: Exception | None = None
    try:
        result = read()
    except MemoryError:
        error = _too_much(limits, path)
    except RecursionError:
        error = ValueError(f"{path}: it is nested too deeply to be read")
    except Exception as raised:  # noqa: BLE001  (any error is raised again in the parent)
        if not isinstance(raised, ValueError | OSError):
            raised.add_note(f"In the process that read {path}:\n{traceback.format_exc()}")
        error = raised
    with contextlib.suppress(BrokenPipeError):  # the parent has ended
        try:
            sender.send((result, error))
        except MemoryError:
            result = None
            sender.send((None, _too_much(limits, path)))
        except BrokenPipeError:
            raise
        except Exception:  # noqa: BLE001  (a result or an error that cannot be pickled is a bug of trainstep)
            sender.send((None, RuntimeError(f"the result of reading {path} cannot be sent: {traceback.format_exc()}")))


def _how_it_ended(exit_code: int | None) -> str:
    """`SIGSEGV` or `exit code 1`."""
    if exit_code is not None and exit_code < 0:
        return next((known.name for known in signal.Signals if known == -exit_code), f"signal {-exit_code}")
    return f"exit code {exit_code}"


def _limit_memory(limits: ReadLimits) -> None:
    """Limit the memory that this process takes beyond what it has now."""
    growth_bytes = max(limits.memory_bytes - _INTERPRETER_BYTES, limits.memory_bytes // 2)
    _lower(resource.RLIMIT_DATA, _data_bytes() + growth_bytes)


def _lower(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _data_bytes() -> int:
    """Memory of this process that RLIMIT_DATA counts; 0 if the system does not tell (macOS, which does not limit it either)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _end_with_parent() -> None:
    """End this process when its parent is killed, because nobody waits for its answer then."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _at_most(file: BinaryIO | gzip.GzipFile, largest_bytes: int, path: Path, way_out: str) -> bytes:
    chunks, size = [], 0
    while chunk := file.read(_CHUNK_BYTES):
        size += len(chunk)
        if size > largest_bytes:
            raise ValueError(f"{path}: over {largest_bytes:,} bytes once unpacked, which is the limit; {way_out}")
        chunks.append(chunk)
    return b"".join(chunks)


def _too_long(limits: ReadLimits, path: Path) -> str:
    return f"{path}: reading it takes more than {limits.time_s:g} s; record fewer steps, or allow more with --timeout-s"


def _too_much(limits: ReadLimits, path: Path) -> ValueError:
    return ValueError(f"{path}: reading it takes more than {_size(limits)} of memory; {_ALLOW_MEMORY}")


def _size(limits: ReadLimits) -> str:
    return f"{limits.memory_bytes / 1e9:.3g} GB"

"""A pickle from anyone, loaded without running anything in it: only containers, text and numbers, every name refused.

    document = plain_pickle(content)      # ValueError, in one sentence, for anything else

[Note: the trial] No name need be looked up for a pickle to do harm: a memo index of four bytes makes Python ask for 64 GB,
and a tuple nested deeply enough ends the process when it is hashed. So another process, whose memory is limited, loads it
first (`python -m trainstep.traces.plain_pickle`, the pickle on stdin), and what has ended that one is not loaded here.
"""

import io
import pickle
import resource
import subprocess
import sys
from typing import Any

from trainstep.config.import_path import python_command

_LARGEST_GROWTH = 100
"""Bytes in memory for one of the pickle: an empty dict takes 64 and its place in a list 8."""
_SPARE_BYTES = 2**30
_TIMEOUT_S = 300.0
_REFUSED = 3
_DAMAGED = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)


def plain_pickle(content: bytes) -> Any:
    """What the pickle holds. ValueError for a damaged or a hostile one. [Note: the trial]"""
    command = python_command("trainstep.traces.plain_pickle")
    try:
        trial = subprocess.run(command, input=content, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"it takes more than {_TIMEOUT_S:.0f} s to load") from None
    if trial.returncode == _REFUSED:
        raise ValueError(trial.stdout.decode(errors="replace"))
    if trial.returncode != 0:
        raise ValueError("it is made to end the process that loads it")
    return _RefusingUnpickler(io.BytesIO(content)).load()


class _RefusingUnpickler(pickle.Unpickler):
    """Loads containers, text and numbers only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not run")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside it")


def _try(content: bytes) -> int:
    """The exit code of a trial; what is wrong, in words, on stdout."""
    most = _SPARE_BYTES + _LARGEST_GROWTH * len(content)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        _RefusingUnpickler(io.BytesIO(content)).load()
    except MemoryError:
        sys.stdout.write("it asks for more memory than a file of its size can need")
    except _DAMAGED as error:
        sys.stdout.write(" ".join(str(error).split())[:200] or type(error).__name__)
    else:
        return 0
    return _REFUSED


if __name__ == "__main__":
    sys.exit(_try(sys.stdin.buffer.read()))

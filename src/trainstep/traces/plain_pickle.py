"""A pickle from anyone, loaded without running anything in it: only containers, text and numbers, every name refused.

    document = plain_pickle(content)      # ValueError, in one sentence, for anything else

[Note: limits] No name need be looked up for a pickle to do harm: a memo index of four bytes makes Python ask for 64 GB, and a
tuple nested deeply enough ends the process when it is hashed or freed. So a pickle from outside is loaded inside
`reading.read_within`, as traces/snapshot.py does, and the child process there bears it.
"""

import io
import pickle
from typing import Any

_DAMAGED = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def plain_pickle(content: bytes) -> Any:
    """What the pickle holds. ValueError for a damaged or a hostile one; not for one that takes too much. [Note: limits]"""
    try:
        return _RefusingUnpickler(io.BytesIO(content)).load()
    except _DAMAGED as error:
        raise ValueError(" ".join(str(error).split())[:200] or type(error).__name__) from None


class _RefusingUnpickler(pickle.Unpickler):
    """Loads containers, text and numbers only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not run")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside it")

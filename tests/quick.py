"""Parameters of a test of which the quick ones run with `make test`, and all with `make test-slow`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(is_quick: Callable[..., bool], values: Iterable[Any]) -> list[Any]:
    """Each value, marked slow unless it is quick; of a tuple `is_quick` gets the items."""
    params = []
    for value in values:
        items = value if isinstance(value, tuple) else (value,)
        params.append(pytest.param(*items, marks=() if is_quick(*items) else pytest.mark.slow))
    return params

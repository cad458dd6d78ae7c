"""What a plain value of a record is: whether it has a declared type, as JSON writes it, and how an error names either.

A type is `int`, `float` (which takes whole numbers too), `str`, `bool`, `object` (anything), a union of them with `None`, or
`list[float]`. Numbers are finite.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

_LARGEST = sys.float_info.max
_WORDS = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    bool: "true or false",
    type(None): "nothing",
}


def is_number(value: Any) -> bool:
    """Whether it is a finite number that floating point can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def is_type(hint: Any) -> bool:
    """Whether this is one of the types that can be looked for here."""
    return all(one in _WORDS or get_origin(one) is list for one in get_args(hint) or (hint,))


def is_a(value: Any, kind: Any) -> bool:
    """Whether a value has this type."""
    if type(value) in classes_of(kind):
        return type(value) not in (int, float) or bool(-_LARGEST <= value <= _LARGEST)
    if get_origin(kind) is list:
        return isinstance(value, list | tuple) and first_wrong(value, *get_args(kind)) is None
    return kind is object


def first_wrong(values: Sequence[Any], kind: Any) -> int | None:
    """Where the first value that is not of this type stands; None where all are."""
    if kind is object:
        return None
    classes = classes_of(kind)
    if set(map(type, values)) <= classes:  # a whole column at the speed of C
        numbers = [value for value in values if value is not None] if type(None) in classes else values
        if classes.isdisjoint((int, float)) or not numbers or _in_range(numbers):
            return None
    return next((place for place, value in enumerate(values) if not is_a(value, kind)), None)


def type_words(kind: Any) -> str:
    """`a whole number or nothing`."""
    if get_origin(kind) is list:
        return f"a list, each of it {type_words(*get_args(kind))}"
    return " or ".join(_WORDS.get(one, "a mapping") for one in get_args(kind) or (kind,))


def value_words(value: Any) -> str:
    """The value where it is short, else its type."""
    short = isinstance(value, str | float | bool | None) and len(ascii(value)) < 80
    kind = "mapping" if isinstance(value, Mapping) else type(value).__name__
    return repr(value) if short else f"of type {kind}"


@functools.cache
def classes_of(kind: Any) -> frozenset[type]:
    """The classes of values of this type; none of a list's, whose own values count."""
    kinds = set() if get_origin(kind) is list else set(get_args(kind) or (kind,))
    return frozenset(kinds | {int} if float in kinds else kinds)


def _in_range(numbers: Sequence[Any]) -> bool:
    """Of text, in a column that may have both, nothing is asked."""
    found = [value for value in numbers if type(value) is not str]
    return not found or (min(found) >= -_LARGEST and max(found) <= _LARGEST)

"""Config fields with their own help text and choices, which `--help` and error messages show; and checks of fields.

A config is a dataclass with fields such as `steps: int = described("timed steps", 10)`; its `__post_init__` calls the checks, such
as `check_integer(self, "steps", at_least=1)`.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

ALIASES = {"flash": "trainstep"}
"""Second name of a choice -> the name in configs and records. A user may write either."""
_MOST_NAMED = 20
"""The most known keys that an error lists beside the nearest one."""
MOST = 2**40
"""No machine has, and no user waits for, more of anything. Larger numbers are mistakes, and would overflow later."""


def described(help: str, default: Any = dataclasses.MISSING, choices: Iterable[str] = (), flat_name: str = "") -> Any:
    """A dataclass field with its meaning (and unit) as `metadata["help"]` and its allowed names as `metadata["choices"]`.

    `flat_name`: its name in text and records, if that differs from the name in Python.
    """
    metadata = {"help": help, "choices": tuple(choices), "flat_name": flat_name}
    return dataclasses.field(default=default, metadata=metadata)


def part(default: Any = dataclasses.MISSING, *, without: Iterable[str] = ()) -> Any:
    """A field that contains another config. In text and records that config's fields stand flat beside the owner's fields.

    `without`: fields of the inner config that are left out there, and must stay at their defaults.
    """
    return dataclasses.field(default=default, metadata={"without": frozenset(without)})


def flat_name(field: dataclasses.Field[Any]) -> str:
    return field.metadata.get("flat_name") or field.name


def aliases_of(field: dataclasses.Field[Any]) -> dict[str, str]:
    """Second name -> name, for the choices of this field."""
    choices = field.metadata.get("choices", ())
    return {alias: name for alias, name in ALIASES.items() if name in choices}


def check_choices(config: Any) -> None:
    """ValueError, naming the field and its choices, if a field with choices has another value."""
    for field in dataclasses.fields(config):
        choices = field.metadata.get("choices", ())
        value = getattr(config, field.name)
        if choices and value not in choices:
            raise ValueError(
                f"{flat_name(field)}: {value!r} is not known{nearest(str(value), choices)}; known: {', '.join(choices)}"
            )


def check_parts(config: Any) -> None:
    """ValueError if an inner config has a value that the flat form, and so a record, would not show."""
    for field in dataclasses.fields(config):
        inner = getattr(config, field.name)
        for name in field.metadata.get("without", ()):
            if getattr(inner, name) != (default := inner.__dataclass_fields__[name].default):
                raise ValueError(f"{name}: has no meaning in a {type(config).__name__}; leave it at {default}")


def check_positive(config: Any, *names: str) -> None:
    """ValueError naming the first of these integer fields that is not at least 1."""
    for name in names:
        check_integer(config, name, at_least=1)


def check_integer(config: Any, name: str, at_least: int, at_most: int = MOST) -> None:
    """ValueError unless the field is an int (not a bool) from `at_least` to `at_most`."""
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name}: must be a whole number of at least {at_least}, not {value!r}")
    if value > at_most:
        raise ValueError(f"{name}: must be at most {at_most}, not {value}")


def nearest(word: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' with the known word closest to this word, or an empty string."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def check_known(keys: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """ValueError for the first unknown key: the place where it stands, the nearest known key, and all of them if they are few."""
    known = list(known)
    for key in keys:
        if key not in known:
            near = nearest(key, known)
            names = "" if near and len(known) > _MOST_NAMED else f"; known: {', '.join(known)}"
            raise ValueError(f"{where}: unknown key {key!r}{near}{names}")

"""Fields that explain themselves: the sentence beside a config field is the one `--help` and error messages show."""

import dataclasses
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

ALIASES = {"flash": "trainstep"}
"""Another name of a choice -> the one that configs and records have. Text from a person may hold either."""


def described(help: str, default: Any = dataclasses.MISSING, choices: Iterable[str] = (), flat_name: str = "") -> Any:
    """A dataclass field with its meaning (and unit) as `metadata["help"]`, its allowed names as `metadata["choices"]`.
    `flat_name`: what text and records call it, if not as Python does."""
    metadata = {"help": help, "choices": tuple(choices), "flat_name": flat_name}
    return dataclasses.field(default=default, metadata=metadata)


def part(default: Any = dataclasses.MISSING, *, without: Iterable[str] = ()) -> Any:
    """A field that holds another config, whose fields stand flat beside the owner's in text and records: but those `without`,
    which stay at their defaults."""
    return dataclasses.field(default=default, metadata={"without": frozenset(without)})


def flat_name(field: dataclasses.Field[Any]) -> str:
    return field.metadata.get("flat_name") or field.name


def aliases_of(field: dataclasses.Field[Any]) -> dict[str, str]:
    """Another name -> its choice, of those that the field has."""
    choices = field.metadata.get("choices", ())
    return {alias: name for alias, name in ALIASES.items() if name in choices}


def check_choices(config: Any) -> None:
    """Raise ValueError, naming the field and its choices, where a field with choices holds anything else."""
    for field in dataclasses.fields(config):
        choices = field.metadata.get("choices", ())
        value = getattr(config, field.name)
        if choices and value not in choices:
            raise ValueError(
                f"{flat_name(field)}: {value!r} is not known{nearest(str(value), choices)}; known: {', '.join(choices)}"
            )


def check_parts(config: Any) -> None:
    """Raise ValueError where a part has a value that the flat form, and so a record, would not tell."""
    for field in dataclasses.fields(config):
        held = getattr(config, field.name)
        for name in field.metadata.get("without", ()):
            if getattr(held, name) != (default := held.__dataclass_fields__[name].default):
                raise ValueError(f"{name}: has no meaning in a {type(config).__name__}; leave it at {default}")


MOST = 2**40
"""More of anything than a machine holds or a person waits for: larger numbers are mistakes, and overflow further on."""


def check_positive(config: Any, *names: str) -> None:
    """Raise ValueError naming the first of these integer fields that is not at least 1."""
    for name in names:
        check_integer(config, name, at_least=1)


def check_integer(config: Any, name: str, at_least: int, at_most: int = MOST) -> None:
    """Raise ValueError unless the field is an int (not a bool) of at least `at_least` and at most `at_most`."""
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name}: must be a whole number of at least {at_least}, not {value!r}")
    if value > at_most:
        raise ValueError(f"{name}: must be at most {at_most}, not {value}")


def nearest(word: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' for the known word closest to this one, or nothing."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def check_known(keys: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise ValueError for the first key that is not known, naming it, where it stood and the nearest known one."""
    known = list(known)
    for key in keys:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}{nearest(key, known)}; known: {', '.join(known)}")

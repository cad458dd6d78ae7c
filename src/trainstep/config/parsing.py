"""Text and plain dicts to configs and back, with the field named in every error, and the hash that identifies a config."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from copy import copy
from functools import cache, reduce
from typing import Any, TypeVar

from trainstep.config.fields import aliases_of, check_known, flat_name
from trainstep.config.instruments import INSTRUMENTS
from trainstep.config.model import ModelConfig, UserModel
from trainstep.config.numerics import NumericsConfig, ToyModel
from trainstep.config.presets import size
from trainstep.config.run import RunConfig

Config = TypeVar("Config")

CONFIGS: dict[str, type[Any]] = {name: one.config for name, one in INSTRUMENTS.items()}
"""Workload -> what a cell of it is made of."""
_WORD_VALUES = {"true": True, "false": False, "none": None}


@cache
def flat_form(config_class: Any) -> dict[str, tuple[tuple[str, ...], dataclasses.Field[Any]]]:
    """The form that people write and records have: name -> the way to the value, in the config or in a part of it, and its field,
    with the owner's default. The model comes first."""
    form: dict[str, tuple[tuple[str, ...], dataclasses.Field[Any]]] = {}
    for field in dataclasses.fields(config_class):
        kind: Any = field.type
        if "without" not in field.metadata:
            form[flat_name(field)] = (field.name,), field
            continue
        for name, (way, inner) in flat_form(kind).items():
            if name not in field.metadata["without"]:
                own = copy(inner)
                own.default = getattr(field.default, inner.name, inner.default)
                form[name] = (field.name, *way), own
    return {"model": form["model"], **form} if "model" in form else form


def fields_of(config_class: Any) -> dict[str, dataclasses.Field[Any]]:
    """The fields a person may set, flat: where there is a model, its shape stands beside the config's own fields."""
    fields = {name: field for name, (_, field) in flat_form(config_class).items()}
    if "model" in fields:
        shape = {field.name: field for field in dataclasses.fields(ModelConfig) if field.name != "name"}
        fields = {**fields, **shape}
    return fields


def build_config(workload: str, values: Mapping[str, Any]) -> Any:
    """The config of a built-in workload (a key of CONFIGS) from flat values.

    `model`: a size's name or package.module:function, any field of either class beside it; of numerics, `toy` too.
    """
    config_class = CONFIGS[workload]
    known = fields_of(config_class)
    check_known(values, known, "run" if config_class is RunConfig else workload)
    if "model" not in known:
        return config_class(**_typed(config_class, values))
    toy = config_class is NumericsConfig and values.get("model") == ToyModel().name
    model, rest = _toy_and_rest(values) if toy else _model_and_rest(values)
    return _assembled(config_class, {"model": model, **_typed(config_class, rest)})


def build_run(values: Mapping[str, Any]) -> RunConfig:
    """A RunConfig from flat values."""
    run: RunConfig = build_config("train_step", values)
    return run


def _toy_and_rest(values: Mapping[str, Any]) -> tuple[ToyModel, dict[str, Any]]:
    rest = {name: value for name, value in values.items() if name != "model"}
    own = {field.name for field in dataclasses.fields(NumericsConfig)}
    if shaped := next((name for name in rest if name not in own), None):
        raise ValueError(f"{shaped}: belongs to the built-in model; the toy has its own shape")
    return ToyModel(), rest


def _model_and_rest(values: Mapping[str, Any]) -> tuple[ModelConfig | UserModel, dict[str, Any]]:
    """The model that flat values name and shape, and the values that say nothing of it."""
    shape_names = {field.name for field in dataclasses.fields(ModelConfig)} - {"name"}
    shape = {name: value for name, value in values.items() if name in shape_names}
    rest = {name: value for name, value in values.items() if name not in shape_names}
    name = rest.pop("model", "small")
    if not isinstance(name, str):
        raise ValueError(f"model: must be a size's name or package.module:function, not {name!r}")
    if ":" in name:
        if shape:
            raise ValueError(f"{next(iter(shape))}: belongs to the built-in model; {name} decides its own shape")
        return UserModel(function=name), rest
    return dataclasses.replace(size(name), **_typed(ModelConfig, shape)) if shape else size(name), rest


def from_plain(config_class: type[Config], plain: Mapping[str, Any]) -> Config:
    """The inverse of `to_plain`: what a record or a request between processes carries."""
    kinds: tuple[tuple[type, str], ...] = ((UserModel, "function"), (ModelConfig, "d_model"), (ToyModel, "name"))
    if isinstance(model := plain.get("model"), Mapping):
        plain = {**plain, "model": next(kind for kind, field in kinds if field in model)(**model)}
    return _assembled(config_class, plain)


def _assembled(config_class: type[Config], values: Mapping[str, Any]) -> Config:
    """A config of flat values, its parts made of theirs."""
    kind: Any = config_class
    form, given = flat_form(kind), dict[str, dict[str, Any]]({"": {}})
    for name, value in values.items():
        *part, attribute = form[name][0] if name in form else (name,)
        given.setdefault("".join(part), {})[attribute] = value
    own = given.pop("")
    for name, its in given.items():
        field = kind.__dataclass_fields__[name]
        own[name] = (
            field.type(**its) if field.default is dataclasses.MISSING else dataclasses.replace(field.default, **its)
        )
    return config_class(**own)


def to_plain(config: Any) -> dict[str, Any]:
    """A config in its flat form, of JSON values."""
    kind: Any = type(config)
    values = {name: reduce(getattr, way, config) for name, (way, _) in flat_form(kind).items()}
    return {name: vars(value).copy() if name == "model" else value for name, value in values.items()}


def config_hash(workload: str, plain: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that identify a workload and its config, whatever the order of keys.

    ValueError naming the field that JSON cannot hold: not a number, infinite, a date.
    """
    try:
        canonical = _canonical([workload, plain])
    except (TypeError, ValueError) as error:
        name = next((name for name, value in plain.items() if not _is_json(value)), "config")
        raise ValueError(f"{name}: {plain.get(name)!r} is no value that a record can hold ({error})") from None
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _is_json(value: Any) -> bool:
    try:
        _canonical(value)
    except (TypeError, ValueError):
        return False
    return True


def parse_value(text: str) -> Any:
    """A word from a command line as int, float, true/false, none, or itself."""
    if text.lower() in _WORD_VALUES:
        return _WORD_VALUES[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _typed(config_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Check each value against its field's annotated type; an int serves where a float is asked, `none` reads as a name.

    Another name of a choice becomes the choice.
    """
    typed, form = {}, flat_form(config_class)
    for name, value in values.items():
        _, field = form[name]
        hint: Any = field.type
        if value is None and hint is str:
            value = "none"
        if isinstance(value, int) and not isinstance(value, bool) and hint in (float, float | None):
            value = float(value) if abs(value) < 10**300 else math.inf
        wrong = not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)
        if wrong:
            raise ValueError(f"{name}: must be {_in_words(hint)}, not {value!r}")
        typed[name] = aliases_of(field).get(value, value) if isinstance(value, str) else value
    return typed


def _in_words(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}
    return words.get(hint) or " or ".join(words.get(part, "none") for part in hint.__args__)

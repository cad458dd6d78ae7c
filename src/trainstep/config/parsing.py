"""Convert text and plain dicts to configs and back, and hash a config; every error names the field.

    config = build_config("attention", {"seq": 4096, "dtype": "bf16"})
    config_hash("attention", to_plain(config))

The flat form of a config is what users write and records store: the fields of inner configs stand beside the owner's fields.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Collection, Mapping
from copy import copy
from functools import cache, reduce
from types import MappingProxyType
from typing import Any, TypeVar

from trainstep.config.fields import aliases_of, check_known, flat_name
from trainstep.config.instruments import INSTRUMENTS
from trainstep.config.model import ModelConfig, UserModel, size
from trainstep.config.numerics import NumericsConfig, ToyModel
from trainstep.config.run import RunConfig

Config = TypeVar("Config")

CONFIGS: dict[str, type[Any]] = {name: instrument.config for name, instrument in INSTRUMENTS.items()}
"""Workload -> class of its cells' configs."""
_WORD_VALUES = {"true": True, "false": False, "none": None}


@cache
def flat_form(config_class: Any) -> dict[str, tuple[tuple[str, ...], dataclasses.Field[Any]]]:
    """Flat name -> path of attributes to the value, and the field with the owner's default. The model comes first."""
    form: dict[str, tuple[tuple[str, ...], dataclasses.Field[Any]]] = {}
    for field in dataclasses.fields(config_class):
        if "without" not in field.metadata:
            form[flat_name(field)] = (field.name,), field
            continue
        inner_class: Any = field.type
        for name, (path, inner) in flat_form(inner_class).items():
            if name not in field.metadata["without"]:
                inner = copy(inner)
                inner.default = getattr(field.default, inner.name, inner.default)
                form[name] = (field.name, *path), inner
    return {"model": form["model"], **form} if "model" in form else form


def fields_of(config_class: Any) -> dict[str, dataclasses.Field[Any]]:
    """The flat fields that a user may set; where there is a model, the fields of its shape are among them."""
    fields = {name: field for name, (_, field) in flat_form(config_class).items()}
    if "model" in fields:
        shape = {field.name: field for field in dataclasses.fields(ModelConfig) if field.name != "name"}
        fields = {**fields, **shape}
    return fields


def build_config(workload: str, values: Mapping[str, Any]) -> Any:
    """The config of a built-in workload (a key of CONFIGS) from flat values.

    `model` is a size's name, package.module:function, or (numerics only) `toy`; the model's own fields stand beside it.
    """
    config_class = CONFIGS[workload]
    return build(config_class, values, where="run" if workload == "train_step" else workload)


def build(config_class: Any, values: Mapping[str, Any], *, where: str) -> Any:
    """A config of this class from flat values; `where` names it in errors about unknown fields."""
    known = fields_of(config_class)
    check_known(values, known, where)
    if "model" not in known:
        return config_class(**typed_values(config_class, values))
    toy = config_class is NumericsConfig and values.get("model") == ToyModel().name
    model, rest = _toy_and_rest(values) if toy else _model_and_rest(values)
    return _assemble(config_class, {"model": model, **typed_values(config_class, rest)})


def build_run(values: Mapping[str, Any]) -> RunConfig:
    """A RunConfig from flat values."""
    run: RunConfig = build(RunConfig, values, where="run")
    return run


def _toy_and_rest(values: Mapping[str, Any]) -> tuple[ToyModel, dict[str, Any]]:
    rest = {name: value for name, value in values.items() if name != "model"}
    fields = {field.name for field in dataclasses.fields(NumericsConfig)}
    if shape_field := next((name for name in rest if name not in fields), None):
        raise ValueError(f"{shape_field}: belongs to the built-in model; the toy has its own shape")
    return ToyModel(), rest


def _model_and_rest(values: Mapping[str, Any]) -> tuple[ModelConfig | UserModel, dict[str, Any]]:
    """The model that flat values describe, and the values that do not belong to the model."""
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
    return dataclasses.replace(size(name), **typed_values(ModelConfig, shape)) if shape else size(name), rest


def typed_values(config_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, each checked against its field's type; the second name of a choice becomes the recorded name."""
    typed, form = {}, flat_form(config_class)
    for name, value in values.items():
        _, field = form[name]
        hint: Any = field.type
        if value is None and hint is str:
            value = "none"  # a choice of that name, which the command line reads as None
        if isinstance(value, int) and not isinstance(value, bool) and hint in (float, float | None):
            value = float(value) if abs(value) < 10**300 else math.inf
        if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
            raise ValueError(f"{name}: must be {_type_words(hint)}, not {value!r}")
        typed[name] = aliases_of(field).get(value, value) if isinstance(value, str) else value
    return typed


def from_plain(config_class: type[Config], plain: Mapping[str, Any]) -> Config:
    """The config of plain values, as a record or a request between processes has them: the inverse of `to_plain`."""
    kinds: tuple[tuple[type, str], ...] = ((UserModel, "function"), (ModelConfig, "d_model"), (ToyModel, "name"))
    if isinstance(model := plain.get("model"), Mapping):
        plain = {**plain, "model": next(kind for kind, field in kinds if field in model)(**model)}
    return _assemble(config_class, plain)


def _assemble(config_class: type[Config], values: Mapping[str, Any]) -> Config:
    """A config of flat values; values of inner configs go into these."""
    kind: Any = config_class
    form = flat_form(kind)
    arguments: dict[str, Any] = {}
    inner_arguments: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        *inner, attribute = form[name][0] if name in form else (name,)
        (inner_arguments.setdefault(inner[0], {}) if inner else arguments)[attribute] = value
    for name, given in inner_arguments.items():
        field = kind.__dataclass_fields__[name]
        no_default = field.default is dataclasses.MISSING
        arguments[name] = field.type(**given) if no_default else dataclasses.replace(field.default, **given)
    return config_class(**arguments)


def to_plain(config: Any) -> dict[str, Any]:
    """A config in its flat form, as JSON values."""
    kind: Any = type(config)
    values = {name: reduce(getattr, path, config) for name, (path, _) in flat_form(kind).items()}
    return {name: vars(value).copy() if name == "model" else value for name, value in values.items()}


def given_values(config_class: Any, config: Any, *, always: Collection[str] = ()) -> dict[str, Any]:
    """Flat values from which `build` makes this config again: those that differ from the class's defaults, and `always`.

    `config` may be of a subclass, whose further fields are left out.
    """
    values: dict[str, Any] = {}
    for name, (path, field) in flat_form(config_class).items():
        value = reduce(getattr, path, config)
        if name == "model":
            values |= {"model": value.name, **_shape_of(value)}
        elif name in always or value != field.default:
            values[name] = value
    return values


def _shape_of(model: ModelConfig | UserModel) -> dict[str, Any]:
    """The fields in which a built-in model differs from the size of its name."""
    if isinstance(model, UserModel):
        return {}
    named = vars(size(model.name))
    return {name: value for name, value in vars(model).items() if value != named[name]}


ADDED_LATER: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "train_step": {"ranks": 1, "nodes": 1},
        "parallel": {"nodes": 1, "recompute_budget_gib": None},
        "memory": {"nodes": 1},
        "collective": {"nodes": 1, "level": "all", "transport": "library", "inbox_mib": 256},
    }
)
"""Workload -> the fields that its older records do not have -> their defaults."""


def config_hash(workload: str, plain: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that identify a workload and its config, whatever the order of keys.

    Fields in ADDED_LATER count only where they differ from their default: records from before have the same keys.

    ValueError names the field whose value JSON cannot represent: a NaN, an infinity, a date.
    """
    try:
        later = ADDED_LATER.get(workload, {})
        counted = {name: value for name, value in plain.items() if name not in later or later[name] != value}
        canonical = _canonical([workload, counted])
    except (TypeError, ValueError) as error:
        name = next((name for name, value in plain.items() if not _is_json(value)), "config")
        raise ValueError(f"{name}: {plain.get(name)!r} is not a value that a record can hold ({error})") from None
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
    """A word from a command line, as int, float, True, False, None or the same text."""
    if text.lower() in _WORD_VALUES:
        return _WORD_VALUES[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _type_words(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}
    return words.get(hint) or " or ".join(words.get(part, "none") for part in hint.__args__)

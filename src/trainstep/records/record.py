"""A record: what one cell was, where it ran, and what was measured or how it failed.

Records are immutable, hold raw values and name their units. `record_to_plain` and `record_from_plain` convert them to JSON values
and back; the second checks every value against its declaration.

Format 1 (2026-11): the first.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, UnionType
from typing import Any, TypeVar, get_args

from trainstep.config.instruments import INSTRUMENTS
from trainstep.config.parsing import flat_form, from_plain
from trainstep.records.amounts import Limits, limits_of, unit_in_name
from trainstep.records.facts import Fact as Fact
from trainstep.records.facts import is_a, is_number, is_type, type_words, value_words, wrong_fact
from trainstep.records.tables import wrong_table

Kind = TypeVar("Kind")

FORMAT = 1
FAILURE_KINDS = ("out_of_memory", "timeout", "crash", "import_error", "unsupported", "divergence", "node_lost")
"""`unsupported`: refused before it ran, as it always would be; this is not an error. `divergence`: replicas that should be equal
differ. `node_lost`: the cell did nothing wrong, and is measured again once the node is back."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Raw values of one quantity in the order of measurement, without the warm-ups that preceded them."""

    unit: str
    values: tuple[float, ...]
    warmups: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("values", "warmups"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a cell ran. None where something is absent (no GPU) or unknown (no git)."""

    hostname: str
    os: str
    cpu: str
    cores: int
    memory_bytes: int
    python: str
    trainstep: str
    source: str
    """Hash of the package's own files: identifies the code where git does not."""
    commit: str | None = None
    dirty: bool | None = None
    torch: str | None = None
    triton: str | None = None
    cuda: str | None = None
    """CUDA version torch was built for; None for a CPU build."""
    gpu: str | None = None
    gpu_count: int = 0
    gpu_memory_bytes: int | None = None
    driver: str | None = None

    def difference(self, other: "Environment", *fields: str) -> str | None:
        """The first of these fields that differs, as 'torch 2.11.0 against 2.13.0'; None if all are equal."""
        for name in fields:
            value, other_value = getattr(self, name), getattr(other, name)
            if value != other_value:
                return f"{name} {value} against {other_value}"
        return None


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Something that occupied memory when memory ran out."""

    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a cell failed. A failure is a result: tables and charts show it."""

    kind: str
    """One of FAILURE_KINDS."""
    phase: str
    """build, warmup, or the phase or stage that was running."""
    message: str
    """One sentence."""
    asked_bytes: int | None = None
    allocated_bytes: int | None = None
    capacity_bytes: int | None = None
    holders: tuple[Holder, ...] = ()
    """What occupied the rest, largest first."""
    last_lines: tuple[str, ...] = ()
    """The end of what the process printed."""

    def __post_init__(self) -> None:
        if self.kind not in FAILURE_KINDS:
            raise ValueError(f"kind: {self.kind!r} is not a kind of failure; known: {', '.join(FAILURE_KINDS)}")
        for name in ("holders", "last_lines"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record of one cell. `tables`: name -> columns (name -> list of values)."""

    workload: str
    key: str
    config: Mapping[str, Any]
    environment: Environment
    started_at: str
    """ISO 8601, UTC."""
    duration_s: float
    samples: Mapping[str, Samples] = field(default_factory=dict)
    facts: Mapping[str, Fact] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    prediction: Mapping[str, Any] | None = None
    """plan's prediction for the config and the GPU (plan/time/recorded.py); None on a CPU, or where there are no formulas."""
    failure: Failure | None = None
    format: int = FORMAT

    def __post_init__(self) -> None:
        for name in ("config", "samples", "facts", "tables", "prediction"):
            object.__setattr__(self, name, _freeze(getattr(self, name)))

    def fact(self, name: str, default: Any = None) -> Any:
        """The value of a fact, or the default."""
        return self.facts[name].value if name in self.facts else default


def record_to_plain(record: Record) -> dict[str, Any]:
    """A record as JSON values."""
    plain: dict[str, Any] = _thaw(record)
    return plain


def record_from_plain(plain: Mapping[str, Any]) -> Record:
    """The record of these JSON values: the inverse of `record_to_plain`.

    ValueError for another format (named), for anything that is not a record, and for a value that contradicts its declaration.
    """
    if not isinstance(plain, dict) or "format" not in plain:
        raise ValueError("not a record: it names no format")
    if plain["format"] != FORMAT:
        known = f"this trainstep knows format {FORMAT}"
        raise ValueError(f"format {plain['format']!r} of records is not known here ({known}): update trainstep")
    for name in ("config", "tables", "prediction"):
        value = plain.get(name, {})
        if not isinstance(value, dict) and (name != "prediction" or value is not None):
            raise ValueError(f"not a record: its {name} is not a mapping")
    try:
        failure = plain.get("failure")
        record = _build(
            Record,
            {
                **plain,
                "environment": _build(Environment, plain["environment"], "environment"),
                "samples": {name: _samples(value, name) for name, value in plain.get("samples", {}).items()},
                "facts": {name: _fact(value, name) for name, value in plain.get("facts", {}).items()},
                "failure": None if failure is None else _failure(failure),
            },
            "record",
        )
        _check_declared(record)
        return record
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a record: {error}") from None


def _samples(plain: Mapping[str, Any], name: str) -> Samples:
    if not all(is_number(value) for value in (*plain["values"], *plain["warmups"])):
        raise ValueError(f"not a record: its samples of {name} are not all numbers")
    samples = _build(Samples, plain, f"samples.{name}")
    limits = limits_of(samples.unit)
    for part, values in (("values", samples.values), ("warmups", samples.warmups)):
        if (place := limits.first_outside(values)) is not None:
            raise ValueError(
                f"not a record: samples.{name}.{part} cannot have {value_words(values[place])}: it must be {limits}"
            )
    return samples


def _fact(plain: Mapping[str, Any], name: str) -> Fact:
    fact = _build(Fact, plain, f"facts.{name}")
    number = isinstance(fact.value, int | float) and not isinstance(fact.value, bool)
    if (fact.unit or number) and not is_number(fact.value):
        raise ValueError(f"not a record: facts.{name}.value is not a finite number")
    return fact


def _failure(plain: Mapping[str, Any]) -> Failure:
    holders = tuple(_build(Holder, holder, "failure.holders") for holder in plain.get("holders", ()))
    lines = tuple(plain.get("last_lines", ()))
    if not all(isinstance(line, str) for line in lines):
        raise ValueError("not a record: failure.last_lines are not all text")
    return _build(Failure, {**plain, "holders": holders, "last_lines": lines}, "failure")


def _check_declared(record: Record) -> None:
    """ValueError for a fact, a table or a config field that contradicts its declaration, or that is missing from a record of a
    workload whose records always have it."""
    wrong = {f"facts.{name}": wrong_fact(name, fact.value) for name, fact in record.facts.items()}
    wrong |= {f"tables.{name}": wrong_table(record.workload, name, table) for name, table in record.tables.items()}
    for where, reason in wrong.items():
        if reason is not None:
            raise ValueError(f"not a record: {where} {reason}")
    instrument = INSTRUMENTS.get(record.workload)
    if instrument is None:
        return
    if (field := _wrong_field(record.config, instrument.config)) is not None:
        raise ValueError(f"not a record: config.{field}")
    for part in ("config",) if record.failure else ("config", "samples", "facts", "tables"):
        values = getattr(record, part)
        for name in instrument.always.get(part, ()):
            if name not in values or (part == "samples" and not values[name].values):
                raise ValueError(f"not a record: {part}.{name} is missing")
    if instrument.identity:
        _check_identity(record.config, instrument.config)


def _check_identity(config: Mapping[str, Any], kind: Any) -> None:
    """ValueError for values that the config's class refuses; fields that only a newer trainstep knows are left out."""
    known = flat_form(kind)
    try:
        from_plain(kind, {name: value for name, value in config.items() if name in known})
    except ValueError as error:
        raise ValueError(f"not a record: config.{error}") from None


def _build(kind: Callable[..., Kind], plain: Mapping[str, Any], where: str) -> Kind:
    """An object of that class. ValueError names the first field whose value does not have the declared type."""
    if not isinstance(plain, Mapping):
        raise ValueError(f"not a record: its {where} is not a mapping")
    if (wrong := _wrong_field(plain, kind)) is not None:
        raise ValueError(f"not a record: {where}.{wrong}")
    for name, limits in _amounts(kind):
        if not limits.allow(plain.get(name)):
            raise ValueError(f"not a record: {where}.{name} cannot be {value_words(plain[name])}: it must be {limits}")
    return kind(**plain)


def _wrong_field(plain: Mapping[str, Any], kind: Callable[..., Any]) -> str | None:
    """The first field whose value contradicts the class, as `context cannot be 'x': it must be a whole number`; or None."""
    for name, (hint, classes) in _declared_fields(kind).items():
        if name not in plain or is_a(plain[name], hint):
            continue
        if not classes or not isinstance(plain[name], Mapping):
            return f"{name} cannot be {value_words(plain[name])}: it must be {type_words(hint)}"
        if (wrong := next(filter(None, (_wrong_field(plain[name], inner) for inner in classes)), None)) is not None:
            return f"{name}.{wrong}"
    return None


@functools.cache
def _declared_fields(kind: Callable[..., Any]) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Field -> its type, and the dataclasses among that type's alternatives. Fields whose type cannot be checked are left out."""
    fields: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for name, (_, declared) in flat_form(kind).items():
        hint = declared.type
        alternatives = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        classes = tuple(alternative for alternative in alternatives if dataclasses.is_dataclass(alternative))
        if classes or is_type(hint):
            fields[name] = (hint, classes)
    return fields


@functools.cache
def _amounts(kind: Callable[..., Any]) -> tuple[tuple[str, Limits], ...]:
    """The fields whose names have a unit, with its limits."""
    units = {name: unit_in_name(name) for name in _declared_fields(kind)}
    return tuple((name, limits_of(unit)) for name, unit in units.items() if unit)


_SINGLE = (str, int, float, type(None))


def _freeze(value: Any) -> Any:
    if isinstance(value, _SINGLE):  # most values; to ask whether one is a mapping takes ten times as long
        return value
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise ValueError(f"the key {name!r} is not a string, but a file would return a string")
        return MappingProxyType({name: _freeze(item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(_freeze(item) for item in value)
    return value


def _thaw(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _thaw(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _thaw(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_thaw(item) for item in value]
    return value

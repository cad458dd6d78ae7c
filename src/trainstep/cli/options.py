"""The options of verbs that run something: one for each config field, so that a new field needs no new code here."""

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Group, Parameter

from trainstep.config.fields import aliases_of
from trainstep.config.model import ModelConfig
from trainstep.config.parsing import CONFIGS, fields_of
from trainstep.config.presets import size_names
from trainstep.config.run import RunConfig
from trainstep.config.text_files import check_length

if TYPE_CHECKING:
    from trainstep.config.cell import Cell
    from trainstep.measure.runner import Limits
    from trainstep.records.record import Environment

Verb = TypeVar("Verb", bound=Callable[..., Any])
EveryColumn = Annotated[
    bool,
    Parameter(
        name="--all",
        help="Show every column on a terminal and in plain text, which show few without it; other formats have them all.",
        negative=(),
        show_default=False,
    ),
]
Defaults = Mapping[str, Mapping[str, Sequence[Any]]]
"""Device -> field -> the values that a verb takes where the command line says nothing, in place of the config's default."""
_GRID = Group("What to run (commas make a grid, but of switches)", sort_key=1)
_ALL_GRID = Group("What to run (commas make a grid)", sort_key=1)
_SHAPE = Group("The built-in model's shape, over its size's", sort_key=2)
_OWN_HELP = {
    "model": f"sizes: {', '.join(size_names())}; or your own: package.module:function, installed or in this folder",
    "device": "where it runs: cpu or cuda; by default the GPU, if there is one",
}

TIMEOUT_S = 600.0
_LARGEST_LIMIT = 2e6
"""Largest limit, in seconds or GiB: 23 days. Beyond 2^31 ms the operating system's clocks overflow."""


def with_fields(config_class: type, defaults: Defaults = MappingProxyType({})) -> Callable[[Verb], Verb]:
    """Give a verb, in place of its **fields, a text option for each field of that config, and of ModelConfig where it has a model;
    help shows `defaults`."""
    return lambda verb: _with_fields(verb, config_class, defaults)


def _with_fields(verb: Verb, config_class: type, defaults: Defaults) -> Verb:
    signature = inspect.signature(verb)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    shape = ModelConfig.__dataclass_fields__ if "model" in fields_of(config_class) else {}
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                bool | None if _is_switch(field) else str | None,
                Parameter(
                    help=_help(name, field, defaults),
                    group=_SHAPE if name in shape else _GRID if issubclass(config_class, RunConfig) else _ALL_GRID,
                    show_default=False,
                    negative=(),
                ),
            ],
        )
        for name, field in fields_of(config_class).items()
    ]
    verb.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    verb.__annotations__.update({option.name: option.annotation for option in options})
    return verb


def _help(name: str, field: dataclasses.Field[Any], defaults: Defaults) -> str:
    default = _default_words(name, field, defaults)
    if name == "model" and "help" in field.metadata:
        return str(field.metadata["help"]) + default
    if name in _OWN_HELP and not any(name in fields for fields in defaults.values()):
        return _OWN_HELP[name]
    choices = field.metadata.get("choices", ())
    if _is_switch(field):
        return f"a switch: {field.metadata['help']} (in a sweep file it may be a list)"
    if field.type in (bool, "bool"):
        return f"{field.metadata['help']}: true, false{default.lower()}"
    named = "".join(f" ({alias} is another name of {choice})" for alias, choice in aliases_of(field).items())
    return str(field.metadata["help"]) + (f": {', '.join(choices)}" if choices else "") + named + default


def _is_switch(field: dataclasses.Field[Any]) -> bool:
    """Whether naming the option says all: what is on by itself must be told false."""
    return field.type in (bool, "bool") and field.default is False


def _default_words(name: str, field: dataclasses.Field[Any], defaults: Defaults) -> str:
    """` [128,512; on a GPU 1024,4096]`: what holds without the option; nothing where that is nothing."""
    own = "" if field.default in (None, dataclasses.MISSING) else str(field.default)
    on_cpu, on_gpu = (
        ",".join(map(str, defaults[device][name])) if name in defaults.get(device, {}) else own
        for device in ("cpu", "cuda")
    )
    words = on_cpu if on_cpu == on_gpu else f"{on_cpu}; on a GPU {on_gpu}"
    return f" [{words}]" if words else ""


def this_machine(device: str | None, *, instead: str = "--device cpu", forks: bool = True) -> "tuple[Environment, str]":
    """Where we are, and the device to run on: the one asked for, or the GPU if there is a usable one.

    `instead`: options that do without a GPU, for the ValueError where it cannot be used. `forks`: the process that cells are
    forked from begins to import torch meanwhile; cells of several ranks have one of their own, and a sweep may have none that fork.
    """
    from trainstep.measure.device import usable_device
    from trainstep.measure.environment import environment
    from trainstep.measure.fork_client import start_server
    from trainstep.measure.nvml import read_driver

    if forks:
        start_server()
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    driver = read_driver(visible_devices)
    here = environment(driver=driver)
    return here, usable_device(device or "auto", here, driver=driver, instead=instead)


def chosen_device(asked: str | None, grid: dict[str, list[Any]]) -> str | None:
    """The device of the command line, for which a sweep file's is dropped; else the one that the file's cells need most."""
    in_file = grid.get("device", ())
    if asked is not None:
        grid.pop("device", None)
        return asked
    return next((name for name in ("cuda", "cpu") if name in in_file), None)


def limits(
    timeout_s: float, memory_limit_gib: float | None, rounds: int | None = None, processes: int | None = None
) -> "Limits":
    """The limits of each cell's process, and how compared variants share the machine."""
    from trainstep.measure.runner import Limits

    check_positive({"timeout_s": timeout_s, "memory_limit_gib": memory_limit_gib})
    if rounds is not None and rounds < 1:
        raise ValueError(f"rounds: must be at least 1, not {rounds}")
    if processes is not None and processes < 1:
        raise ValueError(f"processes: must be at least 1, not {processes}")
    if rounds is not None and processes is not None:
        raise ValueError("processes: rounds has a process for each round; leave out one of the two")
    return Limits(
        timeout_s=timeout_s,
        memory_limit_bytes=None if memory_limit_gib is None else int(memory_limit_gib * 2**30),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        rounds=rounds,
        processes=processes,
    )


def check_file_alone(kind: str, options: Mapping[str, object]) -> None:
    """Where a file is read nothing runs: ValueError for options that only a run would heed. Not given: None or False."""
    given = next((name for name, value in options.items() if value is not None and value is not False), None)
    if given is not None:
        raise ValueError(f"from: {kind} is read, nothing runs: {given} would have no effect; leave it out")


def check_positive(limits: Mapping[str, float | None]) -> None:
    """ValueError for a limit, by its option's name, that is no positive number or too large."""
    for name, value in limits.items():
        if value is not None and not 0 < value <= _LARGEST_LIMIT:
            most = f" of at most {_LARGEST_LIMIT:,.0f}" if value > 0 else ""
            raise ValueError(f"{name}: must be a positive number{most}, not {value}")


def check_compared(bounds: "Limits", groups: "Sequence[Sequence[Cell]]") -> None:
    """Rounds or processes of variants that nobody compares would be ignored in silence."""
    for name in ("rounds", "processes"):
        if getattr(bounds, name) is not None and all(len(group) == 1 for group in groups):
            raise ValueError(
                f"{name}: no variants are compared here; leave it out, or name two or more of what is compared"
            )


def check_cells(cells: "Sequence[Cell]", *, memory_limit_gib: float | None) -> None:
    """ValueError for a text that is not there or too short, which is no cell's failure, and for a limit that no cell heeds."""
    if memory_limit_gib is not None and all(cell.config.get("device") != "cpu" for cell in cells):
        raise ValueError(
            "memory_limit_gib: limits cells on a CPU, and there are none; leave it out, or take --device cpu"
        )
    contexts: dict[str, set[int]] = {}
    for cell in cells:
        if cell.workload in CONFIGS and cell.config.get("data") not in (None, "random", "stdlib"):
            contexts.setdefault(cell.config["data"], set()).add(cell.config["context"])
    for data, asked in contexts.items():
        check_length(data, asked)

"""The options of verbs that run something: one for each config field, so that a new field needs no new code here."""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Group, Parameter

from trainstep.config.fields import described
from trainstep.config.model import ModelConfig
from trainstep.config.parsing import fields_of
from trainstep.config.presets import size_names
from trainstep.config.run import RunConfig

if TYPE_CHECKING:
    from trainstep.measure.runner import Limits
    from trainstep.records.record import Environment

Verb = TypeVar("Verb", bound=Callable[..., Any])
_GRID = Group("What to run (commas make a grid: --context 128,256)", sort_key=1)
_SHAPE = Group("The built-in model's shape, over its size's", sort_key=2)
_MODEL_HELP = f"sizes: {', '.join(size_names())}; or your own: package.module:function"


def with_run_fields(verb: Verb) -> Verb:
    """Give a verb, in place of its **fields, a text option for each field of RunConfig and ModelConfig."""
    signature = inspect.signature(verb)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    shape = ModelConfig.__dataclass_fields__
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                Parameter(help=_help(name, field), group=_SHAPE if name in shape else _GRID, show_default=False),
            ],
        )
        for name, field in fields_of(RunConfig).items()
    ]
    verb.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    verb.__annotations__.update({option.name: option.annotation for option in options})
    return verb


def _help(name: str, field: Any) -> str:
    if name == "model":
        return _MODEL_HELP
    text = str(field.metadata.get("help", described("").metadata["help"]))
    choices = field.metadata.get("choices", ())
    default = (
        ""
        if field.default in (None, inspect.Parameter.empty) or "MISSING" in repr(field.default)
        else f" [{field.default}]"
    )
    return text + (f": {', '.join(choices)}" if choices else "") + default


def this_machine(device: str | None) -> "tuple[Environment, str]":
    """Where we are, and the device to run on: the one asked for, or the GPU if there is a usable one."""
    from trainstep.measure.device import usable_device
    from trainstep.measure.environment import environment
    from trainstep.measure.nvml import read_driver

    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    driver = read_driver(visible_devices)
    here = environment(driver=driver)
    return here, usable_device(device or "auto", here, driver=driver)


def limits(timeout_s: float, memory_limit_gib: float | None) -> "Limits":
    """The limits of each cell's process."""
    from trainstep.measure.runner import Limits

    for name, value in (("timeout_s", timeout_s), ("memory_limit_gib", memory_limit_gib)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}: must be positive, not {value}")
    return Limits(
        timeout_s=timeout_s,
        memory_limit_bytes=None if memory_limit_gib is None else int(memory_limit_gib * 2**30),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def check_data(grid: Mapping[str, list[Any]]) -> None:
    """A text that is not there is bad input, not a cell that failed."""
    for data in grid.get("data", ()):
        if data not in ("random", "stdlib") and not Path(str(data)).exists():
            raise ValueError(f"data: there is no file or folder {data!r}; or take random or stdlib")

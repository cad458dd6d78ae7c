"""The config of a recorded cell, as plan's formulas take it: `ranks_config(record)`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trainstep.config.model import ModelConfig
from trainstep.config.numerics import NumericsConfig
from trainstep.config.parallel import RanksConfig
from trainstep.config.parsing import CONFIGS, from_plain
from trainstep.config.run import RunConfig
from trainstep.plan.step_memory import alone
from trainstep.records.record import Record


def ranks_config(record: Record) -> RanksConfig:
    """The config of a record as the replay takes it. ValueError for a workload without a training step."""
    return planned_config(record.workload, record.config)


def planned_config(workload: str, plain: Mapping[str, Any]) -> RanksConfig:
    """The config of a workload's cell as the replay takes it. ValueError for a workload without a training step."""
    if workload not in CONFIGS:
        raise ValueError(f"{workload}: is no workload of trainstep's own")
    config: Any = from_plain(CONFIGS[workload], plain)
    if isinstance(config, RanksConfig):
        return config
    if isinstance(config, RunConfig):
        return alone(config)
    if isinstance(config, NumericsConfig) and isinstance(config.model, ModelConfig):
        names = {field.name for field in fields(RunConfig)} & {field.name for field in fields(NumericsConfig)}
        return alone(RunConfig(**{name: getattr(config, name) for name in names}))
    raise ValueError(f"{workload}: has no training step of the built-in model")

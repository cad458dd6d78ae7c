"""Run the workload train_step in the process of a test."""

from typing import Any

import torch
from torch._dynamo.utils import compilation_time_metrics, counters

from trainstep.config.model import ModelConfig
from trainstep.config.parsing import to_plain
from trainstep.config.run import RunConfig
from trainstep.measure.harness.workload import Findings
from trainstep.measure.step.workload import WORKLOAD, TrainStepMeasurement

TINY = ModelConfig(d_model=16, d_ff=32, layers=1, heads=2, vocab_size=256)
PHASES = {
    "forward": ["forward"],
    "forward_no_grad": ["forward"],
    "forward_backward": ["forward", "backward"],
    "step": ["forward", "backward", "optimizer"],
}
"""The phases that each mode has."""


def prepare(stages: list[str] | None = None, **fields: Any) -> TrainStepMeasurement:
    given = {"model": TINY, "batch_size": 2, "context": 8, "warmups": 2, "steps": 4, **fields}
    return WORKLOAD.prepare(to_plain(RunConfig(**given)), (stages if stages is not None else []).append)


def measured(turns: tuple[int, ...] = (4,), stages: list[str] | None = None, **fields: Any) -> Findings:
    measurement = prepare(stages, **fields)
    for steps in turns:
        measurement.take(steps)
    return measurement.finish()


def lengths(findings: Findings) -> dict[str, tuple[int, int]]:
    return {name: (len(samples.values), len(samples.warmups)) for name, samples in findings.samples.items()}


def values_of(findings: Findings) -> dict[str, Any]:
    return {name: fact.value for name, fact in findings.facts.items()}


def forget_compilations() -> None:
    """Forget compiled code and counters, as at the start of a cell's own process."""
    torch._dynamo.reset()
    counters.clear()
    compilation_time_metrics.clear()

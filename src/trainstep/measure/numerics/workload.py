"""The workload `numerics` measures what a precision does to a model's numbers, beside what its step costs.

The step is timed as `train_step` times it, and the record holds what such a record holds. Then the numbers are inspected once:

facts   error_logits error_loss error_gradient_median error_gradient_max [ratio] against `reference` (fp64 or fp32)
        gradient_scale: what the loss was multiplied by; settled_scale: the largest that does not overflow (fp16_autocast)
        no_effect: why autocast changed nothing, if it did not
tables  dtypes (by module), gradients (error by parameter), accumulation, reductions, ranges (fp16_autocast)
"""

import gc
from collections.abc import Mapping
from typing import Any

import torch

from trainstep.config.numerics import NumericsConfig
from trainstep.config.parsing import from_plain
from trainstep.measure.harness.workload import Findings, Stage
from trainstep.measure.numerics.dtypes import (
    DtypeWatch,
    ModuleDtypes,
    accumulation_table,
    dtype_words,
    folded,
    reductions_table,
    watch_dtypes,
    why_no_effect,
)
from trainstep.measure.numerics.errors import (
    START_SCALE,
    error_facts,
    gradient_table,
    largest_finite_scale,
    precise_pass,
    range_table,
    reference_of,
)
from trainstep.measure.numerics.passes import Pass
from trainstep.measure.step.workload import TrainStepMeasurement, prepare_step
from trainstep.records.facts import Fact, facts_of

Columns = dict[str, list[Any]]


class NumericsWorkload:
    shares_worker = False  # the mode of fp32 matmuls belongs to the process

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "NumericsMeasurement":
        """Build the step and run its warm-ups."""
        numerics = from_plain(NumericsConfig, config)
        return NumericsMeasurement(numerics, stage, prepare_step(numerics.run(), stage))


WORKLOAD = NumericsWorkload()


class NumericsMeasurement:
    """Times a step, and inspects its numbers afterwards."""

    def __init__(self, config: NumericsConfig, stage: Stage, step: TrainStepMeasurement) -> None:
        self._config = config
        self._stage = stage
        self._step = step

    def take(self, steps: int) -> None:
        self._step.take(steps)

    def settle(self) -> None:
        self._step.settle()

    def finish(self) -> Findings:
        """Return the findings of the timed step and of its numbers."""
        timed = self._step.finish()
        del self._step  # its model makes room for the reference's
        gc.collect()
        if self._config.device == "cuda":
            torch.cuda.empty_cache()
        facts, tables = self._inspect()
        return Findings(samples=timed.samples, facts={**timed.facts, **facts}, tables={**timed.tables, **tables})

    def _inspect(self) -> tuple[dict[str, Fact], dict[str, Columns]]:
        self._stage("reference")
        reference = reference_of(self._config)
        self._stage("errors")
        subject = precise_pass(self._config, reference)
        facts: dict[str, Fact] = {}
        scale = 1.0
        if self._config.precision == "fp16_autocast":
            settled = largest_finite_scale(subject)
            scale = min(START_SCALE, settled or 1.0)
            facts |= facts_of(gradient_scale=scale, settled_scale=settled)
        scaled_pass, watch = watch_dtypes(subject, scale)
        gradients = gradient_table(scaled_pass, reference, scale)
        facts |= error_facts(scaled_pass, reference, gradients)
        facts |= facts_of(no_effect=why_no_effect(subject, watch))
        self._stage("sums")
        tables = {
            "dtypes": _dtype_columns(scaled_pass, watch),
            "gradients": gradients,
            "accumulation": accumulation_table(),
            "reductions": reductions_table(reference.hidden, reference.logits),
        }
        del scaled_pass  # its gradients make room for those of the next passes
        if "settled_scale" in facts:
            self._stage("gradients")
            settled_scale = facts["settled_scale"].value
            tables["ranges"] = range_table(subject, reference.gradients, reference.output_gradients, settled_scale)
        return facts, tables


def _dtype_columns(scaled_pass: Pass, watch: DtypeWatch) -> Columns:
    """The table of dtypes: modules, then the logits, the loss and all gradients together."""
    rows = folded(watch.modules)
    rows += [
        _whole("(logits)", dtype_words([scaled_pass.logits.dtype])),
        _whole("(loss)", dtype_words([scaled_pass.loss.dtype])),
        _whole("(gradients)", dtype_words(gradient.dtype for gradient in scaled_pass.gradients.values())),
    ]
    names = ("module", "kind", "parameters", "output", "output_gradient", "gradient")
    return {name: [getattr(row, name) for row in rows] for name in names}


def _whole(name: str, dtype: str) -> ModuleDtypes:
    return ModuleDtypes(module=name, kind="", parameters="–", output=dtype, output_gradient="–", gradient="–")

"""The workload `numerics`: what a precision does to a model's numbers, beside what its step costs.

The step is timed as `train_step` times it, and the record holds what such a record holds. Then, once:

facts   error_logits error_loss error_gradient_median error_gradient_max [ratio] against `reference` (fp64 or fp32)
        gradient_scale: what the loss was multiplied by; settled_scale: the largest that does not overflow (fp16_autocast)
        no_effect: why autocast changed nothing, where it changed nothing
tables  dtypes (by module), gradients (error by parameter), accumulation, reductions, ranges (fp16_autocast)
"""

import gc
from collections.abc import Mapping
from typing import Any

import torch

from trainstep.config.numerics import NumericsConfig
from trainstep.config.parsing import from_plain
from trainstep.measure.numerics_dtypes import DtypeWatch, ModuleDtypes, dtype_words, folded, watch_dtypes, why_no_effect
from trainstep.measure.numerics_errors import Reference, error_facts, gradient_table, precise_pass, reference_of
from trainstep.measure.numerics_gradients import START_SCALE, largest_finite_scale, range_table
from trainstep.measure.numerics_passes import Pass, Subject
from trainstep.measure.numerics_reductions import accumulation_table, reductions_table
from trainstep.measure.train_step import TrainStepMeasurement, prepare_step
from trainstep.measure.workload import Findings, Stage
from trainstep.records.facts import Fact, facts_of

Columns = dict[str, list[Any]]


class NumericsWorkload:
    """Each cell in a fresh process: the mode of fp32 matmuls is the process's."""

    shares_worker = False

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "NumericsMeasurement":
        """Build the step and run its warm-ups."""
        numerics = from_plain(NumericsConfig, config)
        return NumericsMeasurement(numerics, stage, prepare_step(numerics.run(), stage))


WORKLOAD = NumericsWorkload()


class NumericsMeasurement:
    """A timed step, and afterwards a look at its numbers."""

    def __init__(self, config: NumericsConfig, stage: Stage, step: TrainStepMeasurement) -> None:
        self._config = config
        self._stage = stage
        self._step = step

    def take(self, steps: int) -> None:
        """Time this many more steps."""
        self._step.take(steps)

    def settle(self) -> None:
        """One step that is not timed."""
        self._step.settle()

    def finish(self) -> Findings:
        """Hand over the step's findings with those of the numbers; the step's model is let go first."""
        timed = self._step.finish()
        del self._step
        gc.collect()
        if self._config.device == "cuda":
            torch.cuda.empty_cache()
        facts, tables = self._look()
        return Findings(samples=timed.samples, facts={**timed.facts, **facts}, tables={**timed.tables, **tables})

    def _look(self) -> tuple[dict[str, Fact], dict[str, Columns]]:
        self._stage("reference")
        reference = reference_of(self._config)
        self._stage("errors")
        subject = precise_pass(self._config, reference)
        facts: dict[str, Fact] = {}
        scale = 1.0
        if self._config.precision == "fp16_autocast":
            settled = largest_finite_scale(subject)
            scale = min(START_SCALE, settled or 1.0)
            facts |= facts_of(gradient_scale=scale)
            facts |= facts_of(settled_scale=settled)
        found, watch = watch_dtypes(subject, scale)
        gradients = gradient_table(found, reference, scale)
        facts |= error_facts(found, reference, gradients)
        facts |= facts_of(no_effect=why_no_effect(subject, watch))
        self._stage("sums")
        tables = {
            "dtypes": _dtype_columns(found, watch),
            "gradients": gradients,
            "accumulation": accumulation_table(),
            "reductions": reductions_table(reference.hidden, reference.logits),
        }
        del found  # its gradients make room for the next ones
        if "settled_scale" in facts:
            self._stage("gradients")
            tables["ranges"] = self._ranges(subject, reference, facts["settled_scale"].value)
        return facts, tables

    def _ranges(self, subject: Subject, reference: Reference, settled: float) -> Columns:
        return range_table(subject, reference.gradients, reference.output_gradients, settled)


def _dtype_columns(found: Pass, watch: DtypeWatch) -> Columns:
    """Module by module, then the logits, the loss and all gradients together."""
    rows = folded(watch.modules)
    rows += [
        _whole("(logits)", dtype_words([found.logits.dtype])),
        _whole("(loss)", dtype_words([found.loss.dtype])),
        _whole("(gradients)", dtype_words(gradient.dtype for gradient in found.gradients.values())),
    ]
    names = ("module", "kind", "parameters", "output", "output_gradient", "gradient")
    return {name: [getattr(row, name) for row in rows] for name in names}


def _whole(name: str, dtype: str) -> ModuleDtypes:
    return ModuleDtypes(module=name, kind="", parameters="–", output=dtype, output_gradient="–", gradient="–")

"""The workload `profile`: time a step as `train_step` does, then watch a few more under torch's profiler.

A record of it holds all that one of `train_step` holds, and besides

samples  busy, profiled_step [s]: of the profiled steps, the device's busy time and the host's clock
facts    verdict (what limits the step), idle_s, kernels_s, pieces, launches, profiler_slowdown (profiled over unprofiled
         step), assigned_share, fallback_share, attention_split, trace_file; graph_replay_* where it was asked for
tables   kernels classes spans layers attention host outliers verdict alike stall: see traces/tables.py and its neighbours
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainstep.config.model import ModelConfig
from trainstep.config.parsing import config_hash, from_plain, to_plain
from trainstep.config.profile import ProfileConfig
from trainstep.measure.graph_replay import graph_replay_facts
from trainstep.measure.kept_files import kept_folder
from trainstep.measure.step_trace import keep_trace, record_steps
from trainstep.measure.temporary_folder import TemporaryFolder
from trainstep.measure.train_step import TrainStepMeasurement, prepare_step
from trainstep.measure.workload import Findings, Measurement, Stage
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Samples
from trainstep.traces.attention_split import AttentionShape
from trainstep.traces.kernel_classes import IDLE
from trainstep.traces.kineto import read_trace
from trainstep.traces.profile import Profile, profile_of
from trainstep.traces.verdict import Unprofiled

_ELEMENT_BYTES = {
    "fp32": (4, 4),
    "tf32": (4, 4),
    "bf16_autocast": (2, 4),
    "fp16_autocast": (2, 4),
    "bf16": (2, 2),
    "bf16_master": (2, 2),
}
"""Bytes of what attention's matmuls and its softmax read and write: autocast keeps softmax in fp32."""


class ProfileWorkload:
    """Each cell in a fresh process, so that none spoils the next."""

    shares_worker = False

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> Measurement:
        profile = from_plain(ProfileConfig, config)
        if profile.keep_trace is not None:
            kept_folder("keep_trace", profile.keep_trace)
        return ProfileMeasurement(profile, stage, prepare_step(profile, stage))


WORKLOAD = ProfileWorkload()


class ProfileMeasurement:
    """A timed run; what the profiler sees comes last, so that it disturbs no timed step."""

    def __init__(self, config: ProfileConfig, stage: Stage, timed: TrainStepMeasurement) -> None:
        self._config = config
        self._stage = stage
        self._timed = timed

    def take(self, steps: int) -> None:
        self._timed.take(steps)

    def settle(self) -> None:
        self._timed.settle()

    def finish(self) -> Findings:
        """The timed run's findings, and the profile beside them."""
        found = self._timed.finish()
        self._stage("profile")
        self._timed.settle()
        with TemporaryFolder() as folder:
            path = folder / "trace.json"
            self._record(1, path)  # the profiler's first start costs a second, which would fall into the first step
            kept = {} if self._config.keep_trace is None else self._keep(path, self._config.keep_trace)
            self._record(self._config.profiled_steps, path)
            profiled = profile_of(read_trace(path), shape=_attention_shape(self._config), unprofiled=_unprofiled(found))
        facts = {**found.facts, **_facts(profiled, found, self._config)}
        if self._config.graph_replay:  # last: a capture that fails may leave the device unusable
            self._stage("graph_replay")
            facts.update(graph_replay_facts(self._timed.assembly, self._timed.batches, _kernels_s(profiled)))
        facts |= kept
        samples = {
            **found.samples,
            "busy": Samples(unit="s", values=profiled.busy_s),
            "profiled_step": Samples(unit="s", values=profiled.steps_s),
        }
        return Findings(samples=samples, facts=facts, tables={**found.tables, **profiled.tables})

    def _record(self, steps: int, path: Path) -> None:
        """Steps on the last batches into a trace."""
        record_steps(self._timed.settle, steps, path, on_gpu=self._config.device == "cuda")

    def _keep(self, path: Path, folder: str) -> dict[str, Fact]:
        """Put the trace of one step into the folder asked for. ValueError if that cannot be."""
        name = f"{self._config.model.name.replace(':', '.')}-{self._config.context}-{self._config.mode}"
        name += f"-{config_hash('profile', to_plain(self._config))[:6]}"
        self._record(1, path)  # again: the first was slowed by the profiler's start
        return facts_of(trace_file=str(keep_trace(path, folder, name)))


def _facts(profiled: Profile, found: Findings, config: ProfileConfig) -> dict[str, Fact]:
    step = found.samples["step"].values
    facts = facts_of(
        verdict=profiled.verdict.kind,
        idle_s=statistics.median(profiled.idle_s),
        kernels_s=profiled.total_s,
        pieces=profiled.pieces,
        launches=profiled.launches,
        assigned_share=profiled.assigned_share,
        fallback_share=profiled.fallback_share,
        attention_split=_split_words(config, profiled),
    )
    if step:
        slowdown = statistics.median(profiled.steps_s) / statistics.median(step)
        facts |= facts_of(profiler_slowdown=slowdown)
    return {name: fact for name, fact in facts.items() if fact.value != ""}


def _kernels_s(profiled: Profile) -> dict[str, float]:
    """Phase -> seconds of its kernels and copies, a step."""
    classes, found = profiled.tables["classes"], dict[str, float]()
    for phase, kind, time_s in zip(classes["phase"], classes["class"], classes["time_s"], strict=True):
        if kind != IDLE:
            found[phase] = found.get(phase, 0.0) + time_s
    return found


def _split_words(config: ProfileConfig, profiled: Profile) -> str:
    """Why softmax and matmuls of attention do not stand apart, or nothing where they do."""
    if profiled.compiled:
        return "Softmax and the matmuls of attention are told apart in eager mode only: compiled code fuses across their spans."
    if "attention" not in profiled.tables:
        return f"Attention {config.attention} is not written out: there is no softmax apart from the matmuls."
    return ""


def _attention_shape(config: ProfileConfig) -> AttentionShape | None:
    """Of attention that is written out, eager, and run once a step."""
    model = config.model
    recomputes = config.recompute != "none"
    if not isinstance(model, ModelConfig) or config.attention != "plain" or config.compile != "none" or recomputes:
        return None
    matmul_bytes, softmax_bytes = _ELEMENT_BYTES[config.precision]
    return AttentionShape(
        batch_heads=config.batch_size * model.heads * model.layers * config.accumulation,
        positions=config.context,
        head_dim=model.head_dim,
        matmul_element_bytes=matmul_bytes,
        softmax_element_bytes=softmax_bytes,
    )


def _unprofiled(found: Findings) -> Unprofiled:
    medians = {name: statistics.median(samples.values) for name, samples in found.samples.items() if samples.values}
    return Unprofiled(step_s=medians.get("step"), enqueue_s=medians.get("enqueue"), phases=medians)

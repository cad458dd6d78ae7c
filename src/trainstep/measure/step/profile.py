"""The workload `profile`: times a step as `train_step` does, then records a few more steps with torch's profiler.

A record of this workload holds all that a record of `train_step` holds, and in addition

samples  busy, profiled_step [s]: the device's busy time and the host's time of the profiled steps
facts    verdict (what limits the step), idle_s, kernels_s, pieces, launches, profiler_slowdown (profiled over unprofiled
         step), assigned_share, fallback_share, attention_split, trace_file; graph_replay_* if the config asks for it
tables   kernels classes spans layers attention host outliers verdict alike stall replay: see traces/tables.py and its neighbours

[Note: captured steps]
With `capture` the profiled steps are replays, whose kernels come from one launch. One more step runs eagerly under the
profiler, and each kernel of a replay is placed where the same one of that step belongs (traces/attribution.py). The table
`replay` compares both, phase by phase; the fact replayed_share is the share of device time that has a counterpart, and
replay_idle_share the share that is idle from a replay's first kernel to its last.

[Note: graph replay]
A CUDA graph replays a step's kernels without any work of the host between them. This checks the profile of a launch-bound
step: the sum of its kernels' times should be the time of a replay. The capture follows PyTorch's rules
(docs.pytorch.org/docs/stable/notes/cuda.html, CUDA graphs): warm-ups on a side stream; the same input tensors at every
replay; gradients set to none before the capture, so that backward allocates them in the graph's own memory; nothing that
makes the host wait. So the only optimizer that is captured is the fused AdamW without loss scaling: scaling asks the device
whether the gradients are finite, and AdamW's other implementations run other kernels in a graph than outside.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainstep.config.model import ModelConfig
from trainstep.config.parsing import config_hash, from_plain, to_plain
from trainstep.config.profile import ProfileConfig
from trainstep.config.run import Phase, RunConfig
from trainstep.measure.harness.failures import failure_of
from trainstep.measure.harness.files import TemporaryFolder, kept_folder
from trainstep.measure.harness.workload import Findings, Measurement, Stage
from trainstep.measure.step.device_trace import keep_trace, record_steps
from trainstep.measure.step.workload import TrainStepMeasurement, prepare_step
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Samples
from trainstep.traces.kernel_classes import IDLE
from trainstep.traces.kineto import Trace, read_trace
from trainstep.traces.profile import Profile, profile_of
from trainstep.traces.tables import AttentionShape
from trainstep.traces.verdict import Unprofiled
from trainstep.training.batches import Batch
from trainstep.training.build import Assembly
from trainstep.training.step import TrainStep

_ELEMENT_BYTES = {
    "fp32": (4, 4),
    "tf32": (4, 4),
    "bf16_autocast": (2, 4),
    "fp16_autocast": (2, 4),
    "bf16": (2, 2),
    "bf16_master": (2, 2),
}
"""Bytes per element that attention's matmuls and its softmax read and write: autocast keeps softmax in fp32."""
_WARMUPS, _REPLAYS = 3, 20
_PHASES = {
    "forward": (Phase.FORWARD,),
    "forward_no_grad": (Phase.FORWARD,),
    "forward_backward": (Phase.FORWARD, Phase.BACKWARD),
    "step": (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER),
}


class ProfileWorkload:
    """Profiles training steps; each cell has a fresh process, so that no cell disturbs the next."""

    shares_worker = False

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> Measurement:
        profile = from_plain(ProfileConfig, config)
        if profile.keep_trace is not None:
            kept_folder("keep_trace", profile.keep_trace)
        return ProfileMeasurement(profile, stage, prepare_step(profile, stage))


WORKLOAD = ProfileWorkload()


class ProfileMeasurement:
    """A timed run; the profiler starts after it, so that no timed step is slowed."""

    def __init__(self, config: ProfileConfig, stage: Stage, timed: TrainStepMeasurement) -> None:
        self._config = config
        self._stage = stage
        self._timed = timed

    def take(self, steps: int) -> None:
        self._timed.take(steps)

    def settle(self) -> None:
        self._timed.settle()

    def finish(self) -> Findings:
        """The timed run's findings together with the profile."""
        timed = self._timed.finish()
        self._stage("profile")
        self._timed.settle()
        captured = self._timed.assembly.captured is not None
        with TemporaryFolder() as folder:
            path = folder / "trace.json"
            self._record(1, path)  # the profiler's first start takes a second, which would fall into the first step
            eager = self._eager(folder / "eager.json") if captured else None
            trace_facts = {} if self._config.keep_trace is None else self._keep(path, self._config.keep_trace)
            self._record(self._config.profiled_steps, path)
            shape, unprofiled = _attention_shape(self._config), _unprofiled(timed)
            profiled = profile_of(read_trace(path), shape=shape, unprofiled=unprofiled, eager=eager)
        facts = {**timed.facts, **_facts(profiled, timed, self._config)}
        if self._config.graph_replay:  # last, because a capture that fails may leave the device unusable
            self._stage("graph_replay")
            facts.update(graph_replay_facts(self._timed.assembly, self._timed.batches, _kernels_s(profiled)))
        facts |= trace_facts
        samples = {
            **timed.samples,
            "busy": Samples(unit="s", values=profiled.busy_s),
            "profiled_step": Samples(unit="s", values=profiled.steps_s),
        }
        return Findings(samples=samples, facts=facts, tables={**timed.tables, **profiled.tables})

    def _record(self, steps: int, path: Path) -> None:
        record_steps(self._timed.settle, steps, path, on_gpu=self._config.device == "cuda")

    def _eager(self, path: Path) -> Trace:
        """The trace of one step that runs without its graph. [Note: captured steps]"""
        self._timed.eager_settle()  # what torch.compile or a library does once, it does here
        record_steps(self._timed.eager_settle, 1, path, on_gpu=self._config.device == "cuda")
        return read_trace(path)

    def _keep(self, path: Path, folder: str) -> dict[str, Fact]:
        """Store the trace of one step in this folder. Raises ValueError if it cannot be written."""
        name = f"{self._config.model.name.replace(':', '.')}-{self._config.context}-{self._config.mode}"
        name += f"-{config_hash('profile', to_plain(self._config))[:6]}"
        self._record(1, path)  # again, because the first trace holds the profiler's start
        return facts_of(trace_file=str(keep_trace(path, folder, name)))


def _facts(profiled: Profile, timed: Findings, config: ProfileConfig) -> dict[str, Fact]:
    step = timed.samples["step"].values
    facts = facts_of(**profiled.numbers(), attention_split=_split_words(config, profiled))
    if step:
        slowdown = statistics.median(profiled.steps_s) / statistics.median(step)
        facts |= facts_of(profiler_slowdown=slowdown)
    return {name: fact for name, fact in facts.items() if fact.value != ""}


def _kernels_s(profiled: Profile) -> dict[str, float]:
    """Phase -> seconds of its kernels and copies, per step."""
    classes, by_phase = profiled.tables["classes"], dict[str, float]()
    for phase, kind, time_s in zip(classes["phase"], classes["class"], classes["time_s"], strict=True):
        if kind != IDLE:
            by_phase[phase] = by_phase.get(phase, 0.0) + time_s
    return by_phase


def _split_words(config: ProfileConfig, profiled: Profile) -> str:
    """Why the profile does not separate softmax from attention's matmuls; empty if it does."""
    if profiled.compiled:
        return (
            "Softmax and attention's matmuls are separate only in eager mode: compiled code fuses across their spans."
        )
    if "attention" not in profiled.tables:
        return f"Attention {config.attention}: the profile has no softmax separate from the matmuls."
    return ""


def _attention_shape(config: ProfileConfig) -> AttentionShape | None:
    """The shape of attention if it is plain, eager and run once per step; else None."""
    model = config.model
    recomputes = config.recomputes
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


def _unprofiled(timed: Findings) -> Unprofiled:
    medians = {name: statistics.median(samples.values) for name, samples in timed.samples.items() if samples.values}
    return Unprofiled(step_s=medians.get("step"), enqueue_s=medians.get("enqueue"), phases=medians)


def graph_replay_facts(
    assembly: Assembly, batches: Sequence[Batch], kernels_s: dict[str, float], replays: int = _REPLAYS
) -> dict[str, Fact]:
    """Capture a step in a CUDA graph and time its replays. [Note: graph replay]

    graph_replay_s: mean seconds of a replay, which is one step. graph_replay_kernels_s: the sum of `kernels_s`, seconds by
    phase, over the same phases. graph_replay_failed: why it failed, if it did. The assembly must not be used afterwards:
    its weights have changed.
    """
    left_out = reason_without_optimizer(assembly.run)
    mode = "forward_backward" if left_out else assembly.run.mode
    try:
        replay_s = _replay_s(_capturable(assembly, mode), batches, replays)
    except Exception as error:  # noqa: BLE001  (a user's model may raise anything, and a capture more)
        return facts_of(graph_replay_failed=failure_of(error, "graph_replay").message)
    phases = [str(phase) for phase in _PHASES[mode]]
    facts = facts_of(
        graph_replay_s=replay_s,
        graph_replay_kernels_s=sum(kernels_s.get(phase, 0.0) for phase in phases),
        graph_replay_phases=", ".join(phases),
    )
    return facts | facts_of(graph_replay_left_out=left_out or None)


def reason_without_optimizer(run: RunConfig) -> str:
    """Why a graph of this run leaves out the optimizer, in a sentence; empty if it captures it or if there is none."""
    if not run.trains:
        return ""
    if run.precision == "fp16_autocast":
        return "The optimizer is left out: loss scaling waits for the device, which a graph cannot."
    if run.adamw != "fused":
        return f"The optimizer is left out: AdamW's {run.adamw} runs other kernels in a graph; use adamw fused."
    return ""


def _capturable(assembly: Assembly, mode: str) -> TrainStep:
    """The part of the step that a graph can hold."""
    step = assembly.step
    if mode == "step" and step.optimizer is not None:
        for group in step.optimizer.param_groups:
            group["capturable"] = True  # the fused AdamW already has its step count on the device
    return TrainStep(
        step.module,
        step.optimizer if mode == "step" else None,
        mode=mode,
        autocast=step.autocast,
        scaler=step.scaler,
        clip_grad_norm=step.clip_grad_norm,
    )


def _replay_s(step: TrainStep, batches: Sequence[Batch], replays: int) -> float:
    """Mean seconds of a replay, over replays that are not synchronised."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARMUPS):
            step.clear_gradients()
            step(batches)
    torch.cuda.current_stream().wait_stream(stream)
    step.clear_gradients()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(batches)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / replays

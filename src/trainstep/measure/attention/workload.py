"""The workload `attention` times one implementation's forward, backward or both on one shape, and checks its values.

A record of it holds what measure/step/lone_pass.py measures, and in addition:

facts    flops; inputs_ scores_ softmax_ lse_ output_ gradients_ needed_bytes as costs/attention.py counts them, also for a failed
         cell; error_*, has_nan, deterministic (attention/checks.py); peak_bytes above what was there before the inputs

The forward pass is a training one: it keeps what backward needs. For direction `backward`, an untimed forward precedes each timed
pass; gradients are returned, not accumulated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainstep.config.attention import AttentionConfig
from trainstep.measure.attention.checks import Tensors, accounting_words, check_values, counted_facts, random_tensors
from trainstep.measure.attention.peers import attend_named, own_settings, why_refused
from trainstep.measure.harness.failures import CellFailed, refused
from trainstep.measure.harness.workload import Stage, Stages
from trainstep.measure.step.lone_pass import (
    LonePass,
    PassCell,
    PassMeasurement,
    Times,
    device_facts,
    held_bytes,
    open_device,
    peak_facts,
)
from trainstep.measure.step.memory_watch import MemoryWatch
from trainstep.ops.flash_attention.choice import describe_choice
from trainstep.records.facts import Fact, facts_of
from trainstep.training.attention import Attention

_ON_A_CPU = {
    "trainstep": "algorithm.py (tiled PyTorch)",
    "plain": "reference.py (plain PyTorch)",
    "plain_compiled": "reference.py, compiled",
}


class AttentionWorkload:
    shares_worker = True  # only torch's caches and loaded kernels outlive a cell

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> PassMeasurement:
        """Make the inputs, run the first pass, which compiles, and the warm-ups.

        CellFailed, with the bytes that the pass needs, if the implementation refuses the case or memory runs out.
        """
        attention = AttentionConfig(**config)
        device, facts = torch.device(attention.device), counted_facts(attention)
        cell = PassCell(
            device=device,
            stages=Stages(stage),
            memory=MemoryWatch(device),
            facts=facts,
            float32_matmuls="high" if attention.fp32_precision == "tf32" else "highest",
            needed_words=accounting_words(facts),
        )
        if attention.refusal:
            raise CellFailed(refused(attention.refusal).failure, cell.facts)
        with cell.at_work():
            gpu, cold_cache = open_device(device, cold=attention.l2 == "cold")
            base_bytes = torch.cuda.memory_allocated() if gpu else 0
            timed = AttentionPass(
                config=attention,
                device=device,
                tensors=random_tensors(attention, device),
                attend=attend_named(attention),
                cold_cache=cold_cache,
            )
            warmups = cell.warm_up(timed, attention.warmups)
            cell.stages.enter(attention.direction)
        return PassMeasurement(cell, timed, warmups, gpu, lambda times: _inspect(cell, timed, base_bytes, times))


WORKLOAD = AttentionWorkload()


@dataclass(frozen=True, kw_only=True)
class AttentionPass(LonePass):
    """The pass that is timed, with its inputs."""

    config: AttentionConfig
    tensors: Tensors
    attend: Attention

    def before(self) -> Tensor | None:
        """Run the untimed part: for direction `backward` a forward pass, whose output it returns."""
        return self.attend(*self.tensors.leaves) if self.config.direction == "backward" else None

    def run(self, prepared: Tensor | None) -> tuple[Tensor, ...]:
        """Run the timed part on the output of `before`."""
        output = self.attend(*self.tensors.leaves) if prepared is None else prepared
        if self.config.direction == "forward":
            return (output,)
        return torch.autograd.grad(output, self.tensors.leaves, self.tensors.do)

    def why_refused(self, error: Exception, warned: Sequence[str]) -> str | None:
        return why_refused(self.config, error, warned)


def _inspect(cell: PassCell, timed: AttentionPass, base_bytes: int, times: Times) -> None:
    config, tensors, attend = timed.config, timed.tensors, timed.attend

    def forward() -> tuple[Tensor]:
        return (attend(*tensors.leaves),)

    cell.inspect("memory held", lambda: facts_of(held_bytes=held_bytes(tensors.leaves, forward)))
    if config.device == "cuda":  # a CPU's allocator keeps no peak
        cell.inspect("memory", lambda: peak_facts(timed, base_bytes))
    cell.inspect("values", lambda: check_values(config, tensors, attend))
    cell.inspect("device", lambda: _ran_facts(timed, times))


def _ran_facts(timed: AttentionPass, times: Times) -> dict[str, Fact]:
    """What ran: the kernels on a GPU, and which file of ours or backend of torch's on a CPU."""
    name = timed.config.implementation
    if timed.config.device == "cpu":
        return facts_of(which_ran=_ON_A_CPU.get(name, f"torch's {name} backend"))
    return device_facts(timed, times, kernels_chosen(timed.config, timed.tensors))


def kernels_chosen(config: AttentionConfig, tensors: Tensors) -> str:
    """Which of its kernels trainstep's attention chose and why; empty for other implementations."""
    if config.implementation != "trainstep":
        return ""
    by_head = {"BHSD": lambda x: x, "BSHD": lambda x: x.transpose(1, 2), "BSD": lambda x: x.unsqueeze(1)}[config.layout]
    settings = own_settings(config)
    return describe_choice(
        *map(by_head, tensors.leaves),
        backward=config.direction != "forward",
        fp32_precision=settings["fp32_precision"],
        tiles=settings["tiles"],
    )

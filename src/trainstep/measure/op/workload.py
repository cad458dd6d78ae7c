"""The workload `op` times one implementation's forward, backward or both of one op, and checks its values.

A record of it holds what measure/step/lone_pass.py measures, and in addition:

facts    flops or bytes of the pass as costs/single_op.py counts them, also for a failed cell; error_*, has_nan, deterministic
         (op/checks.py); peak_bytes above the inputs

The forward pass is a training one: it keeps what backward needs. For direction `backward`, an untimed forward precedes each timed
pass; gradients are returned, not accumulated. An update of adamw is one pass, which changes its tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainstep.config.op import OpConfig
from trainstep.costs.single_op import op_bytes, op_flops
from trainstep.measure.harness.failures import CellFailed, refused
from trainstep.measure.harness.workload import Stage, Stages
from trainstep.measure.op.checks import check_values
from trainstep.measure.op.implementations import function_of, why_refused
from trainstep.measure.op.peers import Function, installed_version
from trainstep.measure.op.tensors import Tensors, random_tensors
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
from trainstep.records.facts import Fact, facts_of
from trainstep.training.precision import DTYPES

_ON_A_CPU = {
    "trainstep": "reference.py, because our kernels run on GPUs only",
    "torch": "torch's own",
    "eager": "reference.py (plain PyTorch)",
    "compile": "reference.py, compiled",
}


class OpWorkload:
    shares_worker = True  # only torch's caches and loaded kernels outlive a cell

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> PassMeasurement:
        """Make the inputs, run the first pass, which compiles, and the warm-ups.

        CellFailed, with the bytes or FLOPs of the pass, if the implementation refuses the case or memory runs out.
        """
        op = OpConfig(**config)
        device = torch.device(op.device)
        cell = PassCell(device=device, stages=Stages(stage), memory=MemoryWatch(device), facts=_counted_facts(op))
        if op.refusal:
            raise CellFailed(refused(op.refusal).failure, cell.facts)
        with cell.at_work():
            gpu, cold_cache = open_device(device, cold=op.l2 == "cold")
            timed = OpPass(
                config=op,
                device=device,
                function=function_of(op),
                tensors=random_tensors(op, device),
                cold_cache=cold_cache,
            )
            base_bytes = torch.cuda.memory_allocated() if gpu else 0
            warmups = cell.warm_up(timed, op.warmups)
            cell.stages.enter(op.direction)
        return PassMeasurement(cell, timed, warmups, gpu, lambda times: _inspect(cell, timed, base_bytes, times))


WORKLOAD = OpWorkload()


@dataclass(frozen=True, kw_only=True)
class OpPass(LonePass):
    """The pass that is timed, with its inputs."""

    config: OpConfig
    function: Function
    tensors: Tensors

    def forward(self) -> tuple[Tensor, ...]:
        """The outputs."""
        return self.function(**self.tensors.arguments)

    def before(self) -> tuple[Tensor, ...] | None:
        """Run the untimed part: for direction `backward` a forward pass, whose outputs it returns."""
        return self.forward() if self.config.direction == "backward" else None

    def run(self, prepared: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """Run the timed part on the outputs of `before`."""
        outputs = self.forward() if prepared is None else prepared
        if self.config.direction == "forward" or not self.tensors.gradients:
            return outputs
        return torch.autograd.grad(outputs, tuple(self.tensors.leaves.values()), self.tensors.gradients)

    def why_refused(self, error: Exception, warned: Sequence[str]) -> str | None:
        return why_refused(self.config, error)


def _counted_facts(config: OpConfig) -> dict[str, Fact]:
    sizes, element_bytes = config.sizes, DTYPES[config.dtype].itemsize
    return facts_of(
        flops=op_flops(config.op, config.direction, sizes),
        bytes=op_bytes(config.op, config.direction, sizes, element_bytes),
    )


def _inspect(cell: PassCell, timed: OpPass, base_bytes: int, times: Times) -> None:
    config, tensors = timed.config, timed.tensors
    if tensors.gradients:
        inputs = list(tensors.arguments.values())
        cell.inspect("memory held", lambda: facts_of(held_bytes=held_bytes(inputs, timed.forward)))
    if config.device == "cuda":  # a CPU's allocator keeps no peak
        cell.inspect("memory", lambda: peak_facts(timed, base_bytes))
    cell.inspect("device", lambda: _ran_facts(timed, times))
    cell.inspect("values", lambda: check_values(config, timed.device, timed.function))


def _ran_facts(timed: OpPass, times: Times) -> dict[str, Fact]:
    """What ran: the kernels on a GPU with the package that has them, and which file of ours on a CPU."""
    name = timed.config.implementation
    if timed.config.device == "cpu":
        return facts_of(which_ran=_ON_A_CPU[name])
    return device_facts(timed, times, installed_version(name))

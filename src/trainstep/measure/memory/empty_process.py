"""Measures what a process takes of the GPU beside the allocator's memory, in a process of its own.

    outside = outside_bytes(run, device)      # starts `python -m trainstep.measure.memory.empty_process`, which answers on stdout

It measures first with a CUDA context and nothing else, then after a step of the same width with a single layer, which loads the
kernels and libraries that the whole model's step will use. What the allocator reserved is subtracted each time.
"""

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass

import torch

from trainstep.config.import_path import python_command
from trainstep.config.model import ModelConfig, size
from trainstep.config.parsing import from_plain, to_plain
from trainstep.config.run import RunConfig
from trainstep.training.build import build_step

_TIMEOUT_S = 180.0


@dataclass(frozen=True, kw_only=True)
class OutsideBytes:
    """Bytes of the CUDA context, and of kernels and libraries once a model is built (`build`) and a step has run (`step`)."""

    context: int
    build: int
    step: int


def outside_bytes(run: RunConfig, device: torch.device) -> OutsideBytes | None:
    """Measure in a new process on this GPU; None if the driver cannot be asked or the process fails."""
    arguments = [json.dumps(to_plain(one_layer(run))), str(device.index or 0)]
    command = python_command("trainstep.measure.memory.empty_process", *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        return OutsideBytes(**json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError, TypeError, IndexError):
        return None


def one_layer(run: RunConfig) -> RunConfig:
    """The same step with one layer, eager; a user's own model is replaced by the built-in tiny model."""
    model = dataclasses.replace(run.model if isinstance(run.model, ModelConfig) else size("tiny"), layers=1)
    return dataclasses.replace(run, model=model, compile="none", data="random")


def measure(run: RunConfig, index: int) -> OutsideBytes:
    """Measure in this process, which must not have used GPU number `index` before."""
    before = torch.cuda.device_memory_used(index)
    torch.cuda.set_device(index)  # not earlier, since it makes the context

    def outside() -> int:
        torch.cuda.synchronize()
        return torch.cuda.device_memory_used(index) - before - torch.cuda.memory_reserved()

    torch.zeros(1, device=run.device)
    context = outside()
    assembly = build_step(run)
    built = outside()
    assembly.step(assembly.micro_batches(0))
    return OutsideBytes(context=context, build=built - context, step=outside() - context)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(measure(from_plain(RunConfig, json.loads(sys.argv[1])), int(sys.argv[2])))))

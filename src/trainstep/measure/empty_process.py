"""What a process takes of the device beside the allocator's memory, measured in a process of its own.

    outside = outside_bytes(run, device)      # starts `python -m trainstep.measure.empty_process`, which answers on stdout

First with a CUDA context and nothing else; then after a step of the same width with a single layer, which loads the kernels
and libraries that the whole model's step will use. What the allocator reserved is taken off each time.
"""

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass

import torch

from trainstep.config.import_path import python_command
from trainstep.config.model import ModelConfig
from trainstep.config.parsing import from_plain, to_plain
from trainstep.config.presets import size
from trainstep.config.run import RunConfig
from trainstep.training.build import build_step

_TIMEOUT_S = 180.0


@dataclass(frozen=True, kw_only=True)
class OutsideBytes:
    """`context`: of the CUDA context. `build`, `step`: of kernels and libraries, once a model is built and a step has run."""

    context: int
    build: int
    step: int


def outside_bytes(run: RunConfig, device: torch.device) -> OutsideBytes | None:
    """Ask a new process on this GPU; None where the driver cannot be asked or the process fails."""
    asked = [json.dumps(to_plain(one_layer(run))), str(device.index or 0)]
    command = python_command("trainstep.measure.empty_process", *asked)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        return OutsideBytes(**json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError, TypeError, IndexError):
        return None


def one_layer(run: RunConfig) -> RunConfig:
    """The same step with one layer, eager; for a model of the user's, that of the built-in tiny one."""
    model = dataclasses.replace(run.model if isinstance(run.model, ModelConfig) else size("tiny"), layers=1)
    return dataclasses.replace(run, model=model, compile="none", data="random")


def measure(run: RunConfig, index: int) -> OutsideBytes:
    """In this process, which must not have used the GPU of that number before."""
    before = torch.cuda.device_memory_used(index)
    torch.cuda.set_device(index)  # only now: it makes the context

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

"""Traces a training step of any model on fake tensors: nothing is computed and no memory is taken.

    step = trace_step(run)            # run.model: the user's function, or the built-in model

The table (costs/traced_step.py) has the tensors in the order in which they come and go, and the work of every op. It is that of a
GPU, whatever this machine has, by the rules of gpu_rules.py.
"""

import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainstep.config.run import Phase, RunConfig
from trainstep.costs.traced_step import TracedStep
from trainstep.parallel.units import parameter_sizes
from trainstep.training.batches import Batch
from trainstep.training.build import build_step
from trainstep.training.gpu_rules import gpu_rules
from trainstep.training.precision import precision_named, float32_matmuls
from trainstep.training.tape import Tape

_ON_GPU_ONLY = ("sdpa_cudnn", "sdpa_efficient")


def trace_step(run: RunConfig, *, on_gpu: bool = True) -> TracedStep:
    """Trace one micro-batch's forward and backward. `on_gpu` False: as this machine's CPU would run it, for tests.

    ValueError, in one sentence, if the model cannot be traced, and ImportError if it cannot be imported.
    """
    gc.collect()  # tensors of a trace before would be freed in this one
    with ExitStack() as stack:
        stack.enter_context(float32_matmuls(torch.get_float32_matmul_precision()))
        stack.enter_context(warnings.catch_warnings())
        if on_gpu:
            stack.enter_context(gpu_rules())
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        assembly = build_step(_traced(run))
        [batch] = assembly.micro_batches(0)
        batch = _faked(batch, fake)
        tape = Tape(assembly.module, batch)

        def mark(phase: Phase) -> None:
            if phase is Phase.FORWARD:
                gc.collect()  # what is unreachable is not kept
                tape.end_forward()

        with tape:
            loss = assembly.step([batch], mark)
        tape.finish(loss)
        buffers = {id(b.untyped_storage()): b.untyped_storage().nbytes() for b in assembly.module.buffers()}
        return TracedStep(
            model=run.model.name,
            parameters=tuple(parameter_sizes(assembly.module)),
            buffers_bytes=sum(buffers.values()),
            batch_bytes=tuple(x.untyped_storage().nbytes() for x in batch.values() if isinstance(x, Tensor)),
            tensors=tape.tensors(),
            forward=tuple(tape.forward),
            backward=tuple(tape.backward),
            work=tape.work(),
        )


def _traced(run: RunConfig) -> RunConfig:
    """The run as it can be traced: eager, one micro-batch, no update."""
    return replace(
        run,
        device="cpu",
        mode=run.mode if run.mode.startswith("forward") else "forward_backward",
        precision="fp32" if run.precision == "tf32" else run.precision,
        attention="sdpa" if run.attention in _ON_GPU_ONLY else run.attention,
        compile="none",
        capture="none",
        update="after_backward",
        accumulation=1,
        clip_grad_norm=None,
    )


def _faked(batch: Batch, fake: FakeTensorMode) -> Batch:
    return {
        name: fake.from_tensor(x) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x
        for name, x in batch.items()
    }

"""Counts what a step's tensors hold on torch's fake tensors, which have shapes and storages but no memory.

Fake tensors run every operator by its description of outputs, ours with Triton kernels too, so a CPU counts what a GPU would keep.
What a kernel takes for itself inside an operator is not seen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainstep.config.run import RunConfig
from trainstep.measure.step.live_bytes import live_bytes
from trainstep.ops import linear_cross_entropy, rms_norm, rotary, swiglu
from trainstep.training.build import build_step

_WITH_KERNELS = ("trainstep.ops.linear_cross_entropy", "trainstep.ops.rms_norm", "trainstep.ops.rotary", "trainstep.ops.swiglu")


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Bytes beyond parameters, buffers and the batch."""

    kept: int
    """What forward leaves behind, besides the loss."""
    forward_peak: int
    backward_peak: int


def count(run: RunConfig) -> Counted:
    """Count one forward and backward of a run on a CPU, without its optimizer."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        assembly = build_step(run)
        [batch] = assembly.micro_batches(0)
        with live_bytes(torch.device("cpu")) as live:
            loss = assembly.step._forward(batch)
            kept, forward_peak = live.now(), live.peak()
            live.begin_peak()
            assembly.step._backward(loss, 1)
            return Counted(kept=kept - loss.nbytes, forward_peak=forward_peak, backward_peak=live.peak())

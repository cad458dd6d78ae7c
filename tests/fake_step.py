"""Counts what a step's tensors hold on torch's fake tensors, which have shapes and storages but no memory.

Fake tensors run every operator by its description of outputs, ours with Triton kernels too, so a CPU counts what a GPU would keep.
What a kernel takes for itself inside an operator is not seen.
"""

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainstep.config.run import RunConfig
from trainstep.measure.step.live_bytes import live_bytes
from trainstep.training.build import build_step

_WITH_KERNELS = ("linear_cross_entropy", "rms_norm", "rotary", "swiglu")


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Bytes beyond parameters, buffers and the batch."""

    kept: int
    """What forward leaves behind, besides the loss."""
    backward_peak: int


@contextmanager
def kernels_on_fake_tensors() -> Iterator[None]:
    """Inside, fused ops take their kernels for any tensor, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _WITH_KERNELS:  # as modules: the package has functions of the same names
            patch.setattr(importlib.import_module(f"trainstep.ops.{name}"), "has_kernel", lambda *_: True)
        yield


def count(run: RunConfig) -> Counted:
    """Count one forward and backward of a run on a CPU, without its optimizer."""
    gc.collect()  # tensors of a run before would be freed while this one is counted
    with kernels_on_fake_tensors(), FakeTensorMode(allow_non_fake_inputs=True):
        assembly = build_step(run)
        [batch] = assembly.micro_batches(0)
        with live_bytes(torch.device("cpu")) as live:
            loss = assembly.step._forward(batch)
            gc.collect()  # what is unreachable is not kept
            kept = live.now() - loss.nbytes
            live.begin_peak()
            assembly.step._backward(loss, 1)
            return Counted(kept=kept, backward_peak=live.peak())

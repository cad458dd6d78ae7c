"""One training step with named phases. Where each phase begins and ends is decided here and nowhere else."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.config.phases import Phase
from trainstep.parallel.gradient_sync import GradientSync
from trainstep.spans import span

Mark = Callable[[Phase], None]
"""Called at the end of each phase."""


def _unmarked(_phase: Phase) -> None:
    pass


class TrainStep:
    """`step(micro_batches, mark)` runs forward and backward of each micro-batch, then gradient sync, then the optimizer.

    forward    batch on the device -> loss
    backward   `loss.backward()`, hidden communication included
    grad_sync  end of backward -> last gradient ready; only with `gradient_sync`
    optimizer  unscale, clip, step, zero_grad

    `mode` (RunConfig.mode) says how far it goes; `running` is the phase at work, for whoever must say where it failed.
    The module is called as `module(**batch)` and returns a loss or an object with `.loss`. With n micro-batches each loss
    is divided by n, so gradients are those of the mean.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        mode: str = "step",
        autocast: tuple[str, torch.dtype] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        clip_grad_norm: float | None = None,
        gradient_sync: GradientSync | None = None,
    ) -> None:
        if mode == "step" and optimizer is None:
            raise ValueError("optimizer: mode step needs one")
        self.module = module
        self.optimizer = optimizer
        self.mode = mode
        self.autocast = autocast
        self.scaler = scaler
        self.clip_grad_norm = clip_grad_norm
        self.gradient_sync = gradient_sync
        self.running = Phase.FORWARD

    def __call__(self, micro_batches: Sequence[Mapping[str, Any]], mark: Mark = _unmarked) -> Tensor:
        """One step. Returns the last micro-batch's loss, detached."""
        loss = self.compute(micro_batches, mark)
        if self.mode == "step":
            self.update(mark)
        return loss

    def compute(self, micro_batches: Sequence[Mapping[str, Any]], mark: Mark = _unmarked) -> Tensor:
        """All of the step but the optimizer: its gradients are there afterwards."""
        for left, batch in zip(range(len(micro_batches) - 1, -1, -1), micro_batches, strict=True):
            with self._synchronizing(last=left == 0):
                self.running = Phase.FORWARD
                loss = self._forward(batch)
                mark(Phase.FORWARD)
                if self.mode in ("forward_backward", "step"):
                    self.running = Phase.BACKWARD
                    self._backward(loss, len(micro_batches))
                    mark(Phase.BACKWARD)
        if self.gradient_sync is not None and self.mode in ("forward_backward", "step"):
            self.running = Phase.GRAD_SYNC
            with span(Phase.GRAD_SYNC):
                self.gradient_sync.finish_gradient_synchronization()
            mark(Phase.GRAD_SYNC)
        return loss.detach()

    def update(self, mark: Mark = _unmarked) -> None:
        """The optimizer's part: unscale, clip, step, zero_grad."""
        self.running = Phase.OPTIMIZER
        self._optimizer_step()
        mark(Phase.OPTIMIZER)

    def clear_gradients(self) -> None:
        """Drop the gradients a forward_backward step leaves behind, so that the next does not add to them."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def _forward(self, batch: Mapping[str, Any]) -> Tensor:
        with span(Phase.FORWARD), self._gradients(), self._autocast():
            output = self.module(**batch)
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(output).__name__
            raise ValueError(f"model: its forward must return a scalar loss or an object with .loss, not {got}")
        return loss

    def _backward(self, loss: Tensor, micro_batches: int) -> None:
        with span(Phase.BACKWARD):
            scaled = loss / micro_batches if micro_batches > 1 else loss
            if self.scaler is not None:
                scaled = self.scaler.scale(scaled)
            scaled.backward()

    def _optimizer_step(self) -> None:
        assert self.optimizer is not None
        with span(Phase.OPTIMIZER):
            if self.clip_grad_norm is not None:
                if self.scaler is not None:
                    self.scaler.unscale_(self.optimizer)
                self._clip(self.clip_grad_norm)
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def _clip(self, max_norm: float) -> None:
        if self.gradient_sync is not None:
            self.gradient_sync.clip_grad_norm_(max_norm)
        else:
            nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def _synchronizing(self, *, last: bool) -> AbstractContextManager[None]:
        """Gradients of all micro-batches but the last only add up."""
        return nullcontext() if last or self.gradient_sync is None else self.gradient_sync.no_sync()

    def _gradients(self) -> AbstractContextManager[Any]:
        return torch.no_grad() if self.mode == "forward_no_grad" else nullcontext()

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.autocast[0], dtype=self.autocast[1]) if self.autocast else nullcontext()

"""One training step with named phases; this file alone decides where each phase begins and ends."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.config.run import Phase
from trainstep.parallel.gradient_sync import GradientSync
from trainstep.spans import span
from trainstep.training.update_in_backward import UpdateInBackward

Mark = Callable[[Phase], None]
"""Called at the end of each phase."""


def _unmarked(_phase: Phase) -> None:
    pass


class TrainStep:
    """Runs forward and backward of each micro-batch, then gradient sync, then the optimizer: `step(micro_batches, mark)`.

    forward    batch on the device -> loss
    backward   `loss.backward()`, with the communication that it hides
    grad_sync  end of backward -> last gradient ready; only with `gradient_sync`
    optimizer  unscale, clip, step, zero_grad

    With `in_backward` backward, and grad_sync between two messages, also hold the updates of parameters whose gradients are final,
    and the phase optimizer only what is left of the update.

    `mode` (RunConfig.mode) says how far a step goes: forward_no_grad and forward end after forward, forward_backward after
    grad_sync, step after the optimizer. `running` is the current phase, which an error report names.
    The module is called as `module(**batch)` and returns a loss or an object with `.loss`. With n micro-batches each loss
    is divided by n, so the gradients are those of the mean loss.
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
        in_backward: UpdateInBackward | None = None,
    ) -> None:
        if mode == "step" and optimizer is None:
            raise ValueError("optimizer: mode step needs an optimizer")
        if in_backward is not None and (mode != "step" or scaler is not None or clip_grad_norm is not None):
            raise ValueError("in_backward: an update in backward is for mode step without clipping and loss scaling")
        self.module = module
        self.optimizer = optimizer
        self.mode = mode
        self.autocast = autocast
        self.scaler = scaler
        self.clip_grad_norm = clip_grad_norm
        self.gradient_sync = gradient_sync
        self.in_backward = in_backward
        self.running = Phase.FORWARD

    def __call__(self, micro_batches: Sequence[Mapping[str, Any]], mark: Mark = _unmarked) -> Tensor:
        """Run one step. Returns the last micro-batch's loss, detached."""
        loss = self.compute(micro_batches, mark)
        if self.mode == "step":
            self.update(mark)
        return loss

    def compute(self, micro_batches: Sequence[Mapping[str, Any]], mark: Mark = _unmarked) -> Tensor:
        """Run the step without the optimizer and leave the gradients. Returns the last micro-batch's loss, detached.

        With `in_backward` only what `update` still has to do has gradients. ValueError then for several micro-batches, unless it
        updates by bucket.
        """
        if self.in_backward is None:
            return self._compute(micro_batches, mark)
        if len(micro_batches) > 1 and not self.in_backward.by_bucket:
            raise ValueError("micro_batches: gradients of several add up first; with in_backward give one")
        with self.in_backward.running():
            return self._compute(micro_batches, mark)

    def _compute(self, micro_batches: Sequence[Mapping[str, Any]], mark: Mark) -> Tensor:
        for number, batch in enumerate(micro_batches, start=1):
            is_last = number == len(micro_batches)
            with self._synchronizing(last=is_last):
                self.running = Phase.FORWARD
                loss = self._forward(batch)
                mark(Phase.FORWARD)
                if self._runs_backward:
                    self.running = Phase.BACKWARD
                    self._backward(loss, len(micro_batches))
                    mark(Phase.BACKWARD)
        if self.gradient_sync is not None and self._runs_backward:
            self.running = Phase.GRAD_SYNC
            with span(Phase.GRAD_SYNC):
                self.gradient_sync.finish_gradient_synchronization()
            mark(Phase.GRAD_SYNC)
        return loss.detach()

    def update(self, mark: Mark = _unmarked) -> None:
        """Run the phase `optimizer`: unscale, clip, step, zero_grad."""
        assert self.optimizer is not None
        self.running = Phase.OPTIMIZER
        with span(Phase.OPTIMIZER):
            if self.clip_grad_norm is not None:
                if self.scaler is not None:
                    self.scaler.unscale_(self.optimizer)
                if self.gradient_sync is not None:
                    self.gradient_sync.clip_grad_norm_(self.clip_grad_norm)
                else:
                    nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad_norm)
            if self.in_backward is not None:
                self.in_backward.finish()
            elif self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        mark(Phase.OPTIMIZER)

    def clear_gradients(self) -> None:
        """Drop the gradients of a forward_backward step, so that the next step does not add to them."""
        for parameter in self.module.parameters():
            parameter.grad = None

    @property
    def _runs_backward(self) -> bool:
        return self.mode in ("forward_backward", "step")

    def _synchronizing(self, *, last: bool) -> AbstractContextManager[None]:
        """Inside, gradients are synchronised in the last micro-batch; before it they only add up on this rank."""
        if last or self.gradient_sync is None:
            return nullcontext()
        return self.gradient_sync.no_sync()

    def _forward(self, batch: Mapping[str, Any]) -> Tensor:
        no_grad: AbstractContextManager[Any] = torch.no_grad() if self.mode == "forward_no_grad" else nullcontext()
        autocast: AbstractContextManager[Any] = (
            torch.autocast(self.autocast[0], dtype=self.autocast[1]) if self.autocast else nullcontext()
        )
        with span(Phase.FORWARD), no_grad, autocast:
            output = self.module(**batch)
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            actual = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(output).__name__
            raise ValueError(f"model: its forward must return a scalar loss or an object with .loss, not {actual}")
        return loss

    def _backward(self, loss: Tensor, micro_batches: int) -> None:
        with span(Phase.BACKWARD):
            scaled = loss / micro_batches if micro_batches > 1 else loss
            if self.scaler is not None:
                scaled = self.scaler.scale(scaled)
            scaled.backward()

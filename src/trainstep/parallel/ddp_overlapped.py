"""Data parallel with each gradient sent as soon as it is ready, while backward goes on.

As many messages as NaiveDDP, but hidden behind backward as far as the link keeps up. Gradients are averaged where they are: no
copy, no buffer. A message costs the host more than a kernel's launch, so a small model waits for its host: then
BucketedDDP is better.
"""

import torch
from torch import Tensor, nn

from trainstep.parallel.collectives import Pending
from trainstep.parallel.gradient_sync import HeldTensors, ReplicatedGradients, sent_twice
from trainstep.parallel.launch_order import LaunchOrder
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.usage import Usage


class OverlappedDDP(ReplicatedGradients):
    """`reduce_dtype`: as in NaiveDDP.

    Gradients go out in one order, the reverse of the module's: one that is ready waits until those before it are sent.
    [Note: the same messages on every rank]
    """

    def __init__(
        self, module: nn.Module, ranks: Ranks | None = None, *, reduce_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(module, ranks, options={"reduce_dtype": reduce_dtype})
        self._reduce_dtype = reduce_dtype
        self._usage = Usage(self.collectives)
        self._order = LaunchOrder([[index] for index in reversed(range(len(self.trained_parameters)))])
        self._sent: list[tuple[Tensor, Tensor, Pending]] = []
        """Gradients, what was sent of them, and what to wait for."""

    def held_tensors(self) -> HeldTensors:
        """Flags; during backward gradients on their way, and what they were cast to."""
        return HeldTensors(
            gradients=[gradient for gradient, _, _ in self._sent],
            staging=[sent for _, sent, _ in self._sent],
            flags=[self._usage.flags],
        )

    def _gradient_ready(self, index: int) -> None:
        turns = self._order.ready(index)
        if turns is None:
            raise sent_twice(self.names[index])
        for turn in turns:
            self._send(len(self.trained_parameters) - 1 - turn)

    def _send(self, index: int) -> None:
        parameter, name = self.trained_parameters[index], self.names[index]
        gradient = self._gradients([index])[0]
        self._used[index] = gradient is not None
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter)
        sent = gradient if self._reduce_dtype is None else gradient.to(self._reduce_dtype)
        self._sent.append((gradient, sent, self.collectives.all_reduce(sent, reduction="average", label=name)))

    def _finish(self) -> None:
        for turn in self._order.rest():
            self._send(len(self.trained_parameters) - 1 - turn)
        self._usage.send(self._used)
        for gradient, sent, pending in self._sent:
            pending.wait()
            if sent is not gradient:
                gradient.copy_(sent)
        for index in self._usage.unused_everywhere(self._used):
            self.trained_parameters[index].grad = None
        self._sent = []

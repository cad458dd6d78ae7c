"""Data parallel with each gradient sent as soon as it is ready, while backward goes on.

As many messages as NaiveDDP, but hidden behind backward as far as the link keeps up. Gradients are averaged where they are: no
copy, no buffer. A message costs the host more than a kernel's launch, so a small model waits for its host: then
BucketedDDP is better.
"""

import torch
from torch import Tensor, nn

from trainstep.parallel.collectives import Pending
from trainstep.parallel.gradient_sync import ReplicatedGradients, sent_twice
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
        super().__init__(module, ranks)
        self._reduce_dtype = reduce_dtype
        self._usage = Usage(self.collectives, len(self.parameters))
        self._order = LaunchOrder([[index] for index in reversed(range(len(self.parameters)))])
        self._sent: list[tuple[int, Tensor, Pending]] = []

    def _gradient_ready(self, index: int) -> None:
        turns = self._order.ready(index)
        if turns is None:
            raise sent_twice(self.names[index])
        for turn in turns:
            self._send(len(self.parameters) - 1 - turn)

    def _send(self, index: int) -> None:
        parameter = self.parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        sent = parameter.grad.to(self._reduce_dtype or parameter.grad.dtype)
        pending = self.collectives.all_reduce(sent, reduction="average", label=self.names[index])
        self._sent.append((index, sent, pending))

    def _finish(self) -> None:
        used = [self._was_used(index) for index in range(len(self.parameters))]
        for turn in self._order.rest():
            self._send(len(self.parameters) - 1 - turn)
        self._usage.send(used)
        for index, sent, pending in self._sent:
            pending.wait()
            gradient = self.parameters[index].grad
            if gradient is not None and sent is not gradient:
                gradient.copy_(sent)
        for index in self._usage.unused_everywhere(used):
            self.parameters[index].grad = None
        self._sent = []

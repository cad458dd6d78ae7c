"""Data parallel, the plain way: after backward, average each gradient with a message of its own, one after another.

n parameters, n messages and nothing hidden: the yardstick for the others. One more small message says who used what.
"""

import torch
from torch import nn

from trainstep.parallel.gradient_sync import ReplicatedGradients
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.usage import Usage


class NaiveDDP(ReplicatedGradients):
    """`reduce_dtype`: what gradients are sent and averaged in; by default their own, else each is copied there and back."""

    def __init__(
        self, module: nn.Module, ranks: Ranks | None = None, *, reduce_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(module, ranks)
        self._reduce_dtype = reduce_dtype
        self._usage = Usage(self.collectives, len(self.parameters))

    def _gradient_ready(self, index: int) -> None:
        """Nothing before backward is over."""

    def _finish(self) -> None:
        used = [self._was_used(index) for index in range(len(self.parameters))]
        self._usage.send(used)
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sent = parameter.grad.to(self._reduce_dtype or parameter.grad.dtype)
            self.collectives.all_reduce(sent, reduction="average", label=name).wait()
            if sent is not parameter.grad:
                parameter.grad.copy_(sent)
        for index in self._usage.unused_everywhere(used):
            self.parameters[index].grad = None

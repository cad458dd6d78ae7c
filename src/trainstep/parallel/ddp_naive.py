"""Data parallel, the plain way: after backward, average each gradient with a message of its own, one after another.

n parameters, n messages and nothing hidden: the yardstick for the others. One more small message says who used what.
"""

import torch
from torch import nn

from trainstep.parallel.gradient_sync import HeldTensors, ReplicatedGradients
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.usage import Usage


class NaiveDDP(ReplicatedGradients):
    """`reduce_dtype`: what gradients are sent and averaged in; by default their own, else each is copied there and back."""

    def __init__(
        self, module: nn.Module, ranks: Ranks | None = None, *, reduce_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(module, ranks, options={"reduce_dtype": reduce_dtype})
        self._reduce_dtype = reduce_dtype
        self._usage = Usage(self.collectives)

    def held_tensors(self) -> HeldTensors:
        """The flags."""
        return HeldTensors(flags=[self._usage.flags])

    def _gradient_ready(self, index: int) -> None:
        """Nothing before backward is over."""

    def _finish(self) -> None:
        gradients = self._gradients(range(len(self.trained_parameters)))
        used = [gradient is not None for gradient in gradients]
        self._usage.send(used)
        for name, parameter, gradient in zip(self.names, self.trained_parameters, gradients, strict=True):
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            sent = gradient.to(self._reduce_dtype or gradient.dtype)
            self.collectives.all_reduce(sent, reduction="average", label=name).wait()
            if sent is not gradient:
                gradient.copy_(sent)
        for index in self._usage.unused_everywhere(used):
            self.trained_parameters[index].grad = None

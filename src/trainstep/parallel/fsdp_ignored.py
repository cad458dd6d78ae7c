"""Parameters that FSDP leaves whole on every rank: their gradients are averaged behind the units', in a message a dtype.

Averaged gradients are equal on all ranks to the bit, so an optimizer over `module.parameters()` keeps these parameters equal as
long as it updates each from its own gradient and state alone.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from trainstep.parallel.bucket import make_buckets, plan_buckets
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.flat_buffer import made_dense


class IgnoredParameters:
    """`ignored`: modules and parameters of the module; ValueError for another. `named`: the parameters, all of them, and names."""

    def __init__(self, module: nn.Module, ignored: Sequence[nn.Module | nn.Parameter]) -> None:
        chosen: set[Tensor] = set()
        known = set(module.parameters())
        if isinstance(ignored, (nn.Module, Tensor)) or not isinstance(ignored, Iterable):
            raise ValueError(f"ignored: must list modules and parameters, not be a {type(ignored).__name__}")
        for one in ignored:
            if not isinstance(one, (nn.Module, nn.Parameter)):
                raise ValueError(f"ignored: a {type(one).__name__} is neither a module nor a parameter")
            own = set(one.parameters()) if isinstance(one, nn.Module) else {one}
            if not own <= known:
                raise ValueError(f"ignored: a {type(one).__name__} is not part of the module")
            chosen |= own
        self.named = {parameter: name for name, parameter in module.named_parameters() if parameter in chosen}
        self.indices: list[int] = []
        """Of those that are trained, in FSDP's list of them."""

    def take_over(self, trained: Sequence[nn.Parameter], reduce_dtype: torch.dtype | None) -> None:
        """Make room for their gradients."""
        for parameter in self.named:
            parameter.data = made_dense(parameter.data)
        self.indices = [index for index, parameter in enumerate(trained) if parameter in self.named]
        members = [trained[index] for index in self.indices]
        self._plan = plan_buckets(members, bucket_bytes=math.inf, dtype=reduce_dtype)
        self.buckets = make_buckets("ignored", members, self._plan, dtype=reduce_dtype, keeps_dtype=True)

    def send(self, collectives: Collectives, gradients: Sequence[Tensor | None]) -> None:
        """Start averaging; `gradients` in the order of `indices`."""
        for bucket, members in zip(self.buckets, self._plan, strict=True):
            bucket.send(collectives, [gradients[member] for member in members])

    def receive(self) -> None:
        """Wait for the averages: from here on they are the parameters' gradients. Under no_grad."""
        for bucket in self.buckets:
            bucket.receive()

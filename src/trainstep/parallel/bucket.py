"""Buckets: several gradients in one flat tensor and so in one message; and FSDP's ignored parameters.

    flat   [gradient | gradient | gradient | flags]

There is one flag per parameter: whether this rank used it. Averaged like the rest, flags say whether any rank did, without another
message.

[Note: what is copied]
Autograd makes fresh gradients. Once all gradients of a bucket are ready they are copied into it, by one kernel for many, and freed;
from then on each parameter's gradient is its view of the bucket, and the average is not copied anywhere. A gradient that was
zeroed in place, not dropped, is still that view, and is not copied at all: autograd added to it where it is. Dropping gradients is
cheaper all the same: for n bytes the copy reads n and writes n, while zeroing writes n and adding reads 2 n and writes n.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from trainstep.costs import buckets
from trainstep.parallel.collectives import DONE, Collectives, Pending
from trainstep.parallel.flat_buffer import FlatBuffer, made_dense
from trainstep.parallel.launch_order import FlagReader


class Bucket:
    """Gradients of `parameters`, averaged in `dtype`.

    `keeps_dtype`: gradients of another dtype than their bucket's keep it, and the average is copied back to them; otherwise they
    become views of the bucket, in its dtype.
    """

    def __init__(
        self, name: str, parameters: Sequence[nn.Parameter], *, dtype: torch.dtype, keeps_dtype: bool = True
    ) -> None:
        self.name = name
        self.parameters = list(parameters)
        self._buffer = FlatBuffer(
            self.parameters, dtype=dtype, device=self.parameters[0].device, extra=len(self.parameters)
        )
        self._flags = self._buffer.flat[-len(self.parameters) :]
        self._copied_back = [keeps_dtype and parameter.dtype != dtype for parameter in self.parameters]
        self._back = [index for index, copied_back in enumerate(self._copied_back) if copied_back]
        self._missing: list[int] = []
        self._reader: FlagReader | None = None
        self._pending: Pending = DONE
        for parameter, copied_back in zip(self.parameters, self._copied_back, strict=True):
            if parameter.dtype != dtype and not copied_back:
                parameter.grad_dtype = None  # any dtype: autograd's gradients stay in fp32, but the average may not

    @property
    def nbytes(self) -> int:
        """Bytes of the message, flags included."""
        return self._buffer.flat.nbytes

    @property
    def flat(self) -> Tensor:
        """All gradients of the bucket, and the flags."""
        return self._buffer.flat

    @torch.no_grad()
    def send(self, collectives: Collectives, gradients: Sequence[Tensor | None]) -> None:
        """Copy in the gradients that are not in the bucket yet, zeros for None, and start averaging."""
        views = self._buffer.views
        self._missing = [index for index, gradient in enumerate(gradients) if gradient is None]
        sources: list[Tensor] = []
        destinations: list[Tensor] = []
        for parameter, gradient, view, copied_back in zip(
            self.parameters, gradients, views, self._copied_back, strict=True
        ):
            if gradient is not None and gradient is not view:
                sources.append(gradient)
                destinations.append(view)
                if not copied_back:
                    parameter.grad = view
        if sources:
            torch._foreach_copy_(destinations, sources)
        self._flags.fill_(1)
        if self._missing:
            torch._foreach_zero_([tensor for index in self._missing for tensor in (views[index], self._flags[index])])
        self._reader = self._reader or FlagReader(collectives)
        self._pending = collectives.all_reduce(self._buffer.flat, reduction="average", label=self.name)

    def receive(self) -> None:
        """Wait for the average and make it the parameters' gradients, None where no rank used the parameter. Call under no_grad."""
        self._pending.wait()
        self._pending = DONE
        unused = self._reader.unused_everywhere(self._flags, self._missing) if self._reader else []
        for index in self._missing:
            parameter, view = self.parameters[index], self._buffer.views[index]
            parameter.grad = None if index in unused else view.to(parameter.dtype) if self._copied_back[index] else view
        back = [index for index in self._back if index not in self._missing]
        if back:
            gradients = [gradient for index in back if (gradient := self.parameters[index].grad) is not None]
            torch._foreach_copy_(gradients, [self._buffer.views[index] for index in back])


def make_buckets(
    name: str,
    parameters: Sequence[nn.Parameter],
    plan: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype | None,
    keeps_dtype: bool,
) -> list[Bucket]:
    """Make the buckets of a plan, called `name 0`, `name 1`...; `dtype` None: their parameters' own."""
    return [
        Bucket(
            f"{name} {number}",
            [parameters[index] for index in indices],
            dtype=dtype or parameters[indices[0]].dtype,
            keeps_dtype=keeps_dtype,
        )
        for number, indices in enumerate(plan)
    ]


def plan_buckets(
    tensors: Sequence[Tensor],
    *,
    bucket_bytes: float | None,
    first_bucket_bytes: float | None = None,
    last_bucket_bytes: float | None = None,
    dtype: torch.dtype | None = None,
) -> list[list[int]]:
    """The indices of each bucket's tensors, in the order of the messages, as costs/buckets.py plans them.

    `bucket_bytes` None: the size that costs/buckets.py chooses. A bucket has one dtype: `dtype`, else its tensors' own.
    """
    dtypes = [dtype or tensor.dtype for tensor in tensors]
    sizes_bytes = [tensor.numel() * sent_as.itemsize for tensor, sent_as in zip(tensors, dtypes, strict=True)]
    return buckets.plan_buckets(
        sizes_bytes,
        dtypes,
        bucket_bytes=buckets.usual_bucket_bytes(sum(sizes_bytes)) if bucket_bytes is None else bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
        last_bucket_bytes=last_bucket_bytes,
    )


class IgnoredParameters:
    """Parameters that FSDP leaves whole on every rank; one message per dtype averages their gradients, after those of the units.

    Averaged gradients are equal on all ranks to the bit, so an optimizer over `module.parameters()` keeps these parameters equal as
    long as it updates each from its own gradient and state alone.

    `ignored`: modules and parameters of the module, else ValueError. `named`: all these parameters and their names.
    """

    def __init__(self, module: nn.Module, ignored: Sequence[nn.Module | nn.Parameter]) -> None:
        chosen: set[Tensor] = set()
        known = set(module.parameters())
        if isinstance(ignored, (nn.Module, Tensor)) or not isinstance(ignored, Iterable):
            raise ValueError(f"ignored: must list modules and parameters, not be a {type(ignored).__name__}")
        for entry in ignored:
            if not isinstance(entry, (nn.Module, nn.Parameter)):
                raise ValueError(f"ignored: a {type(entry).__name__} is neither a module nor a parameter")
            parameters = set(entry.parameters()) if isinstance(entry, nn.Module) else {entry}
            if not parameters <= known:
                raise ValueError(f"ignored: a {type(entry).__name__} is not part of the module")
            chosen |= parameters
        self.named = {parameter: name for name, parameter in module.named_parameters() if parameter in chosen}
        self.indices: list[int] = []
        """Indices of the trained ones in FSDP's list of trained parameters."""

    def take_over(self, trained: Sequence[nn.Parameter], reduce_dtype: torch.dtype | None) -> None:
        """Make the buckets for their gradients."""
        for parameter in self.named:
            parameter.data = made_dense(parameter.data)
        self.indices = [index for index, parameter in enumerate(trained) if parameter in self.named]
        members = [trained[index] for index in self.indices]
        self._plan = plan_buckets(members, bucket_bytes=math.inf, dtype=reduce_dtype)
        self.buckets = make_buckets("ignored", members, self._plan, dtype=reduce_dtype, keeps_dtype=True)

    def send(self, collectives: Collectives, gradients: Sequence[Tensor | None]) -> None:
        """Start averaging. `gradients`: in the order of `indices`."""
        for bucket, members in zip(self.buckets, self._plan, strict=True):
            bucket.send(collectives, [gradients[member] for member in members])

    def receive(self) -> None:
        """Wait for the averages and make them the parameters' gradients. Call under no_grad."""
        for bucket in self.buckets:
            bucket.receive()

"""A bucket: several gradients that are sent and averaged as one message, in a flat tensor or each where it is.

    flat   [gradient | gradient | gradient | flags]

There is one flag per parameter: whether this rank used it. Averaged like the rest, flags say whether any rank did, without another
message.

[Note: what is copied]
Autograd makes fresh gradients. Once all gradients of a bucket are ready they are copied into it, by one kernel for many, and freed;
from then on each parameter's gradient is its view of the bucket, and the average is not copied anywhere. A gradient that was
zeroed in place, not dropped, is still that view, and is not copied at all: autograd added to it where it is. Dropping gradients is
cheaper all the same: for n bytes the copy reads n and writes n, while zeroing writes n and adding reads 2 n and writes n.

[Note: in place]
BucketInPlace copies nothing: it gives the library its gradients as a group, which NCCL sends by one kernel. So it holds no memory
but the gradients', and a GPU saves the copy's time. The host pays for each tensor of the group, and gradients must have the dtype
in which they are averaged.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from trainstep.costs import buckets
from trainstep.parallel.collectives import DONE, Pending, ShardGroups
from trainstep.parallel.copies.pieces import Pieces
from trainstep.parallel.flat_buffer import FlatBuffer, in_memory_order, lay_out
from trainstep.parallel.launch_order import FlagReader

OnAverage = Literal["next_sent", "all_sent", "arrived"]
"""When a strategy tells that a bucket's average has arrived (ddp.py)."""


class Bucket:
    """Gradients of `parameters`, averaged in `dtype`.

    `keeps_dtype`: gradients of another dtype than their bucket's keep it, and the average is copied back to them; otherwise they
    become views of the bucket, in its dtype. `parts`: into how many equal parts the flat tensor divides (collectives.py).
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[nn.Parameter],
        *,
        dtype: torch.dtype,
        keeps_dtype: bool = True,
        parts: int = 1,
    ) -> None:
        self.name = name
        self.parameters = list(parameters)
        self._buffer = FlatBuffer(
            self.parameters, dtype=dtype, device=self.parameters[0].device, parts=parts, extra=len(self.parameters)
        )
        self._flags = self._buffer.flat[-len(self.parameters) :]
        self._keeps_own_dtype = [keeps_dtype and parameter.dtype != dtype for parameter in self.parameters]
        """For each parameter, whether its gradient stays a tensor of its own, to which the average is copied back."""
        self._missing: list[int] = []
        self._reader: FlagReader | None = None
        self._pending: Pending = DONE
        for parameter, keeps_own_dtype in zip(self.parameters, self._keeps_own_dtype, strict=True):
            if parameter.dtype != dtype and not keeps_own_dtype:
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
    def send(self, groups: ShardGroups, gradients: Sequence[Tensor | None]) -> None:
        """Copy in the gradients that are not in the bucket yet, zeros for None, and start averaging."""
        self._buffer.take_memory()
        views = self._buffer.views
        self._missing = [index for index, gradient in enumerate(gradients) if gradient is None]
        sources: list[Tensor] = []
        destinations: list[Tensor] = []
        for parameter, gradient, view, keeps_own_dtype in zip(
            self.parameters, gradients, views, self._keeps_own_dtype, strict=True
        ):
            if gradient is not None and gradient is not view:
                sources.append(gradient)
                destinations.append(view)
                if not keeps_own_dtype:
                    parameter.grad = view
        if sources:
            torch._foreach_copy_(destinations, sources)
        self._flags.fill_(1)
        if self._missing:
            torch._foreach_zero_([tensor for index in self._missing for tensor in (views[index], self._flags[index])])
        # The reader is made here, because a bucket gets `groups` only with its first message.
        self._reader = self._reader or FlagReader(groups.everyone)
        self._pending = groups.all_reduce(self._buffer.flat, label=self.name)

    def receive(self) -> None:
        """Wait for the average and make it the parameters' gradients, None where no rank used the parameter. Call under no_grad."""
        self._pending.wait()
        self._pending = DONE
        unused = self._reader.unused_everywhere(self._flags, self._missing) if self._reader else []
        for index in self._missing:
            parameter, view = self.parameters[index], self._buffer.views[index]
            if index in unused:
                parameter.grad = None
            elif self._keeps_own_dtype[index]:
                parameter.grad = view.to(parameter.dtype)
            else:
                parameter.grad = view
        kept = [index for index, keeps in enumerate(self._keeps_own_dtype) if keeps and index not in self._missing]
        if kept:
            gradients = [gradient for index in kept if (gradient := self.parameters[index].grad) is not None]
            torch._foreach_copy_(gradients, [self._buffer.views[index] for index in kept])

    def release(self) -> None:
        """Free the memory until the next message. Parameters must have no gradients in it."""
        self._buffer.free_memory()


class BucketInPlace:
    """Gradients of `parameters`, which have one dtype, averaged where autograd made them. [Note: in place]"""

    def __init__(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        self.name = name
        self.parameters = list(parameters)
        self._templates = [torch.empty_like(parameter, device="meta") for parameter in self.parameters]
        layout = lay_out(self.parameters, extra=len(self.parameters))
        self._starts = [*layout.starts, layout.numel - len(self.parameters)]
        self._numel = layout.numel
        self.flat = torch.empty(len(self.parameters), dtype=self.parameters[0].dtype, device=self.parameters[0].device)
        """The flags."""
        self._missing: list[int] = []
        self._reader: FlagReader | None = None
        self._pending: Pending = DONE

    @property
    def nbytes(self) -> int:
        """Bytes of the message, flags included."""
        return self._numel * self.flat.element_size()

    @torch.no_grad()
    def send(self, groups: ShardGroups, gradients: Sequence[Tensor | None]) -> None:
        """Start averaging the gradients, zeros for None."""
        self._missing = [index for index, gradient in enumerate(gradients) if gradient is None]
        sent = []
        for parameter, template, gradient in zip(self.parameters, self._templates, gradients, strict=True):
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            elif gradient.stride() != template.stride():  # ranks must send elements in the same order
                gradient = parameter.grad = torch.empty_like(parameter).copy_(gradient)
            sent.append(in_memory_order(gradient))
        self.flat.fill_(1)
        if self._missing:
            torch._foreach_zero_([self.flat[index] for index in self._missing])
        self._reader = self._reader or FlagReader(groups.everyone)
        pieces = Pieces(tensors=[*sent, self.flat], starts=self._starts, numel=self._numel)
        self._pending = groups.everyone.all_reduce_pieces(pieces, reduction="average", label=self.name)

    def receive(self) -> None:
        """Wait for the average; gradients that no rank has become None. Call under no_grad."""
        self._pending.wait()
        self._pending = DONE
        for index in self._reader.unused_everywhere(self.flat, self._missing) if self._reader else []:
            self.parameters[index].grad = None

    def release(self) -> None:
        """Nothing is held but gradients."""


def make_buckets(
    name: str,
    parameters: Sequence[nn.Parameter],
    plan: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype | None,
    keeps_dtype: bool,
    in_place: bool = False,
    parts: int = 1,
) -> Sequence[Bucket | BucketInPlace]:
    """Make the buckets of a plan, called `name 0`, `name 1`...; `dtype` None: their parameters' own; `parts`: as in Bucket."""
    if in_place:
        return [
            BucketInPlace(f"{name} {number}", [parameters[index] for index in indices])
            for number, indices in enumerate(plan)
        ]
    return [
        Bucket(
            f"{name} {number}",
            [parameters[index] for index in indices],
            dtype=dtype or parameters[indices[0]].dtype,
            keeps_dtype=keeps_dtype,
            parts=parts,
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

"""A bucket: several gradients in one flat tensor and so in one message; and which parameters share one.

    flat   [gradient | gradient | gradient | flags]

The flags, one a parameter, say whether this rank used it; averaged like the rest they say whether any did, at no further message.

[Note: what is copied]
Autograd hands over fresh gradients. Once all of a bucket's are there they are copied into it, by one kernel for many, and freed;
from then on each parameter's gradient is its view of the bucket, and what is averaged there is not copied anywhere. A gradient
that is that view already, since it was zeroed in place and not dropped, is not copied at all: autograd added to it where it is.
Dropping is cheaper all the same: for n bytes the copy reads n and writes n, while zeroing writes n and adding reads 2 n, writes n.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainstep.costs import buckets
from trainstep.parallel.collectives import DONE, Collectives, Pending
from trainstep.parallel.flat_buffer import FlatBuffer
from trainstep.parallel.usage import FlagReader


class Bucket:
    """Gradients of `parameters`, averaged in `dtype`.

    `keeps_dtype`: gradients of another dtype than their bucket's stay as they are, and what was averaged is copied back to them;
    otherwise they become views of the bucket, in its dtype.
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
                parameter.grad_dtype = None  # any: autograd's own stay in fp32, the average need not

    @property
    def nbytes(self) -> int:
        """Of its message, flags included."""
        return self._buffer.flat.nbytes

    @property
    def flat(self) -> Tensor:
        """All of its gradients, and the flags."""
        return self._buffer.flat

    @torch.no_grad()
    def send(self, collectives: Collectives, gradients: Sequence[Tensor | None]) -> None:
        """Copy in the parameters' gradients that are not there yet, zeros for None, and start averaging."""
        views = self._buffer.views
        self._missing = [index for index, gradient in enumerate(gradients) if gradient is None]
        copied: list[Tensor] = []
        to: list[Tensor] = []
        for parameter, gradient, view, copied_back in zip(
            self.parameters, gradients, views, self._copied_back, strict=True
        ):
            if gradient is not None and gradient is not view:
                copied.append(gradient)
                to.append(view)
                if not copied_back:
                    parameter.grad = view
        if copied:
            torch._foreach_copy_(to, copied)
        self._flags.fill_(1)
        if self._missing:
            torch._foreach_zero_([part for index in self._missing for part in (views[index], self._flags[index])])
        self._reader = self._reader or FlagReader(collectives)
        self._pending = collectives.all_reduce(self._buffer.flat, reduction="average", label=self.name)

    def receive(self) -> None:
        """Wait for the average and make it the parameters' gradients; a parameter that no rank used has none. Under no_grad."""
        self._pending.wait()
        self._pending = DONE
        unused = self._reader.unused_everywhere(self._flags, self._missing) if self._reader else []
        for index in self._missing:
            parameter, view = self.parameters[index], self._buffer.views[index]
            parameter.grad = None if index in unused else view.to(parameter.dtype) if self._copied_back[index] else view
        back = [index for index in self._back if index not in self._missing]
        if back:
            gradients = [_present(self.parameters[index]) for index in back]
            torch._foreach_copy_(gradients, [self._buffer.views[index] for index in back])


def make_buckets(
    name: str,
    parameters: Sequence[nn.Parameter],
    plan: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype | None,
    keeps_dtype: bool,
) -> list[Bucket]:
    """The buckets of a plan, called `name 0`, `name 1`...; `dtype` None: their parameters' own."""
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
    """Indices of the tensors that share a bucket, in the order of their messages, as costs/buckets.py plans them.

    `bucket_bytes` None: as it chooses. A bucket has one dtype: `dtype`, else its tensors' own.
    """
    dtypes = [dtype or tensor.dtype for tensor in tensors]
    sizes_bytes = [tensor.numel() * its.itemsize for tensor, its in zip(tensors, dtypes, strict=True)]
    return buckets.plan_buckets(
        sizes_bytes,
        dtypes,
        bucket_bytes=buckets.usual_bucket_bytes(sum(sizes_bytes)) if bucket_bytes is None else bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
        last_bucket_bytes=last_bucket_bytes,
    )


def _present(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad

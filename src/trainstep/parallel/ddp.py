"""Data parallel in four strategies: they differ in the number of messages per step and in when these are sent.

For n trained parameters with G bytes of gradients:

    strategy        messages per step    sent               most memory for gradients        kept between steps
    NaiveDDP        n + 1                after backward     G                                flags
    FlatDDP         1 per dtype          after backward     2 G, when they are copied        G
    OverlappedDDP   n + 1                during backward    G                                flags
    BucketedDDP     1 per bucket         during backward    G + gradients not copied yet     G
      in_place      1 per bucket         during backward    G                                flags

NaiveDDP is the baseline for the others: nothing is hidden behind backward.
FlatDDP uses the link's full bandwidth and next to no host time, but hides nothing either.
OverlappedDDP hides its messages behind backward as far as the link keeps up, and copies nothing. A message costs the host more
than a kernel launch, so a small model waits for its host.
BucketedDDP sends fewer messages than OverlappedDDP and smaller ones than FlatDDP, so it takes the middle between the two costs.
Which bucket size is best depends on the link: `trainstep collectives` fits its latency and bandwidth.

The flags say which rank used which parameter: the last message of NaiveDDP and OverlappedDDP, and a part of each bucket.
`reduce_dtype` is the dtype that gradients are sent and averaged in, by default their own. Where it is another dtype, NaiveDDP and
OverlappedDDP cast each gradient there and back: NaiveDDP then holds one cast gradient at a time, OverlappedDDP all of them.

What calls `_send` during backward stands in gradient_sync.py: autograd runs a `_Hook` for each gradient, which calls
`HookedGradients._gradient_ready`, and that sends each message whose gradients are all there.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from trainstep.costs.buckets import bytes_of_mib
from trainstep.parallel.bucket import Bucket, BucketInPlace, OnAverage, make_buckets, plan_buckets
from trainstep.parallel.collectives import Pending
from trainstep.parallel.copies.messages import CopyEngines
from trainstep.parallel.gradient_sync import HeldTensors, ReplicatedGradients
from trainstep.parallel.launch_order import LaunchOrder, Usage
from trainstep.parallel.ranks import Ranks

# One message per gradient.


class _MessagePerGradient(ReplicatedGradients):
    """Averages each gradient where it is; one more message tells which parameters were used."""

    def __init__(
        self, module: nn.Module, ranks: Ranks | None = None, *, reduce_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(module, ranks, options={"reduce_dtype": reduce_dtype})
        self._reduce_dtype = reduce_dtype
        self._usage = Usage(self.collectives)

    def _start(self, index: int, gradient: Tensor | None) -> tuple[Tensor, Tensor, Pending]:
        """The gradient, the tensor that is sent for it, and its message."""
        parameter = self.trained_parameters[index]
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter)
        sent = gradient if self._reduce_dtype is None else gradient.to(self._reduce_dtype)
        return gradient, sent, self.collectives.all_reduce(sent, reduction="average", label=self.names[index])

    def _receive(self, gradient: Tensor, sent: Tensor, pending: Pending) -> None:
        pending.wait()
        if sent is not gradient:
            gradient.copy_(sent)

    def _drop_unused(self) -> None:
        """Set the gradients of parameters that no rank used to None, as in one process."""
        for index in self._usage.unused_everywhere(self._used):
            self.trained_parameters[index].grad = None


class NaiveDDP(_MessagePerGradient):
    """Averages the gradients after backward, one after another. `reduce_dtype`: see the module's docstring."""

    def held_tensors(self) -> HeldTensors:
        """The flags."""
        return HeldTensors(flags=[self._usage.flags])

    def _gradient_ready(self, index: int) -> None:
        """Nothing is sent before backward is over."""

    def _finish(self) -> None:
        gradients = self._gradients(range(len(self.trained_parameters)))
        self._used = [gradient is not None for gradient in gradients]
        self._usage.send(self._used)
        for index, gradient in enumerate(gradients):
            gradient, sent, pending = self._start(index, gradient)
            self._receive(gradient, sent, pending)
        self._drop_unused()


class OverlappedDDP(_MessagePerGradient):
    """Sends each gradient as soon as it is ready, while backward goes on. `reduce_dtype`: see the module's docstring.

    Gradients go out in one order, the reverse of the module's: a gradient that is ready waits until those before it are sent.
    [Note: the same messages on every rank]
    """

    def __init__(
        self, module: nn.Module, ranks: Ranks | None = None, *, reduce_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(module, ranks, reduce_dtype=reduce_dtype)
        self._order = LaunchOrder([[index] for index in reversed(range(len(self.trained_parameters)))])
        self._sent: list[tuple[Tensor, Tensor, Pending]] = []
        """The results of `_start` for each gradient that is being averaged."""

    def held_tensors(self) -> HeldTensors:
        """Flags; during backward also the gradients that are being averaged, and the tensors that they were cast to."""
        return HeldTensors(
            gradients=[gradient for gradient, _, _ in self._sent],
            staging=[sent for _, sent, _ in self._sent],
            flags=[self._usage.flags],
        )

    def _send(self, message_index: int) -> None:
        index = len(self.trained_parameters) - 1 - message_index
        gradient = self._gradients([index])[0]
        self._used[index] = gradient is not None
        self._sent.append(self._start(index, gradient))

    def _finish(self) -> None:
        for message_index in self._order.rest():
            self._send(message_index)
        self._usage.send(self._used)
        for gradient, sent, pending in self._sent:
            self._receive(gradient, sent, pending)
        self._drop_unused()
        self._sent = []


# One message per bucket (bucket.py).


class _MessagePerBucket(ReplicatedGradients):
    """Averages gradients in buckets: flat tensors, of which gradients become views where they have the buckets' dtype."""

    def _make_buckets(
        self,
        label: str,
        plan: list[list[int]],
        reduce_dtype: torch.dtype | None,
        keeps_dtype: bool,
        in_place: bool = False,
    ) -> None:
        self._plan = plan
        self._in_place = in_place
        self.buckets: Sequence[Bucket | BucketInPlace] = make_buckets(
            label,
            self.trained_parameters,
            plan,
            dtype=reduce_dtype,
            keeps_dtype=keeps_dtype,
            in_place=in_place,
            parts=self.groups.parts,
        )

    def held_tensors(self) -> HeldTensors:
        """The buckets; of those in place the flags."""
        flats = [bucket.flat for bucket in self.buckets]
        return HeldTensors(flags=flats) if self._in_place else HeldTensors(buckets=flats)

    def _send(self, message_index: int) -> None:
        self.buckets[message_index].send(self.groups, self._gradients(self._plan[message_index]))

    def _finish_buckets(
        self, unsent: Iterable[int], on_average: Callable[[Bucket | BucketInPlace], None] | None = None
    ) -> None:
        for message_index in unsent:
            self._send(message_index)
        for bucket in self.buckets:
            bucket.receive()
            if on_average is not None:
                on_average(bucket)


class FlatDDP(_MessagePerBucket):
    """Averages all gradients of a dtype at once, after backward.

    `reduce_dtype`, `keeps_gradient_dtype`, `transport`: as in BucketedDDP.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
        keeps_gradient_dtype: bool = True,
        transport: CopyEngines | None = None,
    ) -> None:
        options = {"reduce_dtype": reduce_dtype, "keeps_gradient_dtype": keeps_gradient_dtype}
        super().__init__(module, ranks, options=options, transport=transport)
        plan = plan_buckets(self.trained_parameters, bucket_bytes=math.inf, dtype=reduce_dtype)
        self._make_buckets("flat", plan, reduce_dtype, keeps_gradient_dtype)

    def _gradient_ready(self, index: int) -> None:
        """Nothing is sent before backward is over."""

    def _finish(self) -> None:
        self._finish_buckets(range(len(self.buckets)))


class BucketedDDP(_MessagePerBucket):
    """Sends gradients that become ready at about the same time in one message, while backward goes on.

    `bucket_mib`: size of a message in MiB; by default a sixteenth to a quarter of all gradients, at least 25 (costs/buckets.py);
    math.inf: one message. `first_bucket_mib`, `last_bucket_mib`: sizes of the first and the last message, if they differ.

    `bucket_cap_mb`: the name of `bucket_mib` in torch's DDP, in MiB there too. None means the default above; in torch it means 25
    after a first bucket of 1. (A bucket of torch ends with the gradient that reaches the cap, a bucket here before the gradient
    that would exceed it.)

    `reduce_dtype`: what gradients are sent and averaged in; by default their own dtype. If it differs and
    `keeps_gradient_dtype`, the average is copied back into gradients of the parameters' dtype. Without `keeps_gradient_dtype`
    gradients are views of the buckets in `reduce_dtype`: clipping here takes such gradients, and so must the optimizer
    (trainstep's AdamW does, torch's do not).

    `transport`: `CopyEngines()` copies large messages into the other GPUs' memory, where NCCL would send them by kernels
    (copies/messages.py).

    `in_place`: average a bucket's gradients where autograd made them, as one grouped message, instead of copying them into a flat
    tensor first: less memory, by all gradients, and less time on the GPU, but more on the host. ValueError with `reduce_dtype`
    or `shard_ranks`.

    `shard_ranks`: average a bucket in groups of this many consecutive ranks, usually those of a node, and only slices of it across
    groups (collectives.py): three messages, of which the one between nodes carries 1/shard_ranks of the bytes.

    Buckets go out in one order: a full bucket waits for those before it. [Note: the same messages on every rank]
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks | None = None,
        *,
        bucket_mib: float | None = None,
        first_bucket_mib: float | None = None,
        last_bucket_mib: float | None = None,
        reduce_dtype: torch.dtype | None = None,
        keeps_gradient_dtype: bool = True,
        bucket_cap_mb: float | None = None,
        transport: CopyEngines | None = None,
        in_place: bool = False,
        shard_ranks: int | None = None,
    ) -> None:
        if in_place and reduce_dtype is not None:
            raise ValueError("in_place: reduce_dtype averages gradients in a copy; leave one of the two out")
        if in_place and shard_ranks is not None:
            raise ValueError("in_place: shard_ranks averages slices of a copy; leave one of the two out")
        if bucket_cap_mb is not None:
            if bucket_mib is not None:
                raise ValueError("bucket_cap_mb: is torch's name for bucket_mib; give only one of the two")
            bytes_of_mib("bucket_cap_mb", bucket_cap_mb)  # an error names the argument that was given
            bucket_mib = bucket_cap_mb
        sizes_mib = {"bucket_mib": bucket_mib, "first_bucket_mib": first_bucket_mib, "last_bucket_mib": last_bucket_mib}
        bucket_bytes, first_bucket_bytes, last_bucket_bytes = (
            bytes_of_mib(name, size_mib) for name, size_mib in sizes_mib.items()
        )
        how = {"reduce_dtype": reduce_dtype, "keeps_gradient_dtype": keeps_gradient_dtype, "in_place": in_place}
        super().__init__(module, ranks, options={**sizes_mib, **how}, transport=transport, shard_ranks=shard_ranks)
        plan = plan_buckets(
            self.trained_parameters,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            last_bucket_bytes=last_bucket_bytes,
            dtype=reduce_dtype,
        )
        self._make_buckets("bucket", plan, reduce_dtype, keeps_gradient_dtype, in_place)
        self._order = LaunchOrder(self._plan)
        self._on_average: Callable[[Bucket | BucketInPlace], None] | None = None
        self._when: OnAverage = "next_sent"
        self._average_stream: torch.cuda.Stream | None = None
        self._kept: list[Tensor] = []
        """Gradients that the stream of averages may still use: freed, their memory would be the step's at once."""
        self._in_flight: Bucket | BucketInPlace | None = None

    @property
    def sends_by_copies(self) -> bool:
        """Whether large messages go by copies between GPUs."""
        return self.groups.shards.sends_by_copies

    def call_on_average(
        self,
        call: Callable[[Bucket | BucketInPlace], None],
        *,
        when: OnAverage,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Call this for each bucket whose average has arrived (training/update_in_backward.py).

        It may use up the gradients and `release` the bucket. `when`:

            next_sent   once the next bucket is sent, usually during backward; not for the last bucket
            all_sent    for all buckets when all are sent, in `finish_gradient_synchronization`
            arrived     as soon as a bucket is sent, on `stream`, which waits for that bucket's message and for nothing else;
                        `finish_gradient_synchronization` lets the step wait for the stream

        ValueError for `arrived` without a stream, and for a stream without `arrived`.
        """
        if (when == "arrived") != (stream is not None):
            raise ValueError(f"stream: is needed with when='arrived', and only there; when is {when!r}")
        self._on_average, self._when, self._average_stream = call, when, stream

    def _send(self, message_index: int) -> None:
        super()._send(message_index)
        if self._on_average is None:
            return
        if self._when == "arrived":
            self._kept += [gradient for gradient in self._gradients(self._plan[message_index]) if gradient is not None]
            with torch.cuda.stream(self._average_stream), torch.no_grad():
                self.buckets[message_index].receive()
                self._on_average(self.buckets[message_index])
        elif self._when == "next_sent":
            before, self._in_flight = self._in_flight, self.buckets[message_index]
            if before is not None:
                with torch.no_grad():
                    before.receive()
                self._on_average(before)

    def _finish(self) -> None:
        if self._on_average is None or self._when == "all_sent":
            self._finish_buckets(self._order.rest(), self._on_average)
            return
        for message_index in self._order.rest():
            self._send(message_index)
        if self._average_stream is not None:
            torch.cuda.current_stream().wait_stream(self._average_stream)
            self._kept = []
        last, self._in_flight = self._in_flight, None
        if last is not None:
            last.receive()

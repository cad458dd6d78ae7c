"""Data parallel in buckets: gradients that are ready at about the same time share a message, sent while backward goes on.

Fewer messages than OverlappedDDP, so less work for the host and more of the link's bandwidth; smaller than FlatDDP's, so hidden
behind backward. What size is best depends on the link: `trainstep collectives` fits its latency and bandwidth.
"""

import torch
from torch import nn

from trainstep.costs.buckets import bytes_of_mib
from trainstep.parallel.bucket import make_buckets, plan_buckets
from trainstep.parallel.gradient_sync import HeldTensors, ReplicatedGradients, sent_twice
from trainstep.parallel.launch_order import LaunchOrder
from trainstep.parallel.ranks import Ranks


class BucketedDDP(ReplicatedGradients):
    """`bucket_mib`: of a message, by default a sixteenth to a quarter of all gradients (costs/buckets.py), at least 25; math.inf:
    one message. `first_bucket_mib`, `last_bucket_mib`: of the first and the last to be sent, if they differ.

    `bucket_cap_mb`: the same by the name that torch's DDP has for it; MiB there too. None, which in torch is 25 behind a first
    bucket of 1, is the default here. (torch's buckets end with the gradient that reaches the cap, these before one that would
    exceed it.)

    `reduce_dtype`: what gradients are sent and averaged in; by default their own. If it differs and `keeps_gradient_dtype`,
    the average is copied back into gradients of the parameters' dtype; without, gradients are views of the buckets in
    `reduce_dtype`, which the optimizer must take (trainstep's AdamW does, torch's do not) and clipping here does.

    Buckets go out in one order: one that is full waits for those before it. [Note: the same messages on every rank]
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
    ) -> None:
        if bucket_cap_mb is not None:
            if bucket_mib is not None:
                raise ValueError("bucket_cap_mb: is torch's name for bucket_mib; give one of them")
            bytes_of_mib("bucket_cap_mb", bucket_cap_mb)  # refused by the name that was given
            bucket_mib = bucket_cap_mb
        bucket_bytes = bytes_of_mib("bucket_mib", bucket_mib)
        first_bucket_bytes = bytes_of_mib("first_bucket_mib", first_bucket_mib)
        last_bucket_bytes = bytes_of_mib("last_bucket_mib", last_bucket_mib)
        options = {
            "bucket_mib": bucket_mib,
            "first_bucket_mib": first_bucket_mib,
            "last_bucket_mib": last_bucket_mib,
            "reduce_dtype": reduce_dtype,
            "keeps_gradient_dtype": keeps_gradient_dtype,
        }
        super().__init__(module, ranks, options=options)
        self._plan = plan_buckets(
            self.trained_parameters,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            last_bucket_bytes=last_bucket_bytes,
            dtype=reduce_dtype,
        )
        self.buckets = make_buckets(
            "bucket", self.trained_parameters, self._plan, dtype=reduce_dtype, keeps_dtype=keeps_gradient_dtype
        )
        self._order = LaunchOrder(self._plan)

    def held_tensors(self) -> HeldTensors:
        """The buckets; gradients are views of them where they have their dtype."""
        return HeldTensors(buckets=[bucket.flat for bucket in self.buckets])

    def _gradient_ready(self, index: int) -> None:
        turns = self._order.ready(index)
        if turns is None:
            raise sent_twice(self.names[index])
        for turn in turns:
            self._send(turn)

    def _send(self, turn: int) -> None:
        self.buckets[turn].send(self.collectives, self._gradients(self._plan[turn]))

    def _finish(self) -> None:
        for turn in self._order.rest():
            self._send(turn)
        for bucket in self.buckets:
            bucket.receive()

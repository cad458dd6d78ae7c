"""Data parallel with one message: after backward all gradients, in one flat tensor, are averaged at once (one for each dtype).

The link's full bandwidth and next to no work for the host, but nothing is hidden behind backward.
"""

import math

import torch
from torch import nn

from trainstep.parallel.bucket import make_buckets, plan_buckets
from trainstep.parallel.gradient_sync import HeldTensors, ReplicatedGradients
from trainstep.parallel.ranks import Ranks


class FlatDDP(ReplicatedGradients):
    """`reduce_dtype`, `keeps_gradient_dtype`: as in BucketedDDP."""

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
        keeps_gradient_dtype: bool = True,
    ) -> None:
        options = {"reduce_dtype": reduce_dtype, "keeps_gradient_dtype": keeps_gradient_dtype}
        super().__init__(module, ranks, options=options)
        self._plan = plan_buckets(self.trained_parameters, bucket_bytes=math.inf, dtype=reduce_dtype)
        self.buckets = make_buckets(
            "flat", self.trained_parameters, self._plan, dtype=reduce_dtype, keeps_dtype=keeps_gradient_dtype
        )

    def held_tensors(self) -> HeldTensors:
        """The buckets; gradients are views of them where they have their dtype."""
        return HeldTensors(buckets=[bucket.flat for bucket in self.buckets])

    def _gradient_ready(self, index: int) -> None:
        """Nothing before backward is over."""

    def _finish(self) -> None:
        for bucket, indices in zip(self.buckets, self._plan, strict=True):
            bucket.send(self.collectives, self._gradients(indices))
        for bucket in self.buckets:
            bucket.receive()

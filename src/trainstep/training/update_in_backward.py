"""Updates each block's parameters while backward goes on, so that all gradients never exist at once.

    update = UpdateInBackward(model, optimizer)
    with update.running():
        loss.backward()        # a block is updated, and its gradients are freed, when its last gradient is complete
    update.finish()            # what is left: parameters of blocks of which some gradient never came

Parameters around the blocks are updated one by one, so that the head's gradient does not wait for the embedding's. Under
BucketedDDP a bucket takes the place of a block: it is updated when the next bucket has been sent and its own average has arrived.

With `by_bucket` backward never waits for a message, what messages leave exposed is hidden behind the update, and all gradients
exist at once. By NCCL and gloo updates begin when all buckets are sent: each as soon as its average arrives, while later buckets
are on their way. By copies on GPUs a bucket is updated on a stream of its own, which waits for that bucket's message alone, so
usually during backward. (By NCCL that is slower; docs/decisions/0036-copies-in-step.md.)

[Note: when a parameter may change] A parameter's gradient is complete once all of its uses have been differentiated, so nothing in
the graph needs its old value any more. What uses a parameter without a gradient (`weight.detach()`) may still need it; autograd
then raises its error about an in-place change, because every update raises the version of what it writes. (Autograd does not
check what a recomputed block gives back: there such a use of a weight must stay in an update after backward.)

Updates are those of `optimizer.step()` to the bit: its groups, options and state are the same, and it steps with a part of them.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainstep.costs.exchange import ROOT
from trainstep.parallel.bucket import Bucket, BucketInPlace, OnAverage
from trainstep.parallel.gradient_sync import GradientSync
from trainstep.parallel.units import groups_by_tensor, may_step_by_unit, plan_units, step_unit
from trainstep.spans import span


@runtime_checkable
class InBuckets(Protocol):
    """A strategy that tells when a bucket's average has arrived: BucketedDDP, which a step of one process need not import."""

    buckets: Sequence[Bucket | BucketInPlace]

    @property
    def sends_by_copies(self) -> bool: ...

    def call_on_average(
        self,
        call: Callable[[Bucket | BucketInPlace], None],
        *,
        when: OnAverage,
        stream: torch.cuda.Stream | None = None,
    ) -> None: ...


class UpdateInBackward:
    """Steps `optimizer` part by part during backward. For one backward a step, without clipping and loss scaling.

    `by_bucket`: steps bucket by bucket, as averages arrive (see above); micro-batches may add up before.

    ValueError for an optimizer that cannot step with a part of its parameters (AdamW and MasterWeights can), and for a `sync` other
    than BucketedDDP, which `by_bucket` needs. RuntimeError in a backward that completes a gradient twice, as torch's reentrant
    checkpoints do for a parameter that several of them use.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        sync: GradientSync | InBuckets | None = None,
        *,
        by_bucket: bool = False,
    ) -> None:
        if not may_step_by_unit(optimizer):
            raise ValueError(
                f"optimizer: {type(optimizer).__name__} may not count its steps tensor by tensor, or has hooks on a step, so it "
                "cannot update a block alone; take trainstep's AdamW without hooks, or update after backward"
            )
        if not isinstance(sync, InBuckets) and (by_bucket or sync is not None):
            has_none = "none" if sync is None else type(sync).__name__
            raise ValueError(f"sync: {has_none} has no buckets to update; take BucketedDDP")
        self._optimizer = optimizer
        self.by_bucket = by_bucket
        self._buckets: Sequence[Bucket | BucketInPlace] = ()
        self._lock = Lock()  # autograd runs the hooks of each device in a thread of its own
        self._is_running = False
        self._group_of: dict[Tensor, int] = {}
        self._names: list[str] = []
        self._units: list[list[nn.Parameter]] = []
        self._missing: list[set[Tensor]] = []
        """For each unit the parameters whose gradients have not come in this backward."""
        if isinstance(sync, InBuckets):
            self._buckets = sync.buckets
            device = next(module.parameters()).device
            if by_bucket and sync.sends_by_copies and device.type == "cuda":
                sync.call_on_average(self._update_bucket, when="arrived", stream=torch.cuda.Stream(device))
            else:
                sync.call_on_average(self._update_bucket, when="all_sent" if by_bucket else "next_sent")
            self._release_buckets()
            return
        for plan in plan_units(module):
            members = [[parameter] for parameter in plan.parameters] if plan.name == ROOT else [[*plan.parameters]]
            if plan.parameters[0].requires_grad:
                self._names += list(plan.parameter_names) if plan.name == ROOT else [plan.name]
                self._units += members
        for number, unit in enumerate(self._units):
            for parameter in unit:
                parameter.register_post_accumulate_grad_hook(_Hook(self, number))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, a backward updates. Each parameter's gradient must be complete once."""
        self._group_of = groups_by_tensor(self._optimizer)
        self._missing = [set(unit) for unit in self._units]
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def finish(self) -> None:
        """Update the parameters that still have a gradient. Call it when gradients are synchronised."""
        self._optimizer.step()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._release_buckets()

    def _release_buckets(self) -> None:
        if not self.by_bucket:  # all of them are needed at once: to free them would only cost time
            for bucket in self._buckets:
                bucket.release()

    def gradient_ready(self, number: int, parameter: Tensor) -> None:
        """Called by autograd for each gradient of a unit."""
        if not self._is_running:
            return
        with self._lock:
            missing = self._missing[number]
            if parameter not in missing:
                raise RuntimeError(
                    f"{self._names[number]}: a gradient came twice in one backward, and may have been used after the first time; "
                    "such a model must be updated after backward"
                )
            missing.remove(parameter)
            if not missing:
                self._update(self._names[number], self._units[number])

    def _update_bucket(self, bucket: Bucket | BucketInPlace) -> None:
        if self._is_running:
            self._update(bucket.name, bucket.parameters)
            if not self.by_bucket:
                bucket.release()

    def _update(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        """Step with these parameters alone, and free their gradients."""
        with span(f"update {name}"):
            step_unit(self._optimizer, parameters, self._group_of)
        for parameter in parameters:
            parameter.grad = None


class _Hook:
    """Called by autograd; weak, because Python's garbage collector does not see what autograd holds."""

    def __init__(self, update: UpdateInBackward, number: int) -> None:
        self._update = weakref.ref(update)
        self._number = number

    def __call__(self, parameter: Tensor) -> None:
        update = self._update()
        if update is not None:
            update.gradient_ready(self._number, parameter)

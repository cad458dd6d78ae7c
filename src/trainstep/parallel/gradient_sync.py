"""What every strategy of averaging gradients over ranks has in common, and the protocol that training code may rely on.

[Note: the same messages on every rank]
Collectives pair up by order. A parameter that a rank's forward did not use gets no gradient there, so a rank cannot send what it
happens to have: each sends everything, in one order fixed at the start, zeros for what it lacks. Flags go along that say who used
what: used nowhere, a gradient stays None, as in one process; used somewhere, the others' zeros count in the average.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainstep.parallel.clipping import clip_gradients_
from trainstep.parallel.collectives import Collectives, Traffic
from trainstep.parallel.membership import Membership
from trainstep.parallel.module_wrapper import ModuleWrapper
from trainstep.parallel.ranks import Ranks, ranks_around
from trainstep.parallel.same_setup import check_same_setup, named_tensors


@dataclass(frozen=True, kw_only=True)
class HeldTensors:
    """By category. Several may share a storage, also with the module's own. Of torch's wrappers nothing: they keep theirs out of
    sight."""

    buckets: Sequence[Tensor] = ()
    parameters: Sequence[Tensor] = ()
    """Flat ones, shards of them, gathered ones."""
    gradients: Sequence[Tensor] = ()
    """Whole ones, not sent yet."""
    shards: Sequence[Tensor] = ()
    """This rank's, of gradients."""
    staging: Sequence[Tensor] = ()
    """What messages pass through."""
    flags: Sequence[Tensor] = ()
    """Who used what."""

    def __iter__(self) -> Iterator[Tensor]:
        return chain(self.buckets, self.parameters, self.gradients, self.shards, self.staging, self.flags)


class GradientSync(Protocol):
    """Gradients of one module, averaged over ranks.

    The module stays what it is: its methods, its state_dict (FSDP: full_state_dict), its compiled blocks; only hooks stand on
    its parameters and blocks. What training calls is the module, or the strategy, an nn.Module around it (module_wrapper.py).
    A step is

        loss.backward()                           (all but the last micro-batch: under `no_sync()`)
        sync.finish_gradient_synchronization()
        sync.clip_grad_norm_(1.0)
        optimizer.step(); optimizer.zero_grad()
    """

    module: nn.Module
    """What was wrapped; of TorchDDP torch's wrapper around it."""
    ranks: Ranks

    @property
    def traffic(self) -> Traffic | None:
        """Messages and bytes sent so far; None where torch sends them and nobody counts."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients add up on this rank and nothing is sent."""

    def finish_gradient_synchronization(self) -> None:
        """Send what has not been sent, and return when every gradient may be read (on NCCL: by the current stream)."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm, over all parameters and as one process would see it, is at most `max_norm`.

        Returns the norm before."""

    def held_tensors(self) -> HeldTensors:
        """What this rank keeps, now, beside the module's own parameters and their `.grad`."""

    def detach(self) -> None:
        """Take the hooks off again; the module trains on its own from here."""


class HookedGradients(ModuleWrapper, ABC):
    """Base of all: hooks that tell when a gradient is there, and what is checked and remembered around them.

    `ranks`: by default those of torch's default process group, on the module's device. At the start ranks compare what they wrap,
    and how (`options`: what must be equal on all of them): ValueError on every rank where they differ. Then every parameter and
    buffer becomes that of rank 0. Tied parameters count once, frozen ones are left alone.
    Raises ValueError for a parameter on another device than the ranks', for one that is synchronised already, and at
    `finish_gradient_synchronization` for one that was added, replaced or unfrozen since, by name; where a gradient is sent, for a
    sparse one.
    """

    def __init__(
        self, module: nn.Module, ranks: Ranks | None = None, *, options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(module)
        if ranks is not None and not isinstance(ranks, Ranks):
            raise ValueError(f"ranks: must be what start_ranks() or ranks_of_default_group() return, not {ranks!r}")
        self.ranks = ranks or ranks_around(module.parameters())
        self.collectives = Collectives(self.ranks)
        self.names: list[str] = []
        self.trained_parameters: list[nn.Parameter] = []
        """Those that are trained, in the module's order."""
        self._used: list[bool] = []
        """Which parameters had a gradient here when theirs was sent."""
        self._hooks: list[RemovableHandle] = []
        self._syncing = True
        _check_device(module, self.ranks)
        _check_not_wrapped(module)
        check_same_setup(type(self).__name__, named_tensors(module), self.collectives, options=options)
        broadcast_state(module, self.collectives)
        self._take_up([named for named in module.named_parameters() if named[1].requires_grad])

    @property
    def traffic(self) -> Traffic:
        """Messages and bytes sent so far, the comparison and the broadcast at the start included."""
        return self.collectives.traffic

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on this rank and nothing is sent."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Send what has not been sent; every gradient may be read then. ValueError for a parameter that is not known."""
        self._membership.check()
        self._finish()
        self.collectives.count_step()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, a step is captured and not run: the host reads no result of a message, but trusts that of the step before."""
        self.collectives.recorded = True
        try:
            yield
        finally:
            self.collectives.recorded = False

    def detach(self) -> None:
        """Take the hooks off again."""
        for hook in self._hooks:
            hook.remove()

    def _take_up(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Know these parameters, behind those known, and hear of their gradients."""
        for name, parameter in named:
            self.names.append(name)
            self.trained_parameters.append(parameter)
            self._used.append(False)
            hook = _Hook(self, len(self.trained_parameters) - 1)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        self._membership = Membership(self.module)

    @abstractmethod
    def held_tensors(self) -> HeldTensors:
        """What this rank keeps, now, beside the module's own parameters and their `.grad`."""

    @abstractmethod
    def _gradient_ready(self, index: int) -> None:
        """Backward has added the last of this parameter's gradient, and it is to be synchronised.

        Once a parameter and step: what it does the host pays hundreds of times.
        """

    @abstractmethod
    def _finish(self) -> None:
        """Average what is left. Autograd does not look."""

    def _gradients(self, indices: Sequence[int]) -> list[Tensor | None]:
        """What this rank has to send; None for a parameter that it did not use. ValueError for a sparse gradient."""
        gradients = [self.trained_parameters[index].grad for index in indices]
        self._refuse_sparse(indices, gradients)
        return gradients

    def _refuse_sparse(self, indices: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient is not None and gradient.is_sparse:
                raise ValueError(f"{self.names[index]}: its gradient is sparse; build its embedding with sparse=False")


class ReplicatedGradients(HookedGradients):
    """Base of those that keep whole parameters and whole gradients on every rank."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm is at most `max_norm`; they are equal on all ranks, so nothing is sent."""
        return clip_gradients_([parameter.grad for parameter in self.trained_parameters], max_norm, norm_type)


class _Hook:
    """Called by autograd when a parameter's gradient is complete.

    Autograd holds it where Python's garbage collector does not look: if it held the sync, and that the parameter, both would stay
    for ever once a program drops them.
    """

    def __init__(self, sync: HookedGradients, index: int) -> None:
        self._sync = weakref.ref(sync)
        self._name = sync.names[index]
        self._index = index

    @property
    def is_live(self) -> bool:
        """Whether there is still somebody to tell."""
        return self._sync() is not None

    def __call__(self, _parameter: Tensor) -> None:
        sync = self._sync()
        if sync is None:
            raise RuntimeError(
                f"{self._name}: what synchronises its gradient is gone; keep it as long as you train, or detach() it first"
            )
        if sync._syncing:
            sync._gradient_ready(self._index)


def sent_twice(name: str) -> RuntimeError:
    """The error for a second backward while gradients of the first are on their way."""
    return RuntimeError(
        f"{name}: its gradient is on its way to the other ranks already; call finish_gradient_synchronization() after each "
        "backward, or run all but the last micro-batch's under no_sync()"
    )


def _check_device(module: nn.Module, ranks: Ranks) -> None:
    for name, parameter in module.named_parameters():
        if parameter.device.type != ranks.device.type or parameter.device.index not in (None, ranks.device.index):
            raise ValueError(
                f"{name}: is on {parameter.device}, and this rank's device is {ranks.device}; move the module there first"
            )


def _check_not_wrapped(module: nn.Module) -> None:
    """Two that average one gradient would each wait for the other's messages."""
    for name, parameter in module.named_parameters():
        hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
        if any(isinstance(hook, _Hook) and hook.is_live for hook in hooks):
            raise ValueError(
                f"{name}: its gradient is synchronised already; detach() what does so before wrapping anew"
            )


@torch.no_grad()
def broadcast_state(module: nn.Module, collectives: Collectives) -> None:
    """Parameters and buffers of every rank become those of rank 0, whatever their dtypes and strides."""
    tensors = [_distinct(tensor.detach()) for tensor in (*module.parameters(), *module.buffers()) if tensor.numel()]
    sent = [tensor.contiguous() for tensor in tensors]
    pending = [collectives.broadcast(each.reshape(-1).view(torch.uint8), label="start") for each in sent]
    for tensor, each, one in zip(tensors, sent, pending, strict=True):
        one.wait()
        if each is not tensor:
            tensor.copy_(each)


def _distinct(tensor: Tensor) -> Tensor:
    """Without the dimensions in which `expand` repeats the same elements."""
    for dimension, stride in enumerate(tensor.stride()):
        if not stride:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor

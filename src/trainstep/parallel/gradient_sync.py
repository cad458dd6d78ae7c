"""The protocol of gradient synchronisation for training code, and the base classes of our strategies.

[Note: the same messages on every rank]
Collectives pair up by order. A parameter that a rank's forward did not use gets no gradient on that rank, so a rank cannot send
just the gradients that it has. Each rank sends a gradient for every parameter, in one order fixed at the start, and zeros for those
that it lacks. Flags are sent too and say who used what. A gradient that no rank has stays None, as in one process; where some rank
has it, the others' zeros count in the average.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainstep.parallel.clipping import clip_gradients_
from trainstep.parallel.collectives import Collectives, ShardGroups, Traffic
from trainstep.parallel.copies.messages import CopyEngines
from trainstep.parallel.launch_order import LaunchOrder
from trainstep.parallel.module_wrapper import ModuleWrapper
from trainstep.parallel.ranks import Ranks, ranks_around
from trainstep.parallel.same_setup import check_same_setup, named_tensors


@dataclass(frozen=True, kw_only=True)
class HeldTensors:
    """The tensors that a strategy keeps on this rank, by category. Several may share a storage, also with the module's own tensors.

    Empty for torch's wrappers, which do not show their tensors.
    """

    buckets: Sequence[Tensor] = ()
    parameters: Sequence[Tensor] = ()
    """Flat parameters, shards of them, gathered parameters."""
    gradients: Sequence[Tensor] = ()
    """Whole gradients that have not been sent yet."""
    shards: Sequence[Tensor] = ()
    """This rank's shards of gradients."""
    staging: Sequence[Tensor] = ()
    """Buffers that messages pass through."""
    flags: Sequence[Tensor] = ()
    """Flags that say which rank used which parameter."""

    def __iter__(self) -> Iterator[Tensor]:
        return chain(self.buckets, self.parameters, self.gradients, self.shards, self.staging, self.flags)


class GradientSync(Protocol):
    """Averages the gradients of one module over ranks.

    The module stays what it is: its methods, its state_dict (FSDP: full_state_dict), its compiled blocks; it only gets hooks on
    its parameters and blocks. Training calls the module or the strategy, which is an nn.Module around it (module_wrapper.py).
    A step is

        loss.backward()                           (all but the last micro-batch: under `no_sync()`)
        sync.finish_gradient_synchronization()
        sync.clip_grad_norm_(1.0)
        optimizer.step(); optimizer.zero_grad()
    """

    module: nn.Module
    """The wrapped module; for TorchDDP torch's wrapper around it."""
    ranks: Ranks

    @property
    def traffic(self) -> Traffic | None:
        """Messages and bytes sent so far; None where torch sends them and does not count."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients add up on this rank and nothing is sent."""

    def finish_gradient_synchronization(self) -> None:
        """Send the gradients that are left, and return when every gradient may be read (on NCCL: by the current stream)."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm, over all parameters and as one process would see it, is at most `max_norm`.

        Returns the norm before."""

    def held_tensors(self) -> HeldTensors:
        """The tensors that this rank keeps now beside the module's own parameters and their `.grad`."""

    def detach(self) -> None:
        """Remove the hooks; the module trains on its own from here."""


class HookedGradients(ModuleWrapper, ABC):
    """Base of all strategies of ours: hooks that tell when a gradient is ready, and the checks around them.

    `ranks`: by default the ranks of torch's default process group, on the module's device. `transport`: sends large messages by
    copies between the GPUs of one machine (copies/messages.py), by default through NCCL or gloo. `shard_ranks`: ranks in a group
    (collectives.py); copies then go inside groups. At the start ranks compare what
    they wrap, and how (`options`: what must be equal on all ranks): ValueError on every rank where they differ. Then every
    parameter and buffer becomes that of rank 0. Tied parameters count once, frozen parameters are left alone.
    Raises ValueError
    - at the start for a parameter on another device than the ranks', or one that is synchronised already;
    - at `finish_gradient_synchronization` for a parameter that was added, replaced or unfrozen since, by name;
    - when a gradient is sent, if it is sparse.
    """

    _order: LaunchOrder
    """The order of the messages, in strategies that send during backward."""

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        transport: CopyEngines | None = None,
        shard_ranks: int | None = None,
    ) -> None:
        super().__init__(module)
        if ranks is not None and not isinstance(ranks, Ranks):
            raise ValueError(f"ranks: must be what start_ranks() or ranks_of_default_group() return, not {ranks!r}")
        self.ranks = ranks or ranks_around(module.parameters())
        self.collectives = Collectives(self.ranks)
        self.names: list[str] = []
        self.trained_parameters: list[nn.Parameter] = []
        """In the module's order."""
        self._used: list[bool] = []
        """For each trained parameter, whether it had a gradient on this rank when its gradient was sent."""
        self._hooks: list[RemovableHandle] = []
        self._syncing = True
        _check_device(module, self.ranks)
        _check_not_wrapped(module)
        options = {**(options or {}), "transport": transport, "shard_ranks": shard_ranks}
        check_same_setup(type(self).__name__, named_tensors(module), self.collectives, options=options)
        self.groups = ShardGroups(self.collectives, shard_ranks)
        self.groups.shards.send_by(transport)
        broadcast_state(module, self.collectives)
        self._add_parameters([named for named in module.named_parameters() if named[1].requires_grad])

    @property
    def traffic(self) -> Traffic:
        """Messages and bytes sent so far, including the comparison and the broadcast at the start."""
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
        """Send the gradients that are left; then every gradient may be read. ValueError for a parameter that is not known."""
        self._membership.check()
        self._finish()
        self.collectives.count_step()

    def gathered(self, _part: nn.Module) -> AbstractContextManager[None]:
        """Inside, a part's parameters are whole outside of a pass. Every rank must enter it; only FSDP has something to do."""
        return nullcontext()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, a step is recorded, not run: the host cannot read a message's result and uses the previous step's."""
        for collectives in self.groups.levels:
            collectives.recorded = True
        try:
            yield
        finally:
            for collectives in self.groups.levels:
                collectives.recorded = False

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @abstractmethod
    def held_tensors(self) -> HeldTensors:
        """The tensors that this rank keeps now beside the module's own parameters and their `.grad`."""

    def _add_parameters(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Append these parameters to the trained ones, and put hooks on them."""
        for name, parameter in named:
            self.names.append(name)
            self.trained_parameters.append(parameter)
            self._used.append(False)
            hook = _Hook(self, len(self.trained_parameters) - 1)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        self._membership = Membership(self.module)

    def _gradient_ready(self, index: int) -> None:
        """Called when backward has completed this parameter's gradient, outside of no_sync().

        It runs once per parameter and step, so the host pays for it hundreds of times.
        """
        message_indices = self._order.ready(index)
        if message_indices is None:
            raise sent_twice(self.names[index])
        for message_index in message_indices:
            self._send(message_index)

    def _send(self, message_index: int) -> None:
        """Start message `message_index` of `_order`. Strategies that send during backward define it.

        During backward autograd calls `_Hook`, which calls `_gradient_ready`, which calls this for each message that may go.
        """
        raise NotImplementedError

    @abstractmethod
    def _finish(self) -> None:
        """Average the gradients that are left. Called under no_grad."""

    def _gradients(self, indices: Sequence[int]) -> list[Tensor | None]:
        """The gradients that this rank has to send; None for a parameter that it did not use. ValueError for a sparse gradient."""
        gradients = [self.trained_parameters[index].grad for index in indices]
        self._refuse_sparse(indices, gradients)
        return gradients

    def _refuse_sparse(self, indices: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient is not None and gradient.is_sparse:
                raise ValueError(f"{self.names[index]}: its gradient is sparse; build its embedding with sparse=False")


class ReplicatedGradients(HookedGradients):
    """Base of the strategies that keep whole parameters and whole gradients on every rank."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm is at most `max_norm`; they are equal on all ranks, so nothing is sent."""
        return clip_gradients_([parameter.grad for parameter in self.trained_parameters], max_norm, norm_type)


class _Hook:
    """Called by autograd when a parameter's gradient is complete."""

    def __init__(self, sync: HookedGradients, index: int) -> None:
        # Weak, since Python's garbage collector does not see what autograd holds: a cycle of parameter, hook and
        # strategy would stay for ever once a program drops it.
        self._sync = weakref.ref(sync)
        self._name = sync.names[index]
        self._index = index

    @property
    def is_live(self) -> bool:
        """Whether the strategy still exists."""
        return self._sync() is not None

    def __call__(self, _parameter: Tensor) -> None:
        sync = self._sync()
        if sync is None:
            raise RuntimeError(
                f"{self._name}: the wrapper that synchronises its gradient is gone; keep it while you train, or detach() it first"
            )
        if sync._syncing:
            sync._gradient_ready(self._index)


def sent_twice(name: str) -> RuntimeError:
    """The error for a second backward before gradients of the first are synchronised."""
    return RuntimeError(
        f"{name}: its gradient was sent to the other ranks already; call finish_gradient_synchronization() after each "
        "backward, or run the backward of all but the last micro-batch under no_sync()"
    )


def _check_device(module: nn.Module, ranks: Ranks) -> None:
    for name, parameter in module.named_parameters():
        if parameter.device.type != ranks.device.type or parameter.device.index not in (None, ranks.device.index):
            raise ValueError(
                f"{name}: is on {parameter.device}, and this rank's device is {ranks.device}; move the module there first"
            )


def _check_not_wrapped(module: nn.Module) -> None:
    """ValueError for a parameter that another strategy averages: each would wait for messages of the other."""
    for name, parameter in module.named_parameters():
        hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
        if any(isinstance(hook, _Hook) and hook.is_live for hook in hooks):
            raise ValueError(
                f"{name}: its gradient is synchronised already; detach() the wrapper that does so before wrapping again"
            )


@torch.no_grad()
def broadcast_state(module: nn.Module, collectives: Collectives) -> None:
    """Set parameters and buffers of every rank to those of rank 0, whatever their dtypes and strides."""
    tensors = [_distinct(tensor.detach()) for tensor in (*module.parameters(), *module.buffers()) if tensor.numel()]
    sent = [tensor.contiguous() for tensor in tensors]
    messages = [collectives.broadcast(content.reshape(-1).view(torch.uint8), label="start") for content in sent]
    for tensor, content, message in zip(tensors, sent, messages, strict=True):
        message.wait()
        if content is not tensor:
            tensor.copy_(content)
        elif not tensor.is_inference():
            # A message does not do so by itself, and an optimizer that keeps copies of parameters must notice.
            torch.autograd.graph.increment_version(tensor)


def _distinct(tensor: Tensor) -> Tensor:
    """The tensor without the dimensions in which `expand` repeats the same elements."""
    for dimension, stride in enumerate(tensor.stride()):
        if not stride:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


# The parameters that a module had when it was wrapped.


class Membership:
    """Checks that a module still has just these parameters: each rank would train a later one alone, since it has no hook.

    The check runs once per step, so it must cost microseconds: it compares the modules' own dictionaries by map and all, in C, and
    walks by name only to report a difference.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._dicts: list[dict[str, Any]] = []
        """Each submodule's parameters and its children."""
        for submodule in module.modules():
            self._dicts += [submodule._parameters, submodule._modules]
        self._counts = list(map(len, self._dicts))
        self._filled = [members for members in self._dicts if members]
        self._known = list(self._members())
        parameters = list(module.parameters())
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]

    def check(self) -> None:
        """ValueError naming a parameter that was added, replaced or unfrozen since."""
        same = list(map(len, self._dicts)) == self._counts and all(map(is_, self._members(), self._known))
        if not same or any(parameter.requires_grad for parameter in self._frozen):
            self._raise_difference()

    def _members(self) -> Iterator[nn.Parameter | nn.Module | None]:
        return chain.from_iterable(map(dict.values, self._filled))

    def _raise_difference(self) -> None:
        trained, frozen = set(map(id, self._trained)), set(map(id, self._frozen))
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and id(parameter) not in trained:
                change = "unfrozen" if id(parameter) in frozen else "added or replaced"
                raise ValueError(
                    f"{name}: was {change} after the module was wrapped, so its gradient would not be averaged; "
                    "wrap the module once it is complete"
                )

"""Start a compiled kernel below the Python that Triton's launcher runs at each launch.

That launcher adds values that no launch changes, encodes every TMA descriptor anew, and hands all of it to a C function. Here what
the C function is handed is recorded once; later launches call it with their stream and addresses, and a descriptor is encoded
once an address: forward and backward of attention cost the host 58 us that way, 98 by Triton's launcher (on a stub, docs/log.md).
Triton 3.6 hands the C function a kernel's arguments one by one, 3.9 as one sequence. Where a launcher does not look like that
(another Triton, scratch memory, instrumentation), Triton launches as it always does.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from triton import knobs
except ImportError:  # no triton for this platform: nothing is launched
    knobs = None

DESCRIPTORS_KEPT, LAUNCHES_KEPT = 16_384, 4096
"""Of all kernels together, about 1 KB each; the least recently used goes first."""

Grid = tuple[int, int, int]

_UNFAMILIAR = (AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError)
"""What looking into a launcher of another make raises."""


def hooks_listen() -> bool:
    """Whether somebody wants to be told of launches through Triton, which direct ones would pass by."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True))  # one without `calls` may listen


def starter(compiled: Any, grid: Grid, device: torch.device, constants: Sequence[Any]) -> Callable[..., None]:
    """What compiled[grid] does, at less cost as long as no hook listens.

    Takes what comes before the constants, addresses for tensors.
    """
    ordinary = compiled[grid]  # also loads the kernel, so that `function` is there
    handed = _handed(compiled, grid)
    if handed is None:
        return lambda *varying: ordinary(*varying, *constants)
    launch = handed.launch(compiled.run.launch, device)

    def run(*varying: Any) -> None:
        if hooks_listen():
            ordinary(*varying, *constants)
        else:
            launch((*varying, *constants))

    return run


def described_starter(
    compiled: Any, grid: Grid, device: torch.device, descriptors: Sequence[Sequence[Any]], constants: Sequence[Any]
) -> Callable[..., None] | None:
    """Of a kernel whose arguments are descriptors like these, of any aligned tensors, then tensors, then constants.

    `descriptors`: of each tensor one or several, None for an argument that is None. Takes all the tensors, each once. No hook may
    listen. None where Triton's launcher is not as it has to be for this.
    """
    handed = _handed(compiled, grid)
    if handed is None:
        return None
    try:
        # The only way to the C function: the launcher that Triton wraps around it for descriptors closes over it by this name
        function = inspect.getclosurevars(compiled.run.launch).nonlocals["launcher"]
        types = [x for x in compiled.src.signature.values() if isinstance(x, str) and x.startswith("tensordesc")]
        made = [x for x in chain.from_iterable(descriptors) if x is not None]
        each = zip(made, types, compiled.metadata.tensordesc_meta, strict=True)
        by_descriptor = {id(one[0]): _encoder(handed, compiled, grid, *one) for one in each}
        encoders = [_together([by_descriptor.get(id(x), _no_descriptor) for x in some]) for some in descriptors]
        for encode, (descriptor, *_) in zip(encoders, descriptors, strict=True):
            encode(descriptor.base.data_ptr())
    except _UNFAMILIAR:
        return None
    launch = handed.launch(function, device)

    def arguments(*addresses: int) -> tuple[Any, ...]:
        described = [_kept(encode, address) for encode, address in zip(encoders, addresses, strict=False)]
        return (*chain.from_iterable(described), *addresses[len(encoders) :], *constants)

    def run(*tensors: Tensor) -> None:
        launch(_all_kept(arguments, *[x.data_ptr() for x in tensors]))

    return run


# An encoder's descriptors differ in nothing but the address, so one that is freed and given out again is no danger.


@functools.lru_cache(maxsize=DESCRIPTORS_KEPT)
def _kept(encode: Callable[[int], tuple[Any, ...]], address: int) -> tuple[Any, ...]:
    return encode(address)


@functools.lru_cache(maxsize=LAUNCHES_KEPT)
def _all_kept(arguments: Callable[..., tuple[Any, ...]], *addresses: int) -> tuple[Any, ...]:
    """A training step comes back to the same addresses, as a rule."""
    return arguments(*addresses)


def _together(encoders: Sequence[Callable[[int], tuple[Any, ...]]]) -> Callable[[int], tuple[Any, ...]]:
    """All descriptors of one tensor."""
    return lambda address: tuple(chain.from_iterable(encode(address) for encode in encoders))


def _no_descriptor(_address: int) -> tuple[None]:
    """What the C function takes for an argument that is None."""
    return (None,)


def _encoder(
    handed: "_Handed", compiled: Any, grid: Grid, descriptor: Any, type_: str, meta: Any
) -> Callable[[int], tuple[Any, ...]]:
    """From an address to what the C function takes for the descriptor: an encoded map, and numbers behind it."""
    from triton.backends.nvidia.driver import wrap_handle_tensordesc  # no other GPU has descriptors of this kind

    record = _recorder(compiled, grid, lambda launch: wrap_handle_tensordesc(launch, {0: type_}, [meta]))
    checked = copy.copy(descriptor)
    checked.base = None  # keeps no tensor alive

    def encode(address: int) -> tuple[Any, ...]:
        moved = copy.copy(checked)
        moved.base = _At(address)
        return handed.arguments(record(moved))

    return encode


class _At(NamedTuple):
    """As much of a tensor as encoding asks for."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class _Mark(int):
    """Found again by identity; an integer, as streams and addresses are."""


_STREAM, _ARGUMENT = _Mark(), _Mark()


class _Handed(NamedTuple):
    """What the C function is handed: this, and between it the stream, and behind it the kernel's arguments."""

    before_stream: tuple[Any, ...]
    after_stream: tuple[Any, ...]
    in_one: bool
    """Whether the kernel's arguments come as one sequence."""

    def arguments(self, everything: tuple[Any, ...]) -> tuple[Any, ...]:
        """The kernel's."""
        if self.in_one:
            return tuple(everything[-1])
        return everything[len(self.before_stream) + 1 + len(self.after_stream) :]

    def launch(self, function: Callable[..., None], device: torch.device) -> Callable[[Sequence[Any]], None]:
        """`function` on the current stream, with these arguments of the kernel."""
        before, after, stream, index = *self[:2], torch._C._cuda_getCurrentRawStream, device.index
        if self.in_one:
            return lambda arguments: function(*before, stream(index), *after, arguments)
        return lambda arguments: function(*before, stream(index), *after, *arguments)


def _handed(compiled: Any, grid: Grid) -> _Handed | None:
    """As Triton's launcher does it; None where that is not plain to see."""
    scratch = [getattr(compiled.run, f"{kind}_scratch_size", 0) for kind in ("global", "profile")]
    if not hasattr(compiled.run, "launch") or any(scratch):
        return None
    try:
        *rest, last = _recorder(compiled, grid)(_ARGUMENT)
    except _UNFAMILIAR:
        return None
    stream = next((i for i, x in enumerate(rest) if x is _STREAM), None)
    in_one = last is not _ARGUMENT
    if stream is None or (in_one and not (isinstance(last, tuple | list) and len(last) == 1 and last[0] is _ARGUMENT)):
        return None
    return _Handed(tuple(rest[:stream]), tuple(rest[stream + 1 :]), in_one)


def _recorder(
    compiled: Any, grid: Grid, wrap: Callable[[Callable[..., None]], Callable[..., None]] = lambda launch: launch
) -> Callable[..., tuple[Any, ...]]:
    """From a kernel's arguments to everything that Triton's launcher hands to the C function behind it, which is not called."""
    before = (*grid, _STREAM, compiled.function, compiled.packed_metadata, None, None, None)

    def record(*arguments: Any) -> tuple[Any, ...]:
        launcher, seen = copy.copy(compiled.run), []
        launcher.launch = wrap(lambda *everything: seen.append(everything))
        launcher(*before, *arguments)
        (everything,) = seen  # ValueError of a launcher that does not call `launch` once
        return everything

    return record

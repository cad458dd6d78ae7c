"""Launches kernels at little host cost: everything that depends only on shapes is computed once and kept.

Triton's own launch binds and specialises every argument on every call, which takes about as long as a short kernel runs. Here only
the first call of a shape does that; later calls, with tensors aligned to 16 bytes, start the compiled kernel directly (`starter`).
An op keeps a BoundKernel for all that decides what is compiled and launched (shapes, strides, settings, the tensors' dtypes, their
device): functools.lru_cache(PROBLEMS_KEPT) on the function that makes it, with arguments for dtypes and device even if it does not
read them.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from triton import knobs
except ImportError:  # there is no triton for this platform, and nothing is launched
    knobs = None

PROBLEMS_KEPT = 1024
"""Number of bound kernels that each function keeps; the least recently used is dropped first."""
DESCRIPTORS_KEPT, LAUNCHES_KEPT = 16_384, 4096
"""For all kernels together, about 1 KB each; the least recently used is dropped first."""
TRITON_STAGES = 3
"""Triton's default for `num_stages` on NVIDIA's GPUs, with which the fused ops were measured."""
FP_FUSION = {"enable_fp_fusion": True}
"""Fuse multiplications with additions, as in all that was measured. Triton 3.10 will not unless it is asked to, as 3.9 warns."""
_UNFAMILIAR = (AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError)
"""Errors from inspecting the launcher of another version of Triton."""
Grid = tuple[int, int, int]


class BoundKernel:
    """A kernel with its grid and every argument that is not a tensor.

    `programs`: the grid's size, or (x, y). `arguments`: the kernel's last parameters by name, in any order; KeyError if one is
    missing. All launches must have tensors of the dtypes and the device of the first, which compiles the kernel; the caller makes
    that device the current one.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int | tuple[int, int],
        arguments: dict[str, Any],
        *,
        num_warps: int,
        num_stages: int = 1,
    ) -> None:
        names = kernel.arg_names
        self._kernel = kernel
        self._grid: Grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
        self._arguments = tuple(arguments[name] for name in names[len(names) - len(arguments) :])
        self._options = {"num_warps": num_warps, "num_stages": num_stages, **FP_FUSION}
        self._start: Callable[..., None] | None = None
        self.compiled: Any = None
        """Triton's compiled kernel; None until the first launch."""

    def __call__(self, *tensors: Tensor, descriptors: Sequence[Any] = ()) -> None:
        """Launch. `descriptors`, of aligned tensors, are the kernel's first arguments; Triton's launcher encodes them each time."""
        addresses = [x.data_ptr() for x in tensors]
        aligned = not reduce(or_, addresses) % 16
        if aligned and self._start is not None:
            self._start(*descriptors, *addresses)
            return
        self.compiled = self._kernel[self._grid](*descriptors, *tensors, *self._arguments, **self._options)
        if aligned and self.compiled is not None:  # the interpreter compiles nothing
            self._start = starter(self.compiled, self._grid, tensors[0].device, self._arguments)


# Direct launches, below the Python that Triton's launcher runs at each launch.
#
# That launcher adds values that are the same at every launch, encodes every TMA descriptor again, and passes all of it
# to a C function. Here the arguments of the C function are recorded once; later launches call it with their stream and
# addresses, and `described_starter` encodes a descriptor once per address. Forward and backward of attention cost the host
# 58 us so, and 98 us by Triton's launcher (on a stub, docs/log.md). Triton 3.6 passes a kernel's arguments to the C function one by
# one, 3.9 as one sequence. Where a launcher is different (another Triton, scratch memory, instrumentation), Triton
# launches as usual.


def hooks_listen() -> bool:
    """Whether a hook listens to Triton's launches: direct launches would bypass it."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True))  # a hook without `calls` may listen


def starter(compiled: Any, grid: Grid, device: torch.device, constants: Sequence[Any]) -> Callable[..., None]:
    """A function that does what compiled[grid] does, at less cost as long as no hook listens.

    It takes the arguments before the constants, with addresses for tensors.
    """
    ordinary = compiled[grid]  # also loads the kernel, so that compiled.function exists
    call = _recorded_call(compiled, grid)
    if call is None:
        return lambda *varying: ordinary(*varying, *constants)
    launch = call.launcher(compiled.run.launch, device)

    def run(*varying: Any) -> None:
        if hooks_listen():
            ordinary(*varying, *constants)
        else:
            launch((*varying, *constants))

    return run


def described_starter(
    compiled: Any, grid: Grid, device: torch.device, descriptors: Sequence[Sequence[Any]], constants: Sequence[Any]
) -> Callable[..., None] | None:
    """`starter` for a kernel whose arguments are descriptors like these, of any aligned tensors, then tensors, then constants.

    `descriptors`: for each tensor one or several, None for an argument that is None. The function takes all the tensors, each once;
    no hook may listen. None where Triton's launcher has not the form that this needs.
    """
    call = _recorded_call(compiled, grid)
    if call is None:
        return None
    try:
        # The only way to the C function: Triton's wrapper for descriptors closes over it by this name.
        function = inspect.getclosurevars(compiled.run.launch).nonlocals["launcher"]
        types = [x for x in compiled.src.signature.values() if isinstance(x, str) and x.startswith("tensordesc")]
        present = [x for x in chain.from_iterable(descriptors) if x is not None]
        described = zip(present, types, compiled.metadata.tensordesc_meta, strict=True)
        encoder_of = {id(x): _encoder(call, compiled, grid, x, type_, meta) for x, type_, meta in described}
        encoders = [_together([encoder_of.get(id(x), _no_descriptor) for x in of_tensor]) for of_tensor in descriptors]
        for encode, (descriptor, *_) in zip(encoders, descriptors, strict=True):
            encode(descriptor.base.data_ptr())
    except _UNFAMILIAR:
        return None
    launch = call.launcher(function, device)

    def arguments(*addresses: int) -> tuple[Any, ...]:
        encoded = [_kept(encode, address) for encode, address in zip(encoders, addresses, strict=False)]
        return (*chain.from_iterable(encoded), *addresses[len(encoders) :], *constants)

    def run(*tensors: Tensor) -> None:
        launch(_all_kept(arguments, *[x.data_ptr() for x in tensors]))

    return run


# An encoder's descriptors differ only in the address, so memory that is freed and allocated again does no harm.
@functools.lru_cache(maxsize=DESCRIPTORS_KEPT)
def _kept(encode: Callable[[int], tuple[Any, ...]], address: int) -> tuple[Any, ...]:
    return encode(address)


@functools.lru_cache(maxsize=LAUNCHES_KEPT)
def _all_kept(arguments: Callable[..., tuple[Any, ...]], *addresses: int) -> tuple[Any, ...]:
    return arguments(*addresses)  # a training step usually has the same addresses as the step before


def _together(encoders: Sequence[Callable[[int], tuple[Any, ...]]]) -> Callable[[int], tuple[Any, ...]]:
    """An encoder of all descriptors of one tensor."""
    return lambda address: tuple(chain.from_iterable(encode(address) for encode in encoders))


def _no_descriptor(_address: int) -> tuple[None]:
    """The C function's arguments for a descriptor that is None."""
    return (None,)


def _encoder(
    call: "_RecordedCall", compiled: Any, grid: Grid, descriptor: Any, type_: str, meta: Any
) -> Callable[[int], tuple[Any, ...]]:
    """A function from an address to the C function's arguments for the descriptor: an encoded map, and numbers after it."""
    from triton.backends.nvidia.driver import wrap_handle_tensordesc  # no other GPU has descriptors of this kind

    record = _recorder(compiled, grid, lambda launch: wrap_handle_tensordesc(launch, {0: type_}, [meta]))
    template = copy.copy(descriptor)
    template.base = None  # so that the encoder keeps no tensor alive

    def encode(address: int) -> tuple[Any, ...]:
        moved = copy.copy(template)
        moved.base = _At(address)
        return call.kernel_arguments(record(moved))

    return encode


class _At(NamedTuple):
    """Stands for a tensor at this address: encoding needs no more of it."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class _Mark(int):
    """A placeholder that is found again by identity; an integer, like streams and addresses."""


_STREAM, _ARGUMENT = _Mark(), _Mark()


class _RecordedCall(NamedTuple):
    """The arguments of the C function: before_stream, the stream, after_stream, the kernel's arguments."""

    before_stream: tuple[Any, ...]
    after_stream: tuple[Any, ...]
    in_one: bool
    """Whether the kernel's arguments are one sequence."""

    def kernel_arguments(self, everything: tuple[Any, ...]) -> tuple[Any, ...]:
        """The kernel's arguments among all of the C function's."""
        if self.in_one:
            return tuple(everything[-1])
        return everything[len(self.before_stream) + 1 + len(self.after_stream) :]

    def launcher(self, function: Callable[..., None], device: torch.device) -> Callable[[Sequence[Any]], None]:
        """A function that calls the C `function` on the current stream with a kernel's arguments."""
        before, after, stream, index = *self[:2], torch._C._cuda_getCurrentRawStream, device.index
        if self.in_one:
            return lambda arguments: function(*before, stream(index), *after, arguments)
        return lambda arguments: function(*before, stream(index), *after, *arguments)


def _recorded_call(compiled: Any, grid: Grid) -> _RecordedCall | None:
    """The call that Triton's launcher makes; None where its form is not recognised."""
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
    return _RecordedCall(tuple(rest[:stream]), tuple(rest[stream + 1 :]), in_one)


def _recorder(
    compiled: Any, grid: Grid, wrap: Callable[[Callable[..., None]], Callable[..., None]] = lambda launch: launch
) -> Callable[..., tuple[Any, ...]]:
    """A function from a kernel's arguments to all arguments that Triton's launcher passes to the C function, without calling it."""
    before = (*grid, _STREAM, compiled.function, compiled.packed_metadata, None, None, None)

    def record(*arguments: Any) -> tuple[Any, ...]:
        launcher, calls = copy.copy(compiled.run), []
        launcher.launch = wrap(lambda *everything: calls.append(everything))
        launcher(*before, *arguments)
        (everything,) = calls  # ValueError for a launcher that does not call `launch` once
        return everything

    return record

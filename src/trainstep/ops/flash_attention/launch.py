"""From tensors to a running kernel, at little host cost: what depends on shapes alone is worked out once and kept.

Triton's own launch binds and specialises every argument on every call, about as long as a short kernel runs. Here the first call of
a shape goes that way; later ones, with tensors aligned to 16 bytes as then, start the compiled kernel directly (starter.py).
"""

from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainstep.ops.flash_attention.starter import starter
from trainstep.ops.flash_attention.tiles import Arithmetic, KernelPass, TileProblem

PROBLEMS_KEPT = 1024
"""Shapes whose launches are kept; the least recently used goes first."""
Stride = tuple[int, ...]


class Problem(NamedTuple):
    """What a call asks for beside its tensors."""

    scale: float
    causal: bool
    bottom_right: bool
    arithmetic: Arithmetic

    def offset(self, queries: int, keys: int) -> int:
        """Under a causal mask query i sees keys 0..i + offset."""
        return keys - queries if self.bottom_right else 0


class CallMeta(NamedTuple):
    """A call's tensors but for their numbers and addresses: with its Problem all that a launch depends on.

    v has k's shape; outputs and gradients lie as torch.empty_like lays them out.
    """

    q_shape: torch.Size
    """(B, H, S, D)."""
    k_shape: torch.Size
    """(B, G, S', D)."""
    dtype: torch.dtype
    device: torch.device
    q_stride: Stride
    k_stride: Stride
    v_stride: Stride
    do_stride: Stride = ()
    """Backward alone reads it, as o_stride."""
    o_stride: Stride = ()

    @classmethod
    def forward(cls, q: Tensor, k: Tensor, v: Tensor) -> "CallMeta":
        """Made at every call, so written out: a loop would cost the host as much again."""
        return cls(q.shape, k.shape, q.dtype, q.device, q.stride(), k.stride(), v.stride())

    @classmethod
    def backward(cls, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> "CallMeta":
        """As forward, and what backward alone reads."""
        return cls(q.shape, k.shape, q.dtype, q.device, q.stride(), k.stride(), v.stride(), do.stride(), o.stride())

    @property
    def like_q(self) -> Stride:
        """The output's stride, and dq's."""
        return _stride_like(self.q_shape, self.q_stride)

    @property
    def like_k(self) -> Stride:
        """dk's stride."""
        return _stride_like(self.k_shape, self.k_stride)

    @property
    def like_v(self) -> Stride:
        """dv's stride."""
        return _stride_like(self.k_shape, self.v_stride)


def _stride_like(shape: torch.Size, stride: Stride) -> Stride:
    """The stride of torch.empty_like's result."""
    return torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()


class Device(NamedTuple):
    """What tile choices need to know of a GPU."""

    architecture: str
    shared_memory_bytes: int


@cache
def device_of(device: torch.device) -> Device:
    """Of a CPU, which runs kernels in Triton's interpreter: the least any GPU has."""
    if device.type != "cuda":
        return Device("any", 65_536)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Device(str(properties.gcnArchName).split(":")[0], 65_536)
    return Device(f"sm_{properties.major}{properties.minor}", properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def tile_problem(pass_: KernelPass, head_dim: int, arithmetic: Arithmetic, device: torch.device) -> TileProblem:
    """What a tile of this kernel on this device is chosen for."""
    return TileProblem(pass_=pass_, head_dim=head_dim, arithmetic=arithmetic, **device_of(device)._asdict())


class BoundKernel:
    """A kernel, its grid and every argument that is no tensor."""

    def __init__(
        self, kernel: Any, programs: int, arguments: dict[str, Any], *, num_warps: int, num_stages: int = 1
    ) -> None:
        names = kernel.arg_names
        self._kernel = kernel
        self._grid = (programs, 1, 1)
        self._arguments = tuple(arguments[name] for name in names[len(names) - len(arguments) :])
        self._options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
        self._start: Callable[..., None] | None = None
        self.compiled: Any = None
        """Triton's compiled kernel, once it has run."""

    def __call__(self, *tensors: Tensor, descriptors: Sequence[Any] = ()) -> None:
        """`descriptors`, of aligned tensors, are the kernel's first arguments; Triton encodes them at each launch."""
        addresses = [x.data_ptr() for x in tensors]
        aligned = not reduce(or_, addresses) % 16
        if aligned and self._start is not None:
            self._start(*descriptors, *addresses)
            return
        self.compiled = self._kernel[self._grid](*descriptors, *tensors, *self._arguments, **self._options)
        if aligned and self.compiled is not None:  # the interpreter compiles nothing
            self._start = starter(self.compiled, self._grid, tensors[0].device, self._arguments)


def strides(**by_letter: Stride) -> dict[str, int]:
    """Arguments stride_<letter>b, h and s from (batch, head, position, 1) strides."""
    return {f"stride_{letter}{axis}": stride[i] for letter, stride in by_letter.items() for i, axis in enumerate("bhs")}

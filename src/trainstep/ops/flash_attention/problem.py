"""What a launch of attention depends on: a call's settings, the shapes and strides of its tensors, and the GPU."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from trainstep.ops.flash_attention.portable.tiles import Arithmetic, KernelPass, TileProblem

Stride = tuple[int, ...]


class Problem(NamedTuple):
    """A call's settings: everything but its tensors."""

    scale: float
    causal: bool
    bottom_right: bool
    arithmetic: Arithmetic

    def offset(self, queries: int, keys: int) -> int:
        """The offset of a causal mask: query i sees keys 0..i + offset."""
        return keys - queries if self.bottom_right else 0


class CallMeta(NamedTuple):
    """Shapes, dtype, device and strides of a call's tensors: with its Problem all that a launch depends on.

    v has k's shape; outputs and gradients have the layout of torch.empty_like.
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
    """Only for backward, like o_stride."""
    o_stride: Stride = ()

    @classmethod
    def forward(cls, q: Tensor, k: Tensor, v: Tensor) -> "CallMeta":
        # Written out, since it runs at every call: a loop would double its host time.
        return cls(q.shape, k.shape, q.dtype, q.device, q.stride(), k.stride(), v.stride())

    @classmethod
    def backward(cls, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> "CallMeta":
        return cls(q.shape, k.shape, q.dtype, q.device, q.stride(), k.stride(), v.stride(), do.stride(), o.stride())

    @property
    def like_q(self) -> Stride:
        """The stride of the output and of dq."""
        return _stride_like(self.q_shape, self.q_stride)

    @property
    def like_k(self) -> Stride:
        """The stride of dk."""
        return _stride_like(self.k_shape, self.k_stride)

    @property
    def like_v(self) -> Stride:
        """The stride of dv."""
        return _stride_like(self.k_shape, self.v_stride)


def _stride_like(shape: torch.Size, stride: Stride) -> Stride:
    """The stride of torch.empty_like's result."""
    return torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()


class Device(NamedTuple):
    """The properties of a GPU on which the choice of tiles depends."""

    architecture: str
    shared_memory_bytes: int


@cache
def device_of(device: torch.device) -> Device:
    """The properties of a GPU. For a CPU, where kernels run in Triton's interpreter: the least that any GPU has."""
    if device.type != "cuda":
        return Device("any", 65_536)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Device(str(properties.gcnArchName).split(":")[0], 65_536)
    return Device(f"sm_{properties.major}{properties.minor}", properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def tile_problem(pass_: KernelPass, head_dim: int, arithmetic: Arithmetic, device: torch.device) -> TileProblem:
    """The problem for which the tile of this kernel on this device is chosen."""
    return TileProblem(pass_=pass_, head_dim=head_dim, arithmetic=arithmetic, **device_of(device)._asdict())


def strides(**by_letter: Stride) -> dict[str, int]:
    """Arguments stride_<letter>b, h and s from (batch, head, position, 1) strides."""
    return {f"stride_{letter}{axis}": stride[i] for letter, stride in by_letter.items() for i, axis in enumerate("bhs")}

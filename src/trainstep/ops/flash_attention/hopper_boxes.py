"""Tensors as TMA is told to see them, and kernels that read and write them so."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trainstep.ops.flash_attention.hopper_schedules import ROWS
from trainstep.ops.flash_attention.starter import described_starter, hooks_listen

_GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Boxes(NamedTuple):
    """A tensor as a TMA descriptor has it: sizes and strides in elements, `box`: what one copy moves, `layout`: how that lies in
    shared memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    layout: Any

    def of(self, tensor: Tensor) -> TensorDescriptor:
        return TensorDescriptor(tensor, self.shape, self.strides, self.box, self.layout)


def boxes(shape: Sequence[int], stride: Sequence[int], rows: int, columns: int, dtype: torch.dtype) -> Boxes:
    """Of `rows` positions of one head of a (batch, head, position, column) tensor. The stride of a size of 1 means nothing."""
    steps = tuple(step if size > 1 else shape[-1] for size, step in zip(shape[:-1], stride[:-1], strict=True))
    box = [1, 1, rows, columns]
    return Boxes(tuple(shape), (*steps, 1), tuple(box), gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[dtype]))


def row_boxes(length: int, box: int) -> Boxes:
    """`box` at a time of fp32 numbers in a row."""
    return Boxes((length,), (1,), (box,), gl.NVMMASharedLayout.get_default_for([box], gl.float32))


def piece_boxes(pieces: int, columns: int) -> Boxes:
    """dq, summed in pieces of ROWS queries x `columns` in fp32 (hopper_backward's note): a box each, in rows of 256, the most."""
    rows = ROWS * columns // 256
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return Boxes((pieces * rows, 256), (256, 1), (rows, 256), layout)


class BoxedKernel:
    """A kernel whose first arguments are TMA descriptors, then come tensors, then what a shape fixes."""

    def __init__(
        self,
        kernel: Any,
        programs: int,
        boxes: Sequence[Boxes],
        arguments: dict[str, Any],
        most_registers: int | None = None,
    ) -> None:
        names = kernel.arg_names
        self.kernel, self.programs = kernel, programs
        self.boxes = tuple(boxes)
        self._arguments = tuple(arguments[name] for name in names[len(names) - len(arguments) :])
        self.options = {"num_warps": 4} | ({} if most_registers is None else {"maxnreg": most_registers})
        self._start: Callable[..., None] | None = None
        self._has_run = False

    def arguments(self, *tensors: Tensor) -> list[Any]:
        """All of the kernel's."""
        descriptors = [form.of(tensor) for form, tensor in zip(self.boxes, tensors, strict=False)]
        return [*descriptors, *tensors[len(descriptors) :], *self._arguments]

    def __call__(self, *tensors: Tensor) -> None:
        if self._start is not None and not hooks_listen():
            self._start(*tensors)
            return
        arguments, grid = self.arguments(*tensors), (self.programs, 1, 1)
        compiled = self.kernel[grid](*arguments, **self.options)
        if not self._has_run:
            descriptors = arguments[: len(self.boxes)]
            self._start = described_starter(compiled, grid, tensors[0].device, descriptors, self._arguments)
            self._has_run = True

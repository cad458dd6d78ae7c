"""Tensors as TMA is told to see them, and kernels that read and write them so."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trainstep.ops.flash_attention.hopper_schedules import ROWS, column_parts
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


Forms = tuple[Boxes | None, ...]
"""A kernel's descriptors of one tensor; None where tiles of other widths have one more."""


def boxes(shape: Sequence[int], stride: Sequence[int], rows: int, width: int, dtype: torch.dtype) -> Forms:
    """Of `rows` positions of one head of a (batch, head, position, column) tensor, in one part or two (hopper_columns).

    The stride of a size of 1 means nothing.
    """
    steps = tuple(step if size > 1 else shape[-1] for size, step in zip(shape[:-1], stride[:-1], strict=True))

    def part(columns: int) -> Boxes:
        box = [1, 1, rows, columns]
        layout = gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[dtype])
        return Boxes(tuple(shape), (*steps, 1), tuple(box), layout)

    first, *rest = map(part, column_parts(width))
    return first, rest[0] if rest else None


def row_boxes(length: int, box: int) -> Forms:
    """`box` at a time of fp32 numbers in a row."""
    return (Boxes((length,), (1,), (box,), gl.NVMMASharedLayout.get_default_for([box], gl.float32)),)


def piece_boxes(size: int, columns: Sequence[int]) -> Forms:
    """dq, `size` numbers in fp32, summed in pieces of ROWS queries x `columns` (hopper_backward's note): a box each, in rows of
    256, the most. None for a second that is like the first."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    first, last = (
        Boxes((size // 256, 256), (256, 1), (ROWS * n // 256, 256), layout) for n in (columns[0], columns[-1])
    )
    return first, None if last == first else last


class BoxedKernel:
    """A kernel whose first arguments are TMA descriptors, then come tensors, then what a shape fixes."""

    def __init__(
        self,
        kernel: Any,
        programs: int,
        boxes: Sequence[Forms],
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
        descriptors = chain.from_iterable(self._descriptors(tensors))
        return [*descriptors, *tensors[len(self.boxes) :], *self._arguments]

    def _descriptors(self, tensors: Sequence[Tensor]) -> list[list[TensorDescriptor | None]]:
        """Of each tensor that has any."""
        each = zip(self.boxes, tensors, strict=False)
        return [[form and form.of(tensor) for form in forms] for forms, tensor in each]

    def __call__(self, *tensors: Tensor) -> None:
        if self._start is not None and not hooks_listen():
            self._start(*tensors)
            return
        arguments, grid = self.arguments(*tensors), (self.programs, 1, 1)
        compiled = self.kernel[grid](*arguments, **self.options)
        if not self._has_run:
            each = self._descriptors(tensors)
            self._start = described_starter(compiled, grid, tensors[0].device, each, self._arguments)
            self._has_run = True

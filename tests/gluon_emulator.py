"""Run the unmodified bodies of Gluon kernels for Hopper on a CPU, on the emulated machine of gluon_machine.py.

`emulate(kernel, programs, arguments)`: the code objects of the kernel run as Python, and the functions they call are replaced: the
language, barriers, copies, wgmma. Integers refuse the division of negative numbers, which C and Python round differently.
"""

import math
import random
import re
import struct
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

import gluon_machine as machine
from gluon_machine import Barriers
from gluon_program import DTYPES, Descriptor, Partition, Program, Shared, Tile, Wrong, begin, plain
from trainstep.ops.flash_attention.hopper import parts as hopper_parts


class Whole(int):
    """An integer in a register."""

    def _divisible(self, other: int) -> None:
        if self < 0 or other < 0:
            raise Wrong(f"{int(self)} divided by {int(other)}: a GPU rounds to zero, Python down")

    def __floordiv__(self, other: int) -> "Whole":
        self._divisible(other)
        return Whole(int(self) // int(other))

    def __mod__(self, other: int) -> "Whole":
        self._divisible(other)
        return Whole(int(self) % int(other))


def _whole_operator(name: str) -> Any:
    def operator(self: Whole, other: Any) -> Any:
        result = getattr(int, name)(self, other)
        return Whole(result) if isinstance(result, int) and not isinstance(result, bool) else result

    return operator


for _name in ("add", "sub", "mul", "and", "or", "xor"):
    for _side in ("", "r"):
        setattr(Whole, f"__{_side}{_name}__", _whole_operator(f"__{_side}{_name}__"))


@dataclass(frozen=True)
class Pointer:
    memory: Tensor
    offset: Any = 0

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, Tile(torch.as_tensor(plain(self.offset) + plain(other))))


# The language --------------------------------------------------------------------------------------------------------------------


def _of_tiles(function: Callable[..., Tensor]) -> Callable[..., Tile]:
    return lambda *operands: Tile(function(*map(plain, operands)))


def _either(function: Callable[..., Any], tensors: Callable[..., Tensor]) -> Callable[..., Any]:
    def choose(a: Any, b: Any) -> Any:
        if isinstance(a, Tile) or isinstance(b, Tile):
            return Tile(tensors(*(torch.as_tensor(plain(x)) for x in (a, b))))
        return Whole(function(a, b))

    return choose


def _where(condition: Tile, a: Any, b: Any) -> Tile:
    return Tile(torch.where(condition.data, plain(a), plain(b)))


def _store_to(pointer: Pointer, value: Tile, mask: Tile | None = None) -> None:
    selected = torch.ones_like(value.data, dtype=torch.bool) if mask is None else mask.data
    pointer.memory.view(-1)[plain(pointer.offset)[selected]] = value.data[selected]


def _load_from(pointer: Pointer) -> Whole:
    return Whole(pointer.memory.view(-1)[int(plain(pointer.offset))])


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if dtype is gl.int64:
        return Barriers(int(shape[0])) if len(shape) > 1 else Barriers(1).index(0)
    return Shared(torch.full([int(n) for n in shape], math.nan, dtype=DTYPES[dtype]), layout)


def assembly(text: str, _constraints: str, operands: Sequence[Tile], **_options: Any) -> Any:
    """Emulate the inline assembly of our kernels: named barriers, a selection, a product in bf16."""
    if match := re.match(r"bar\.(sync|arrive) \$1, (\d+);", text):
        come = machine.meet if match[1] == "sync" else machine.pass_by
        come(int(operands[0]), int(match[2]))
        return None
    if text == "mul.bf16x2 $0, $1, $2;":
        return Tile(operands[0].data * operands[1].data)
    if match := re.search(r"setp\.le\.s32 (\w+), \$2, \$3; selp\.f32 \$0, \$1, 0f(\w{8}), \1;", text):
        x, smaller, larger = (operand.data for operand in operands)
        return Tile(torch.where(smaller <= larger, x, struct.unpack(">f", bytes.fromhex(match[2]))[0]))
    raise Wrong(f"inline assembly that is not emulated: {text}")


class _Language:
    """The replacement of `gl`; layouts are the real ones, and ignored."""

    def __init__(self, program: Program, place: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self._program, self._place, self._grid = program, place, grid

    def __getattr__(self, name: str) -> Any:
        return getattr(gl, name)

    def program_id(self, axis: int) -> Whole:
        return Whole(self._place[axis])

    def num_programs(self, axis: int) -> Whole:
        return Whole(self._grid[axis])

    def warp_specialize(self, roles: Any, _warps: Any, _registers: Any) -> None:
        self._program.run_partitions(roles)

    static_range = staticmethod(range)
    zeros = staticmethod(lambda shape, dtype, _layout: Tile(torch.zeros(list(map(int, shape)), dtype=DTYPES[dtype])))
    full = staticmethod(
        lambda shape, x, dtype, _layout: Tile(torch.full(list(map(int, shape)), x, dtype=DTYPES[dtype]))
    )
    arange = staticmethod(lambda first, end, _layout: Tile(torch.arange(int(first), int(end), dtype=torch.int32)))
    convert_layout = staticmethod(lambda tile, _layout: tile)
    expand_dims = staticmethod(lambda tile, axis: Tile(tile.data.unsqueeze(axis)))
    reshape = staticmethod(lambda tile, shape: Tile(tile.data.reshape(*map(int, shape))))
    permute = staticmethod(lambda tile, order: Tile(tile.data.permute(*order)))
    minimum = staticmethod(_either(min, torch.minimum))
    maximum = staticmethod(_either(max, torch.maximum))
    max = staticmethod(lambda tile, axis: Tile(tile.data.amax(axis)))
    sum = staticmethod(lambda tile, axis: Tile(tile.data.sum(axis)))
    exp2 = staticmethod(_of_tiles(torch.exp2))
    log2 = staticmethod(_of_tiles(torch.log2))
    where = staticmethod(_where)
    store = staticmethod(_store_to)
    load = staticmethod(_load_from)
    allocate_shared_memory = staticmethod(_allocate)
    inline_asm_elementwise = staticmethod(assembly)


_MBARRIER = types.SimpleNamespace(
    MBarrierLayout=lambda: None,
    init=lambda barrier, count: barrier.init(count),
    expect=lambda barrier, nbytes: barrier.arrive(1, nbytes),
    arrive=machine.arrive,
    wait=machine.wait,
)
_STANDS_FOR = {
    id(hopper.mbarrier): _MBARRIER,
    id(hopper.tma): types.SimpleNamespace(store_wait=machine.store_wait),
    id(hopper.fence_async_shared): machine.fence,
    id(hopper.warpgroup_mma): machine.start_wgmma,
    id(hopper.warpgroup_mma_wait): machine.wait_wgmma,
    id(hopper_parts.copy_in): machine.copy_in,
    id(hopper_parts.copy_out): lambda *arguments: machine.store_shared(*arguments, add=False),
    id(hopper_parts.add_out): lambda *arguments: machine.store_shared(*arguments, add=True),
}


def _range(*bounds: int) -> Any:
    return map(Whole, range(*map(int, bounds)))


def _python_function(kernel: Any, language: _Language, functions: dict[int, Any]) -> Callable[..., Any]:
    """The code of the kernel as a Python function, with the functions that it calls replaced."""
    if id(kernel) not in functions:
        functions[id(kernel)] = lambda *arguments, **named: functions[-id(kernel)](
            *arguments, **named
        )  # the function may call itself
        names = dict(kernel.fn.__globals__)
        for name, value in names.items():
            if isinstance(value, JITFunction):
                names[name] = _python_function(value, language, functions)
            elif isinstance(value, gl.constexpr):
                names[name] = value.value
            elif id(value) in _STANDS_FOR:
                names[name] = _STANDS_FOR[id(value)]
            elif value is gl:
                names[name] = language
        names["range"] = _range
        functions[-id(kernel)] = types.FunctionType(
            kernel.fn.__code__, names, kernel.fn.__name__, kernel.fn.__defaults__, kernel.fn.__closure__
        )
    return functions[id(kernel)]  # type: ignore[no-any-return]


def _argument(x: Any) -> Any:
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    if isinstance(x, Tensor):
        return Pointer(x)
    return Whole(x) if isinstance(x, int) and not isinstance(x, bool) else x


@torch.no_grad()
def emulate(kernel: Any, programs: int, arguments: Sequence[Any], *, late: bool = False, seed: int = 0) -> None:
    """Run the kernel on tensors of the CPU, one program after the other."""
    assert isinstance(kernel, gluon._runtime.GluonJITFunction)
    draw = random.Random(seed)
    for number in range(programs):
        program = Program(draw, late)
        begin(Partition(program, -1))
        language = _Language(program, (number, 0, 0), (programs, 1, 1))
        _python_function(kernel, language, {})(*map(_argument, arguments))

"""The emulator refuses small kernels that each break one rule of the machine and would fail on a GPU."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gluon_emulator import emulate
from gluon_program import Wrong
from trainstep.ops.flash_attention.hopper.parts import (
    accumulator_layout,
    copy_in,
    copy_out,
    meet,
    new_barriers,
    pass_by,
)

TILE = gl.constexpr(64)


@gluon.jit
def _load(x_desc, tile, full, announced):
    mbarrier.expect(full.index(0), announced)
    copy_in(x_desc, [0, 0], full.index(0), tile)


@gluon.jit
def _square_and_store(y_desc, tile, out, full, WAITS: gl.constexpr, FENCES: gl.constexpr, STAYS: gl.constexpr):
    if WAITS:
        mbarrier.wait(full.index(0), 0)
    zeros = gl.zeros([TILE, TILE], gl.float32, accumulator_layout(TILE))
    started = warpgroup_mma(tile, tile, zeros, use_acc=False, is_async=True)
    out.store(warpgroup_mma_wait(0, deps=(started,)).to(tile.dtype))
    if FENCES:
        fence_async_shared()
    copy_out(y_desc, [0, 0], out)
    if STAYS:
        tma.store_wait(0)


@gluon.jit
def square_kernel(
    x_desc, y_desc, announced, WAITS: gl.constexpr, FENCES: gl.constexpr, STAYS: gl.constexpr, ARRIVALS: gl.constexpr
):
    """Write y = x x for one tile."""
    tile = gl.allocate_shared_memory(x_desc.dtype, [TILE, TILE], x_desc.layout)
    out = gl.allocate_shared_memory(x_desc.dtype, [TILE, TILE], y_desc.layout)
    full = new_barriers(1, ARRIVALS)
    gl.warp_specialize(
        [
            (_square_and_store, (y_desc, tile, out, full, WAITS, FENCES, STAYS)),
            (_load, (x_desc, tile, full, announced)),
        ],
        [1],
        [24],
    )


def square(x: torch.Tensor, *, late: bool, announced: int = 64 * 64 * 2, **rules: object) -> torch.Tensor:
    y = torch.full_like(x, float("nan"))
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    descriptors = [TensorDescriptor.from_tensor(tensor, [64, 64], layout) for tensor in (x, y)]
    constants = {"WAITS": True, "FENCES": True, "STAYS": True, "ARRIVALS": 1} | rules
    emulate(square_kernel, 1, [*descriptors, announced, *constants.values()], late=late)
    return y


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("size", [64, 40])
def test_a_correct_kernel_gives_its_result(size: int, late: bool):
    x = torch.randn(size, 64).half()
    padded = torch.zeros(64, 64)
    padded[:size] = x.float()
    torch.testing.assert_close(square(x, late=late), (padded @ padded).half()[:size])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"FENCES": False}, "fence"),
        ({"STAYS": False}, "nobody waited for"),
        ({"ARRIVALS": 2}, "deadlock"),
        ({"announced": 64 * 64 * 2 + 16}, "deadlock"),
        ({"announced": 64 * 64 * 2 - 16}, "more bytes"),
    ],
)
def test_each_broken_rule_is_an_error(rules: dict[str, int], message: str):
    with pytest.raises(Wrong, match=message):
        square(torch.randn(64, 64).half(), late=True, **rules)  # type: ignore[arg-type]


def test_a_buffer_that_is_read_too_early_is_an_error():
    """Without the wait the tile holds old data."""
    with pytest.raises(Wrong, match="nobody waited for"):
        square(torch.randn(64, 64).half(), late=True, WAITS=False)


@gluon.jit
def sum_kernel(y_ptr, WAITS: gl.constexpr):
    """Add the product of a second wgmma to that of a first."""
    tile = gl.allocate_shared_memory(gl.float16, [TILE, TILE], None)
    tile.store(gl.full([TILE, TILE], 0.5, gl.float16, None))
    fence_async_shared()
    zeros = gl.zeros([TILE, TILE], gl.float32, accumulator_layout(TILE))
    started = warpgroup_mma(tile, tile, zeros, use_acc=False, is_async=True)
    if WAITS:
        warpgroup_mma_wait(0, deps=(started,))
    more = warpgroup_mma(tile, tile, started, is_async=True)
    number = gl.arange(0, TILE, None)
    place = gl.expand_dims(number, 1) * TILE + gl.expand_dims(number, 0)
    gl.store(y_ptr + place, warpgroup_mma_wait(0, deps=(more,)))


@pytest.mark.parametrize("late", [False, True])
def test_a_product_is_added_to_an_unfinished_one_only(late: bool):
    y = torch.zeros(64, 64)
    emulate(sum_kernel, 1, [y, False], late=late)
    assert (y == 2 * 64 * 0.25).all()
    with pytest.raises(Wrong, match="from before the wait"):
        emulate(sum_kernel, 1, [y, True], late=late)


@gluon.jit
def _come(TIMES: gl.constexpr):
    for _ in range(TIMES):
        pass_by(9, 256)


@gluon.jit
def _wait():
    meet(9, 256)


@gluon.jit
def meeting_kernel(TIMES: gl.constexpr):
    gl.warp_specialize([(_wait, ()), (_come, (TIMES,))], [4], [24])


def test_a_named_barrier_needs_all_partitions_once():
    """Two arrivals of one partition do not count as arrivals of two."""
    emulate(meeting_kernel, 1, [1])
    for times, message in ((0, "deadlock"), (2, "twice|nobody met")):
        with pytest.raises(Wrong, match=message):
            emulate(meeting_kernel, 1, [times])


@gluon.jit
def divide_kernel(x_ptr, number):
    gl.store(
        x_ptr + gl.arange(0, 4, gl.BlockedLayout([1], [32], [4], [0])), gl.zeros([4], gl.float32, None) + number // 4
    )


def test_negative_numbers_are_not_divided():
    x = torch.zeros(4)
    emulate(divide_kernel, 1, [x, 9])
    assert x.tolist() == [2.0] * 4
    with pytest.raises(Wrong, match="divided"):
        emulate(divide_kernel, 1, [x, -9])

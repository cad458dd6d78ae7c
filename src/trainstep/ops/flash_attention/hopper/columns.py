"""Device functions of the Hopper kernels for tiles whose columns are in one part or two: copies, products, sums.

[Note: columns in parts]
Sizes in Gluon are powers of two. So a tile of 80 or 96 columns has two parts: 64 columns and a rest of 16 or 32, each with its own
TMA box, its own shared memory and its own wgmma. `parts` here are a tuple or list of one or two; the second begins at column 64.
Loops over parts are unrolled when compiling, so that a tile in one part costs nothing.

    a b^T   a sum over columns: one result, to which the second part's wgmma adds
    p v     separate columns: a result for each part

A wait counts each warpgroup_mma as one, however many instructions it has: while p v of two parts is running, two are newer than
anything that was started before it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from trainstep.ops.flash_attention.hopper.parts import ROWS, accumulator_layout, copy_in, copy_out, operand_layout

# Descriptors and shared memory ------------------------------------------------------------------------------------------------


@gluon.jit
def in_parts(desc, rest_desc):
    """The descriptors of a tensor. `rest_desc`: None for a tile in one part."""
    return (desc,) if rest_desc is None else (desc, rest_desc)


@gluon.jit
def new_tiles(descs, number: gl.constexpr):
    """Shared memory for `number` boxes, (number, 1, 1, rows, columns) for each part."""
    return [gl.allocate_shared_memory(x.dtype, [number] + x.block_type.shape, x.layout) for x in descs]  # noqa: RUF005


@gluon.jit
def box_at(tiles, i):
    """The i-th box of new_tiles, in the shape that TMA writes and reads."""
    return [tile.index(i) for tile in tiles]


@gluon.jit
def matrices(boxes):
    """The boxes as (rows, columns), which wgmma reads."""
    return [box.reshape([box.shape[2], box.shape[3]]) for box in boxes]


@gluon.jit
def rows_of(tiles, first: gl.constexpr, AXIS: gl.constexpr = 0):
    """ROWS rows of each part, from `first` on. AXIS: the axis of rows, 0 for matrices and 2 for boxes."""
    return [tile.slice(first, ROWS, AXIS) for tile in tiles]


@gluon.jit
def announce(barrier, descs, more_bytes: gl.constexpr):
    """Tell a barrier to expect a box of each descriptor, and `more_bytes`."""
    nbytes: gl.constexpr = descs[0].block_type.nbytes + more_bytes
    if len(descs) == 1:
        mbarrier.expect(barrier, nbytes)
    else:
        announce(barrier, descs[1:], nbytes)


@gluon.jit
def copy_in_parts(descs, batch, head, row, barrier, boxes):
    for part in gl.static_range(len(descs)):
        copy_in(descs[part], [batch, head, row, part * descs[0].block_type.shape[3]], barrier, boxes[part])


@gluon.jit
def copy_out_parts(descs, batch, head, row, boxes):
    for part in gl.static_range(len(descs)):
        copy_out(descs[part], [batch, head, row, part * descs[0].block_type.shape[3]], boxes[part])


# Products -----------------------------------------------------------------------------------------------------------------------


@gluon.jit
def start_sum(a, b, zeros):
    """Start wgmma: a b^T, summed over the columns of all parts. `zeros` give the result's layout; they are not added."""
    started = warpgroup_mma(a[0], b[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    for part in gl.static_range(1, len(a)):
        started = warpgroup_mma(a[part], b[part].permute((1, 0)), started, is_async=True)
    return started


@gluon.jit
def start_products(p, v, sums):
    """Start wgmma: sums + p v, part by part. p: 16 bits, in registers."""
    first = _start_product(p, v[0], sums[0])
    return (first,) if len(v) == 1 else (first, _start_product(p, v[1], sums[1]))


@gluon.jit
def _start_product(p, v, acc):
    OPERAND: gl.constexpr = operand_layout(v.shape[1])  # the same registers for every width
    return warpgroup_mma(gl.convert_layout(p, OPERAND), v, acc, is_async=True)


@gluon.jit
def finished(started, newer: gl.constexpr):
    """The results of start_products, once at most `newer` wgmma are running."""
    sums = warpgroup_mma_wait(newer, deps=started)
    return (sums,) if len(started) == 1 else sums


@gluon.jit
def zero_sums(descs):
    """Zeros, (ROWS, columns) in fp32, a part for each descriptor."""
    return [zero_sum(desc.block_type.shape[3]) for desc in descs]


@gluon.jit
def zero_sum(columns: gl.constexpr):
    """Zeros, (ROWS, columns) in fp32, in the layout to which wgmma adds."""
    return gl.zeros([ROWS, columns], gl.float32, accumulator_layout(columns))


@gluon.jit
def rows_times(sums, factor):
    """Each row multiplied by its number in `factor`."""
    return [_rows_times(x, factor) for x in sums]


@gluon.jit
def _rows_times(x, factor):
    ROW: gl.constexpr = gl.SliceLayout(1, accumulator_layout(x.shape[1]))
    return x * gl.expand_dims(gl.convert_layout(factor, ROW), 1)


@gluon.jit
def store_sums(tiles, sums):
    """Round the sums and store them into matrices in shared memory."""
    for part in gl.static_range(len(tiles)):
        tiles[part].store(sums[part].to(tiles[part].dtype))

"""The table of tiles for the portable kernels, the rule for tiles that can run, and the candidates for a tuner.

The table was chosen offline and each row names the record that chose it. Nothing is tuned at run time, so that ranks agree and the
first step is like the others. The first row that fits head width, precision, pass, architecture and shared memory is used;
architecture "any" is for GPUs that were not measured.
"""

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from enum import StrEnum

UNTUNED = "untuned: estimate from compiled registers and shared memory"
H200 = "results/h200/attention_tiles.jsonl"
MOST_HEAD_DIM = 256
MOST_PART_ROWS = 256
"""Rows of a tile of fp16 parts: the limit of a tensor map's box."""
MOST = 30
"""Candidates at most."""
_SHARED_CACHE_BYTES = 24 << 20
_POSITIONS_SHARED = 4096
"""heads_together is one number for all lengths: as many heads as share that much L2 cache with keys and values of this length."""


class KernelPass(StrEnum):
    """The pass that a kernel computes; there is one kernel for each."""

    FORWARD = "forward"
    KEY_GRADIENTS = "key_gradients"
    QUERY_GRADIENTS = "query_gradients"


class Arithmetic(StrEnum):
    """How tiles are multiplied: 16-bit operands; fp32 operands, with torch's names of fp32_precision; or three products of parts.

    TF32X3: parts in TF32, made where they are used. FP16X3: parts in fp16, made beforehand (split/parts.py).
    """

    HALF = "half"
    IEEE = "ieee"
    TF32 = "tf32"
    TF32X3 = "tf32x3"
    FP16X3 = "fp16x3"

    @property
    def element_bytes(self) -> int:
        return 2 if self is Arithmetic.HALF else 4

    @property
    def dot_precision(self) -> str:
        """tl.dot's input_precision, which has no effect on 16-bit operands."""
        return "ieee" if self in (Arithmetic.HALF, Arithmetic.FP16X3) else str(self)


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """How a kernel cuts its work."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    """Tiles in flight in the loop."""
    heads_together: int = 1
    """Heads whose longest tiles all start before their shorter tiles, so that programs end together and share the cache."""


TILE_FIELDS = tuple(field.name for field in fields(TileConfig))


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tiles of all three kernels in place of the table's, for tuning."""

    forward: TileConfig
    key_gradients: TileConfig
    query_gradients: TileConfig

    def numbers(self) -> list[int]:
        """The tiles as a list of numbers, which an operator's schema can have."""
        return [*astuple(self.forward), *astuple(self.key_gradients), *astuple(self.query_gradients)]

    @classmethod
    def of_numbers(cls, numbers: list[int]) -> "Tiles":
        chunks = [numbers[first : first + len(TILE_FIELDS)] for first in range(0, len(numbers), len(TILE_FIELDS))]
        forward, keys, queries = (TileConfig(**dict(zip(TILE_FIELDS, chunk, strict=True))) for chunk in chunks)
        return cls(forward=forward, key_gradients=keys, query_gradients=queries)


@dataclass(frozen=True, kw_only=True)
class TileProblem:
    """What a tile is chosen for: a kernel, the width of heads, and the GPU. `shared_memory_bytes`: a block's maximum."""

    pass_: KernelPass
    head_dim: int
    arithmetic: Arithmetic
    shared_memory_bytes: int
    architecture: str = "any"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: `config` for heads up to `most_head_dim` wide."""

    architecture: str
    arithmetic: Arithmetic
    pass_: KernelPass
    most_head_dim: int
    config: TileConfig
    record: str = UNTUNED


def padded(head_dim: int) -> int:
    """The tile's width: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def staying_and_streaming(config: TileConfig, pass_: KernelPass) -> tuple[int, int]:
    """(the side of the tile that a program keeps, the side that it runs over)."""
    sides = (config.block_q, config.block_k)
    return sides[::-1] if pass_ is KernelPass.KEY_GRADIENTS else sides


def shared_bytes(config: TileConfig, problem: TileProblem) -> int:
    """An upper bound of a block's shared memory: tiles that stay, tiles in flight, and for fp32 copies in another layout."""
    width = padded(problem.head_dim) * problem.arithmetic.element_bytes
    stays, streams = staying_and_streaming(config, problem.pass_)
    staying = stays * (1 if problem.pass_ is KernelPass.FORWARD else 2)
    in_flight = 2 * streams * config.num_stages
    copies = {Arithmetic.HALF: 0, Arithmetic.FP16X3: streams // 2, Arithmetic.IEEE: streams}.get(
        problem.arithmetic, staying
    )
    return (staying + in_flight + copies) * width + 8 * streams * config.num_stages


def accumulator_registers(config: TileConfig, problem: TileProblem) -> int:
    """Registers per thread that hold fp32 accumulators and scores."""
    width, q, k = padded(problem.head_dim), config.block_q, config.block_k
    floats = {
        KernelPass.FORWARD: q * (width + k),
        KernelPass.KEY_GRADIENTS: 2 * k * (width + q),
        KernelPass.QUERY_GRADIENTS: q * (width + 2 * k),
    }[problem.pass_]
    return floats // (32 * config.num_warps)


def is_legal(config: TileConfig, problem: TileProblem) -> bool:
    """Whether the tile can run; `why_illegal` says why not."""
    return why_illegal(config, problem) is None


def why_illegal(config: TileConfig, problem: TileProblem) -> str | None:
    """Why this tile cannot run, or None."""
    for name in ("block_q", "block_k"):
        size = getattr(config, name)
        if size < 16 or size & (size - 1):
            return f"{name}={size} is not a power of two of at least 16"
        if size > MOST_PART_ROWS and problem.arithmetic is Arithmetic.FP16X3:
            return f"{name}={size} is more than the {MOST_PART_ROWS} rows of parts that one load takes"
    if config.num_warps not in (1, 2, 4, 8, 16):
        return f"num_warps={config.num_warps} is not 1, 2, 4, 8 or 16"
    if min(config.num_stages, config.heads_together) < 1:
        return "num_stages and heads_together must be at least 1"
    needed = shared_bytes(config, problem)
    if needed > problem.shared_memory_bytes:
        return f"needs {needed} bytes of shared memory, the device has {problem.shared_memory_bytes}"
    registers = accumulator_registers(config, problem)
    if registers > 192:
        return f"needs {registers} registers a thread for accumulators alone"
    return None if problem.arithmetic is Arithmetic.IEEE else _why_too_narrow(config, problem.pass_)


def _why_too_narrow(config: TileConfig, pass_: KernelPass) -> str | None:
    """Why warps split the streamed side too finely for matrix units, or None.

    Where there is more than one warp per 16 rows of the side that stays, warps split the streamed side, into parts of at least 16.
    """
    # Narrower parts compile with triton 3.6.0, but on an H200 (TF32x3, key_gradients, 16 x 64, 8 warps) they read beyond
    # their memory.
    stays, streams = staying_and_streaming(config, pass_)
    parts = 16 * config.num_warps // stays if stays >= 64 else 1
    if parts > 1 and streams // parts < 16:
        return f"{config.num_warps} warps split the streamed side of {streams} into {parts} parts of less than 16"
    return None


def choose_row(problem: TileProblem) -> Row:
    """The table's first row that fits. ValueError where none does."""
    for row in TABLE:
        if (
            row.pass_ is problem.pass_
            and row.arithmetic is problem.arithmetic
            and row.architecture in (problem.architecture, "any")
            and problem.head_dim <= row.most_head_dim
            and is_legal(row.config, problem)
        ):
            return row
    raise ValueError(
        f"no {problem.pass_} tile of head width {problem.head_dim} fits {problem.shared_memory_bytes} bytes of shared memory "
        f"({problem.architecture}): use torch.nn.functional.scaled_dot_product_attention"
    )


def _rows(
    architecture: str,
    arithmetic: Arithmetic,
    pass_: KernelPass,
    by_head_dim: dict[int, tuple[int, ...]],
    record: str = UNTUNED,
) -> list[Row]:
    """Rows from {most_head_dim: (block_q, block_k, num_warps, num_stages, heads_together, which may be left out)}.

    `record`: the file of `trainstep tune` that chose them, relative to the repository's root.
    """
    return [
        Row(
            architecture=architecture,
            arithmetic=arithmetic,
            pass_=pass_,
            most_head_dim=most,
            config=TileConfig(**dict(zip(TILE_FIELDS, numbers, strict=False))),
            record=record,
        )
        for most, numbers in by_head_dim.items()
    ]


_HALF, _IEEE, _TF32, _TF32X3 = Arithmetic.HALF, Arithmetic.IEEE, Arithmetic.TF32, Arithmetic.TF32X3
_FP16X3 = Arithmetic.FP16X3
_FORWARD, _KEYS, _QUERIES = KernelPass.FORWARD, KernelPass.KEY_GRADIENTS, KernelPass.QUERY_GRADIENTS
TABLE: tuple[Row, ...] = (
    *_rows(
        "sm_90",
        _HALF,
        _FORWARD,
        {32: (64, 64, 4, 3, 48), 64: (128, 64, 8, 3, 24), 128: (64, 64, 4, 3, 12), 256: (128, 32, 8, 3, 6)},
        H200,
    ),
    *_rows(
        "sm_90",
        _HALF,
        _KEYS,
        {32: (128, 64, 4, 3, 48), 64: (128, 64, 4, 2, 24), 128: (64, 128, 8, 3, 12), 256: (32, 64, 8, 3, 6)},
        H200,
    ),
    *_rows(
        "sm_90",
        _HALF,
        _QUERIES,
        {32: (64, 64, 4, 3, 48), 64: (64, 64, 4, 3, 24), 128: (128, 64, 8, 3, 12), 256: (128, 32, 8, 3, 6)},
        H200,
    ),
    *_rows("sm_100", _HALF, _FORWARD, {64: (128, 128, 8, 3), 128: (128, 128, 8, 2), 256: (128, 64, 8, 2)}),
    *_rows("sm_100", _HALF, _KEYS, {64: (64, 128, 8, 2), 128: (64, 64, 8, 2), 256: (32, 64, 8, 2)}),
    *_rows("sm_100", _HALF, _QUERIES, {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)}),
    *_rows("sm_80", _HALF, _FORWARD, {64: (128, 64, 4, 3), 128: (128, 64, 8, 2), 256: (64, 64, 8, 2)}),
    *_rows("sm_80", _HALF, _KEYS, {64: (64, 64, 4, 2), 128: (32, 64, 4, 2), 256: (32, 32, 8, 2)}),
    *_rows("sm_80", _HALF, _QUERIES, {64: (64, 64, 4, 2), 128: (64, 32, 4, 2), 256: (32, 32, 8, 2)}),
    *_rows("any", _HALF, _FORWARD, {64: (64, 64, 4, 2), 128: (64, 32, 4, 2), 256: (32, 16, 4, 2)}),
    *_rows("any", _HALF, _KEYS, {64: (32, 64, 4, 2), 128: (32, 32, 4, 2), 256: (16, 16, 4, 2)}),
    *_rows("any", _HALF, _QUERIES, {64: (64, 32, 4, 2), 128: (32, 32, 4, 2), 256: (16, 16, 4, 2)}),
    *_rows("sm_90", _TF32, _FORWARD, {64: (128, 64, 8, 2), 128: (128, 32, 8, 2)}),
    *_rows("sm_90", _TF32, _KEYS, {64: (64, 64, 8, 2), 128: (32, 64, 8, 2)}),
    *_rows("sm_90", _TF32, _QUERIES, {64: (64, 64, 8, 2), 128: (64, 32, 8, 2)}),
    *_rows("sm_90", _TF32X3, _FORWARD, {64: (32, 64, 4, 2), 128: (32, 64, 4, 2)}, H200),
    *_rows("sm_90", _TF32X3, _KEYS, {64: (64, 32, 4, 1), 128: (64, 32, 8, 1)}, H200),
    *_rows("sm_90", _TF32X3, _QUERIES, {64: (32, 64, 4, 2), 128: (32, 64, 8, 1)}, H200),
    # The best tiles of a prototype on an H200 for one head (docs/log.md); those for width 256 are estimates
    *_rows("sm_90", _FP16X3, _FORWARD, {64: (128, 64, 8, 3, 16), 128: (128, 64, 8, 2, 16), 256: (64, 32, 8, 2, 16)}),
    *_rows("sm_90", _FP16X3, _KEYS, {64: (64, 64, 4, 2, 16), 128: (32, 64, 4, 2, 16)}),
    *_rows("sm_90", _FP16X3, _QUERIES, {64: (64, 64, 4, 2, 16), 128: (64, 32, 4, 2, 16), 256: (64, 16, 4, 1, 16)}),
    *_rows("sm_90", _IEEE, _FORWARD, {64: (32, 64, 4, 2), 128: (32, 64, 8, 1)}, H200),
    *_rows("sm_90", _IEEE, _KEYS, {64: (64, 32, 4, 2), 128: (64, 32, 8, 1)}, H200),
    *_rows("sm_90", _IEEE, _QUERIES, {64: (32, 64, 4, 2), 128: (32, 64, 8, 1)}, H200),
    *_rows("any", _IEEE, _FORWARD, {64: (32, 32, 4, 1), 128: (32, 32, 8, 1), 256: (16, 16, 4, 1)}),
    *_rows("any", _IEEE, _KEYS, {64: (32, 32, 8, 1), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1)}),
    *_rows("any", _IEEE, _QUERIES, {64: (32, 32, 8, 1), 128: (32, 16, 8, 1), 256: (16, 16, 8, 1)}),
    *(
        row
        for arithmetic in (_TF32, _TF32X3, _FP16X3)
        for pass_ in KernelPass
        for row in _rows("any", arithmetic, pass_, {64: (32, 32, 4, 1), 128: (16, 32, 4, 1), 256: (16, 16, 4, 1)})
    ),
)

# Candidates: the legal tiles that are worth timing for one kernel on one GPU, the most promising first.
#
# A tile has a side that stays with its program and a side that streams past it (staying_and_streaming). With 16-bit
# operands one warp per 16 rows of the side that stays was fastest wherever it was measured (H200): a warpgroup owns 64
# rows. Twice as many warps are needed where accumulators need their registers. fp32 products take more registers and
# memory, so tiles are smaller and fewer of them are in flight. An operand has two fp16 parts, so tiles of half the size
# take as much memory as 16-bit tiles.


def candidates(problem: TileProblem, *, heads: int) -> list[TileConfig]:
    """At most MOST legal tiles. `heads`: batch x heads; with a single head, heads_together has no effect."""
    head_bytes = 2 * _POSITIONS_SHARED * padded(problem.head_dim) * problem.arithmetic.element_bytes
    heads_together = (1, max(2, _SHARED_CACHE_BYTES // head_bytes)) if heads > 1 else (1,)
    rule = {Arithmetic.HALF: _half_tiles, Arithmetic.FP16X3: _parts_tiles}.get(problem.arithmetic, _fp32_tiles)
    legal = [tile for tile in rule(problem.pass_, problem.head_dim) if is_legal(tile, problem)]
    shapes = list(dict.fromkeys(legal))[: MOST // len(heads_together)]
    return [replace(tile, heads_together=number) for tile in shapes for number in heads_together]


def _half_tiles(pass_: KernelPass, head_dim: int) -> Iterator[TileConfig]:
    streaming = (64, 32, 128) if padded(head_dim) <= 128 else (32, 64, 16)
    for stages, streams, stays in itertools.product((3, 2), streaming, (64, 128)):
        yield _tile(pass_, stays, streams, stays // 16, stages)
        if padded(head_dim) > 128:
            yield _tile(pass_, stays, streams, stays // 8, stages)
    for stages in (3, 2):  # with narrow heads a warp has registers for 32 rows
        yield _tile(pass_, 128, 64, 4, stages)
    yield _tile(pass_, 64, 32, 4, 4)
    if padded(head_dim) > 128:
        yield from _small_tiles(pass_)


def _fp32_tiles(pass_: KernelPass, head_dim: int) -> Iterator[TileConfig]:
    for (stays, warps), streams, stages in itertools.product(
        ((64, 8), (64, 4), (32, 4), (128, 8)), (32, 16, 64), (1, 2)
    ):
        yield _tile(pass_, stays, streams, warps, stages)
    for streams in (32, 64):
        yield _tile(pass_, 32, streams, 8, 1)
    if padded(head_dim) > 128:
        yield from _small_tiles(pass_)


def _parts_tiles(pass_: KernelPass, head_dim: int) -> Iterator[TileConfig]:
    streaming = (64, 32, 128) if padded(head_dim) <= 64 else (32, 64, 16)
    for stages, streams, stays in itertools.product((2, 1, 3), streaming, (64, 128)):
        yield _tile(pass_, stays, streams, stays // 16, stages)
    for stages, streams in itertools.product((1, 2), (32, 16)):
        yield _tile(pass_, 32, streams, 4, stages)
    if padded(head_dim) > 128:
        yield from _small_tiles(pass_)


def _small_tiles(pass_: KernelPass) -> Iterator[TileConfig]:
    """Tiles for wide heads on GPUs with little shared memory."""
    for stays, streams, stages in itertools.product((32, 16), (32, 16), (2, 1)):
        yield _tile(pass_, stays, streams, 4, stages)


def _tile(pass_: KernelPass, stays: int, streams: int, num_warps: int, num_stages: int) -> TileConfig:
    block_q, block_k = (streams, stays) if pass_ is KernelPass.KEY_GRADIENTS else (stays, streams)
    return TileConfig(block_q=block_q, block_k=block_k, num_warps=num_warps, num_stages=num_stages)

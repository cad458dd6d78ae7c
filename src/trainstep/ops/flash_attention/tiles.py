"""Which tiles a kernel runs with: a table chosen offline, a row with the record that chose it, and one predicate of what can run.

Nothing is tuned at run time, so that ranks agree and the first step is like the others. The first row that fits head width,
precision, pass, architecture and shared memory is taken; architecture "any" is for GPUs nobody has measured.
"""

from dataclasses import astuple, dataclass, fields
from enum import StrEnum

UNTUNED = "untuned: estimate from compiled registers and shared memory"
H200 = "results/h200/attention_tiles.jsonl"
MOST_HEAD_DIM = 256
MOST_PART_ROWS = 256
"""Of a tile of fp16 parts: the box of a tensor map ends there."""


class KernelPass(StrEnum):
    """One kernel each."""

    FORWARD = "forward"
    KEY_GRADIENTS = "key_gradients"
    QUERY_GRADIENTS = "query_gradients"


class Arithmetic(StrEnum):
    """How tiles are multiplied: 16-bit operands, or fp32 ones as torch's fp32_precision names it, or by three products.

    Of TF32 parts made where they are used, or of fp16 parts made beforehand (split_parts.py).
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
        """tl.dot's input_precision, which 16-bit operands ignore."""
        return "ieee" if self in (Arithmetic.HALF, Arithmetic.FP16X3) else str(self)


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """How one kernel cuts its work."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    """Tiles in flight in a loop."""
    heads_together: int = 1
    """Heads whose longest tiles start before any of their shorter ones: evens out the end, shares the cache."""


TILE_FIELDS = tuple(field.name for field in fields(TileConfig))


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tiles of all three kernels in place of the table's, for whoever tunes them."""

    forward: TileConfig
    key_gradients: TileConfig
    query_gradients: TileConfig

    def numbers(self) -> list[int]:
        """As an operator's schema can carry them."""
        return [*astuple(self.forward), *astuple(self.key_gradients), *astuple(self.query_gradients)]

    @classmethod
    def of_numbers(cls, numbers: list[int]) -> "Tiles":
        each = [numbers[first : first + len(TILE_FIELDS)] for first in range(0, len(numbers), len(TILE_FIELDS))]
        forward, keys, queries = (TileConfig(**dict(zip(TILE_FIELDS, one, strict=True))) for one in each)
        return cls(forward=forward, key_gradients=keys, query_gradients=queries)


@dataclass(frozen=True, kw_only=True)
class TileProblem:
    """What a tile is chosen for: a kernel on heads of a width, and the GPU. `shared_memory_bytes`: what a block may have there."""

    pass_: KernelPass
    head_dim: int
    arithmetic: Arithmetic
    shared_memory_bytes: int
    architecture: str = "any"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table: `config` for heads up to `most_head_dim` wide."""

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
    """The tile's side that a program keeps, and the one it runs over."""
    sides = (config.block_q, config.block_k)
    return sides[::-1] if pass_ is KernelPass.KEY_GRADIENTS else sides


def shared_bytes(config: TileConfig, problem: TileProblem) -> int:
    """Shared memory a block takes, from above: tiles that stay, tiles in flight; fp32 lays operands out again."""
    width = padded(problem.head_dim) * problem.arithmetic.element_bytes
    stays, streams = staying_and_streaming(config, problem.pass_)
    staying = stays * (1 if problem.pass_ is KernelPass.FORWARD else 2)
    in_flight = 2 * streams * config.num_stages
    again = {Arithmetic.HALF: 0, Arithmetic.FP16X3: streams // 2, Arithmetic.IEEE: streams}.get(
        problem.arithmetic, staying
    )
    return (staying + in_flight + again) * width + 8 * streams * config.num_stages


def accumulator_registers(config: TileConfig, problem: TileProblem) -> int:
    """Registers of each thread that hold fp32 accumulators and scores."""
    width, q, k = padded(problem.head_dim), config.block_q, config.block_k
    floats = {
        KernelPass.FORWARD: q * (width + k),
        KernelPass.KEY_GRADIENTS: 2 * k * (width + q),
        KernelPass.QUERY_GRADIENTS: q * (width + 2 * k),
    }[problem.pass_]
    return floats // (32 * config.num_warps)


def is_legal(config: TileConfig, problem: TileProblem) -> bool:
    """Whether the tile can run: `why_illegal` has the reason."""
    return why_illegal(config, problem) is None


def why_illegal(config: TileConfig, problem: TileProblem) -> str | None:
    """Why this tile cannot run, or None."""
    for name in ("block_q", "block_k"):
        size = getattr(config, name)
        if size < 16 or size & (size - 1):
            return f"{name}={size} is not a power of two of at least 16"
        if size > MOST_PART_ROWS and problem.arithmetic is Arithmetic.FP16X3:
            return f"{name}={size} is more than the {MOST_PART_ROWS} rows of parts that are loaded at once"
    if config.num_warps not in (1, 2, 4, 8, 16):
        return f"num_warps={config.num_warps} is not 1, 2, 4, 8 or 16"
    if min(config.num_stages, config.heads_together) < 1:
        return "num_stages and heads_together start at 1"
    needed = shared_bytes(config, problem)
    if needed > problem.shared_memory_bytes:
        return f"needs {needed} bytes of shared memory, the device has {problem.shared_memory_bytes}"
    registers = accumulator_registers(config, problem)
    if registers > 192:
        return f"needs {registers} registers a thread for accumulators alone"
    return None if problem.arithmetic is Arithmetic.IEEE else _why_too_narrow(config, problem.pass_)


def _why_too_narrow(config: TileConfig, pass_: KernelPass) -> str | None:
    """Matrix units only: warps beyond one for 16 rows of what stays split what streams, and 16 columns are the least a part has.

    Narrower parts compile with triton 3.6.0, and on an H200 (TF32x3, key_gradients, 16 x 64, 8 warps) read beyond their memory.
    """
    stays, streams = staying_and_streaming(config, pass_)
    parts = 16 * config.num_warps // stays if stays >= 64 else 1
    if parts > 1 and streams // parts < 16:
        return f"{config.num_warps} warps split the streamed side of {streams} into {parts} parts of less than 16"
    return None


def choose_row(problem: TileProblem) -> Row:
    """The table's first row that fits."""
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
    """Rows from {most_head_dim: (block_q, block_k, num_warps, num_stages, heads_together or nothing for 1)}.

    `record`: the file of `trainstep tune` that chose them, from the repository's root.
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
    # Best of a prototype's on an H200 for one head (docs/log.md); the 256 wide ones are estimates
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

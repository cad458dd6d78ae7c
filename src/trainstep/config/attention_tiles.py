"""One attention kernel to find the fastest tile of, on one problem: a cell of the workload `attention_tiles`."""

import math
from dataclasses import dataclass

from trainstep.config.fields import check_choices, check_integer, check_positive, described

KERNELS = ("forward", "key_gradients", "query_gradients")
ARITHMETICS = ("bf16", "fp16", "ieee", "tf32", "tf32x3", "fp16x3")
MASKS = ("causal", "full")
GENERATED = "generated"
KERNEL_TILE_FIELDS = ("block_q", "block_k", "num_warps", "num_stages", "heads_together")
"""A tile's numbers, in the order of their spelling and of the kernels' TileConfig."""
_TILE_FORM = f"{' x '.join(KERNEL_TILE_FIELDS[:4])} [x {KERNEL_TILE_FIELDS[4]}], as 128x64x8x3"
_MOST_OWN = 100


@dataclass(frozen=True, kw_only=True)
class AttentionTilesConfig:
    """Which kernel, on what, and which tiles are tried. Raises ValueError naming the field."""

    kernel: str = described("the kernel whose tile is chosen", "forward", KERNELS)
    head_dim: int = described("width of a head", 64)
    arithmetic: str = described("16-bit operands, or how fp32 ones are multiplied", "bf16", ARITHMETICS)
    mask: str = described("what a query sees", "causal", MASKS)
    shape: str = described("batch x heads x positions", "4x16x4096")
    candidates: str = described(f"tiles to try: {GENERATED}, or your own, commas between them: {_TILE_FORM}", GENERATED)
    rounds: int = described("times that each candidate is timed, in turns", 12)
    workers: int = described("processes that compile and check candidates; 0: one a core", 0)
    budget_s: float = described("seconds after which no candidate is begun and no round beyond the third", 120.0)
    device: str = described("where it runs; a CPU is for tests, in Triton's interpreter", "cuda", ("cpu", "cuda"))
    seed: int = described("seed of the tensors", 0)

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "rounds")
        check_integer(self, "head_dim", at_least=8, at_most=256)
        check_integer(self, "workers", at_least=0, at_most=256)
        check_integer(self, "seed", at_least=0, at_most=2**63 - 1)
        if not 0 < self.budget_s < math.inf:
            raise ValueError(f"budget_s: must be a positive number of seconds, not {self.budget_s}")
        self.sizes  # noqa: B018  (checks them)
        self.own_tiles  # noqa: B018

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Batch, heads and positions."""
        numbers = _numbers(self.shape)
        if len(numbers) != 3 or not all(0 < number <= 2**31 for number in numbers):
            raise ValueError(f"shape: {self.shape!r} is not batch x heads x positions, as 4x16x4096")
        batch, heads, positions = numbers
        return batch, heads, positions

    @property
    def own_tiles(self) -> tuple[tuple[int, ...], ...]:
        """Four or five numbers a tile, in the order of their spelling; none where they are generated."""
        if self.candidates == GENERATED:
            return ()
        tiles = tuple(_numbers(word) for word in self.candidates.split(","))
        if not all(len(tile) in (4, 5) and all(number > 0 for number in tile) for tile in tiles):
            raise ValueError(f"candidates: {self.candidates!r} is neither {GENERATED!r} nor tiles {_TILE_FORM}")
        if len(tiles) > _MOST_OWN:
            raise ValueError(f"candidates: {len(tiles)} tiles, and {_MOST_OWN} is the most")
        return tiles


def _numbers(text: object) -> tuple[int, ...]:
    """(4, 16, 4096) of `4x16x4096`; nothing for anything else."""
    words = text.strip().lower().split("x") if isinstance(text, str) else []
    return tuple(map(int, words)) if all(word.strip().isdecimal() and len(word) < 12 for word in words) else ()

"""The configs of attention: one pass to measure, and one kernel whose fastest tile is searched for.

`AttentionConfig(implementation="sdpa_flash", seq=4096, dtype="bf16")` is a cell of the workload `attention`. A config that no
implementation could run is a ValueError. A config that only this implementation cannot run is still a cell of the table, and its
`refusal` says why. `AttentionTilesConfig` is a cell of the workload `attention_tiles`.
"""

import math
from dataclasses import dataclass

from trainstep.config.fields import check_choices, check_integer, check_positive, described, nearest

IMPLEMENTATIONS = (
    *("plain", "plain_compiled", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "flex"),
    *("flash_attn", "flash_attn_4", "trainstep"),
)
PACKAGES = {"flash_attn": "flash-attn", "flash_attn_4": "flash-attn-4"}
"""Optional implementation -> package to install. flash-attn-4 is a separate package, although its module flash_attn.cute lies
inside flash-attn's."""
DIRECTIONS = ("forward", "backward", "both")
MASKS = ("causal", "full")
RULE = "rule"
_THREE_PRODUCTS = ("tf32x3", "fp16x3")
"""Both have errors of the same size. SDPA's memory-efficient kernel always uses three TF32 products and is the peer of both."""
_FP32_PRECISIONS = ("ieee", "tf32", *_THREE_PRODUCTS)
_ON_GPUS_ONLY = ("sdpa_cudnn", "sdpa_efficient", "flex", *PACKAGES)
_SIXTEEN_BIT_ON_GPUS = ("sdpa_flash", "sdpa_cudnn", *PACKAGES)
_MASKS_TOP_LEFT = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math")
_MASKS_BOTTOM_RIGHT = tuple(PACKAGES)
_FLASH_ATTN_4_WIDTH_STEP, _FLASH_ATTN_4_WIDEST = 8, 256
"""Limits of head_dim on sm_90 (_validate_head_dims in flash-attn-4's interface.py). On other chips it refuses more itself, at its
first call."""

KERNELS = ("forward", "key_gradients", "query_gradients")
ARITHMETICS = ("bf16", "fp16", "ieee", "tf32", "tf32x3", "fp16x3")
KERNEL_TILE_FIELDS = ("block_q", "block_k", "num_warps", "num_stages", "heads_together")
"""A tile's numbers, in the order in which tiles are written, which is that of the kernels' TileConfig."""
TILE_FIELDS = KERNEL_TILE_FIELDS[:4]
"""The numbers that AttentionConfig can set. The number of heads that start together always comes from the table."""
GENERATED = "generated"
_TILE_FORM = f"{' x '.join(TILE_FIELDS)} [x {KERNEL_TILE_FIELDS[4]}], as 128x64x8x3"
_MOST_OWN_TILES = 100


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention's forward, backward or both, and how it is timed. ValueError names the field and the remedy."""

    implementation: str = described("implementation of attention", "trainstep", IMPLEMENTATIONS)
    batch: int = described("sequences", 4)
    heads: int = described("heads of the queries", 16)
    key_heads: int | None = described("heads of keys and values (GQA has fewer than queries); none: as many", None)
    seq: int = described("queries in a sequence", 1024)
    keys: int | None = described("keys in a sequence; none: as many as queries", None)
    head_dim: int = described("width of a head", 64)
    mask: str = described("which keys a query sees", "causal", MASKS)
    causal_alignment: str = described(
        "where the mask's diagonal ends if the numbers of keys and queries differ",
        "top_left",
        ("top_left", "bottom_right"),
    )
    dtype: str = described("dtype of inputs and output", "fp32", ("fp32", "fp16", "bf16"))
    fp32_precision: str | None = described(
        "how fp32 is multiplied on a GPU: ieee, tf32, or as three products, tf32x3 or fp16x3 (sdpa_efficient runs tf32x3 for "
        "both); none: IEEE",
        None,
    )
    direction: str = described("which pass is timed", "both", DIRECTIONS)
    l2: str = described(
        "the GPU's cache before each pass: hot, as the last pass left it, or cold, filled with other data",
        "hot",
        ("hot", "cold"),
    )
    layout: str = described("layout of the inputs in memory; BSD has no heads", "BHSD", ("BHSD", "BSHD", "BSD"))
    device: str = described("device to run on", "cpu", ("cpu", "cuda"))
    seed: int = described("seed of the inputs", 0)
    warmups: int = described("passes before the timed ones, after a first that may compile; recorded separately", 3)
    steps: int = described("timed passes", 20)
    block_q: int | str | None = described(
        "trainstep's tile for every kernel, instead of the table's (trainstep tune finds the fastest): number of queries, or "
        f"{RULE}: min(max(next_pow2(seq / 16), 16), 32)",
        None,
    )
    block_k: int | str | None = described(f"the tile's number of keys, or {RULE}", None)
    num_warps: int | None = described("the tile's warps; none: 4 up to 64 x 64, else 8", None)
    num_stages: int | None = described("the tile's stages; none: from the table", None)

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "batch", "heads", "seq", "head_dim", "steps")
        check_integer(self, "warmups", at_least=0)
        check_integer(self, "seed", at_least=0, at_most=2**63 - 1)
        for name in ("key_heads", "keys", "num_warps", "num_stages"):
            if getattr(self, name) is not None:
                check_integer(self, name, at_least=1)
        if self.heads % self.group_heads:
            raise ValueError(f"key_heads: {self.key_heads} does not divide heads {self.heads}")
        if self.layout == "BSD" and self.heads != 1:
            raise ValueError(f"heads: layout BSD has one head, not {self.heads}; take heads 1, or layout BHSD or BSHD")
        self._check_precision()
        self._check_tile()
        if self.device == "cpu" and self.l2 == "cold":
            raise ValueError("l2: cold is about a GPU's cache; on a CPU leave it at hot")

    def _check_precision(self) -> None:
        precision = self.fp32_precision
        if precision is None:
            return
        if precision not in _FP32_PRECISIONS:
            hint = nearest(str(precision), _FP32_PRECISIONS)
            raise ValueError(
                f"fp32_precision: {precision!r} is not known{hint}; known: {', '.join(_FP32_PRECISIONS)}, none"
            )
        if self.dtype != "fp32":
            raise ValueError(
                f"fp32_precision: says how fp32 is multiplied, but dtype is {self.dtype}; leave it at none"
            )
        if self.device == "cpu" and precision != "ieee":
            raise ValueError(f"fp32_precision: {precision} needs NVIDIA matrix units; on a CPU leave it at none")

    def _check_tile(self) -> None:
        for name in ("block_q", "block_k"):
            value = getattr(self, name)
            if isinstance(value, str) and value != RULE:
                raise ValueError(f"{name}: must be a whole number, {RULE} or none, not {value!r}")
            if value is not None and value != RULE:
                check_integer(self, name, at_least=1)
        field = next((name for name in TILE_FIELDS if getattr(self, name) is not None), None)
        if field and self.implementation != "trainstep":
            raise ValueError(f"{field}: only trainstep's kernels take a tile; {self.implementation} does not")

    @property
    def group_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.key_heads or self.heads

    @property
    def key_count(self) -> int:
        """Number of keys in a sequence."""
        return self.keys or self.seq

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def bottom_right(self) -> bool:
        """Whether the mask's diagonal ends at the last key, where that makes a difference."""
        return self.causal and self.causal_alignment == "bottom_right" and self.key_count != self.seq

    @property
    def has_own_tile(self) -> bool:
        return any(getattr(self, name) is not None for name in TILE_FIELDS)

    @property
    def blocks(self) -> tuple[int | None, int | None]:
        """The tile's numbers of queries and keys; None where they come from the table."""
        sides = ((self.block_q, self.seq), (self.block_k, self.key_count))
        block_q, block_k = (rule_block(count) if side == RULE else side for side, count in sides)
        return block_q, block_k  # type: ignore[return-value]

    @property
    def refusal(self) -> str | None:
        """Why this implementation cannot run this config, as far as that is known without trying; None if it may run."""
        name = self.implementation
        if self.device == "cpu":
            if name in _ON_GPUS_ONLY:
                return f"implementation: {name} runs on GPUs only"
        elif self.dtype == "fp32" and name in _SIXTEEN_BIT_ON_GPUS:
            return f"implementation: {name} does not take float32"
        return self._mask_refusal() or self._width_refusal() or self._precision_refusal()

    def _mask_refusal(self) -> str | None:
        name = self.implementation
        if not self.causal or self.key_count == self.seq:
            return None
        if self.bottom_right and name in _MASKS_TOP_LEFT:
            return f"implementation: {name} masks from the top left only"
        if not self.bottom_right and name in _MASKS_BOTTOM_RIGHT:
            return f"implementation: {name} masks from the bottom right only"
        return None

    def _width_refusal(self) -> str | None:
        name, width, step, widest = self.implementation, self.head_dim, _FLASH_ATTN_4_WIDTH_STEP, _FLASH_ATTN_4_WIDEST
        if name != "flash_attn_4" or (width % step == 0 and width <= widest):
            return None
        return f"implementation: {name} takes multiples of {step} up to {widest} as head_dim, not {width}"

    def _precision_refusal(self) -> str | None:
        name, precision = self.implementation, self.fp32_precision
        if precision is None or name == "trainstep":
            return None
        three_products = precision in _THREE_PRODUCTS
        if name == "sdpa_efficient" and not three_products:
            return f"implementation: {name} multiplies fp32 as tf32x3, never as {precision}"
        if name != "sdpa_efficient" and three_products:
            return f"implementation: {name} does not multiply as {precision}"
        return None


@dataclass(frozen=True, kw_only=True)
class AttentionTilesConfig:
    """One attention kernel, one problem, and the tiles to try on it. ValueError names the field."""

    kernel: str = described("the kernel whose tile is chosen", "forward", KERNELS)
    head_dim: int = described("width of a head", 64)
    arithmetic: str = described("16-bit operands, or how fp32 operands are multiplied", "bf16", ARITHMETICS)
    mask: str = described("which keys a query sees", "causal", MASKS)
    shape: str = described("batch x heads x positions", "4x16x4096")
    candidates: str = described(f"tiles to try: {GENERATED}, or your own with commas between: {_TILE_FORM}", GENERATED)
    rounds: int = described("times that each candidate is timed, interleaved with the others", 12)
    workers: int = described("processes that compile and check candidates; 0: one per core", 0)
    budget_s: float = described("seconds after which no candidate is started, and no round after the third", 120.0)
    device: str = described("device to run on; a CPU is for tests, in Triton's interpreter", "cuda", ("cpu", "cuda"))
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
        """The user's tiles, each of four or five numbers in the order of KERNEL_TILE_FIELDS; empty if tiles are generated."""
        if self.candidates == GENERATED:
            return ()
        tiles = tuple(_numbers(word) for word in self.candidates.split(","))
        if not all(len(tile) in (4, 5) and all(number > 0 for number in tile) for tile in tiles):
            raise ValueError(f"candidates: {self.candidates!r} is neither {GENERATED!r} nor tiles {_TILE_FORM}")
        if len(tiles) > _MOST_OWN_TILES:
            raise ValueError(f"candidates: {len(tiles)} tiles are more than the limit of {_MOST_OWN_TILES}")
        return tiles


def rule_block(positions: int) -> int:
    """A tile's side by rule: a sixteenth of the positions, rounded up to a power of two, within 16 to 32."""
    sixteenth = -(-positions // 16)
    return min(max(1 << (sixteenth - 1).bit_length(), 16), 32)


def _numbers(text: object) -> tuple[int, ...]:
    """(4, 16, 4096) for `4x16x4096`; empty for anything else."""
    words = text.strip().lower().split("x") if isinstance(text, str) else []
    return tuple(map(int, words)) if all(word.strip().isdecimal() and len(word) < 12 for word in words) else ()

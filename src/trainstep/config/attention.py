"""One pass of attention to measure: whose, on what shape, in which direction, and what an implementation does not take.

`AttentionConfig(implementation="sdpa_flash", seq=4096, dtype="bf16")`; `refusal` says in a sentence why a peer cannot run it:
that is a cell of the table, where a config that makes no sense is a ValueError.
"""

from dataclasses import dataclass

from trainstep.config.attention_tiles import KERNEL_TILE_FIELDS
from trainstep.config.fields import check_choices, check_integer, check_positive, described, nearest

IMPLEMENTATIONS = (
    *("plain", "plain_compiled", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "flex"),
    *("flash_attn", "flash_attn_4", "trainstep"),
)
PACKAGES = {"flash_attn": "flash-attn", "flash_attn_4": "flash-attn-4"}
"""Of implementations that need not be there: what to install. flash-attn-4 is another package, whose module flash_attn.cute lies
inside flash-attn's."""
DIRECTIONS = ("forward", "backward", "both")
RULE = "rule"
TILE_FIELDS = KERNEL_TILE_FIELDS[:4]
"""What a pass may be timed with: the number of heads that start together is the table's."""
_THREE_PRODUCTS = ("tf32x3", "fp16x3")
"""One class of error. SDPA's memory-efficient kernel, always by three TF32 products, is the peer of both."""
_FP32_PRECISIONS = ("ieee", "tf32", *_THREE_PRODUCTS)
_ON_GPUS_ONLY = ("sdpa_cudnn", "sdpa_efficient", "flex", *PACKAGES)
_SIXTEEN_BIT_ON_GPUS = ("sdpa_flash", "sdpa_cudnn", *PACKAGES)
_MASKS_TOP_LEFT = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math")
_MASKS_BOTTOM_RIGHT = tuple(PACKAGES)
_FLASH_ATTN_4_WIDTH_STEP, _FLASH_ATTN_4_WIDEST = 8, 256
"""Of a head, on sm_90 (its interface.py, _validate_head_dims). It refuses more on other chips itself, when first called."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention's forward, backward or both, and the way to time it. Raises ValueError naming the field and the way out."""

    implementation: str = described("whose attention", "trainstep", IMPLEMENTATIONS)
    batch: int = described("sequences", 4)
    heads: int = described("heads of the queries", 16)
    key_heads: int | None = described("heads of keys and values, fewer than queries have in GQA; none: as many", None)
    seq: int = described("queries of a sequence", 1024)
    keys: int | None = described("keys of a sequence; none: as many as queries", None)
    head_dim: int = described("width of a head", 64)
    mask: str = described("which keys a query sees", "causal", ("causal", "full"))
    causal_alignment: str = described(
        "where the diagonal ends if keys are not as many as queries", "top_left", ("top_left", "bottom_right")
    )
    dtype: str = described("of inputs and output", "fp32", ("fp32", "fp16", "bf16"))
    fp32_precision: str | None = described(
        "how fp32 is multiplied on a GPU: ieee, tf32, or by three products, tf32x3 and fp16x3 (sdpa_efficient: tf32x3 at "
        "either); none: IEEE",
        None,
    )
    direction: str = described("what is timed", "both", DIRECTIONS)
    l2: str = described(
        "the GPU's cache before each pass: as the last pass left it, or filled with others", "hot", ("hot", "cold")
    )
    layout: str = described("of the inputs in memory; BSD has no heads", "BHSD", ("BHSD", "BSHD", "BSD"))
    device: str = described("where it runs", "cpu", ("cpu", "cuda"))
    seed: int = described("seed of the inputs", 0)
    warmups: int = described("passes before the timed ones, after a first that may compile; kept apart", 3)
    steps: int = described("timed passes", 20)
    block_q: int | str | None = described(
        f"trainstep's tile in place of its table's, for every kernel (trainstep tune finds the fastest): queries, or {RULE}: "
        "min(max(next_pow2(seq / 16), 16), 32)",
        None,
    )
    block_k: int | str | None = described(f"the tile's keys, or {RULE}", None)
    num_warps: int | None = described("the tile's warps; none: 4 up to 64 x 64, else 8", None)
    num_stages: int | None = described("the tile's stages; none: the table's", None)

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
            raise ValueError(f"heads: layout BSD has none to hold {self.heads}; take heads 1, or layout BHSD or BSHD")
        self._check_precision()
        self._check_tile()
        if self.device == "cpu" and self.l2 == "cold":
            raise ValueError("l2: cold is a GPU's cache; on a CPU leave it hot")

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
                f"fp32_precision: says how fp32 is multiplied, and dtype is {self.dtype}; leave it at none"
            )
        if self.device == "cpu" and precision != "ieee":
            raise ValueError(f"fp32_precision: {precision} is of NVIDIA matrix units; on a CPU leave it at none")

    def _check_tile(self) -> None:
        for name in ("block_q", "block_k"):
            value = getattr(self, name)
            if isinstance(value, str) and value != RULE:
                raise ValueError(f"{name}: must be a whole number, {RULE} or none, not {value!r}")
            if value is not None and value != RULE:
                check_integer(self, name, at_least=1)
        given = next((name for name in TILE_FIELDS if getattr(self, name) is not None), None)
        if given and self.implementation != "trainstep":
            raise ValueError(f"{given}: tiles are trainstep's; {self.implementation} has none to set")

    @property
    def group_heads(self) -> int:
        """Heads of keys and values."""
        return self.key_heads or self.heads

    @property
    def key_count(self) -> int:
        """Keys of a sequence."""
        return self.keys or self.seq

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def bottom_right(self) -> bool:
        """Whether the mask's diagonal ends at the last key and would not anyway."""
        return self.causal and self.causal_alignment == "bottom_right" and self.key_count != self.seq

    @property
    def has_own_tile(self) -> bool:
        return any(getattr(self, name) is not None for name in TILE_FIELDS)

    @property
    def blocks(self) -> tuple[int | None, int | None]:
        """The tile's queries and keys as numbers, None where the table's stand."""
        sides = ((self.block_q, self.seq), (self.block_k, self.key_count))
        block_q, block_k = (rule_block(count) if side == RULE else side for side, count in sides)
        return block_q, block_k  # type: ignore[return-value]

    @property
    def refusal(self) -> str | None:
        """Why this implementation does not run this, known without trying; None if it may."""
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
        return f"implementation: {name} takes a head_dim that {step} divides, up to {widest}, not {width}"

    def _precision_refusal(self) -> str | None:
        name, precision = self.implementation, self.fp32_precision
        if precision is None or name == "trainstep":
            return None
        if name == "sdpa_efficient":
            return (
                None
                if precision in _THREE_PRODUCTS
                else f"implementation: {name} multiplies fp32 as tf32x3, never as {precision}"
            )
        return f"implementation: {name} does not multiply as {precision}" if precision in _THREE_PRODUCTS else None


def rule_block(positions: int) -> int:
    """A tile's side by rule: a sixteenth of the positions up to a power of two, but 16 to 32."""
    sixteenth = -(-positions // 16)
    return min(max(1 << (sixteenth - 1).bit_length(), 16), 32)

"""Turns an attention implementation's name into a callable (q, k, v) -> output on tensors in the config's layout.

`attend_named(config)` builds it, or raises CellFailed if it is not installed or its tile cannot run. `why_refused` turns the error
of its first call into a sentence if the implementation refuses the case. AttentionConfig.refusal has what is known without trying.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainstep.config.attention import PACKAGES, TILE_FIELDS, AttentionConfig
from trainstep.measure.harness.failures import refused
from trainstep.ops import reference
from trainstep.ops.flash_attention import Tiles, flash_attention
from trainstep.ops.flash_attention.portable.tiles import Arithmetic, KernelPass, TileConfig, choose_row, why_illegal
from trainstep.ops.flash_attention.problem import tile_problem
from trainstep.training.attention import Attention, PackagedAttention, flash_attn_func, flex_attention, sdpa_on

_REFUSALS = {"trainstep": (ValueError,), "flash_attn_4": (AssertionError, NotImplementedError)}
"""Implementation -> the errors with which it refuses a case."""
_SMALL_TILE = 64 * 64
_MOST_REASONS = 2


def attend_named(config: AttentionConfig) -> Attention:
    """The config's implementation as a callable on tensors in its layout."""
    name = config.implementation
    if name == "trainstep":
        return _trainstep(config)
    if name in PACKAGES:
        return _flash_attn(config)
    if name in ("plain_compiled", "flex"):
        # A process measures many cells, and after a few recompilations of a function torch would run it eagerly.
        torch.compiler.reset()
    shares_keys = config.group_heads != config.heads
    if name == "flex":
        lengths, offset = (config.seq, config.key_count), config.key_count - config.seq if config.bottom_right else 0
        flex = flex_attention(
            *lengths, torch.device(config.device), causal=config.causal, offset=offset, shares_keys=shares_keys
        )
        return _on_heads(config, flex)
    if name.startswith("sdpa_"):
        return _on_heads(config, sdpa_on(name, causal=config.causal, shares_keys=shares_keys))
    plain = _on_heads(config, _plain(config))
    return torch.compile(plain, dynamic=False) if name == "plain_compiled" else plain


def as_BHSD(x: Tensor, layout: str) -> Tensor:
    """A view with heads second, from any layout."""
    return x.unsqueeze(1) if layout == "BSD" else x.transpose(1, 2) if layout == "BSHD" else x


def why_refused(config: AttentionConfig, error: Exception, warnings: Sequence[str]) -> str | None:
    """A sentence if the first call's error is a refusal of the case; None if it is a fault.

    `warnings`: the warnings of that call, in which torch says why one of its backends declined.
    """
    name = config.implementation
    if name.startswith("sdpa_") and "No available kernel" in str(error):
        texts = [text.partition(" (Triggered internally")[0].strip() for text in warnings]
        reasons = [text.rstrip(".") for text in texts if text and "not used because" not in text]
        because = "; ".join(dict.fromkeys(reasons[:_MOST_REASONS])) or "torch gives no reason"
        return f"implementation: {name} does not take this case: {because}"
    if isinstance(error, _REFUSALS.get(name, ())):
        return f"implementation: {name} does not take this case: {str(error) or 'it gives no reason'}"
    if type(error).__name__ == "OutOfResources":  # Triton's error for too much shared memory
        return f"implementation: {name} does not fit this GPU: {error}"
    return None


def _on_heads(config: AttentionConfig, attend: Attention) -> Attention:
    """Adapt a callable on (B, H, S, D) to the config's layout."""
    layout = config.layout
    if layout == "BHSD":
        return attend

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o_BHSD = attend(as_BHSD(q, layout), as_BHSD(k, layout), as_BHSD(v, layout))
        return o_BHSD.squeeze(1) if layout == "BSD" else o_BHSD.transpose(1, 2)

    return run


def _plain(config: AttentionConfig) -> Attention:
    causal, alignment = config.causal, config.causal_alignment

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, causal=causal, causal_alignment=alignment)

    return run


def _flash_attn(config: AttentionConfig) -> Attention:
    """flash_attn_func of the package flash-attn or flash-attn-4, on (batch, seq, heads, head_dim)."""
    attend = _installed(config.implementation)
    causal, layout = config.causal, config.layout

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tensors = (x if layout == "BSHD" else as_BHSD(x, layout).transpose(1, 2) for x in (q, k, v))
        output = attend(*tensors, causal=causal)
        o_BSHD: Tensor = output[0] if isinstance(output, tuple) else output  # flash-attn-4 adds the log-sum-exp
        if layout == "BSHD":
            return o_BSHD
        return o_BSHD.squeeze(2) if layout == "BSD" else o_BSHD.transpose(1, 2)

    return run


def _installed(name: str) -> PackagedAttention:
    """The package's function. CellFailed, with the reason, if the module or anything it needs is absent."""
    try:
        return flash_attn_func(name, "implementation")
    except ImportError as error:
        raise refused(str(error), "import_error") from None


def _trainstep(config: AttentionConfig) -> Attention:
    settings = own_settings(config)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output: Tensor = flash_attention(q, k, v, **settings)  # type: ignore[assignment]
        return output

    return run


def own_settings(config: AttentionConfig) -> dict[str, Any]:
    """The arguments of flash_attention for this cell, beside q, k and v, which decide its kernels and tiles."""
    return {
        "is_causal": config.causal,
        "enable_gqa": True,
        "causal_alignment": config.causal_alignment,
        "layout": "BSHD" if config.layout == "BSHD" else "BHSD",
        "fp32_precision": config.fp32_precision,
        "tiles": own_tiles(config) if config.has_own_tile else None,
    }


def own_tiles(config: AttentionConfig) -> Tiles:
    """The config's tile for every kernel of its direction. CellFailed, with the reason, if a tile cannot run."""
    arithmetic = Arithmetic(config.fp32_precision or "ieee") if config.dtype == "fp32" else Arithmetic.HALF
    tiles = {}
    for pass_ in KernelPass:
        problem = tile_problem(pass_, config.head_dim, arithmetic, torch.device(config.device))
        try:
            row = choose_row(problem)
        except ValueError as error:
            raise refused(f"implementation: {error}") from None
        tiles[pass_] = row.config
        if config.direction == "forward" and pass_ is not KernelPass.FORWARD:
            continue  # it is never launched, so the table's tile will do
        tile = tiles[pass_] = _own_tile(config, row.config)
        reason = why_illegal(tile, problem)
        if reason:
            shape = f"{tile.block_q} x {tile.block_k}, {tile.num_warps} warps, {tile.num_stages} stages"
            given = next(name for name in TILE_FIELDS if getattr(config, name) is not None)
            raise refused(f"{given}: illegal tile: {reason} ({pass_}, {shape})")
    if config.device == "cpu":
        raise refused("device: not for a CPU: algorithm.py, which runs there, has tiles of its own")
    return Tiles(
        forward=tiles[KernelPass.FORWARD],
        key_gradients=tiles[KernelPass.KEY_GRADIENTS],
        query_gradients=tiles[KernelPass.QUERY_GRADIENTS],
    )


def _own_tile(config: AttentionConfig, from_table: TileConfig) -> TileConfig:
    """The config's tile, filled up from the table's."""
    block_q, block_k = config.blocks
    if block_q is None and block_k is None:
        num_warps = from_table.num_warps
    else:  # the table's warps fit only its own tile
        num_warps = 4 if (block_q or from_table.block_q) * (block_k or from_table.block_k) <= _SMALL_TILE else 8
    return TileConfig(
        block_q=block_q or from_table.block_q,
        block_k=block_k or from_table.block_k,
        num_warps=config.num_warps or num_warps,
        num_stages=config.num_stages or from_table.num_stages,
    )

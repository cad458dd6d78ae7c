"""The time of an attention kernel by length and head width.

    time = fixed + rows x (B H S) + FLOPs / rate        FLOPs: 4 D B H S (S + 1) / 2 forward, 10 D ... backward

Each row of queries has a part of its own: loading, rescaling, writing. Causal rows near the end are the longest: with few
heads the last tile of 128 queries, on one multiprocessor, takes longer than all others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainstep.plan.time.fits import nonnegative_fit

_TILE, _FP32_TILE = 128, 64
"""Queries of a tile."""
_MATMULS = {"forward": 4, "backward": 10}
"""FLOPs for each visible pair and unit of head width."""
_OTHER_WIDTH, _OTHER_KERNEL = 0.12, 0.3
"""Spread where another head width was measured, or another kernel."""
_OF_ONE_POINT = 0.03
"""Spread that is added for a head width of which only one length was measured."""
_SHORT_S, _FIXED_S = 50e-6, 8e-6
"""Times shorter than the first show the fixed part; where there is none, the second is assumed."""
_SHARE_OF_MATMULS = {"forward": 0.45, "backward": 0.35}
"""Attention's share of a matmul's rate, where no attention was measured."""
_DEFAULTS = {"bf16": "sdpa_flash", "fp32": "sdpa_efficient"}
"""The kernel that torch chooses, by dtype, where a calibration has no points of its choice, which are named sdpa. In 16 bits
torch 2.11 takes cuDNN's on Hopper GPUs, with all heads and contexts that were tried (results/h200/sdpa_kernels.csv)."""

Key = tuple[str, str, str, int]


@dataclass(frozen=True, kw_only=True)
class AttentionSpeed:
    """time = fixed_s + row_s x rows + FLOPs / flops_per_s."""

    fixed_s: float
    row_s: float
    flops_per_s: float
    spread: float


def attention_work(direction: str, dtype: str, batch_heads: int, context: int, head_dim: int, *, units: int) -> float:
    """FLOPs that set a kernel's time: all of them, but at least what all units could do while one has the longest tile."""
    pairs = batch_heads * context * (context + 1) / 2
    tile = min(_FP32_TILE if dtype == "fp32" else _TILE, context)
    longest = units * tile * context if units > 1 else 0
    return _MATMULS[direction] * head_dim * max(pairs, longest)


def attention_rows(dtype: str, batch_heads: int, context: int, *, units: int) -> float:
    """Rows of queries that set a kernel's time: all of them, but at least a tile's rows for each unit."""
    tile = min(_FP32_TILE if dtype == "fp32" else _TILE, context)
    return max(batch_heads * context, units * tile if units > 1 else 0)


def attention_speeds(rows: Sequence[Mapping[str, Any]], *, units: int) -> dict[Key, AttentionSpeed]:
    """The fits by implementation, dtype, direction and head width.

    `fixed_s` comes from the width with a short measurement. A width with a single point takes the proportions of another width.
    """
    groups: dict[Key, list[Mapping[str, Any]]] = {}
    for row in rows:
        key = (row["implementation"], row["dtype"], row["direction"], row["head_dim"])
        groups.setdefault(key, []).append(row)
    speeds: dict[Key, AttentionSpeed] = {}
    for key, points in sorted(groups.items(), key=lambda group: (-_is_short(group[1]), -len(group[1]))):
        direction, width = key[2], key[3]
        terms = [
            (
                1.0,
                attention_rows(key[1], point["batch_heads"], point["context"], units=units),
                attention_work(direction, key[1], point["batch_heads"], point["context"], width, units=units),
            )
            for point in points
        ]
        times_s = [point["time_s"] for point in points]
        like = _nearest(speeds, *key)
        if like is not None and like[0][:3] != key[:3]:
            like = None
        if len(points) == 1 and like is not None:
            ratio = times_s[0] / _seconds(like[1], terms[0])
            speeds[key] = replace(
                like[1],
                row_s=like[1].row_s * ratio,
                flops_per_s=like[1].flops_per_s / ratio,
                spread=like[1].spread + _OF_ONE_POINT,
            )
            continue
        if _is_short(points):
            fit = nonnegative_fit(terms, times_s)
            fixed_s, row_s, flop_s = fit.factors
        else:
            fixed_s = min(like[1].fixed_s if like is not None else _FIXED_S, 0.9 * min(times_s))
            fit = nonnegative_fit([term[1:] for term in terms], [time_s - fixed_s for time_s in times_s])
            row_s, flop_s = fit.factors
        if flop_s == 0:  # points that are too alike to tell rows from FLOPs
            fixed_s, row_s = 0.0, 0.0
            fit = nonnegative_fit([term[2:] for term in terms], times_s)
            (flop_s,) = fit.factors
        speeds[key] = AttentionSpeed(fixed_s=fixed_s, row_s=row_s, flops_per_s=1 / flop_s, spread=fit.spread)
    return speeds


def _is_short(points: Sequence[Mapping[str, Any]]) -> bool:
    return len(points) > 2 and min(point["time_s"] for point in points) < _SHORT_S


def _seconds(speed: AttentionSpeed, terms: Sequence[float]) -> float:
    return speed.fixed_s + speed.row_s * terms[1] + terms[2] / speed.flops_per_s


def seconds_of_attention(
    speeds: Mapping[Key, AttentionSpeed],
    implementation: str,
    dtype: str,
    direction: str,
    symbols: Mapping[str, int],
    *,
    units: int,
    matmul: float,
) -> tuple[float, float, str]:
    """Seconds, spread, and what was guessed. `matmul`: FLOP/s of matmuls, of which attention has a share if none was measured."""
    batch_heads, context, width = symbols["B"] * symbols["H"], symbols["S"], symbols["D"]
    work = attention_work(direction, dtype, batch_heads, context, width, units=units)
    name = implementation
    if name == "sdpa" and not any(key[:3] == (name, dtype, direction) for key in speeds):
        name = _DEFAULTS[dtype]
    nearest = _nearest(speeds, name, dtype, direction, width)
    if nearest is None:
        rate = _SHARE_OF_MATMULS[direction] * matmul
        return work / rate, _OTHER_KERNEL, f"{implementation} attention as a share of matmuls"
    key, speed = nearest
    time_s = _seconds(speed, (1.0, attention_rows(dtype, batch_heads, context, units=units), work))
    guess, spread = "", speed.spread
    if key[0] != name or key[1] != dtype:
        guess, spread = f"{implementation} attention in {dtype} as {key[0]}'s in {key[1]}", _OTHER_KERNEL
    elif key[3] != width:
        guess, spread = f"attention of width {width} as of {key[3]}", max(spread, _OTHER_WIDTH)
    return time_s, spread, guess


def _nearest(
    speeds: Mapping[Key, AttentionSpeed], name: str, dtype: str, direction: str, width: int
) -> tuple[Key, AttentionSpeed] | None:
    """The same kernel at the nearest width; else another kernel in the same dtype, but for torch's choice, which has a name too."""
    same = [key for key in speeds if key[:3] == (name, dtype, direction)]
    others = [key for key in speeds if key[1:3] == (dtype, direction) and key[0] != "sdpa"]
    keys = same or others
    if not keys:
        return None
    best = min(keys, key=lambda key: abs(key[3] - width))
    return best, speeds[best]

"""Written-out attention taken apart: its matmuls against its softmax, in time, FLOPs, bytes and what was achieved.

Eager only: compiled code is one kernel for several of these, and a fused attention has no softmax to tell apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.costs.plain_attention import matmuls_bytes, matmuls_flops, softmax_bytes, softmax_flops
from trainstep.traces.kernel_classes import MATMUL
from trainstep.traces.tables import Columns, columns_of, phases_of
from trainstep.traces.work import TraceWork, Work

SCORES, SOFTMAX, VALUES = "attention scores", "attention softmax", "attention values"
_MATMULS, _SOFTMAX, _REST = "matmuls", "softmax", "mask, scale and copies"


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What the attention of one step multiplies, all layers together. `batch_heads`: batch x heads x layers x micro-batches."""

    batch_heads: int
    positions: int
    head_dim: int
    matmul_element_bytes: int
    softmax_element_bytes: int


def attention_table(work: TraceWork, shape: AttentionShape | None) -> Columns:
    """Rows matmuls, softmax and the rest by phase, per step; without a shape (someone else's trace) no FLOPs and bytes.

    Empty where the trace names no such spans.
    """
    rows = []
    for phase in phases_of(work.pieces):
        mine = [one for one in work.pieces if one.place.phase == phase]
        inside = [one for one in mine if one.place.span.endswith((SCORES, SOFTMAX, VALUES))]
        parts: dict[str, list[Work]] = {_MATMULS: [], _SOFTMAX: [], _REST: []}
        for one in inside:
            parts[_part(one)].append(one)
        rows += [_row(work, phase, part, pieces, shape) for part, pieces in parts.items() if inside]
    return columns_of(rows)


def _part(piece: Work) -> str:
    if piece.place.span.endswith(SOFTMAX):
        return _SOFTMAX
    return _MATMULS if piece.kind == MATMUL else _REST


def _row(
    work: TraceWork, phase: str, part: str, pieces: Sequence[Work], shape: AttentionShape | None
) -> dict[str, Any]:
    time_s = sum(one.duration_ns for one in pieces) / 1e9 / len(work.steps)
    flops, byte_count = _costs(phase, part, shape)
    return {
        "phase": phase,
        "part": part,
        "calls": len(pieces) / len(work.steps),
        "time_s": time_s,
        "flops": flops,
        "bytes": byte_count,
        "flops_per_s": flops / time_s if flops and time_s else None,
        "bytes_per_s": byte_count / time_s if byte_count and time_s else None,
    }


def _costs(phase: str, part: str, shape: AttentionShape | None) -> tuple[int | None, int | None]:
    if shape is None or part == _REST or phase not in ("forward", "backward"):
        return None, None
    if part == _MATMULS:
        sides = shape.batch_heads, shape.positions, shape.head_dim
        return matmuls_flops(phase, *sides), matmuls_bytes(phase, *sides, shape.matmul_element_bytes)
    return (
        softmax_flops(phase, shape.batch_heads, shape.positions),
        softmax_bytes(phase, shape.batch_heads, shape.positions, shape.softmax_element_bytes),
    )

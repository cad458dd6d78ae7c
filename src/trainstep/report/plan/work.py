"""Table of what a traced micro-batch computes and moves: matmuls and attention by shape, all else by operator."""

from dataclasses import dataclass

from trainstep.costs.traced_step import TracedStep, Work
from trainstep.report.kit.forms import COUNT, GIGA, SIZE, TEXT
from trainstep.report.kit.tables import Column, Table

_BY_SHAPE = ("matmul", "attention")
_SHAPES = "matmul: batch x m x n x k; attention: batch x heads x key heads x queries x keys x head dim."


@dataclass
class _Sum:
    calls: int = 0
    flops: int = 0
    nbytes: int = 0


def work_table(traced: TracedStep) -> Table:
    """A line for each kind of call, sorted by FLOPs and then by bytes moved, largest first."""
    sums: dict[tuple[str, str, str, str], _Sum] = {}
    for work in traced.work:
        total = sums.setdefault((work.phase, work.op, _shape(work), work.dtype), _Sum())
        total.calls += work.times
        total.flops += work.times * work.flops
        total.nbytes += work.times * (work.read_bytes + work.written_bytes)
    rows = [
        {"phase": phase, "op": op, "shape": shape, "dtype": dtype, **vars(total)}
        for (phase, op, shape, dtype), total in sorted(sums.items(), key=lambda item: (-item[1].flops, -item[1].nbytes))
    ]
    flops = sum(total.flops for total in sums.values())
    return Table.of(
        "What a micro-batch computes",
        rows,
        [
            Column("phase", TEXT, names=True),
            Column("op", TEXT, names=True),
            Column("shape", TEXT),
            Column("dtype", TEXT),
            Column("calls", COUNT),
            Column("GFLOP", GIGA, "flops"),
            Column("read and written ({unit})", SIZE, "nbytes"),
        ],
        raw=rows,
        note=f"{flops / 1e9:,.4g} GFLOP in products and attention, the update left out. {_SHAPES}",
    )


def _shape(work: Work) -> str:
    if work.kind not in _BY_SHAPE:
        return ""
    return " x ".join(map(str, work.shape)) + (", causal" if work.causal else "")

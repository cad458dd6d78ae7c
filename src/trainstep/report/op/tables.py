"""Tables of ops: every cell with its time, rate, memory and errors, and our time over each peer's."""

from collections.abc import Sequence
from typing import Any

from trainstep.config.op import IMPLEMENTATIONS
from trainstep.report.kit.forms import ERROR, GIGA, PERCENT, Form, three_digits
from trainstep.report.kit.pass_columns import cell_columns, pass_doubts
from trainstep.report.kit.peer_answer import PLAIN_ERRORS
from trainstep.report.kit.peers import ordered, ratio_table
from trainstep.report.kit.rows import Row, facts_in, quantities
from trainstep.report.kit.tables import Column, Table, doubts_column, point_columns
from trainstep.report.op.rows import bytes_per_s, copy_share, flops_per_s, named_rows, works_of

_RESULTS = ("output", *(name.removeprefix("error_") for name in PLAIN_ERRORS if name.startswith("error_d")))
_NOTE = (
    "Rate: the least bytes of the pass, or the FLOPs of its matmuls, over the time that the GPU works; on a CPU over the time of a "
    "call. Error: the largest of outputs and gradients, relative to the largest magnitude of a reference in fp64; beside it plain "
    "PyTorch's in the same dtype. Peak: above the inputs."
)
_TERA = Form(text=lambda rate: three_digits(rate / 1e12))


def op_tables(rows: Sequence[Row], ceilings: Sequence[Row] = ()) -> list[Table]:
    """The table of cells, and the ratios to each peer if one ran. `ceilings`: rows of ceilings, for the share of a copy's rate."""
    named = named_rows(rows)
    compared = [work for work in works_of(named) if work.against]
    peers = ordered((peer for work in compared for peer in work.against), IMPLEMENTATIONS)
    return [cells_table(named, ceilings), *([ratio_table(compared, peers)] if compared else [])]


def cells_table(rows: Sequence[Row], ceilings: Sequence[Row]) -> Table:
    """A row per cell of rows that `named_rows` has named."""
    columns = cell_columns(
        (
            Column("GB/s", GIGA, bytes_per_s),
            Column("of a copy (%)", PERCENT, lambda row: copy_share(row, ceilings)),
            Column("TFLOP/s", _TERA, flops_per_s),
        ),
        (
            Column("error", ERROR, lambda row: _largest(row, PLAIN_ERRORS)),
            Column("plain PyTorch's", ERROR, lambda row: _largest(row, PLAIN_ERRORS.values())),
        ),
        _RESULTS,
    )
    raw = [_numbers(row, ceilings) for row in rows]
    return Table.of("Ops", rows, [*point_columns(rows), *columns, doubts_column(pass_doubts)], note=_NOTE, raw=raw)


def _largest(row: Row, names: Any) -> float | None:
    return max((error for name in names if (error := row.record.fact(name)) is not None), default=None)


def _numbers(row: Row, ceilings: Sequence[Row]) -> dict[str, Any]:
    """The row for programs: the whole config, the quantities, all errors, and the rates."""
    record, numbers = row.record, quantities(row)
    config = {name: value for name, value in record.config.items() if name not in numbers and value is not None}
    errors = facts_in(record, [*PLAIN_ERRORS, *PLAIN_ERRORS.values()]) if record.failure is None else {}
    rates = {"bytes_per_s": bytes_per_s(row), "flops_per_s": flops_per_s(row), "copy_ratio": copy_share(row, ceilings)}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    return {"workload": numbers.pop("workload"), **config, **numbers, **errors, **known}

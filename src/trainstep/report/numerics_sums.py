"""Tables of what few bits lose: gradients below fp16's range, and sums in 16-bit accumulators."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.report.hand_built import Column
from trainstep.report.numerics_rows import error_entry, groups_of, share_entry, share_words, table_of, text_entry
from trainstep.report.rows import Row
from trainstep.report.tables import Entry, Table

_TEXTBOOK = (
    "Exact would be 10; textbooks print 10.0001, 9.9531, 10.0021 and 10.0021 for the first four. An fp32 accumulator leaves "
    "only the rounding of 0.01 itself; an fp16 one rounds at every addition; a bf16 one stops at 4, where 0.01 is less than "
    "half the distance to the next number."
)


def range_tables(rows: Sequence[Row]) -> list[Table]:
    """What fp16's range takes from gradients, by layer."""
    return [_range_table(row) for row in rows if "ranges" in row.record.tables and row.record.fact("settled_scale")]


def _range_table(row: Row) -> Table:
    table = table_of(row, "ranges")
    shares = {
        "zero_unscaled": "zero, unscaled (%)",
        "subnormal_unscaled": "subnormal, unscaled (%)",
        "zero_scaled": "zero, scaled (%)",
        "subnormal_scaled": "subnormal, scaled (%)",
        "overflow_at_twice": "infinite at twice the scale (%)",
    }
    columns = (
        Column(title="gradient of"),
        Column(title="layer"),
        *(Column(title=title, number=True) for title in ("elements", *shares.values())),
    )
    entries = tuple(
        (
            text_entry(table["of"][place]),
            text_entry(table["layer"][place]),
            Entry(text=f"{table['elements'][place]:,}", sort=table["elements"][place]),
            *(Entry(text=share_words(table[name][place]), sort=table[name][place]) for name in shares),
        )
        for place in range(len(table["layer"]))
    )
    title = f"fp16's range: {row.label(without=('precision',))}"
    return Table(title=title, columns=columns, entries=entries, note=range_sentence(row))


def range_sentence(row: Row) -> str:
    """How much is lost without a scale and with it, and what the scale is."""
    table, scale = table_of(row, "ranges"), row.record.fact("settled_scale")
    lost = {
        name: _weighted(table, name)
        for name in ("zero_unscaled", "subnormal_unscaled", "zero_scaled", "subnormal_scaled")
    }
    return (
        "Of fp16 gradient elements that are not zero in the reference: "
        f"unscaled, {share_words(lost['zero_unscaled'])} % become zero and {share_words(lost['subnormal_unscaled'])} % are "
        f"subnormal, with fewer digits; with the loss times {scale:,.0f}, {share_words(lost['zero_scaled'])} % and "
        f"{share_words(lost['subnormal_scaled'])} %. {scale:,.0f} is the largest power of two without an infinite gradient on "
        "this batch: GradScaler begins at 65,536, doubles every 2000 steps and halves at an overflow, so it settles there. "
        "Gradients that are computed in fp32 (embeddings, normalisations) are not counted."
    )


def _weighted(table: Mapping[str, Any], name: str) -> float:
    elements = sum(table["elements"])
    return (
        sum(share * count for share, count in zip(table[name], table["elements"], strict=True)) / elements
        if elements
        else 0.0
    )


def sum_tables(rows: Sequence[Row]) -> list[Table]:
    """1000 x 0.01 once; sums over a model's own activations once a model."""
    first = next((row for row in rows if "accumulation" in row.record.tables), None)
    if first is None:
        return []
    table = table_of(first, "accumulation")
    entries = tuple(
        (text_entry(how), Entry(text=f"{total:.4f}", sort=total), error_entry(error))
        for how, total, error in zip(table["how"], table["total"], table["error"], strict=True)
    )
    columns = (
        Column(title="0.01 added 1000 times"),
        Column(title="total", number=True),
        Column(title="error", number=True),
    )
    made = [Table(title="Accumulation", columns=columns, entries=entries, note=_TEXTBOOK)]
    for name, group in groups_of(rows).items():
        held = next((row for row in group if "reductions" in row.record.tables), None)
        if held is not None:
            made.append(_reduction_table(name, table_of(held, "reductions")))
    return made


def _reduction_table(name: str, table: Mapping[str, Any]) -> Table:
    columns = (
        *(Column(title=title) for title in ("what", "values", "numbers", "accumulator")),
        *(Column(title=title, number=True) for title in ("error, median", "error, worst", "lost (%)")),
    )
    entries = tuple(
        (
            *(text_entry(table[column][place]) for column in ("what", "values", "numbers", "accumulator")),
            error_entry(table["error_median"][place]),
            error_entry(table["error_max"][place]),
            share_entry(table["overflow_share"][place]),
        )
        for place in range(len(table["what"]))
    )
    note = (
        "The same 16-bit numbers of this model summed with a 16-bit and with an fp32 accumulator, against fp64. Lost: infinite, "
        "or zero where it should not be. A square overflows fp16 from 256 on; a bf16 accumulator stops once a term is under "
        "half its spacing. RMSNorm: all in 16 bits inside, against fp32 inside and rounded once at the end."
    )
    return Table(title=f"Sums in 16 bits: {name}", columns=columns, entries=entries, note=note)

"""The curve of peak memory against added time, for steps whose recomputation was chosen for a budget of memory."""

from collections.abc import Sequence

from trainstep.records.record import Record
from trainstep.records.tables import table_lines
from trainstep.report.kit.charts import Section
from trainstep.report.kit.forms import COUNT, MS, ROUGH_SIZE, TEXT, byte_words, ms_words
from trainstep.report.kit.rows import Row
from trainstep.report.kit.tables import Column, Line, Table, filled, point_columns

_NOTE = (
    "{unit}. Predicted from the measured bytes and times of each kind of block: for budgets at equal distances the recomputation "
    "that adds least time. Numbers of blocks that recompute nothing, all but the results of matmuls and attention, also wide "
    "matmuls, or all; in chains only the first block's input is kept."
)


def curve_tables(rows: Sequence[Row]) -> list[Table]:
    """The curve of each row with a budget, and the costs of its blocks."""
    curves = [Line(row, line) for row in rows for line in table_lines(row.record.tables.get("recompute_curve"))]
    blocks = [Line(row, line) for row in rows for line in table_lines(row.record.tables.get("recompute_blocks"))]
    counts = (Column(name, COUNT) for name in ("none", "selective", "narrow", "block"))
    curve_columns = (
        Column("peak", ROUGH_SIZE, "peak_bytes"),
        Column("added (ms)", MS, "added_s"),
        *counts,
        Column("chains", COUNT, lambda line: line.value["chains"] or None, optional=True),
        Column("", TEXT, lambda line: "chosen" if line.value["chosen"] else ""),
    )
    block_columns = (
        Column("kind of block", COUNT, "kind", names=True),
        Column("blocks", COUNT),
        Column("mode", TEXT, names=True),
        Column("kept", ROUGH_SIZE, "kept_bytes"),
        Column("most in backward", ROUGH_SIZE, "backward_bytes"),
        Column("added (ms)", MS, "added_s"),
    )
    return filled(
        Table.of(
            "Recomputation: peak against added time", curves, [*point_columns(curves), *curve_columns], note=_NOTE
        ),
        Table.of("Recomputation: one block ({unit})", blocks, [*point_columns(blocks), *block_columns]),
    )


def recomputation_sections(rows: Sequence[Row], _ceilings: Sequence[Row] = ()) -> list[Section]:
    """The section of a page, if a row has a budget."""
    tables = curve_tables(rows)
    chosen = [(row, sentence) for row in rows if (sentence := chosen_sentence(row.record))]
    paragraphs = tuple(f"{row.label()}: {sentence}" if len(chosen) > 1 else sentence for row, sentence in chosen)
    section = Section(title="Recomputation within a budget", paragraphs=paragraphs, tables=tuple(tables))
    return [section] if tables else []


def chosen_sentence(record: Record) -> str:
    """`Within 40 GiB the blocks recompute: 12 none, 22 selective. That adds 3.2 ms; the peak is 39.1 GiB by prediction and ...`"""
    choice, budget_gib = record.fact("recompute_choice"), record.config.get("recompute_budget_gib")
    if choice is None or budget_gib is None:
        return ""
    predicted, measured = (
        byte_words(record.fact(name) or 0.0) for name in ("recompute_peak_bytes", "recompute_measured_peak_bytes")
    )
    return (
        f"Within {budget_gib:g} GiB the blocks recompute: {choice}. That adds {ms_words(record.fact('recompute_added_s') or 0.0)}; "
        f"the peak is {predicted} by prediction and {measured} as measured."
    )

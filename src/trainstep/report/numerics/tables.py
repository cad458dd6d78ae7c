"""The tables of `trainstep numerics` with their explanations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainstep.grouping import grouped
from trainstep.records.tables import table_lines
from trainstep.report.kit.forms import COUNT, DIGITS, ERROR, MS_STD, TEXT, Form, percent
from trainstep.report.kit.ranking import (
    mean_column,
    median_and_range,
    median_of,
)
from trainstep.report.kit.rows import Row, quantities
from trainstep.report.kit.tables import Column, Table, doubts_column, filled, point_columns

ERRORS = {
    "error_logits": "logits",
    "error_loss": "loss",
    "error_gradient_median": "gradients, median",
    "error_gradient_max": "gradients, worst",
}
_WORST = 3
"""The number of worst gradients shown for each cell."""
_TEXTBOOK = (
    "The exact sum is 10; textbooks print 10.0001, 9.9531, 10.0021 and 10.0021 for the first four. With an fp32 accumulator "
    "only the rounding of 0.01 itself remains; an fp16 accumulator rounds at every addition; a bf16 accumulator stops at 4, "
    "where 0.01 is less than half the distance to the next number."
)
_SUMS = (
    "The same 16-bit numbers of this model, summed with a 16-bit and with an fp32 accumulator, compared with fp64. Lost: "
    "infinite, or zero although the exact sum is not zero. A square overflows fp16 from 256 on; a bf16 accumulator stops when "
    "a term is under half its spacing. RMSNorm: computed in 16 bits throughout, or in fp32 and rounded once at the end."
)


def numerics_tables(rows: Sequence[Row]) -> list[Table]:
    """All tables that these records fill."""
    return filled(errors_table(rows), worst_table(rows), *dtype_tables(rows), *range_tables(rows), *sum_tables(rows))


def errors_table(rows: Sequence[Row]) -> Table:
    """Errors and time of each precision, one row each."""
    groups = groups_of(rows).values()
    ordered = [row for group in groups for row in group]
    fp32 = {id(row): fp32_of(group) for group in groups for row in group}
    columns = [
        *point_columns(ordered, without=("precision",)),
        Column("precision", TEXT, precision_of, failed=None, names=True),
        Column("step (ms)", MS_STD, median_and_range("step")),
        Column("of fp32's time", DIGITS, lambda row: _over(median_step_s, row, fp32[id(row)])),
        *(Column(f"error of {name}", ERROR, fact) for fact, name in ERRORS.items()),
        Column("reference", failed=None, more=True),
        mean_column("step", "step"),
        doubts_column(_doubts),
    ]
    note = (
        "Errors are relative, |x − reference| / |reference| in the 2-norm, with the same weights and batch; gradients are "
        "compared parameter by parameter. The step is the median ± half the interquartile range of its timed steps, including "
        "the optimizer; its ratio is of medians."
    )
    return Table.of("Error and cost of each precision", ordered, columns, raw=map(_raw, ordered), note=note)


def worst_table(rows: Sequence[Row]) -> Table:
    """The parameters with the largest errors of their gradients."""
    lines = [
        {**line, "model": row.label(without=("precision",)), "precision": precision_of(row)}
        for row in rows
        for line in table_lines(row.record.tables.get("gradients"))[:_WORST]
    ]
    columns = (
        *(Column(name, names=True) for name in ("model", "precision", "parameter")),
        Column("error", ERROR, "relative_error"),
        Column("norm of the reference", ERROR, "reference_norm"),
    )
    note = "Relative error of the gradients of single parameters, the largest first."
    return Table.of("Worst gradients", lines, columns, note=note, folded=True)


def dtype_tables(rows: Sequence[Row]) -> list[Table]:
    """A table per model with a line per module: the dtype of its output in each precision."""
    tables = []
    for name, group in groups_of(rows).items():
        recorded = [row for row in group if row.record.tables.get("dtypes")]
        by_module: dict[tuple[str, str], dict[str, Any]] = {}
        for row in recorded:
            for line in table_lines(row.record.tables["dtypes"]):
                by_module.setdefault((line["module"], line["kind"]), {})[precision_of(row)] = line
        lines = [
            {
                "module": module,
                "kind": kind,
                "parameters": _dtype_words({precision: line["parameters"] for precision, line in by_precision.items()}),
                **{precision: line["output"] for precision, line in by_precision.items()},
            }
            for (module, kind), by_precision in by_module.items()
        ]
        columns = [Column(title) for title in ("module", "kind", "parameters", *map(precision_of, recorded))]
        no_effect = [(precision_of(row), why) for row in recorded if (why := row.record.fact("no_effect"))]
        note = " ".join(
            (
                "The dtype of each module's output; the last lines are the logits, the loss and the parameters' gradients.",
                *_kept_in_fp32(recorded),
                *(f"{precision}: {why}." for precision, why in no_effect),
            )
        )
        tables.append(Table.of(f"Dtypes: {name}", lines, columns, note=note))
    return filled(*tables)


def _doubts(row: Row) -> str:
    record = row.record
    reasons = [quantities(row)["doubts"], record.fact("reference_reason")]
    if lost := record.fact("gradients_without_error"):
        reasons.append(f"{lost} gradients are not finite or all zero in the reference")
    return "; ".join(filter(None, reasons))


def _raw(row: Row) -> dict[str, Any]:
    record = row.record
    names = (*ERRORS, "reference", "reference_reason", "gradient_scale", "settled_scale", "no_effect", "logits_module")
    numbers = {**quantities(row), "precision": precision_of(row)}
    return numbers | ({} if record.failure else {name: record.fact(name) for name in names})


def _over(number_of: Callable[[Row], float | None], row: Row, fp32: Row | None) -> float | None:
    """A number of the row over fp32's."""
    number, reference = number_of(row), number_of(fp32) if fp32 else None
    return number / reference if number and reference else None


def gradient_error(row: Row) -> float | None:
    error: float | None = row.record.fact("error_gradient_median")
    return error


def median_step_s(row: Row) -> float | None:
    return median_of(row.record, "step")


def _dtype_words(dtypes: Mapping[str, str]) -> str:
    """The dtypes by precision: the most frequent dtype, then each other dtype with its precisions."""
    precisions = grouped(dtypes, dtypes.__getitem__)
    most = max(precisions, key=lambda dtype: len(precisions[dtype]))
    others = [f"{dtype} in {', '.join(names)}" for dtype, names in precisions.items() if dtype != most]
    return "; ".join([most, *others])


def _kept_in_fp32(rows: Sequence[Row]) -> list[str]:
    """The kinds of modules that autocast leaves in fp32, a sentence per precision."""
    sentences = []
    for row in rows:
        if not precision_of(row).endswith("_autocast") or row.record.fact("no_effect"):
            continue
        lines = table_lines(row.record.tables["dtypes"])
        kinds = dict.fromkeys(line["kind"] for line in lines if line["kind"] and line["output"] == "fp32")
        if kinds:
            sentences.append(f"{precision_of(row)} leaves in fp32: {', '.join(kinds)}.")
    return sentences


def range_tables(rows: Sequence[Row]) -> list[Table]:
    """A table per model: the shares of gradients that fp16's range loses, by layer."""
    tables = []
    for row in rows:
        scale, lines = row.record.fact("settled_scale"), table_lines(row.record.tables.get("ranges"))
        if scale:
            title = f"fp16's range: {row.label(without=('precision',))}"
            tables.append(Table.of(title, lines, _RANGE, note=_range_note(lines, scale)))
    return filled(*tables)


def _range_note(lines: Sequence[Mapping[str, Any]], scale: float) -> str:
    """The shares lost without and with a loss scale, and the meaning of the scale."""
    elements = sum(line["elements"] for line in lines) or 1
    lost = {
        name: share_words(sum(line[name] * line["elements"] for line in lines) / elements)
        for name in ("zero_unscaled", "subnormal_unscaled", "zero_scaled", "subnormal_scaled")
    }
    return (
        f"Of the fp16 gradient elements that are not zero in the reference, {lost['zero_unscaled']} % become zero without a "
        f"scale, and {lost['subnormal_unscaled']} % are subnormal, with fewer digits; with the loss times {scale:,.0f}, "
        f"{lost['zero_scaled']} % and {lost['subnormal_scaled']} %. {scale:,.0f} is the largest power of two without "
        "an infinite gradient on this batch: GradScaler begins at 65,536, doubles every 2000 steps and halves at an "
        "overflow, so it settles there. Gradients computed in fp32 (embeddings, normalisations) are not counted."
    )


def sum_tables(rows: Sequence[Row]) -> list[Table]:
    """The table of 1000 x 0.01, and a table per model of sums over its activations."""
    tables = [Table.of("Accumulation", _first_lines(rows, "accumulation"), _ACCUMULATION, note=_TEXTBOOK)]
    for name, group in groups_of(rows).items():
        lines = _first_lines(group, "reductions")
        tables.append(Table.of(f"Sums in 16 bits: {name}", lines, _REDUCTION, note=_SUMS))
    return filled(*tables)


def _first_lines(rows: Sequence[Row], name: str) -> list[dict[str, Any]]:
    """The lines of a table in the first record that has it."""
    return next((lines for row in rows if (lines := table_lines(row.record.tables.get(name)))), [])


def groups_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that differ only in precision, by their other values: `small 256`."""
    return grouped(rows, lambda row: row.label(without=("precision",)))


def precision_of(row: Row) -> str:
    return str(row.record.config.get("precision"))


def fp32_of(group: Sequence[Row]) -> Row | None:
    """The row with which the time and error of the others are compared; None if there is no fp32."""
    return next((row for row in group if precision_of(row) == "fp32"), None)


def share_words(share: float) -> str:
    """Percent, in scientific notation for rare shares."""
    if share == 0:
        return "0"
    return percent(share) if share >= 0.001 else f"{share * 100:.1e}"


_SHARE = Form(text=share_words)
_RANGE = (
    Column("gradient of", TEXT, "of", names=True),
    Column("layer", names=True),
    Column("elements", COUNT, more=True),
    Column("zero, unscaled (%)", _SHARE, "zero_unscaled"),
    Column("subnormal, unscaled (%)", _SHARE, "subnormal_unscaled"),
    Column("zero, scaled (%)", _SHARE, "zero_scaled"),
    Column("subnormal, scaled (%)", _SHARE, "subnormal_scaled"),
    Column("infinite at twice the scale (%)", _SHARE, "overflow_at_twice"),
)
_ACCUMULATION = (
    Column("0.01 added 1000 times", TEXT, "how"),
    Column("total", Form(text=lambda total: f"{total:.4f}")),
    Column("error", ERROR),
)
_REDUCTION = (
    *(Column(name, names=True) for name in ("what", "values", "numbers", "accumulator")),
    Column("error, median", ERROR, "error_median"),
    Column("error, worst", ERROR, "error_max"),
    Column("lost (%)", _SHARE, "overflow_share"),
)

"""The tables of `trainstep numerics`, each with the sentence that says what it shows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from trainstep.report.forms import COUNT, DIGITS, ERROR, MS_STD, TEXT, Form, percent, three_digits
from trainstep.report.ratios import mean_column, median_and_range
from trainstep.report.rows import Row, grouped, quantities, table_lines
from trainstep.report.tables import Column, Table, doubts_column, filled, point_columns

ERRORS = {
    "error_logits": "logits",
    "error_loss": "loss",
    "error_gradient_median": "gradients, median",
    "error_gradient_max": "gradients, worst",
}
_WORST = 3
"""Parameters shown a cell."""
_TEXTBOOK = (
    "Exact would be 10; textbooks print 10.0001, 9.9531, 10.0021 and 10.0021 for the first four. An fp32 accumulator leaves "
    "only the rounding of 0.01 itself; an fp16 one rounds at every addition; a bf16 one stops at 4, where 0.01 is less than "
    "half the distance to the next number."
)
_SUMS = (
    "The same 16-bit numbers of this model summed with a 16-bit and with an fp32 accumulator, against fp64. Lost: infinite, "
    "or zero where it should not be. A square overflows fp16 from 256 on; a bf16 accumulator stops once a term is under "
    "half its spacing. RMSNorm: all in 16 bits inside, against fp32 inside and rounded once at the end."
)


def numerics_tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that these records hold; none without a record of numerics."""
    errors = errors_table(rows)
    errors = replace(errors, note=" ".join([errors.note, *trade_sentences(rows)]))
    return filled(errors, worst_table(rows), *dtype_tables(rows), *range_tables(rows), *sum_tables(rows))


def errors_table(rows: Sequence[Row]) -> Table:
    """Error and cost side by side, one row a precision."""
    groups = groups_of(rows).values()
    ordered = [row for group in groups for row in group]
    fp32 = {id(row): fp32_of(group) for group in groups for row in group}
    columns = [
        *point_columns(ordered, without=("precision",)),
        Column("precision", TEXT, precision_of, failed=None, names=True),
        Column("step (ms)", MS_STD, median_and_range("step")),
        Column("of fp32's time", DIGITS, lambda row: _over(_median_step_s, row, fp32[id(row)])),
        *(Column(f"error of {name}", ERROR, fact) for fact, name in ERRORS.items()),
        Column("reference", failed=None, more=True),
        mean_column("step", "step"),
        doubts_column(_doubts),
    ]
    note = (
        "Errors are relative, |x − reference| / |reference| in the 2-norm, with the same weights and batch; gradients are "
        "taken parameter by parameter. The step is the median ± half the interquartile range of its timed steps, optimizer "
        "included; its ratio is of medians."
    )
    return Table.of("Error and cost of each precision", ordered, columns, raw=map(_raw, ordered), note=note)


def trade_sentences(rows: Sequence[Row]) -> list[str]:
    """What each precision costs in error and gives in time, against fp32 on the same model."""
    said = []
    for name, group in groups_of(rows).items():
        fp32 = fp32_of(group)
        for row in group:
            time, off = _over(_median_step_s, row, fp32), _gradients_off(row)
            if row is fp32 or time is None or off is None:
                continue
            ratio = _over(_gradients_off, row, fp32)
            against = f", {ratio:,.0f} times fp32's error" if ratio else ""
            said.append(
                f"{name}, {precision_of(row)}: {three_digits(time)} of fp32's time, gradients off by {percent(off)} % "
                f"in the median{against}."
            )
    return said


def worst_table(rows: Sequence[Row]) -> Table:
    """The parameters whose gradients are furthest off."""
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
    note = "Relative error of the gradient of single parameters, the furthest off first."
    return Table.of("Worst gradients", lines, columns, note=note, folded=True)


def dtype_tables(rows: Sequence[Row]) -> list[Table]:
    """One table a model: a line a module, what it returns in each precision."""
    made = []
    for name, group in groups_of(rows).items():
        held = [row for row in group if row.record.tables.get("dtypes")]
        by_module: dict[tuple[str, str], dict[str, Any]] = {}
        for row in held:
            for line in table_lines(row.record.tables["dtypes"]):
                by_module.setdefault((line["module"], line["kind"]), {})[precision_of(row)] = line
        lines = [
            {
                "module": module,
                "kind": kind,
                "parameters": _agreed({precision: line["parameters"] for precision, line in found.items()}),
                **{precision: line["output"] for precision, line in found.items()},
            }
            for (module, kind), found in by_module.items()
        ]
        columns = [Column(title) for title in ("module", "kind", "parameters", *map(precision_of, held))]
        no_effect = [(precision_of(row), why) for row in held if (why := row.record.fact("no_effect"))]
        note = " ".join(
            (
                "The dtype of each module's output; of the logits, the loss and the parameters' gradients in the last lines.",
                *_kept_wide(held),
                *(f"{precision}: {why}." for precision, why in no_effect),
            )
        )
        made.append(Table.of(f"Dtypes: {name}", lines, columns, note=note))
    return filled(*made)


def _doubts(row: Row) -> str:
    record = row.record
    said = [quantities(row)["doubts"], record.fact("reference_reason")]
    if lost := record.fact("gradients_without_error"):
        said.append(f"{lost} gradients are not finite or all zero in the reference")
    return "; ".join(filter(None, said))


def _raw(row: Row) -> dict[str, Any]:
    record = row.record
    named = (*ERRORS, "reference", "reference_reason", "gradient_scale", "settled_scale", "no_effect", "logits_module")
    numbers = {**quantities(row), "precision": precision_of(row)}
    return numbers | ({} if record.failure else {name: record.fact(name) for name in named})


def _over(number_of: Callable[[Row], float | None], row: Row, fp32: Row | None) -> float | None:
    """A number of the row over fp32's."""
    own, reference = number_of(row), number_of(fp32) if fp32 else None
    return own / reference if own and reference else None


def _gradients_off(row: Row) -> float | None:
    off: float | None = row.record.fact("error_gradient_median")
    return off


def _median_step_s(row: Row) -> float | None:
    samples = row.record.samples.get("step")
    return median(samples.values) if samples and samples.values and row.record.failure is None else None


def _agreed(dtypes: Mapping[str, str]) -> str:
    """The dtype by precision in words: of the precisions that agree, once; of one that does not, after its name."""
    precisions = grouped(dtypes, dtypes.__getitem__)
    most = max(precisions, key=lambda dtype: len(precisions[dtype]))
    others = [f"{dtype} in {', '.join(names)}" for dtype, names in precisions.items() if dtype != most]
    return "; ".join([most, *others])


def _kept_wide(rows: Sequence[Row]) -> list[str]:
    """What autocast leaves in fp32."""
    said = []
    for row in rows:
        if not precision_of(row).endswith("_autocast") or row.record.fact("no_effect"):
            continue
        lines = table_lines(row.record.tables["dtypes"])
        kinds = dict.fromkeys(line["kind"] for line in lines if line["kind"] and line["output"] == "fp32")
        if kinds:
            said.append(f"{precision_of(row)} leaves in fp32: {', '.join(kinds)}.")
    return said


def range_tables(rows: Sequence[Row]) -> list[Table]:
    """What fp16's range takes from gradients, by layer."""
    made = []
    for row in rows:
        scale, lines = row.record.fact("settled_scale"), table_lines(row.record.tables.get("ranges"))
        if scale:
            title = f"fp16's range: {row.label(without=('precision',))}"
            made.append(Table.of(title, lines, _RANGE, note=_range_note(lines, scale)))
    return filled(*made)


def _range_note(lines: Sequence[Mapping[str, Any]], scale: float) -> str:
    """How much is lost without a scale and with it, and what the scale is."""
    elements = sum(line["elements"] for line in lines) or 1
    lost = {
        name: share_words(sum(line[name] * line["elements"] for line in lines) / elements)
        for name in ("zero_unscaled", "subnormal_unscaled", "zero_scaled", "subnormal_scaled")
    }
    return (
        f"Of fp16 gradient elements that are not zero in the reference: unscaled, {lost['zero_unscaled']} % become zero "
        f"and {lost['subnormal_unscaled']} % are subnormal, with fewer digits; with the loss times {scale:,.0f}, "
        f"{lost['zero_scaled']} % and {lost['subnormal_scaled']} %. {scale:,.0f} is the largest power of two without "
        "an infinite gradient on this batch: GradScaler begins at 65,536, doubles every 2000 steps and halves at an "
        "overflow, so it settles there. Gradients that are computed in fp32 (embeddings, normalisations) are not counted."
    )


def sum_tables(rows: Sequence[Row]) -> list[Table]:
    """1000 x 0.01 once; sums over a model's own activations once a model."""
    made = [Table.of("Accumulation", _first_lines(rows, "accumulation"), _ACCUMULATION, note=_TEXTBOOK)]
    for name, group in groups_of(rows).items():
        lines = _first_lines(group, "reductions")
        made.append(Table.of(f"Sums in 16 bits: {name}", lines, _REDUCTION, note=_SUMS))
    return filled(*made)


def _first_lines(rows: Sequence[Row], name: str) -> list[dict[str, Any]]:
    """The lines of that table in the first record that has any."""
    return next((lines for row in rows if (lines := table_lines(row.record.tables.get(name)))), [])


def groups_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that differ in precision only, by what they share: `small 256`."""
    return grouped(rows, lambda row: row.label(without=("precision",)))


def precision_of(row: Row) -> str:
    return str(row.record.config.get("precision"))


def fp32_of(group: Sequence[Row]) -> Row | None:
    """The row that the others' time and error are held to."""
    return next((row for row in group if precision_of(row) == "fp32"), None)


def share_words(share: float) -> str:
    """Percent, with digits left for what is rare."""
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

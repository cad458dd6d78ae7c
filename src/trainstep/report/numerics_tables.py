"""The tables of `trainstep numerics`, each with the sentence that says what it shows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from trainstep.report.forms import COUNT, DIGITS, ERROR, MS_STD, TEXT, Form, percent, three_digits
from trainstep.report.rows import Row, grouped, quantities, table_lines, time_of
from trainstep.report.tables import Column, Line, Table, doubts_column, point_columns

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
    return [errors, *worst_tables(rows), *dtype_tables(rows), *range_tables(rows), *sum_tables(rows)]


def errors_table(rows: Sequence[Row]) -> Table:
    """Error and cost side by side, one row a precision."""
    lines = [Line(row, fp32_of(group)) for group in groups_of(rows).values() for row in group]
    columns = [
        *point_columns(lines, without=("precision",)),
        Column("precision", TEXT, lambda line: precision_of(line.row), failed=None),
        Column("step (ms)", MS_STD, lambda line: time_of(quantities(line.row), "step")),
        Column("of fp32's time", DIGITS, lambda line: time_ratio(*line)),
        *(Column(f"error of {name}", ERROR, _fact(fact)) for fact, name in ERRORS.items()),
        Column("reference", TEXT, _fact("reference"), failed=None),
        doubts_column(_doubts),
    ]
    note = (
        "Errors are relative, |x − reference| / |reference| in the 2-norm, with the same weights and batch; gradients are "
        "taken parameter by parameter. The step is the mean ± standard deviation of its timed steps, optimizer included; "
        "its ratio is of medians."
    )
    raw = (_raw(line.row) for line in lines)
    return Table.of("Error and cost of each precision", lines, columns, raw=raw, note=note)


def trade_sentences(rows: Sequence[Row]) -> list[str]:
    """What each precision costs in error and gives in time, against fp32 on the same model."""
    said = []
    for name, group in groups_of(rows).items():
        fp32 = fp32_of(group)
        for row in group:
            time, ratio = time_ratio(row, fp32), _error_ratio(row, fp32)
            if row is fp32 or time is None:
                continue
            off = row.record.fact("error_gradient_median")
            against = f", {ratio:,.0f} times fp32's error" if ratio else ""
            if off is not None:
                said.append(
                    f"{name}, {precision_of(row)}: {three_digits(time)} of fp32's time, gradients off by {percent(off)} % "
                    f"in the median{against}."
                )
    return said


def time_ratio(row: Row, fp32: Row | None) -> float | None:
    """The row's median step over fp32's."""
    mine, theirs = (_median_step_s(one) for one in (row, fp32))
    return mine / theirs if mine and theirs else None


def worst_tables(rows: Sequence[Row]) -> list[Table]:
    """The parameters whose gradients are furthest off."""
    lines = [
        {**line, "model": row.label(without=("precision",)), "precision": precision_of(row)}
        for row in rows
        for line in table_lines(row.record.tables.get("gradients"))[:_WORST]
    ]
    columns = (
        *(Column(name) for name in ("model", "precision", "parameter")),
        Column("error", ERROR, "relative_error"),
        Column("norm of the reference", ERROR, "reference_norm"),
    )
    note = "Relative error of the gradient of single parameters, the furthest off first."
    return [Table.of("Worst gradients", lines, columns, note=note)] if lines else []


def dtype_tables(rows: Sequence[Row]) -> list[Table]:
    """One table a model: a line a module, what it returns in each precision."""
    made = []
    for name, group in groups_of(rows).items():
        held = [row for row in group if row.record.tables.get("dtypes")]
        if not held:
            continue
        found = {precision_of(row): _dtypes_by_module(row) for row in held}
        lines: list[dict[str, str | None]] = [
            {
                "module": module,
                "kind": kind,
                "parameters": _parameters(held, (module, kind)),
                **{precision: outputs.get((module, kind)) for precision, outputs in found.items()},
            }
            for module, kind in dict.fromkeys(key for outputs in found.values() for key in outputs)
        ]
        columns = [Column(title) for title in ("module", "kind", "parameters", *found)]
        note = " ".join(
            (
                "The dtype of each module's output; of the logits, the loss and the parameters' gradients in the last lines.",
                *_kept_wide(held),
                *(
                    f"{precision_of(row)}: {row.record.fact('no_effect')}."
                    for row in held
                    if row.record.fact("no_effect")
                ),
            )
        )
        made.append(Table.of(f"Dtypes: {name}", lines, columns, note=note))
    return made


def _fact(name: str) -> Callable[[Line], Any]:
    return lambda line: line.row.record.fact(name)


def _doubts(line: Line) -> str:
    record = line.row.record
    said = [quantities(line.row)["doubts"], record.fact("reference_reason")]
    if lost := record.fact("gradients_without_error"):
        said.append(f"{lost} gradients are not finite or all zero in the reference")
    return "; ".join(filter(None, said))


def _raw(row: Row) -> dict[str, Any]:
    record = row.record
    named = (*ERRORS, "reference", "reference_reason", "gradient_scale", "settled_scale", "no_effect", "logits_module")
    numbers = {**quantities(row), "precision": precision_of(row)}
    return numbers | ({} if record.failure else {name: record.fact(name) for name in named})


def _error_ratio(row: Row, fp32: Row | None) -> float | None:
    mine = row.record.fact("error_gradient_median")
    theirs = fp32.record.fact("error_gradient_median") if fp32 else None
    return mine / theirs if mine and theirs else None


def _median_step_s(row: Row | None) -> float | None:
    samples = row.record.samples.get("step") if row and row.record.failure is None else None
    return median(samples.values) if samples and samples.values else None


def _dtypes_by_module(row: Row) -> dict[tuple[str, str], str]:
    table = table_of(row, "dtypes")
    return dict(zip(zip(table["module"], table["kind"], strict=True), table["output"], strict=True))


def _parameters(rows: Sequence[Row], key: tuple[str, str]) -> str:
    """The parameters' dtype: of the precisions that agree, once; of one that does not, after its name."""
    found: dict[str, list[str]] = {}
    for row in rows:
        table = table_of(row, "dtypes")
        for module, kind, dtype in zip(table["module"], table["kind"], table["parameters"], strict=True):
            if (module, kind) == key:
                found.setdefault(dtype, []).append(precision_of(row))
    most = max(found, key=lambda dtype: len(found[dtype]))
    others = [f"{dtype} in {', '.join(names)}" for dtype, names in found.items() if dtype != most]
    return "; ".join([most, *others])


def _kept_wide(rows: Sequence[Row]) -> list[str]:
    """What autocast leaves in fp32."""
    said = []
    for row in rows:
        if not precision_of(row).endswith("_autocast") or row.record.fact("no_effect"):
            continue
        table = table_of(row, "dtypes")
        kinds = dict.fromkeys(
            kind for kind, output in zip(table["kind"], table["output"], strict=True) if kind and output == "fp32"
        )
        if kinds:
            said.append(f"{precision_of(row)} leaves in fp32: {', '.join(kinds)}.")
    return said


def range_tables(rows: Sequence[Row]) -> list[Table]:
    """What fp16's range takes from gradients, by layer."""
    return [_range_table(row) for row in rows if row.record.tables.get("ranges") and row.record.fact("settled_scale")]


def _range_table(row: Row) -> Table:
    title = f"fp16's range: {row.label(without=('precision',))}"
    return Table.of(title, table_lines(table_of(row, "ranges")), _RANGE, note=range_sentence(row))


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
    first = next((row for row in rows if row.record.tables.get("accumulation")), None)
    if first is None:
        return []
    made = [Table.of("Accumulation", table_lines(table_of(first, "accumulation")), _ACCUMULATION, note=_TEXTBOOK)]
    for name, group in groups_of(rows).items():
        held = next((row for row in group if row.record.tables.get("reductions")), None)
        if held is not None:
            lines = table_lines(table_of(held, "reductions"))
            made.append(Table.of(f"Sums in 16 bits: {name}", lines, _REDUCTION, note=_SUMS))
    return made


def groups_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that differ in precision only, by what they share: `small 256`."""
    return grouped(rows, lambda row: row.label(without=("precision",)))


def precision_of(row: Row) -> str:
    return str(row.record.config.get("precision"))


def fp32_of(group: Sequence[Row]) -> Row | None:
    """The row that the others' time and error are held to."""
    return next((row for row in group if precision_of(row) == "fp32"), None)


def table_of(row: Row, name: str) -> Mapping[str, Any]:
    """A table of the record, by column; empty where it has none."""
    return row.record.tables.get(name, {})


def share_words(share: float) -> str:
    """Percent, with digits left for what is rare."""
    if share == 0:
        return "0"
    return percent(share) if share >= 0.001 else f"{share * 100:.1e}"


_SHARE = Form(text=share_words)
_RANGE = (
    Column("gradient of", TEXT, "of"),
    Column("layer"),
    Column("elements", COUNT),
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
    *(Column(name) for name in ("what", "values", "numbers", "accumulator")),
    Column("error, median", ERROR, "error_median"),
    Column("error, worst", ERROR, "error_max"),
    Column("lost (%)", _SHARE, "overflow_share"),
)

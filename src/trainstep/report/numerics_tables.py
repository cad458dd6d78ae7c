"""The tables of `trainstep numerics`, each with the sentence that says what it shows."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from trainstep.report.forms import ABSENT, failure_sentence, failure_word, in_ms, milliseconds, percent, three_digits
from trainstep.report.hand_built import Column, point_columns
from trainstep.report.numerics_rows import (
    ERRORS,
    error_entry,
    fp32_of,
    groups_of,
    numerics_rows,
    precision_of,
    table_of,
    text_entry,
)
from trainstep.report.numerics_sums import range_tables, sum_tables
from trainstep.report.quantities import quantities, time_of
from trainstep.report.rows import Row
from trainstep.report.tables import Entry, Table

_WORST = 3
"""Parameters shown a cell."""


def numerics_tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that these records hold; none without a record of numerics."""
    mine = numerics_rows(rows)
    if not mine:
        return []
    errors = errors_table(mine)
    errors = replace(errors, note=" ".join([errors.note, *trade_sentences(mine)]))
    return [errors, *worst_tables(mine), *dtype_tables(mine), *range_tables(mine), *sum_tables(mine)]


def errors_table(rows: Sequence[Row]) -> Table:
    """Error and cost side by side, one row a precision."""
    points = point_columns(rows, without=("precision",))
    named = ("step (ms)", "of fp32's time", *(f"error of {name}" for name in ERRORS.values()))
    columns = (
        *(column for column, _ in points),
        Column(title="precision"),
        *(Column(title=name, number=True) for name in named),
        Column(title="reference"),
        Column(title="doubts"),
    )
    groups = list(groups_of(rows).values())
    entries = tuple(
        (*(make(row) for _, make in points), Entry(text=precision_of(row)), *_numbers(row, group), *_words(row))
        for group in groups
        for row in group
    )
    raw = tuple(_raw(row) for group in groups for row in group)
    note = (
        "Errors are relative, |x − reference| / |reference| in the 2-norm, with the same weights and batch; gradients are "
        "taken parameter by parameter. The step is the mean ± standard deviation of its timed steps, optimizer included; "
        "its ratio is of medians."
    )
    return Table(title="Error and cost of each precision", columns=columns, entries=entries, raw=raw, note=note)


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
    entries = []
    for row in rows:
        table = table_of(row, "gradients")
        for parameter, error, norm in list(zip(*(table.get(name, ()) for name in _GRADIENT_COLUMNS), strict=True))[
            :_WORST
        ]:
            where = (Entry(text=row.label(without=("precision",))), Entry(text=precision_of(row)))
            entries.append((*where, Entry(text=str(parameter)), error_entry(error), error_entry(norm)))
    if not entries:
        return []
    columns = (
        *(Column(title=name) for name in ("model", "precision", "parameter")),
        Column(title="error", number=True),
        Column(title="norm of the reference", number=True),
    )
    note = "Relative error of the gradient of single parameters, the furthest off first."
    return [Table(title="Worst gradients", columns=columns, entries=tuple(entries), note=note)]


_GRADIENT_COLUMNS = ("parameter", "relative_error", "reference_norm")


def dtype_tables(rows: Sequence[Row]) -> list[Table]:
    """One table a model: a line a module, what it returns in each precision."""
    made = []
    for name, group in groups_of(rows).items():
        held = [row for row in group if "dtypes" in row.record.tables]
        if not held:
            continue
        found = [_dtypes_by_module(row) for row in held]
        modules = dict.fromkeys(key for one in found for key in one)
        columns = (
            *(Column(title=title) for title in ("module", "kind", "parameters")),
            *(Column(title=precision_of(row)) for row in held),
        )
        entries = tuple(
            (*map(text_entry, (*key, _parameters(held, key))), *(text_entry(one.get(key, ABSENT)) for one in found))
            for key in modules
        )
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
        made.append(Table(title=f"Dtypes: {name}", columns=columns, entries=entries, note=note))
    return made


def _numbers(row: Row, group: Sequence[Row]) -> list[Entry]:
    if row.record.failure is not None:
        return [Entry(text=failure_word(row.record.failure), failure=row.record.failure)] * (2 + len(ERRORS))
    step = time_of(quantities(row), "step")
    ratio = time_ratio(row, fp32_of(group))
    return [
        Entry(text=milliseconds(*step), sort=in_ms(step[0])) if step else Entry(text=ABSENT),
        Entry(text=three_digits(ratio), sort=ratio) if ratio else Entry(text=ABSENT),
        *(error_entry(row.record.fact(name)) for name in ERRORS),
    ]


def _words(row: Row) -> list[Entry]:
    if row.record.failure is not None:
        return [text_entry(ABSENT), Entry(text=failure_sentence(row.record.failure), failure=row.record.failure)]
    said = [quantities(row)["doubts"], row.record.fact("reference_reason")]
    lost = row.record.fact("gradients_without_error")
    if lost:
        said.append(f"{lost} gradients are not finite or all zero in the reference")
    return [text_entry(row.record.fact("reference", ABSENT)), text_entry("; ".join(filter(None, said)))]


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

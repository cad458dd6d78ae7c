"""Compares steps along an axis such as precision or compile: ratios with intervals and verdicts."""

from collections.abc import Callable, Sequence
from typing import Any

from trainstep.config.instruments import says
from trainstep.grouping import grouped
from trainstep.report.kit.charts import Chart, Section, label
from trainstep.report.kit.forms import MS_STD, RATIO, TEXT, Form, failure_sentence
from trainstep.report.kit.ranking import Ratio, ratio_of
from trainstep.report.kit.ratio_charts import ratio_chart
from trainstep.report.kit.rows import Row, needless, of_workload, quantities, time_of, varying, words
from trainstep.report.kit.tables import Column, Entry, Table, point_columns

NOT_COMPARED = {
    *("model", "context", "batch_size", "accumulation", "d_model", "d_ff", "layers", "heads", "vocab_size", "mode"),
    *("warmups", "steps", "sync", "cold_compile", "seed", "data", "device"),
    *("machine", "hostname", "file", "started_at"),
}
"""Axes along which the work or the way of timing differs, so that a ratio would not help to choose a value."""


def comparison_sections(rows: Sequence[Row]) -> list[Section]:
    """A section per compared axis: ratios of step time against the axis's first value."""
    return [_comparison_section(axis, ratios) for axis, ratios in compared_ratios(rows)]


def comparison_tables(rows: Sequence[Row], axis: str | None = None) -> list[Table]:
    """A table per compared axis (or of `axis` alone): ratios and verdicts against the axis's first value."""
    return [_ratio_table(name, ratios) for name, ratios in compared_ratios(rows, axis)]


def compared_ratios(rows: Sequence[Row], axis: str | None = None) -> list[tuple[str, list[Ratio]]]:
    """Each axis along which training steps are compared, with its ratios; with `axis`, that axis for any timed workload."""
    steps = of_workload(rows, "train_step")
    if axis is None:
        by_axis = [(name, _ratios(name, steps)) for name in varying(steps) if name not in NOT_COMPARED]
    else:
        by_axis = [(axis, _ratios(axis, [row for row in rows if not says(row.record.workload, "ratios")]))]
    return [(name, ratios) for name, ratios in by_axis if ratios]


def _ratios(axis: str, rows: Sequence[Row]) -> list[Ratio]:
    ratios = []
    for group in grouped(rows, lambda row: row.rest(axis)).values():
        base = next((row for row in group if row.point.get(axis) == rows[0].point.get(axis)), None)
        ratios += [ratio_of(base, row, _timed(row)) for row in group if base and row is not base]
    return ratios


def _comparison_section(axis: str, ratios: Sequence[Ratio]) -> Section:
    first = ratios[0].base.point.get(axis)
    verdicts = [ratio.comparison.word for ratio in ratios if ratio.comparison]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    name, chart = axis.replace("_", " "), _ratio_chart(axis, ratios)
    sentence = f"Against {name} {words(first)}, of {len(ratios)} comparisons of the total step: {counts or 'none could be made'}."
    return Section(
        title=f"What {name} changes",
        paragraphs=(sentence,),
        charts=(chart,) if chart else (),
        tables=(_ratio_table(axis, ratios),),
    )


def _timed(row: Row) -> str:
    """The quantity that is compared: a step's time, or the first quantity of another workload."""
    samples = row.record.samples
    return "step" if "step" in samples else next(iter(samples), "step")


def _ratio_chart(axis: str, ratios: Sequence[Ratio]) -> Chart | None:
    first = words(ratios[0].base.point.get(axis))
    unnamed = [axis, *needless([ratio.row for ratio in ratios])]
    several = grouped(ratios, lambda ratio: words(ratio.row.point.get(axis)))
    if len({ratio.row.label(without=unnamed) for ratio in ratios}) == 1:  # only the axis's value tells the rows apart
        series = {axis.replace("_", " "): [(words(ratio.row.point.get(axis)), ratio) for ratio in ratios]}
    else:
        series = {
            value: [(ratio.row.label(without=unnamed), ratio) for ratio in alike] for value, alike in several.items()
        }
    title = f"Total step, relative to {axis.replace('_', ' ')} {label(first)}"
    return ratio_chart(title, "", f"time of a step ÷ that with {label(first)}", series)


def _ratio_table(axis: str, ratios: Sequence[Ratio]) -> Table:
    timed = "total step" if all(_timed(ratio.row) == "step" for ratio in ratios) else "time"
    columns = [
        *point_columns(ratios, without=[axis]),
        Column(axis, TEXT, lambda ratio: words(ratio.row.point.get(axis)), failed=None, names=True),
        Column("against", TEXT, lambda ratio: words(ratio.base.point.get(axis)), failed=None, names=True),
        _compared("ratio", RATIO, lambda ratio: ratio.ratio),
        _compared("99 % from", RATIO, lambda ratio: ratio.interval and ratio.interval[0]),
        _compared("to", RATIO, lambda ratio: ratio.interval and ratio.interval[2]),
        _compared(f"{timed} (ms)", MS_STD, lambda ratio: _time(ratio.row), more=True),
        _compared("was (ms)", MS_STD, lambda ratio: _time(ratio.base), more=True),
        Column("verdict", TEXT, lambda ratio: ratio.known.word if ratio.known else "cannot tell", failed=None),
        Column("why (a: compared against, b: this cell)", TEXT, _why, failed=None, more=True),
    ]
    title = f"{timed.capitalize()} against {axis.replace('_', ' ')} {words(ratios[0].base.point.get(axis))}"
    reasons = [ratio.known.reason for ratio in ratios if ratio.known and not ratio.interval]
    reasons += [ratio.trouble for ratio in ratios if not ratio.known and not ratio.failure]
    note = " ".join(f"No interval: {reason}." for reason in dict.fromkeys(reasons))
    raw = (
        {**ratio.row.point, "compared_along": axis, "against": ratio.base.point.get(axis), **ratio.numbers()}
        for ratio in ratios
    )
    return Table.of(title, ratios, columns, note=note, raw=raw)


def _time(row: Row) -> tuple[float, float | None] | None:
    return time_of(quantities(row), _timed(row))


def _compared(title: str, form: Form, get: Callable[[Ratio], Any], *, more: bool = False) -> Column:
    """A column whose number needs both cells; if one of them failed, the column shows its failure."""

    def read(ratio: Ratio) -> Any:
        if ratio.known is None:
            return Entry(text=ratio.trouble, failure=ratio.failure) if ratio.failure else None
        return get(ratio)

    return Column(title, form, read, failed=None, more=more)


def _why(ratio: Ratio) -> str | Entry:
    if ratio.failure:
        return Entry(text=failure_sentence(ratio.failure), failure=ratio.failure)
    return ratio.reason

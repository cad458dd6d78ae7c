"""What a page shows of a compared axis (precision, compile, attention...): ratios with intervals and verdicts."""

from collections.abc import Callable, Sequence
from typing import Any

from trainstep.config.instruments import says
from trainstep.records.compare import Comparison
from trainstep.report.charts import (
    FAILURE_COLOUR,
    INK,
    SERIES,
    Chart,
    Panels,
    Section,
    bar,
    error_bars,
    label,
    lines_of,
    short_labels,
)
from trainstep.report.forms import MS_STD, RATIO, TEXT, Form, failure_sentence, failure_word, ratio_words
from trainstep.report.ratios import Ratio, ratio_of
from trainstep.report.rows import Row, grouped, needless, of_workload, quantities, time_of, varying, words
from trainstep.report.tables import Column, Entry, Table, point_columns

NOT_COMPARED = {
    *("model", "context", "batch_size", "accumulation", "d_model", "d_ff", "layers", "heads", "vocab_size", "mode"),
    *("warmups", "steps", "sync", "cold_compile", "seed", "data", "device"),
    *("machine", "hostname", "file", "started_at"),
}
"""Axes along which more work is done, or the same work is timed otherwise: a ratio would say nothing of a choice."""
_LABELLED_BARS = 40


def comparison_sections(rows: Sequence[Row]) -> list[Section]:
    """One section for each axis that is compared: ratios of step time against the axis's first value."""
    return [_comparison_section(axis, ratios) for axis, ratios in compared_ratios(rows)]


def comparison_tables(rows: Sequence[Row], axis: str | None = None) -> list[Table]:
    """Ratios and verdicts against the first value of each compared axis (or of `axis` alone), a table each."""
    return [_ratio_table(name, ratios) for name, ratios in compared_ratios(rows, axis)]


def compared_ratios(rows: Sequence[Row], axis: str | None = None) -> list[tuple[str, list[Ratio]]]:
    """Each axis along which steps are compared, or `axis` alone whatever was timed, with its ratios."""
    steps = of_workload(rows, "train_step")
    if axis is None:
        found = [(name, _ratios(name, steps)) for name in varying(steps) if name not in NOT_COMPARED]
    else:
        found = [(axis, _ratios(axis, [row for row in rows if not says(row.record.workload, "ratios")]))]
    return [(name, ratios) for name, ratios in found if ratios]


def _ratios(axis: str, rows: Sequence[Row]) -> list[Ratio]:
    ratios = []
    for group in grouped(rows, lambda row: row.rest(axis)).values():
        base = next((row for row in group if row.point.get(axis) == rows[0].point.get(axis)), None)
        ratios += [ratio_of(base, row, _timed(row)) for row in group if base and row is not base]
    return ratios


def _comparison_section(axis: str, ratios: Sequence[Ratio]) -> Section:
    first = ratios[0].base.point.get(axis)
    verdicts = [ratio.found.verdict for ratio in ratios if ratio.found]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    name = axis.replace("_", " ")
    said = f"Against {name} {words(first)}, of {len(ratios)} comparisons of the total step: {counts or 'none could be made'}."
    return Section(
        title=f"What {name} changes",
        paragraphs=(said,),
        charts=(_ratio_chart(axis, ratios),) if verdicts else (),
        tables=(_ratio_table(axis, ratios),),
    )


def _timed(row: Row) -> str:
    """The quantity that is compared: a step's time, or what another workload times first."""
    samples = row.record.samples
    return "step" if "step" in samples else next(iter(samples), "step")


def _ratio_chart(axis: str, ratios: Sequence[Ratio]) -> Chart:
    first = words(ratios[0].base.point.get(axis))
    unnamed = [axis, *needless([ratio.row for ratio in ratios])]
    panels = Panels(
        titles=[""],
        columns=1,
        x_title=", ".join(label(name) for name in ratios[0].row.point if name not in unnamed),
        y_title=f"time of a step ÷ that with {label(first)}",
        x_axis={"type": "category", "automargin": True},
    )
    by_value = grouped(ratios, lambda ratio: words(ratio.row.point.get(axis)))
    for index, (value, compared) in enumerate(by_value.items()):
        colour = SERIES[index % len(SERIES)]
        panels.add(0, _ratio_bars(unnamed, value, colour, compared, len(ratios) <= _LABELLED_BARS))
    at_one = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    return panels.chart(
        f"Total step, relative to {axis.replace('_', ' ')} {label(first)}",
        "Below 1 is faster. The whisker is the 99 % interval of the ratio; a hatched bar means: cannot tell.",
        shapes=[{**at_one, "line": {"color": INK, "width": 1.5, "dash": "dot"}}],
        barmode="group",
        bargap=0.3 if len(ratios) > 8 else 0.6,
    )


def _ratio_bars(
    unnamed: Sequence[str], value: str, colour: str, ratios: Sequence[Ratio], labelled: bool
) -> dict[str, Any]:
    known = [ratio.found is not None and ratio.found.ratio is not None for ratio in ratios]
    shapes = ["/" if ratio.found and ratio.found.verdict == "cannot tell" else "" for ratio in ratios]
    hatching = {"shape": shapes, "bgcolor": colour, "fgcolor": "theme:paper", "size": 7}
    return bar(
        label(value),
        short_labels([ratio.row.label(without=unnamed) for ratio in ratios]),
        # A bar without a height takes no text: what failed stands on a bar of no height.
        [ratio.found.ratio or 0.0 if ratio.found else 0.0 for ratio in ratios],
        colour=colour,
        hover=[_ratio_hover(ratio) for ratio in ratios],
        marker={"pattern": hatching},
        error_y=error_bars(*([_side(ratio, side) for ratio in ratios] for side in ("high", "low"))),
        text=[_ratio_text(ratio, labelled) for ratio in ratios],
        # At the foot of its bar, where no whisker is.
        textposition=["inside" if it_is else "outside" for it_is in known],
        insidetextanchor="start",
        insidetextfont={"color": "theme:paper", "size": 12},
        textangle=0,
        textfont={"color": [INK if it_is else FAILURE_COLOUR for it_is in known], "size": 11},
        cliponaxis=False,
        offsetgroup=label(value),
    )


def _side(ratio: Ratio, side: str) -> float:
    known = ratio.known
    return abs(getattr(known, side) - known.ratio) if known else 0.0


def _ratio_text(ratio: Ratio, labelled: bool) -> str:
    if ratio.failure is not None:
        return f"<b>{failure_word(ratio.failure)}</b>"
    if ratio.found is None or ratio.found.ratio is None:
        return "?"
    return f"{ratio.found.ratio:.2f}" if labelled else ""


def _ratio_hover(ratio: Ratio) -> str:
    found = ratio.found
    name = label(ratio.row.label())
    if found is None or found.ratio is None or found.low is None or found.high is None:
        return lines_of(name, label(ratio.trouble))
    interval = f"{ratio_words(found.ratio)} (99 % interval {ratio_words(found.low)} to {ratio_words(found.high)})"
    return lines_of(name, interval, found.verdict, label(found.reason))


def _ratio_table(axis: str, ratios: Sequence[Ratio]) -> Table:
    timed = "total step" if all(_timed(ratio.row) == "step" for ratio in ratios) else "time"
    columns = [
        *point_columns(ratios, without=[axis]),
        Column(axis, TEXT, lambda ratio: words(ratio.row.point.get(axis)), failed=None),
        Column("against", TEXT, lambda ratio: words(ratio.base.point.get(axis)), failed=None),
        _compared("ratio", RATIO, lambda ratio, found: found.ratio),
        _compared("99 % from", RATIO, lambda ratio, found: found.low),
        _compared("to", RATIO, lambda ratio, found: found.high),
        _compared(f"{timed} (ms)", MS_STD, lambda ratio, _: time_of(quantities(ratio.row), _timed(ratio.row))),
        _compared("was (ms)", MS_STD, lambda ratio, _: time_of(quantities(ratio.base), _timed(ratio.base))),
        Column("verdict", TEXT, lambda ratio: ratio.known.verdict if ratio.known else "cannot tell", failed=None),
        Column("why", TEXT, _why, failed=None),
    ]
    title = f"{timed.capitalize()} against {axis.replace('_', ' ')} {words(ratios[0].base.point.get(axis))}"
    note = "In the reasons, a is the cell compared against and b the row's own."
    return Table.of(title, ratios, columns, note=note, raw=(_ratio_numbers(axis, ratio) for ratio in ratios))


def _compared(title: str, form: Form, get: Callable[[Ratio, Comparison], Any]) -> Column:
    """A number that both cells are needed for: where either failed, its failure stands there."""

    def read(ratio: Ratio) -> Any:
        if ratio.known is None:
            return Entry(text=ratio.trouble, failure=ratio.failure) if ratio.failure else None
        return get(ratio, ratio.known)

    return Column(title, form, read, failed=None)


def _why(ratio: Ratio) -> str | Entry:
    if ratio.failure:
        return Entry(text=failure_sentence(ratio.failure), failure=ratio.failure)
    return ratio.known.reason if ratio.known else ratio.trouble


def _ratio_numbers(axis: str, ratio: Ratio) -> dict[str, Any]:
    """What a program reads of a comparison."""
    aside = {"compared_along": axis, "against": ratio.base.point.get(axis)}
    return {**ratio.row.point, **aside, **ratio.numbers()}

"""One self-contained HTML file: summary, charts, tables, failures, provenance. Its own policy forbids it to fetch anything."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from trainstep.config.instruments import resolve
from trainstep.report.all_tables import instruments_of, without_own_tables
from trainstep.report.answers import answers
from trainstep.report.charts import Section, chart_table
from trainstep.report.comparison_page import comparison_sections
from trainstep.report.folding import folded
from trainstep.report.footnotes import footnotes
from trainstep.report.forms import byte_words, failure_sentence, failure_word
from trainstep.report.notes import environments, mfu_conventions, mixed_machines, notes, provenance, summary
from trainstep.report.rows import Row, of_workload
from trainstep.report.tables import cell_tables
from trainstep.report.visible import visible


def page(rows: Sequence[Row], *, title: str | None = None, description: str | None = None) -> str:
    """The page of these rows as text. `title` and `description`: the heading and the first paragraph, as a sweep has them."""
    noted = footnotes(rows)
    rows = noted.rows
    found = sections(rows)
    charts = [chart for section in found for chart in section.charts]
    drawn = [{"data": list(chart.data), "layout": dict(chart.layout)} for chart in charts]
    warnings = mixed_machines(rows)
    said_elsewhere = [*warnings, *mfu_conventions(rows)]
    return (
        _environment()
        .get_template("template.html")
        .render(
            title=title or title_of(rows),
            description=description,
            answers=answers(rows),
            summary=noted.shortened(summary(rows)),
            warnings=map(noted.shortened, warnings),
            parts=folded(found),
            numbers=itertools.count(),
            notes=[note for note in notes(rows) if note not in said_elsewhere],
            provenance=provenance(rows),
            environments=[(noted.marks.get(name, ""), name, facts) for name, facts in environments(rows)],
            charts_json=script_json(drawn),
            plotly_js=get_plotlyjs() if charts else "",
        )
    )


def sections(rows: Sequence[Row]) -> list[Section]:
    """What the page shows, what matters most first: what compares cells, steps, each workload's sections; last the cells of
    workloads that have sections of their own or, as ceilings, stand beside others."""
    others = without_own_tables(rows)
    shown = [(one, of_workload(rows, one.name)) for one in instruments_of(rows)]
    charts = tuple(chart for one, mine in shown for place in one.charts for chart in resolve(place)(mine))
    overview = Section(title="All cells", charts=charts, tables=tuple(cell_tables(others)))
    first, last = [], []
    for one, mine in shown:
        held_to = [of_workload(rows, one.held_to)] if one.held_to else []
        first += [section for place in one.sections for section in resolve(place)(mine, *held_to)]
        last += [section for place in one.last_sections for section in resolve(place)(mine)]
    overviews = [overview] if others or charts else []
    ahead = any(one.last_sections for one, _ in shown) or not first  # the overview is those workloads' own page
    return [*comparison_sections(rows), *(overviews if ahead else []), *first, *last, *([] if ahead else overviews)]


def title_of(rows: Sequence[Row]) -> str:
    """`Training step: small, medium on NVIDIA H200`."""
    models = list(dict.fromkeys(str(row.point.get("model")) for row in rows if "model" in row.point))
    chips = list(dict.fromkeys(row.record.environment.gpu or row.record.environment.cpu for row in rows))
    shown = instruments_of(rows)
    beside = {one.held_to for one in shown}  # as ceilings, which have no sections
    main = [one for one in shown if (one.sections or one.last_sections) and one.name not in beside] or shown
    alone = main[0].title if len({row.record.workload for row in rows}) == len(shown) and len(main) == 1 else ""
    named = f": {', '.join(models[:5])}{'…' if len(models) > 5 else ''}" if models else ""
    what = (alone or ("Training step" if models else "Measurements")) + named
    return f"{what} on {' and '.join(chips)}" if len(chips) < 3 else f"{what} on {len(chips)} machines"


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element: no text in it can end the element or open a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _shown(value: Any) -> Any:
    """A value of the template; text of records visible, since files of pages are shown on terminals too."""
    return visible(value) if type(value) is str else value  # markup is ours


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("trainstep.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
    )
    made.filters |= {
        "next": next,
        "numbers_of": chart_table,
        "bytes": byte_words,
        "failure_word": failure_word,
        "failure_sentence": failure_sentence,
    }
    return made

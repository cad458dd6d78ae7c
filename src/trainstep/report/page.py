"""Writes a report as one self-contained HTML file: answers, charts, tables, failures and provenance."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from trainstep.config.instruments import resolve
from trainstep.report.answers import answers
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.charts import Chart, Section, chart_table
from trainstep.report.kit.forms import byte_words, failure_sentence, failure_word
from trainstep.report.kit.notes import environments, mfu_conventions, mixed_machines, notes, provenance, summary
from trainstep.report.kit.rows import Row, machine_labels, of_workload
from trainstep.report.kit.tables import Table, cell_tables, instruments_of, without_own_tables
from trainstep.report.kit.visible import visible
from trainstep.report.step.comparison import comparison_sections

# The parts of a page that are open fill its first screens; the others are folded under a line that names their contents.
OPEN_PX = 6 * 900
"""The height of the open page on a screen 1280 pixels wide."""
_FRAME_PX = 900
"""The height of a page's head and foot."""
_HEADING_PX = 140
"""The height of a section's title and of the line of its fold."""
_PARAGRAPH_CHARACTERS, _LINE_PX = 105, 30
_ROW_PX, _LONGEST_TABLE_PX, _AROUND_PX, _FOLDED_PX = 27, 720, 130, 50
_MOST_FOLDED = 6
"""More folded tables than this at the end of a section go into its fold."""
_NAMED = 5
"""The most charts and tables that the line of a fold names."""
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def page(
    rows: Sequence[Row],
    *,
    title: str | None = None,
    description: str | None = None,
    lead: Sequence[Section] = (),
    lead_answers: Sequence[Answer] = (),
) -> str:
    """The page of these rows as text. `title` and `description`: a sweep's heading and first paragraph.

    `lead` and `lead_answers`: sections and answers to stand before those that the rows have.
    """
    noted = footnotes(rows)
    rows = noted.rows
    shown = [*lead, *sections(rows)]
    warnings = mixed_machines(rows)
    shown_elsewhere = [*warnings, *mfu_conventions(rows)]
    return _rendered(
        title=title or title_of(rows),
        description=description,
        answers=[*lead_answers, *answers(rows)],
        shown=shown,
        summary=noted.shortened(summary(rows)),
        warnings=map(noted.shortened, warnings),
        notes=[note for note in notes(rows) if note not in shown_elsewhere],
        provenance=provenance(rows),
        environments=[(noted.marks.get(name, ""), name, facts) for name, facts in environments(rows)],
    )


def page_of_sections(
    sections: Sequence[Section],
    *,
    title: str,
    answers: Sequence[Answer],
    summary: str,
    sources: Sequence[tuple[str, str]],
) -> str:
    """A page of finished sections, of which no records are the source. `sources`: name and value of each line at its foot."""
    return _rendered(title=title, answers=answers, shown=sections, summary=summary, provenance=sources)


def _rendered(*, shown: Sequence[Section], **parts: Any) -> str:
    charts = [chart for section in shown for chart in section.charts]
    figures = [{"data": list(chart.data), "layout": dict(chart.layout)} for chart in charts]
    empty = {"description": None, "warnings": (), "notes": (), "environments": ()}
    return (
        _environment()
        .get_template("template.html")
        .render(
            **empty | parts,
            parts=folded(shown),
            numbers=itertools.count(),
            charts_json=script_json(figures),
            plotly_js=get_plotlyjs() if charts else "",
        )
    )


def sections(rows: Sequence[Row]) -> list[Section]:
    """The sections of the page, the most important first: comparisons, the overview of all cells, each workload's sections.

    The overview comes last if workloads have sections of their own and none has `last_sections`, whose main part it would be.
    """
    others = without_own_tables(rows)
    shown = [(instrument, of_workload(rows, instrument.name)) for instrument in instruments_of(rows)]
    charts = tuple(chart for instrument, cells in shown for name in instrument.charts for chart in resolve(name)(cells))
    overview = Section(title="All cells", charts=charts, tables=tuple(cell_tables(others)))
    first, last = [], []
    for instrument, cells in shown:
        held_to = [of_workload(rows, instrument.held_to)] if instrument.held_to else []
        first += [section for name in instrument.sections for section in resolve(name)(cells, *held_to)]
        last += [section for name in instrument.last_sections for section in resolve(name)(cells)]
    overviews = [overview] if others or charts else []
    ahead = any(instrument.last_sections for instrument, _ in shown) or not first
    return [*comparison_sections(rows), *(overviews if ahead else []), *first, *last, *([] if ahead else overviews)]


def title_of(rows: Sequence[Row]) -> str:
    """`Training step: small, medium on NVIDIA H200`."""
    models = list(dict.fromkeys(str(row.point.get("model")) for row in rows if "model" in row.point))
    chips = list(dict.fromkeys(row.record.environment.gpu or row.record.environment.cpu for row in rows))
    shown = instruments_of(rows)
    references = {
        instrument.held_to for instrument in shown
    }  # ceilings or collectives, beside which another workload is shown
    main = [
        instrument
        for instrument in shown
        if (instrument.sections or instrument.last_sections) and instrument.name not in references
    ] or shown
    only = main[0].title if len({row.record.workload for row in rows}) == len(shown) and len(main) == 1 else ""
    named = f": {', '.join(models[:5])}{'…' if len(models) > 5 else ''}" if models else ""
    what = (only or ("Training step" if models else "Measurements")) + named
    return f"{what} on {' and '.join(chips)}" if len(chips) < 3 else f"{what} on {len(chips)} machines"


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element: no text in it can end the element or open a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trainstep.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        # Records' text is made visible because pages are shown on terminals too; Markup, a subclass of str, is ours.
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters |= {
        "next": next,
        "numbers_of": chart_table,
        "bytes": byte_words,
        "failure_word": failure_word,
        "failure_sentence": failure_sentence,
    }
    return environment


@dataclass(frozen=True, kw_only=True)
class Part:
    """A section of the page, divided into an open and a folded part."""

    title: str
    paragraphs: tuple[str, ...]
    charts: tuple[Chart, ...]
    tables: tuple[Table, ...]
    folded: Section | None
    """The folded part, with the line of the fold as its title; None if all is open."""


def folded(sections: Sequence[Section]) -> list[Part]:
    """The sections, open as far as the page's first screens reach; the first chart or table is always open."""
    left = OPEN_PX - _FRAME_PX - _HEADING_PX * len(sections)
    parts: list[Part] = []
    for section in sections:
        left -= sum(_LINE_PX * -(-len(text) // _PARAGRAPH_CHARACTERS) for text in section.paragraphs)
        paragraphs = section.paragraphs if left > 0 or not parts else ()
        items: list[Chart | Table] = [*section.charts, *section.tables]
        count, most = 0, len(items) - _closed_at_end(items)
        while count < most and ((left := left - _height_px(items[count])) > 0 or not (parts or count)):
            count += 1
        charts, tables = section.charts[:count], section.tables[: max(0, count - len(section.charts))]
        inside = Section(
            title=_fold_title(items[count:]),
            paragraphs=() if paragraphs else section.paragraphs,
            charts=section.charts[len(charts) :],
            tables=section.tables[len(tables) :],
        )
        fold = inside if inside.paragraphs or inside.charts or inside.tables else None
        parts.append(Part(title=section.title, paragraphs=paragraphs, charts=charts, tables=tables, folded=fold))
    return parts


def _closed_at_end(items: Sequence[Chart | Table]) -> int:
    """The number of closed tables at the end of a section if they are too many to read past; else 0."""
    count = sum(1 for _ in itertools.takewhile(lambda item: isinstance(item, Table) and item.folded, items[::-1]))
    return count if count > _MOST_FOLDED else 0


def _height_px(item: Chart | Table) -> int:
    """The estimated height on the page."""
    if isinstance(item, Chart):
        return int(item.layout["height"]) + _AROUND_PX
    return _FOLDED_PX if item.folded else min(_ROW_PX * len(item.entries), _LONGEST_TABLE_PX) + _AROUND_PX


def _fold_title(items: Sequence[Chart | Table]) -> str:
    """`2 charts, 1 table: Peak memory; Time; Every cell`."""
    kinds = [("chart", Chart), ("table", Table)]
    numbers = [(sum(isinstance(item, kind) for item in items), name) for name, kind in kinds]
    counts = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in numbers if count)
    titles = "; ".join([item.title for item in items[:_NAMED]] + ["…"] * (len(items) > _NAMED))
    return f"{counts}: {titles}" if items else "What the numbers show"


@dataclass(frozen=True, kw_only=True)
class Footnotes:
    """Environments as footnotes: labels carry marks such as ¹, and the page's foot describes the environment of each mark."""

    rows: list[Row]
    """The rows with marks in place of their environments' labels."""
    marks: dict[str, str]
    """Label -> mark; a chip with only one environment needs no mark."""
    _short: dict[str, str]

    def shortened(self, text: str) -> str:
        """The sentence with marks in place of environments' labels."""
        for label in sorted(self._short, key=len, reverse=True):
            text = text.replace(label, self._short[label])
        return text


def footnotes(rows: Sequence[Row]) -> Footnotes:
    """The footnotes of these rows: labels that say more than the chip's name get a mark."""
    labels = machine_labels([row.record.environment for row in rows])
    chips = {
        label: row.record.environment.gpu or row.record.environment.cpu for label, row in zip(labels, rows, strict=True)
    }
    marked = [label for label, chip in chips.items() if label != chip]
    marks = {label: str(number).translate(_SUPERSCRIPTS) for number, label in enumerate(marked, 1)}
    short = {label: chips[label] + mark for label, mark in marks.items()}
    shown = marks if len(set(chips.values())) == 1 else short
    noted_rows = [
        replace(row, point={**row.point, "machine": shown[label]}) if "machine" in row.point and label in shown else row
        for label, row in zip(labels, rows, strict=True)
    ]
    return Footnotes(rows=noted_rows, marks=marks, _short=short)

"""What of a page stands open: its first screens. What is further down waits behind a line that says what is inside."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.report.charts import Chart, Section
from trainstep.report.tables import Table

OPEN_PX = 6 * 900
"""The height of the whole page, on a screen 1280 pixels wide."""
_FRAME_PX = 900
"""Head and foot of a page."""
_HEADING_PX = 140
"""A section's title and the line of what is folded in it."""
_PARAGRAPH_CHARACTERS, _LINE_PX = 105, 30
_ROW_PX, _LONGEST_TABLE_PX, _AROUND_PX, _FOLDED_PX = 27, 720, 130, 50
_MOST_FOLDED = 6
_NAMED = 5
"""Things inside that the line names."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A section of the page: what stands open in it, and what is folded."""

    title: str
    paragraphs: tuple[str, ...]
    charts: tuple[Chart, ...]
    tables: tuple[Table, ...]
    folded: Section | None
    """What is inside the fold, under the line that says so; None where nothing is."""


def folded(sections: Sequence[Section]) -> list[Part]:
    """Each section opened as far as the page's first screens go; the first thing to see is always open."""
    left = OPEN_PX - _FRAME_PX - _HEADING_PX * len(sections)
    parts: list[Part] = []
    for section in sections:
        left -= sum(_LINE_PX * -(-len(text) // _PARAGRAPH_CHARACTERS) for text in section.paragraphs)
        says = section.paragraphs if left > 0 or not parts else ()
        things: list[Chart | Table] = [*section.charts, *section.tables]
        shown, most = 0, len(things) - _folded_in_a_row(things)
        while shown < most and ((left := left - _px(things[shown])) > 0 or not (parts or shown)):
            shown += 1
        charts, tables = section.charts[:shown], section.tables[: max(0, shown - len(section.charts))]
        inside = Section(
            title=_inside(things[shown:]),
            paragraphs=() if says else section.paragraphs,
            charts=section.charts[len(charts) :],
            tables=section.tables[len(tables) :],
        )
        some = inside.paragraphs or inside.charts or inside.tables
        parts.append(
            Part(title=section.title, paragraphs=says, charts=charts, tables=tables, folded=inside if some else None)
        )
    return parts


def _folded_in_a_row(things: Sequence[Chart | Table]) -> int:
    """How many tables at the end, each folded already, are too many lines to read past."""
    count = sum(1 for _ in itertools.takewhile(lambda thing: isinstance(thing, Table) and thing.folded, things[::-1]))
    return count if count > _MOST_FOLDED else 0


def _px(thing: Chart | Table) -> int:
    """About how high it stands on the page."""
    if isinstance(thing, Chart):
        return int(thing.layout["height"]) + _AROUND_PX
    return _FOLDED_PX if thing.folded else min(_ROW_PX * len(thing.entries), _LONGEST_TABLE_PX) + _AROUND_PX


def _inside(things: Sequence[Chart | Table]) -> str:
    """`2 charts, 1 table: Peak memory; Time; Every cell`."""
    kinds = [("chart", Chart), ("table", Table)]
    numbers = [(sum(isinstance(thing, kind) for thing in things), name) for name, kind in kinds]
    counts = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in numbers if count)
    named = "; ".join([thing.title for thing in things[:_NAMED]] + ["…"] * (len(things) > _NAMED))
    return f"{counts}: {named}" if things else "What the numbers say"

"""A part of the page, as data."""

from dataclasses import dataclass

from trainstep.report.charts import Chart
from trainstep.report.tables import Table


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page. `paragraphs`: what the numbers say. A chart's numbers stand in a table of its section."""

    title: str
    paragraphs: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()

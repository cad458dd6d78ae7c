"""The section on ops of a page: our time over each peer's, and the tables."""

from collections.abc import Sequence

from trainstep.report.kit.charts import Section
from trainstep.report.kit.peers import OURS
from trainstep.report.kit.ranking import Ratio
from trainstep.report.kit.ratio_charts import ratio_chart
from trainstep.report.kit.rows import Row, needless
from trainstep.report.op.rows import named_rows, works_of
from trainstep.report.op.tables import op_tables


def op_sections(rows: Sequence[Row], ceilings: Sequence[Row] = ()) -> list[Section]:
    """One section. `ceilings`: rows of ceilings, for the share of a copy's rate."""
    works = works_of(named_rows(rows))
    unnamed = needless([work.row for work in works])
    series: dict[str, list[tuple[str, Ratio]]] = {}
    for work in works:
        for peer, ratio in work.against.items():
            series.setdefault(peer, []).append((work.row.label(without=unnamed), ratio))
    chart = ratio_chart("Time, relative to each peer", "", f"{OURS}'s time ÷ peer's", series)
    return [Section(title="Ops", charts=(chart,) if chart else (), tables=tuple(op_tables(rows, ceilings)))]

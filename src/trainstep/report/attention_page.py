"""What a page shows of attention: which is fastest and right, in sentences made from the numbers, then charts and tables."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from trainstep.report.attention_charts import MAXIMUM_GROUPS, attention_charts, groups_left_out, ratio_charts
from trainstep.report.attention_rows import (
    OURS,
    Configuration,
    configurations,
    implementation,
    implementations,
    mean_ratio,
    ratio_tables,
)
from trainstep.report.attention_tables import accounting_tables, cells_table, side_by_side, tile_chart, tile_tables
from trainstep.report.charts import Section
from trainstep.report.forms import times_words
from trainstep.report.rows import Row


def attention_sections(rows: Sequence[Row]) -> list[Section]:
    """Ours against each, side by side, tiles, every cell: those that these rows have."""
    works = configurations(rows)
    tiles = tile_chart(rows)
    # Of ours alone at many tiles, lines against the length would show one tile each time.
    overview = tiles is None or len(set(map(implementation, rows))) > 1
    made = [
        Section(
            title="Attention: ours against each",
            paragraphs=tuple(_against(works)),
            charts=tuple(ratio_charts(works)),
            tables=tuple(ratio_tables(works)),
        ),
        Section(
            title="Attention",
            charts=tuple(attention_charts(works)) if overview else (),
            tables=tuple(side_by_side(works)),
        ),
        Section(title="Attention: tiles", charts=(tiles,) if tiles else (), tables=tuple(tile_tables(rows))),
        Section(title="Attention: every cell", tables=(cells_table(rows), *accounting_tables(rows))),
    ]
    first, *others = [section for section in made if section.paragraphs or section.charts or section.tables]
    said = (*_wrong(rows), *_left_out(works))
    return [replace(first, paragraphs=(*first.paragraphs, *said)), *others]


def _wrong(rows: Sequence[Row]) -> list[str]:
    """Cells whose result a reader should not trust, by implementation."""
    kinds = {
        "gave NaN or infinity": [row for row in rows if row.record.fact("has_nan")],
        "gave other bits when run again": [row for row in rows if row.record.fact("deterministic") == 0],
    }
    return [f"{len(wrong)} of {len(rows)} cells {what}: {_counted(wrong)}." for what, wrong in kinds.items() if wrong]


def _counted(rows: Sequence[Row]) -> str:
    counts = Counter(map(implementation, rows))
    return ", ".join(f"{name} {counts[name]}" for name in implementations(counts))


def _against(works: Sequence[Configuration]) -> list[str]:
    """A clause a peer: the geometric mean over all configurations where both ran."""
    said = []
    for peer in implementations(peer for work in works for peer in work.ratios):
        ratios = [work.ratios[peer] for work in works if peer in work.ratios]
        said.append(f"{times_words(1 / mean_ratio(ratios))} as fast as {peer} ({len(ratios)} configurations)")
    return [f"{OURS} is, in the geometric mean, {'; '.join(said)}."] if said else []


def _left_out(works: Sequence[Configuration]) -> list[str]:
    left = groups_left_out(works)
    return (
        [f"Charts show the first {MAXIMUM_GROUPS} of {MAXIMUM_GROUPS + left} groups; tables have all."] if left else []
    )

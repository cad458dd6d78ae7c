"""The sections on attention of a page: the fastest implementations, wrong results, charts and tables."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from trainstep.report.attention.charts import MAXIMUM_GROUPS, attention_charts, groups_left_out, ratio_charts
from trainstep.report.attention.rows import configurations, implementations, ratio_tables
from trainstep.report.attention.tables import accounting_tables, cells_table, side_by_side, tile_chart, tile_tables
from trainstep.report.kit.charts import Section
from trainstep.report.kit.forms import times_words
from trainstep.report.kit.peers import OURS, Configuration, implementation, mean_ratio
from trainstep.report.kit.rows import Row


def attention_sections(rows: Sequence[Row]) -> list[Section]:
    """Ratios to each peer, implementations side by side, tiles, every cell: the sections that these rows fill."""
    works = configurations(rows)
    tiles = tile_chart(rows)
    # With only our kernels at many tiles, lines against the length would show one tile per length.
    overview = tiles is None or len(set(map(implementation, rows))) > 1
    sections = [
        Section(
            title="Attention: trainstep against each peer",
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
    first, *others = [section for section in sections if section.paragraphs or section.charts or section.tables]
    sentences = _wrong_results(rows)
    if left_out := groups_left_out(works):
        sentences.append(
            f"Charts show the first {MAXIMUM_GROUPS} of {MAXIMUM_GROUPS + left_out} groups; tables have all."
        )
    return [replace(first, paragraphs=(*first.paragraphs, *sentences)), *others]


def _against(works: Sequence[Configuration]) -> list[str]:
    """The geometric mean of the speed-up over each peer, over all configurations in which both ran."""
    parts = []
    for peer in implementations(peer for work in works for peer in work.ratios):
        ratios = [work.ratios[peer] for work in works if peer in work.ratios]
        parts.append(f"{times_words(1 / mean_ratio(ratios))} as fast as {peer} ({len(ratios)} configurations)")
    return [f"{OURS} is, in the geometric mean, {'; '.join(parts)}."] if parts else []


def _wrong_results(rows: Sequence[Row]) -> list[str]:
    """The number of cells with NaN or infinity, and of cells that are not deterministic, by implementation."""
    kinds = {
        "gave NaN or infinity": [row for row in rows if row.record.fact("has_nan")],
        "were not deterministic": [row for row in rows if row.record.fact("deterministic") == 0],
    }
    sentences = []
    for what, wrong in kinds.items():
        if wrong:
            counts = Counter(map(implementation, wrong))
            listing = ", ".join(f"{name} {counts[name]}" for name in implementations(counts))
            sentences.append(f"{len(wrong)} of {len(rows)} cells {what}: {listing}.")
    return sentences

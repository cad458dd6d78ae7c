"""The answers for attention: our kernels against the fastest peers, and the tiles in use against the best tiles."""

from collections.abc import Sequence
from statistics import median

from trainstep.report.attention.rows import configurations, flops_per_s, implementations
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import percent, rate_words
from trainstep.report.kit.peer_answer import HOW_TIMED, peer_answer
from trainstep.report.kit.peers import TIME, implementation
from trainstep.report.kit.ranking import against_words, ranking_of, ranking_words, ratio_of
from trainstep.report.kit.rows import Row, needless

_WORTH = 1.02
"""The least speed-up at which a tile counts as faster than the tile in use: the minimum effect of `compare`."""


def attention_answer(rows: Sequence[Row]) -> Answer | None:
    """Our kernels against the fastest peer of each configuration, or without peers the best rate; then the largest errors."""
    return peer_answer("attention", rows, configurations(rows), _without_peers)


def _without_peers(rows: Sequence[Row]) -> str:
    """All implementations against the first one, the ranking of a single configuration, or the best and the least rate."""
    works = configurations(rows)
    names = list(dict.fromkeys(name for work in works for name in implementations(work.cells)))
    if len(works) > 1 and len(names) > 1:
        base = names[0]
        compared = [work.cells for work in works if base in work.cells]
        ratios = [
            ratio_of(cells[base], row, TIME) for cells in compared for row in cells.values() if row is not cells[base]
        ]
        return against_words("implementation", ratios) if ratios else ""
    if len(works) == 1:
        ranking = ranking_of(rows, TIME)
        return ranking_words(ranking, per=" a call", name=implementation) if ranking else ""
    rated = [(rate, row) for row in rows if (rate := flops_per_s(row))]
    if not rated:
        return ""
    (high, fastest), (low, slowest) = (choose(rated, key=lambda pair: pair[0]) for choose in (max, min))
    unnamed = [*HOW_TIMED, *needless(rows)]
    best, least = (row.label(without=unnamed, named=True) for row in (fastest, slowest))
    return f"The best rate is {rate_words(high, 'flop/s')} ({best}), the least {rate_words(low, 'flop/s')} ({least})."


def tiles_answer(rows: Sequence[Row]) -> Answer | None:
    """In how many cells the tiles in use are the fastest, and the cell that the best tile would speed up most."""
    tuned = [row for row in rows if row.record.fact("best")]
    if not tuned:
        return None
    gains = [(gain, row) for row in tuned if (gain := _gain(row)) and gain >= _WORTH]
    verdict = f"The tiles in use are within 2 % of the fastest in {len(tuned) - len(gains)} of {len(tuned)} cells."
    if not gains:
        return Answer(workload="attention_tiles", verdict=verdict)
    gain, row = max(gains, key=lambda pair: pair[0])
    name = row.label(without=[*HOW_TIMED, *needless(rows)], named=True)
    saved, middle = (percent(1 - 1 / times) for times in (gain, median(gain for gain, _ in gains)))
    return Answer(
        workload="attention_tiles",
        verdict=f"{verdict} In the others the best tile takes {middle} % less time in the median.",
        suggestion=(
            f"{name} should gain most: {row.record.fact('best')} takes {saved} % less time than {row.record.fact('in_use')}; "
            "`trainstep tune` prints the rows of the table."
        ),
    )


def _gain(row: Row) -> float | None:
    """The speed-up of the best tile over the tile in use."""
    used_s, times = row.record.fact("in_use_time"), row.record.tables.get("candidates", {}).get("time_s", ())
    best_s = min((time_s for time_s in times if time_s), default=None)
    return used_s / best_s if used_s and best_s else None

"""The answers of attention: ours against the best peer of each configuration, by intervals; tiles in use against the best."""

from collections.abc import Sequence
from statistics import median

from trainstep.report.answers import Answer
from trainstep.report.attention_rows import (
    OURS,
    TIME,
    Configuration,
    configurations,
    flops_per_s,
    implementation,
    implementations,
    mean_ratio,
    median_s,
)
from trainstep.report.forms import listed, percent, rate_words, ratio_words, times_words
from trainstep.report.ranking import against_words, interval_words, is_judged, ranking_of, ranking_words
from trainstep.report.ratios import Ratio, ratio_of
from trainstep.report.rows import Row, grouped, needless

_ERRORS = ("error_output", "error_dq", "error_dk", "error_dv", "error_lse")
_WORTH = 1.02
"""A tile that is so many times as fast as the one in use is faster: `compare`'s minimum effect."""
_VERDICTS = {"faster": "faster", "slower": "slower", "cannot tell": "without a difference seen"}


def attention_answer(rows: Sequence[Row]) -> Answer | None:
    """Ours against the best peer of each configuration; without peers the best rate; with their errors."""
    works = configurations(rows)
    best = [ratio for work in works if (ratio := _best_peer(work))]
    if best:
        verdict, suggestion = _against_best(best, len(works)), _where_slower(best)
    else:
        verdict, suggestion = _alone(rows, works), ""
    if not verdict:
        return None
    return Answer(
        workload="attention",
        verdict=" ".join(filter(None, (verdict, _errors(rows)))),
        suggestion=suggestion or _launches(rows),
    )


def _best_peer(work: Configuration) -> Ratio | None:
    """Ours against the peer with the least median there; None where ours or every peer is missing."""
    return min(work.ratios.values(), key=lambda ratio: median_s(ratio.base) or 0.0, default=None)


def _against_best(best: Sequence[Ratio], works: int) -> str:
    """`Against the fastest peer of each shape, trainstep is faster in 12 of 20 (0.61 to 0.97 of its time), ...`"""
    judged = [ratio for ratio in best if is_judged(ratio)]
    if len(best) == 1:
        [ratio] = best
        if not judged:
            why = ratio.found.reason if ratio.found else ratio.trouble
            return f"Against {implementation(ratio.base)}, the fastest peer, nothing can be told of trainstep: {why}."
        verdict = ratio.known.verdict if ratio.known else ""
        what = "shows no difference to" if verdict == "cannot tell" else f"is {verdict} than"
        return f"trainstep {what} {implementation(ratio.base)}, the fastest peer: {interval_words(ratio)} of its time."
    by_verdict = grouped(judged, lambda ratio: ratio.known.verdict if ratio.known else "")
    parts = [f"{words} in {len(by_verdict[verdict])}" for verdict, words in _VERDICTS.items() if verdict in by_verdict]
    if len(judged) < len(best):
        parts.append(f"not to be told in {len(best) - len(judged)} (too few samples, or too wide an interval)")
    mean = f"; its time is {ratio_words(mean_ratio(judged))} of theirs in the geometric mean" if judged else ""
    unmet = f" ({works - len(best)} more met no peer)" if works > len(best) else ""
    return f"Against the fastest peer of each of {len(best)} configurations, trainstep is {listed(parts)}{mean}{unmet}."


def _where_slower(best: Sequence[Ratio]) -> str:
    """The peer to take where ours loses most."""
    slower = [ratio for ratio in best if is_judged(ratio) and ratio.known and ratio.known.verdict == "slower"]
    if not slower:
        return ""
    worst = max(slower, key=lambda ratio: ratio.interval[1] if ratio.interval else 0.0)
    name = worst.row.label(without=["implementation", *needless([ratio.row for ratio in best])])
    peers = listed(dict.fromkeys(implementation(ratio.base) for ratio in slower))
    factor = times_words(worst.interval[1] if worst.interval else 1.0)
    most = (
        f", most at {name}: {implementation(worst.base)} is {factor} as fast there"
        if len(best) > 1
        else f": {factor} as fast"
    )
    return f"Take {peers} where ours is slower{most}."


def _alone(rows: Sequence[Row], works: Sequence[Configuration]) -> str:
    """Without ours or a peer: every implementation against the first, a ranking of one configuration's, or the best rate."""
    firsts = {name: None for work in works for name in implementations(work.cells)}
    if len(works) > 1 and len(firsts) > 1:
        base = next(iter(firsts))
        met = [work.cells for work in works if base in work.cells]
        ratios = [ratio_of(cells[base], row, TIME) for cells in met for row in cells.values() if row is not cells[base]]
        return against_words("implementation", ratios) if ratios else ""
    if len(works) == 1:
        ranking = ranking_of(rows, TIME)
        return ranking_words(ranking, of=" a call", name=implementation) if ranking else ""
    rated = [(rate, row) for row in rows if (rate := flops_per_s(row))]
    if not rated:
        return ""
    (high, fastest), (low, slowest) = (choose(rated, key=lambda pair: pair[0]) for choose in (max, min))
    aside = needless(rows)
    return (
        f"The best rate is {rate_words(high, 'flop/s')} ({fastest.label(without=aside)}), the least {rate_words(low, 'flop/s')} "
        f"({slowest.label(without=aside)})."
    )


def _errors(rows: Sequence[Row]) -> str:
    """The largest error of each implementation, by the reference that it is held to."""
    errors: dict[str, float] = {}
    for row in rows:
        seen = [error for name in _ERRORS if (error := row.record.fact(name)) is not None]
        name = implementation(row)
        errors |= {name: max([errors.get(name, 0.0), *seen])} if seen else {}
    if not errors:
        return ""
    ours, others = errors.pop(OURS, None), errors
    worst = f"{max(others.values()):.1e} of {max(others, key=lambda name: others[name])}" if others else ""
    if ours is None:
        return f"Largest error against the reference: {worst}."
    return f"Largest error against the reference: {ours:.1e}{f', and {worst}' if worst else ''}."


def _launches(rows: Sequence[Row]) -> str:
    """Cells whose time is the host's."""
    bound = [row for row in rows if row.record.fact("launch_bound")]
    if not bound:
        return ""
    return (
        f"{len(bound)} of {len(rows)} cells are launch-bound, so that their time is the host's: inside a captured step "
        "(`trainstep bench --capture step`) the kernels alone count."
    )


def tiles_answer(rows: Sequence[Row]) -> Answer | None:
    """How many cells' tiles in use are the fastest, and what the best tile would gain most where they are not."""
    tuned = [row for row in rows if row.record.fact("best")]
    if not tuned:
        return None
    gains = [(gain, row) for row in tuned if (gain := _gain(row)) and gain >= _WORTH]
    verdict = (
        f"The tiles that were in use are within 2 % of the fastest in {len(tuned) - len(gains)} of {len(tuned)} cells."
    )
    if not gains:
        return Answer(workload="attention_tiles", verdict=verdict)
    gain, row = max(gains, key=lambda pair: pair[0])
    name = row.label(without=["steps", *needless(rows)])
    saved, middle = (percent(1 - 1 / times) for times in (gain, median(gain for gain, _ in gains)))
    return Answer(
        workload="attention_tiles",
        verdict=f"{verdict} In the others the best takes {middle} % less time in the median.",
        suggestion=(
            f"{name} should gain most: {row.record.fact('best')} takes {saved} % less time than {row.record.fact('in_use')}; "
            "`trainstep tune` prints the rows of the table."
        ),
    )


def _gain(row: Row) -> float | None:
    """How many times as fast the best tile is."""
    used_s, times = row.record.fact("in_use_time"), row.record.tables.get("candidates", {}).get("time_s", ())
    best_s = min((time_s for time_s in times if time_s), default=None)
    return used_s / best_s if used_s and best_s else None

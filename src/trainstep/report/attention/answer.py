"""The answers for attention: our kernels against the fastest peers, and the tiles in use against the best tiles."""

from collections.abc import Sequence
from statistics import median

from trainstep.report.attention.rows import (
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
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import listed, percent, rate_words, ratio_words, times_words
from trainstep.report.kit.ranking import (
    Ratio,
    against_words,
    interval_words,
    is_judged,
    ranking_of,
    ranking_words,
    ratio_of,
)
from trainstep.report.kit.rows import Row, grouped, needless

_ERRORS = ("error_output", "error_dq", "error_dk", "error_dv", "error_lse")
_PLAIN_ERRORS = {"error_output": "error_same_dtype"} | {
    f"error_{name}": f"error_same_dtype_{name}" for name in ("dq", "dk", "dv", "lse")
}
"""An implementation's error -> that of plain PyTorch in the same dtype."""
_WRONG = 10
"""How many times plain PyTorch's error a result may have before it counts as wrong, not as less accurate."""
_HOW_TIMED = ("steps", "warmups")
_WORTH = 1.02
"""The least speed-up at which a tile counts as faster than the tile in use: the minimum effect of `compare`."""
_VERDICTS = {
    "faster": "faster",
    "slower": "slower",
    "cannot tell": "without a difference of 2 % or more that is measurable",
}


def attention_answer(rows: Sequence[Row]) -> Answer | None:
    """Our kernels against the fastest peer of each configuration, or without peers the best rate; then the largest errors."""
    works = configurations(rows)
    # In each configuration, the peer with the least median.
    right = [[ratio for ratio in work.ratios.values() if not _is_wrong(ratio.base)] for work in works]
    best = [min(ratios, key=lambda ratio: median_s(ratio.base) or 0.0) for ratios in right if ratios]
    if best:
        wrong = [ratio.base for work in works for ratio in work.ratios.values() if _is_wrong(ratio.base)]
        verdict, suggestion = f"{_against_best(best, len(works))}{_wrong_words(wrong)}", _where_slower(best)
    else:
        verdict, suggestion = _without_peers(rows, works), ""
    if not verdict:
        return None
    return Answer(
        workload="attention",
        verdict=" ".join(filter(None, (verdict, _errors(rows)))),
        suggestion=suggestion or _launches(rows),
    )


def _is_wrong(row: Row) -> bool:
    """Whether an error is far over that of plain PyTorch in the same dtype: a fast wrong result is no peer."""
    fact = row.record.fact
    return any(
        (fact(name) or 0.0) > _WRONG * plain
        for name, plain_name in _PLAIN_ERRORS.items()
        if (plain := fact(plain_name)) is not None
    )


def _wrong_words(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    names = listed(dict.fromkeys(implementation(row) for row in rows))
    return f" Results of {names} are wrong in {len(rows)} and not compared there: errors over {_WRONG} times plain PyTorch's."


def _against_best(best: Sequence[Ratio], works: int) -> str:
    """`Against the fastest peer of each of 20 configurations, trainstep is faster in 12 and slower in 8; ...`"""
    judged = [ratio for ratio in best if is_judged(ratio)]
    if len(best) == 1:
        [ratio] = best
        if not judged:
            return f"No verdict on trainstep against {implementation(ratio.base)}, the fastest peer: {ratio.reason}."
        verdict = ratio.known.verdict if ratio.known else ""
        what = "shows no difference to" if verdict == "cannot tell" else f"is {verdict} than"
        return f"trainstep {what} {implementation(ratio.base)}, the fastest peer: {interval_words(ratio)} of its time."
    by_verdict = grouped(judged, lambda ratio: ratio.known.verdict if ratio.known else "")
    parts = [f"{words} in {len(by_verdict[verdict])}" for verdict, words in _VERDICTS.items() if verdict in by_verdict]
    if len(judged) < len(best):
        parts.append(f"without a verdict in {len(best) - len(judged)} (too few samples, or too wide an interval)")
    over = f" over the {len(judged)} with a verdict" if len(judged) < len(best) else ""
    mean = f"; its time is {ratio_words(mean_ratio(judged))} of theirs in the geometric mean{over}" if judged else ""
    unmet = f" ({works - len(best)} more have no peer)" if works > len(best) else ""
    return f"Against the fastest peer of each of {len(best)} configurations, trainstep is {listed(parts)}{mean}{unmet}."


def _where_slower(best: Sequence[Ratio]) -> str:
    """The peers to use where our kernels are slower; empty if they are slower nowhere."""
    slower = [ratio for ratio in best if is_judged(ratio) and ratio.known and ratio.known.verdict == "slower"]
    if not slower:
        return ""
    worst = max(slower, key=lambda ratio: ratio.ratio or 0.0)
    unnamed = ["implementation", *_HOW_TIMED, *needless([ratio.row for ratio in best])]
    name = worst.row.label(without=unnamed, named=True)
    peers = listed(dict.fromkeys(implementation(ratio.base) for ratio in slower))
    factor = times_words(worst.ratio or 1.0)
    most = f": {factor} as fast"
    if len(best) > 1:
        most = f", {'by most ' if len(slower) > 1 else ''}at {name}: {implementation(worst.base)} is {factor} as fast there"
    return f"Take {peers} where trainstep is slower{most}."


def _without_peers(rows: Sequence[Row], works: Sequence[Configuration]) -> str:
    """All implementations against the first one, the ranking of a single configuration, or the best and the least rate."""
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
    unnamed = [*_HOW_TIMED, *needless(rows)]
    best, least = (row.label(without=unnamed, named=True) for row in (fastest, slowest))
    return f"The best rate is {rate_words(high, 'flop/s')} ({best}), the least {rate_words(low, 'flop/s')} ({least})."


def _errors(rows: Sequence[Row]) -> str:
    """The largest error of our kernels, and of the worst peer, against a reference in higher precision."""
    errors: dict[str, float] = {}
    for row in rows:
        row_errors = [error for name in _ERRORS if (error := row.record.fact(name)) is not None]
        if row_errors:
            name = implementation(row)
            errors[name] = max([errors.get(name, 0.0), *row_errors])
    if not errors:
        return ""
    ours, others = errors.pop(OURS, None), errors
    worst = f"{max(others.values()):.1e} of {max(others, key=lambda name: others[name])}" if others else ""
    if ours is None:
        return f"Largest error against the reference: {worst}."
    return f"Largest error against the reference: {ours:.1e}{f', and {worst}' if worst else ''}."


def _launches(rows: Sequence[Row]) -> str:
    """How many cells are launch-bound, and how to time their kernels alone; empty if none is."""
    bound = [row for row in rows if row.record.fact("launch_bound")]
    if not bound:
        return ""
    return (
        f"{len(bound)} of {len(rows)} cells are launch-bound, so they show the host's time; in a captured step "
        "(`trainstep bench --capture auto`) only the kernels' time counts."
    )


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
    name = row.label(without=[*_HOW_TIMED, *needless(rows)], named=True)
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

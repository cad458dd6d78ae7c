"""The answer of numerics: the largest error, what it is compared to, and which precision is worth it."""

from collections.abc import Sequence

from trainstep.report.answers import Answer
from trainstep.report.forms import percent
from trainstep.report.numerics_tables import ERRORS, fp32_of, groups_of, precision_of
from trainstep.report.ranking import interval_words, is_judged
from trainstep.report.ratios import Ratio, median_of, ratio_of
from trainstep.report.rows import Row, needless

_GRADIENTS = "error_gradient_median"


def numerics_answer(rows: Sequence[Row]) -> Answer | None:
    """The precision that is furthest off and in what; the fastest one against fp32, with its error."""
    errors = [
        (row.record.fact(name), name, row) for row in rows for name in ERRORS if row.record.fact(name) is not None
    ]
    if not errors:
        return None
    error, name, row = max(errors, key=lambda found: found[0])
    aside = ("precision", *needless(rows))
    verdict = (
        f"Largest error: {precision_of(row)} on {row.label(without=aside)}, {percent(error)} % in {ERRORS[name]}, against "
        f"{row.record.fact('reference')}."
    )
    groups = sorted(groups_of(rows).values(), key=lambda group: -_longest_s(group))
    return Answer(workload="numerics", verdict=verdict, suggestion=_trade(groups[0], aside))


def _longest_s(group: Sequence[Row]) -> float:
    """The longest step of a model's precisions."""
    return max(median_of(row.record, "step") or 0.0 for row in group)


def _trade(group: Sequence[Row], aside: Sequence[str]) -> str:
    """Whether another precision is worth its error on this model: the fastest against fp32."""
    fp32 = fp32_of(group)
    ratios = [ratio_of(fp32, row, "step") for row in group if row is not fp32] if fp32 else []
    judged = [ratio for ratio in ratios if is_judged(ratio)]
    if not judged:
        return ""
    best = min(judged, key=_time)
    off = best.row.record.fact(_GRADIENTS)
    error = "" if off is None else f", with gradients off by {percent(off)} % in the median"
    takes = f"{precision_of(best.row)} takes {interval_words(best)} of fp32's time{error}"
    if best.known and best.known.verdict == "faster":
        return f"On {best.row.label(without=aside)} take {precision_of(best.row)} where that error is allowed: {takes}."
    seen = "stay with fp32" if best.known and best.known.verdict == "slower" else "none is seen to be faster than fp32"
    host = any(row.record.fact("launch_bound") for row in group)
    why = ", and the host limits some of these steps: time a larger model with `trainstep bench`" if host else ""
    return f"On {best.row.label(without=aside)} {seen}: {takes}{why}."


def _time(ratio: Ratio) -> float:
    return ratio.interval[1] if ratio.interval else 1.0

"""The answer for precisions: the error of each on the slowest model, and whether a faster one is worth its error."""

from collections.abc import Sequence

from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import in_percent, listed, seconds_words, three_digits
from trainstep.report.kit.ranking import interval_words, is_judged, ratio_of
from trainstep.report.kit.rows import PROVENANCE, Row, host_limit
from trainstep.report.numerics.tables import (
    fp32_of,
    gradient_error,
    groups_of,
    median_step_s,
    precision_of,
    share_words,
)
from trainstep.traces.verdict import LAUNCH_BOUND

_LESS_WORK = 0.9
"""A precision is worth a larger model if the GPU works at most this share of fp32's time."""


def numerics_answer(rows: Sequence[Row]) -> Answer | None:
    """The errors of each precision on the model with the longest step, and whether a faster precision is worth its error."""
    known = [row for row in rows if gradient_error(row) is not None]
    if not known:
        return None
    unnamed = ("precision", *PROVENANCE)
    group = max(groups_of(known).values(), key=lambda group: max(median_step_s(row) or 0.0 for row in group))
    same_work = group[0].label(without=unnamed)
    apart = [row for row in known if row not in group and row.label(without=unnamed) == same_work]
    errors = [
        f"{_error_words(gradient_error(row))} in {precision_of(row)}{_worst_words(row)}"
        for row in sorted([*group, *apart], key=lambda row: gradient_error(row) or 0.0)
    ]
    verdict = (
        f"Gradients of {same_work} differ from {group[0].record.fact('reference', 'the reference')}, in the median over "
        f"parameters, by {listed(errors)}."
    )
    return Answer(workload="numerics", verdict=verdict, suggestion=_trade(group, apart, same_work))


def _worst_words(row: Row) -> str:
    worst = row.record.fact("error_gradient_max")
    return f" (at worst {_error_words(worst)})" if worst else ""


def _error_words(share: float | None) -> str:
    """`1.58 %`, or `2.2e-04 %` for rare errors."""
    share = share or 0.0
    return f"{three_digits(in_percent(share)) if share >= 0.001 else share_words(share)} %"


def _trade(group: Sequence[Row], apart: Sequence[Row], place: str) -> str:
    """Whether the fastest precision is worth its error on this model; empty without a verdict.

    `apart`: rows of the same model that another machine or other code measured. `place`: the model and its context.
    """
    fp32 = fp32_of(group)
    ratios = [ratio_of(fp32, row, "step") for row in group if row is not fp32] if fp32 else []
    judged = [ratio for ratio in ratios if is_judged(ratio)]
    if not judged:
        return ""
    best = min(judged, key=lambda ratio: ratio.ratio or 1.0)
    name, verdict = precision_of(best.row), best.known.verdict if best.known else ""
    takes = f"{name} takes {interval_words(best)} of fp32's time"
    others = [*(ratio.row for ratio in ratios if ratio not in judged), *apart]
    beside = ""
    if others:
        beside = f" Not compared in time: {listed(map(precision_of, others))}, of another machine, other code or too few steps."
    if verdict == "faster":
        return f"On {place} take {name} where its error is allowed: {takes}.{beside}"
    if work := _work_words(group):
        return f"On {place} {takes}, but {work}.{beside}"
    advice = "stay with fp32" if verdict == "slower" else "no precision is measurably faster than fp32"
    return f"On {place} {advice}: {takes}.{beside}"


def _work_words(group: Sequence[Row]) -> str:
    """The GPU's work time in each precision, if the host limits a step and its time therefore says little; else empty."""
    busy = [(precision_of(row), row.record.fact("device_busy_s")) for row in group]
    fp32_s = next((busy_s for name, busy_s in busy if name == "fp32"), None)
    if (
        not any(host_limit(row.record) == LAUNCH_BOUND for row in group)
        or not fp32_s
        or not all(busy_s for _, busy_s in busy)
    ):
        return ""
    if min(busy_s for _, busy_s in busy) > _LESS_WORK * fp32_s:
        return ""
    times = listed(f"{seconds_words(busy_s)} in {name}" for name, busy_s in busy)
    names = ",".join(name for name, _ in busy)
    return (
        f"the host limits some of these steps: the GPU works for {times}. A model that fills the GPU shows that gain: "
        f"`trainstep bench --model large --precision {names}`"
    )

"""The answer for timed training steps: whether the host or the GPU limits them, and what should gain most.

A gain is stated with the numbers of the record that it is computed from. A captured step takes at least the time for which the
device works; 16-bit matmuls shorten the share of the step that MFU counts by the ratio of the data sheet's peaks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.config.machine import machine_spec
from trainstep.config.run import Phase
from trainstep.grouping import grouped
from trainstep.records.record import Record
from trainstep.report.kit.answer import Answer, compile_option
from trainstep.report.kit.forms import listed, ms_words, percent, times_words
from trainstep.report.kit.ranking import median_of
from trainstep.report.kit.rows import Row, host_limit, known_mfu, needless, words
from trainstep.report.step.comparison import NOT_COMPARED
from trainstep.report.step.ranks import slowest_sentence
from trainstep.report.step.recomputation import chosen_sentence
from trainstep.report.step.warmup import swept_answer
from trainstep.traces.verdict import DEVICE_BOUND, LAUNCH_BOUND, NEAR_THE_LINE

_WORTH = 1.1
"""The least speed-up that is suggested."""
_NAMED = 3
"""The most cells named in a sentence."""


@dataclass(frozen=True, kw_only=True)
class StepLimit:
    """A timed step and what limits it. `kind` is a constant of traces/verdict.py; shares are of the unprofiled step."""

    row: Row
    name: str
    kind: str
    step_s: float
    busy_s: float
    enqueue_s: float | None
    mfu: float | None

    @property
    def record(self) -> Record:
        return self.row.record

    @property
    def busy_share(self) -> float:
        # `busy_s` comes from another step, a profiled one, and may exceed this step's time.
        return min(1.0, self.busy_s / self.step_s)


def step_answer(rows: Sequence[Row]) -> Answer | None:
    """The answer for these cells: what limits their steps, and the change to try; None if no step was timed."""
    unnamed = ["warmups", *needless(rows)]
    limits = [limit for row in rows if (limit := limit_of(row, _name(row, unnamed)))]
    timed = [row for row in rows if median_of(row.record, "step")]
    if not timed:
        return None
    by_work = grouped(limits, lambda limit: tuple(item for item in limit.row.point.items() if item[0] in NOT_COMPARED))
    suggestion = _suggestion(list(by_work.values()), rows)
    chosen = " ".join(
        filter(
            None,
            (
                *(slowest_sentence(row, named=len(timed) > 1) for row in timed[:_NAMED]),
                *(chosen_sentence(row.record) for row in timed[:_NAMED]),
            ),
        )
    )
    if len(limits) < len(timed):
        phases = _phases_words(max(timed, key=lambda row: median_of(row.record, "step") or 0.0), len(timed))
        return Answer(
            workload="train_step",
            verdict=f"{phases} {chosen}".strip(),
            suggestion=suggestion or _profile_advice(timed[0]),
        )
    limited = limit_sentence(limits[0]) if len(limits) == 1 else _counted_limits(limits)
    warmups = swept_answer(rows)
    verdict = " ".join(filter(None, (warmups, limited, chosen)))
    return Answer(workload="train_step", verdict=verdict, suggestion=suggestion)


def _name(row: Row, unnamed: Sequence[str]) -> str:
    """The row's label; a value of --capture has its option beside it, because `step` alone reads like the mode."""
    captured = f" --capture {words(row.point['capture'])}" if "capture" in row.point else ""
    return f"{row.label(without=[*unnamed, 'capture'])}{captured}"


def limit_of(row: Row, name: str) -> StepLimit | None:
    """What limits the row's step; None if the record has no GPU time (on a CPU, or with phases timed one by one)."""
    record = row.record
    step_s, busy_s = median_of(record, "step"), record.fact("device_busy_s")
    if not step_s or not busy_s or record.config.get("sync") == "phase":
        return None
    enqueue_s, kind = median_of(record, "enqueue"), host_limit(record)
    if kind is None:
        return None
    utilisation = known_mfu(record)
    return StepLimit(
        row=row,
        name=name,
        kind=kind,
        step_s=step_s,
        busy_s=busy_s,
        enqueue_s=enqueue_s,
        mfu=utilisation.share if utilisation else None,
    )


def limit_sentence(limit: StepLimit) -> str:
    """`Launch-bound: the GPU works for 30.2 % of a step of 22.06 ms, the host launches for 97.0 % of it.`"""
    launches = ""
    if limit.enqueue_s is not None:
        launches = f", the host launches for {percent(limit.enqueue_s / limit.step_s)} % of it"
    works = f"the GPU works for {percent(limit.busy_share)} % of a step of {ms_words(limit.step_s)}"
    if limit.kind == LAUNCH_BOUND:
        return f"Launch-bound: {works}{launches}."
    if limit.kind == NEAR_THE_LINE:
        return f"Near the line between launch-bound and limited by the GPU: {works}{launches}."
    use = ""
    if limit.mfu is not None:
        use = f", at {percent(limit.mfu)} % of its peak in {limit.record.fact('flops_dtype')} (MFU)"
    return f"The GPU limits the step: {works.replace('the GPU', 'it')}{use}."


def _counted_limits(limits: Sequence[StepLimit]) -> str:
    """The number of steps for each kind of limit, with the range of the GPU's share."""
    what = {
        LAUNCH_BOUND: "launch-bound",
        NEAR_THE_LINE: "near the line between the host and the GPU",
        DEVICE_BOUND: "limited by the GPU",
    }
    by_kind = grouped(sorted(limits, key=lambda limit: [*what].index(limit.kind)), lambda limit: limit.kind)
    parts = [
        f"{len(alike)} of {len(limits)} steps {'is' if len(alike) == 1 else 'are'} {what[kind]}{_span(alike)}"
        for kind, alike in by_kind.items()
    ]
    first, *others = parts
    rest = [part.replace(f" of {len(limits)} steps", "") for part in others]  # the first part says it
    return f"{'; '.join([first, *rest])}."


def _span(limits: Sequence[StepLimit]) -> str:
    """` (small 128: the GPU works for 30.2 % of it)`; more than a few cells are not named."""
    shares = sorted(limit.busy_share for limit in limits)
    low, high = percent(shares[0]), percent(shares[-1])
    named = f"{listed(limit.name for limit in limits)}: " if len(limits) <= _NAMED else ""
    whole = "it" if len(limits) == 1 else "each"
    return f" ({named}the GPU works for {low if low == high else f'{low} to {high}'} % of {whole})"


def _suggestion(works: Sequence[Sequence[StepLimit]], rows: Sequence[Row]) -> str:
    """The change with the largest gain over these cells; empty if no change gains enough.

    `works`: variants (precision, compile...) of the same work. Only the fastest needs bf16 or a compiler; a graph may make
    another variant the fastest.
    """
    fastest = [min(variants, key=lambda limit: limit.step_s) for variants in works]
    gains = [gain for limit in fastest if (gain := _sixteen_bit(limit, rows))]
    limits = [limit for variants in works if (limit := _worth_capturing(variants))]
    gains += [_capture(limits)] if limits else []
    factor, sentence = max(gains, default=(0.0, ""))
    return sentence if factor >= _WORTH else _less_launching(fastest)


def _worth_capturing(variants: Sequence[StepLimit]) -> StepLimit | None:
    """The variant of one work that a CUDA graph can make the fastest, among those that the host limits.

    None if it would not be faster than the fastest is now, or if a variant was captured: that one shows what a graph gains.
    """
    if any(limit.record.config.get("capture", "none") != "none" for limit in variants):
        return None
    limited = [
        limit
        for limit in variants
        if limit.kind != DEVICE_BOUND and limit.record.config.get("adamw") not in ("loop", "foreach")
    ]
    best = min(limited, key=lambda limit: limit.busy_s, default=None)
    return best if best and best.busy_s * _WORTH <= min(limit.step_s for limit in variants) else None


def _capture(limits: Sequence[StepLimit]) -> tuple[float, str]:
    """The largest possible gain of a CUDA graph per step, and the range of the others."""
    best, *others = sorted(limits, key=lambda limit: limit.step_s / limit.busy_s, reverse=True)
    factor, *factors = (limit.step_s / limit.busy_s for limit in (best, *others))
    more = ""
    if factors:
        span = times_words(factors[0]) if len(factors) == 1 else f"{factors[-1]:.2f} to {times_words(factors[0])}"
        more = f" {len(factors)} more can become at most {span} as fast."
    return factor, (
        f"`--capture auto` can make {best.name} at most {times_words(factor)} as fast: from "
        f"{ms_words(best.step_s)} to the {ms_words(best.busy_s)} that the GPU works.{more}"
    )


def _sixteen_bit(limit: StepLimit, rows: Sequence[Row]) -> tuple[float, str] | None:
    """The gain of bf16 matmuls if the GPU limits an fp32 step and no cell has tried another precision; else None."""
    spec = machine_spec(limit.record.environment.gpu)
    precisions = {row.record.config.get("precision") for row in rows}
    if limit.kind != DEVICE_BOUND or limit.mfu is None or spec is None or precisions != {"fp32"}:
        return None
    ratio = spec.peak_flops["bf16"] / spec.peak_flops["fp32"]
    factor = 1 / (1 - limit.mfu + limit.mfu / ratio)
    return factor, (
        f"`--precision bf16_autocast` should make {limit.name} {times_words(factor)} as fast or more, until the host limits "
        f"it: its matmuls are at least {percent(limit.mfu)} % of the step (MFU), and the peak in bf16 is {times_words(ratio)} "
        f"fp32's."
    )


def _less_launching(limits: Sequence[StepLimit]) -> str:
    """Advice where neither a graph nor bf16 gains: what was not captured, or work other than matmuls on the GPU."""
    left_out = next((limit for limit in limits if limit.record.fact("capture_left_out")), None)
    if left_out is not None:
        return f"The graph does not contain the whole step: {left_out.record.fact('capture_left_out')}."
    idle = [limit for limit in limits if limit.kind == DEVICE_BOUND and limit.mfu is not None and limit.mfu < 0.5]
    if not idle:
        return ""
    worst = min(idle, key=lambda limit: limit.mfu or 0.0)
    return (
        f"Of {ms_words(worst.busy_s)} of GPU work in {worst.name} the matmuls need at least "
        f"{ms_words(worst.step_s * (worst.mfu or 0.0))}: {compile_option(worst.record.config)} fuses the other work, and "
        "`trainstep profile` shows what it is."
    )


def _phases_words(row: Row, cells: int) -> str:
    """The time of a step by phase, for steps without GPU time beside them."""
    step_s = median_of(row.record, "step") or 0.0
    times = {str(phase): median_of(row.record, str(phase)) or 0.0 for phase in Phase}
    phases_s = sum(times.values())  # the medians of phases need not add up to the step's median
    largest_first = sorted(times.items(), key=lambda item: -item[1])
    parts = [f"{name.replace('_', ' ')} {percent(time_s / phases_s)} %" for name, time_s in largest_first if time_s]
    longest = "" if cells == 1 else f", the longest of {cells} cells"
    shares = f": {listed(parts)}" if parts else ""
    return f"A step of {row.label()} takes {ms_words(step_s)}{longest}{shares}."


def _profile_advice(row: Row) -> str:
    model = row.point.get("model")
    option = f" --model {model}" if model else ""
    return (
        f"`trainstep profile{option}` with the same options shows which kernels or operators take the time, and what limits "
        "them."
    )

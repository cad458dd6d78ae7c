"""The answer of timed training steps: what limits each, the host or the device, and what to try, with what it should gain.

A gain is stated with the numbers of the record that it rests on: capturing a step leaves at least what the device works; 16-bit
matmuls shorten what MFU counts by the ratio of the data sheet's peaks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.config.machine import machine_spec
from trainstep.config.phases import Phase
from trainstep.records.derive import mfu
from trainstep.records.record import Record
from trainstep.report.answers import Answer
from trainstep.report.comparison_page import NOT_COMPARED
from trainstep.report.forms import listed, percent, seconds_words, times_words
from trainstep.report.ratios import median_of
from trainstep.report.rows import Row, grouped, needless
from trainstep.report.warmup_page import swept_answer
from trainstep.traces.launch_bound import DEVICE_BOUND, LAUNCH_BOUND, NEAR_THE_LINE, step_limit

_WORTH = 1.1
"""A gain under this many times is not suggested."""
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class StepLimit:
    """A timed step and what limits it: `kind` of traces/launch_bound.py. Shares are of the unprofiled step."""

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
        """At most 1: the device's work is seen in another step, a profiled one."""
        return min(1.0, self.busy_s / self.step_s)


def step_answer(rows: Sequence[Row]) -> Answer | None:
    """What limits the steps of these cells, and what to try."""
    aside = ["warmups", *needless(rows)]
    limits = [limit for row in rows if (limit := limit_of(row, row.label(without=aside)))]
    timed = [row for row in rows if median_of(row.record, "step")]
    if not timed:
        return None
    suggestion = _suggestion(_quickest_each(limits), rows)
    if len(limits) < len(timed):
        said = _phases_words(max(timed, key=lambda row: median_of(row.record, "step") or 0.0), len(timed))
        return Answer(workload="train_step", verdict=said, suggestion=suggestion or _profile_it(timed[0]))
    words = limit_sentence(limits[0]) if len(limits) == 1 else _many(limits)
    swept = swept_answer(rows)
    return Answer(workload="train_step", verdict=f"{swept} {words}" if swept else words, suggestion=suggestion)


def limit_of(row: Row, name: str) -> StepLimit | None:
    """What limits the step of the row; None where no GPU's work was seen beside it (on a CPU, or timed phase by phase)."""
    record = row.record
    step_s, busy_s = median_of(record, "step"), record.fact("device_busy_s")
    if not step_s or busy_s is None or record.config.get("sync") == "phase":
        return None
    enqueue_s = median_of(record, "enqueue")
    kind = step_limit(busy_s=busy_s, enqueue_s=enqueue_s, step_s=step_s)
    return StepLimit(
        row=row, name=name, kind=kind, step_s=step_s, busy_s=busy_s, enqueue_s=enqueue_s, mfu=mfu_of(record)
    )


def mfu_of(record: Record) -> float | None:
    """The share of the peak; None where it is not known, or cannot be."""
    try:
        utilisation = mfu(record)
    except ValueError:  # over 100 %: the row's doubts say so
        return None
    return utilisation.share if utilisation else None


def limit_sentence(limit: StepLimit) -> str:
    """`Launch-bound: the GPU works for 30.2 % of a step of 22.06 ms, the host launches for 97.0 % of it.`"""
    launches = (
        "" if limit.enqueue_s is None else f", the host launches for {percent(limit.enqueue_s / limit.step_s)} % of it"
    )
    works = f"the GPU works for {percent(limit.busy_share)} % of a step of {seconds_words(limit.step_s)}"
    if limit.kind == LAUNCH_BOUND:
        return f"Launch-bound: {works}{launches}."
    if limit.kind == NEAR_THE_LINE:
        return f"Near the line between launch-bound and limited by the GPU: {works}{launches}."
    use = (
        ""
        if limit.mfu is None
        else f", at {percent(limit.mfu)} % of its peak in {limit.record.fact('flops_dtype')} (MFU)"
    )
    return f"The GPU limits the step: {works.replace('the GPU', 'it')}{use}."


def _many(limits: Sequence[StepLimit]) -> str:
    """How many cells are limited by what, with the range of the device's share."""
    words = {
        LAUNCH_BOUND: "launch-bound",
        NEAR_THE_LINE: "near the line between the host and the GPU",
        DEVICE_BOUND: "limited by the GPU",
    }
    by_kind = grouped(sorted(limits, key=lambda limit: [*words].index(limit.kind)), lambda limit: limit.kind)
    parts = [
        f"{len(alike)} of {len(limits)} steps {'is' if len(alike) == 1 else 'are'} {words[kind]}{_span(alike)}"
        for kind, alike in by_kind.items()
    ]
    first, *others = parts
    rest = [part.replace(f" of {len(limits)} steps", "") for part in others]
    return f"{'; '.join([first, *rest])}."


def _span(limits: Sequence[StepLimit]) -> str:
    """` (small 128; it works for 30.2 % of the step)`, with the names of a few."""
    shares = sorted(limit.busy_share for limit in limits)
    low, high = percent(shares[0]), percent(shares[-1])
    named = f"{listed(limit.name for limit in limits)}: " if len(limits) <= _NAMED else ""
    return f" ({named}the GPU works for {low if low == high else f'{low} to {high}'} % of it)"


def _quickest_each(limits: Sequence[StepLimit]) -> list[StepLimit]:
    """The quickest of the variants of each work (precision, compile...): the others need no advice."""
    by_work = grouped(limits, lambda limit: tuple(item for item in limit.row.point.items() if item[0] in NOT_COMPARED))
    return [min(alike, key=lambda limit: limit.step_s) for alike in by_work.values()]


def _suggestion(limits: Sequence[StepLimit], rows: Sequence[Row]) -> str:
    """The change with the largest gain over these cells; none where none is worth it."""
    gains = [gain for limit in limits for gain in (_capture(limit), _sixteen_bit(limit, rows)) if gain]
    factor, sentence = max(gains, default=(0.0, ""))
    return sentence if factor >= _WORTH else _less_launching(limits)


def _capture(limit: StepLimit) -> tuple[float, str] | None:
    """The gain of one CUDA graph a step, at most, where the host limits it and nothing forbids a graph."""
    config = limit.record.config
    if (
        limit.kind == DEVICE_BOUND
        or config.get("capture", "none") != "none"
        or config.get("adamw") in ("loop", "foreach")
    ):
        return None
    factor = limit.step_s / limit.busy_s
    return factor, (
        f"`--capture step` should make {limit.name} up to {times_words(factor)} as fast: from "
        f"{seconds_words(limit.step_s)} to the {seconds_words(limit.busy_s)} that the GPU works."
    )


def _sixteen_bit(limit: StepLimit, rows: Sequence[Row]) -> tuple[float, str] | None:
    """The gain of bf16 matmuls, at most, where the GPU limits an fp32 step and no cell here has tried it."""
    spec = machine_spec(limit.record.environment.gpu)
    precisions = {row.record.config.get("precision") for row in rows}
    if limit.kind != DEVICE_BOUND or limit.mfu is None or spec is None or precisions != {"fp32"}:
        return None
    ratio = spec.peak_flops["bf16"] / spec.peak_flops["fp32"]
    factor = 1 / (1 - limit.mfu + limit.mfu / ratio)
    return factor, (
        f"`--precision bf16_autocast` should make {limit.name} {times_words(factor)} as fast or more, until the host limits it: "
        f"its matmuls are at least {percent(limit.mfu)} % of the step (MFU), and the peak in bf16 is {times_words(ratio)} fp32's."
    )


def _less_launching(limits: Sequence[StepLimit]) -> str:
    """What is left for captured steps that the host limits all the same, and for GPUs far from their peak."""
    left_out = next((limit for limit in limits if limit.record.fact("capture_left_out")), None)
    if left_out is not None:
        return f"Not all is captured: {left_out.record.fact('capture_left_out')}."
    idle = [limit for limit in limits if limit.kind == DEVICE_BOUND and limit.mfu is not None and limit.mfu < 0.5]
    if not idle:
        return ""
    worst = min(idle, key=lambda limit: limit.mfu or 0.0)
    return (
        f"At its peak the GPU would need {seconds_words(worst.step_s * (worst.mfu or 0.0))} for the matmuls of "
        f"{worst.name}: `--compile model` fuses the rest, and `trainstep profile` says what it is."
    )


def _phases_words(row: Row, cells: int) -> str:
    """Where the step of a device whose work is not seen goes: by phase."""
    step_s = median_of(row.record, "step") or 0.0
    times = {str(phase): median_of(row.record, str(phase)) or 0.0 for phase in Phase}
    together_s = sum(times.values())  # medians need not add up to the step's
    parts = [f"{name.replace('_', ' ')} {percent(time_s / together_s)} %" for name, time_s in _largest(times) if time_s]
    longest = "" if cells == 1 else f", the longest of {cells} cells"
    spent = f": {listed(parts)}" if parts else ""
    return f"A step of {row.label()} takes {seconds_words(step_s)}{longest}{spent}."


def _largest(times: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])


def _profile_it(row: Row) -> str:
    model = row.point.get("model")
    named = f" --model {model}" if model else ""
    return f"`trainstep profile{named}` with the same options says which kernels or operators take it, and what limits them."

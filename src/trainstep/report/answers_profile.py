"""The answer of profiled steps: the verdict with its figures, and the change that should gain most, with what it should gain."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trainstep.config.machine import machine_spec
from trainstep.records.summary import doubts
from trainstep.report.answers import Answer
from trainstep.report.forms import listed, percent, seconds_words, times_words
from trainstep.report.profile_words import Columns, GetFact, verdict_kinds, verdict_sentence, verdict_word
from trainstep.report.rows import Row, grouped, needless, table_lines
from trainstep.traces import verdict
from trainstep.traces.kernel_classes import ELEMENT_WISE, IDLE, MATMUL, NORMALISATION, REDUCTION

_FUSED = (ELEMENT_WISE, REDUCTION, NORMALISATION)
"""Classes of work that a compiler fuses."""
_NAMED = 3
"""Cells that are spoken of one by one."""
_WORTH = 1.05
"""A gain under this many times is not suggested."""


class Profile(NamedTuple):
    """What a profile says, of a record or of a trace that somebody else made (whose config nobody knows)."""

    tables: Mapping[str, Columns]
    fact: GetFact
    config: Mapping[str, Any]
    gpu: str | None

    @property
    def is_ours(self) -> bool:
        """Whether the step's config is known, as a trace of somebody else's is not."""
        return "precision" in self.config

    @property
    def limit(self) -> dict[str, Any] | None:
        """The verdict's row of numbers."""
        return next(iter(table_lines(self.tables.get("verdict"))), None)

    def class_share(self, *names: str) -> float:
        """The share of the step that these classes of work take."""
        lines = table_lines(self.tables.get("classes"))
        return self.share(sum(line["time_s"] for line in lines if line["class"] in names))

    def share(self, time_s: float) -> float:
        """The share of the step that so much profiled work is: of a GPU's unprofiled step, since a profiler slows no kernels; of
        all of a CPU's profiled time."""
        limit, lines = self.limit, table_lines(self.tables.get("classes"))
        on_device = limit is not None and limit["on_device"]
        whole_s = (
            limit["step_s"] if limit and on_device else sum(line["time_s"] for line in lines if line["class"] != IDLE)
        )
        return min(1.0, time_s / whole_s) if whole_s else 0.0


class Gain(NamedTuple):
    """A change, and how many times as fast it should make the step."""

    factor: float
    sentence: str


def profile_answer(rows: Sequence[Row]) -> Answer | None:
    """The verdict of a cell, or of each kind how many, with the change that should gain most."""
    profiles = [(row, profile) for row in rows if (profile := profile_of(row)).limit]
    if not profiles:
        return None
    gains = [(gain, row, profile) for row, profile in profiles if (gain := best_gain(profile))]
    if len(profiles) == 1:
        [(_, profile)] = profiles
        return Answer(workload="profile", verdict=_verdict(profile), suggestion=gains[0][0].sentence if gains else "")
    aside = needless(rows)
    limits = [(row, profile.limit) for row, profile in profiles if profile.limit]
    counts = Counter(verdict_word(limit) for _, limit in limits)
    kinds = listed(f"{count} {'is' if count == 1 else 'are'} {kind}" for kind, count in counts.most_common())
    said = [f"{row.label(without=aside)} {_short(limit)}" for row, limit in limits[:_NAMED]]
    more = f"; {len(limits) - _NAMED} more" if len(limits) > _NAMED else ""
    by_kind = grouped(gains, lambda found: verdict_word(found[2].limit or {})).values()
    best = [max(alike, key=lambda found: found[0].factor) for alike in by_kind]
    return Answer(
        workload="profile",
        verdict=f"Of {len(limits)} steps {kinds}: {'; '.join(said)}{more}.",
        suggestion=" ".join(f"{row.label(without=aside)}{_doubt(row)}: {gain.sentence}" for gain, row, _ in best[:2]),
    )


def trace_answer(tables: Mapping[str, Columns], fact: GetFact) -> list[Answer]:
    """The answer of a trace alone; none where it holds no verdict."""
    profile = Profile(tables, fact, {}, None)
    gain = best_gain(profile)
    suggestion = gain.sentence if gain else ""
    return [Answer(workload="profile", verdict=_verdict(profile), suggestion=suggestion)] if profile.limit else []


def profile_of(row: Row) -> Profile:
    """The row's profile."""
    return Profile(row.record.tables, row.record.fact, row.record.config, row.record.environment.gpu)


def best_gain(profile: Profile) -> Gain | None:
    """The change that should gain most; None where none follows from the numbers."""
    limit = profile.limit
    if limit is None or not limit["step_s"]:
        return None
    gains = [gain for suggest in _SUGGESTIONS if (gain := suggest(profile, limit))]
    best = max(gains, key=lambda gain: gain.factor, default=None)
    return best if best and best.factor >= _WORTH else None


def _verdict(profile: Profile) -> str:
    return verdict_sentence(profile.limit or {})


def _short(limit: Mapping[str, Any]) -> str:
    """`is launch-bound (the device works for 74.2 % of 35.32 ms)`."""
    if not limit["on_device"]:
        return f"is {verdict_word(limit)} ({percent(1 - limit['overhead_share'])} % of {seconds_words(limit['step_s'])} in ops)"
    busy = percent(limit["busy_s"] / limit["step_s"])
    return f"is {verdict_word(limit)} (the device works for {busy} % of {seconds_words(limit['step_s'])})"


def _doubt(row: Row) -> str:
    """A gain over a step that is unstable is no surer than the step."""
    return " (whose step is unstable)" if "unstable" in doubts(row.record) else ""


def _captured(profile: Profile, limit: Mapping[str, Any]) -> Gain | None:
    """One CUDA graph a step, where the host limits it: as its replay took, or at least what the device works."""
    host_limits = verdict.LAUNCH in verdict_kinds(limit) and limit["on_device"]
    if not host_limits or profile.config.get("adamw") in ("loop", "foreach"):
        return None
    replay_s = profile.fact("graph_replay_s")
    whole = replay_s and not profile.fact("graph_replay_left_out")
    left_s = replay_s if whole else limit["busy_s"]
    factor = limit["step_s"] / left_s if left_s else 0.0
    why = "its replay as a CUDA graph took" if whole else "the device works"
    up_to = "" if whole else "up to "
    step = "the profiled step" if limit["profiled_step"] else "the step"
    capture = "`trainstep bench --capture step`" if profile.is_ours else "Capturing the step as one CUDA graph"
    return Gain(
        factor,
        f"{capture} should make {step} {up_to}{times_words(factor)} as fast: from "
        f"{seconds_words(limit['step_s'])} to the {seconds_words(left_s)} that {why}.",
    )


def _sixteen_bit(profile: Profile, limit: Mapping[str, Any]) -> Gain | None:
    """bf16 matmuls in place of fp32's, where the device limits the step."""
    spec = machine_spec(profile.gpu)
    if profile.config.get("precision") != "fp32" or spec is None or not limit["on_device"]:
        return None
    if verdict.LAUNCH in verdict_kinds(limit):
        return None
    ratio, share = spec.peak_flops["bf16"] / spec.peak_flops["fp32"], profile.class_share(MATMUL)
    factor = 1 / (1 - share * (1 - 1 / ratio))
    return Gain(
        factor,
        f"`--precision bf16_autocast` should make it up to {times_words(factor)} as fast: fp32's matmuls are {percent(share)} % of "
        f"the step and leave the tensor cores idle, whose peak in bf16 is {times_words(ratio)} fp32's.",
    )


def _fused_attention(profile: Profile, limit: Mapping[str, Any]) -> Gain | None:
    """An attention kernel that never writes scores out."""
    lines = table_lines(profile.tables.get("attention"))
    share = profile.share(sum(line["time_s"] for line in lines if line["part"] != "matmuls"))
    if not 0 < share < 1 or profile.config.get("attention") != "plain" or not _device_limits(limit):
        return None
    return Gain(
        1 / (1 - share),
        f"`--attention sdpa` should make it up to {times_words(1 / (1 - share))} as fast: softmax, mask, scale and copies of "
        f"written-out attention take {percent(share)} % of the step.",
    )


def _fused_rest(profile: Profile, limit: Mapping[str, Any]) -> Gain | None:
    """What a compiler fuses: element-wise work, norms and reductions."""
    if profile.config.get("compile", "none") != "none" or not _device_limits(limit):
        return None
    share = profile.class_share(*_FUSED)
    if not 0 < share < 1:
        return None
    factor = 1 / (1 - share)
    compiled = "`--compile model`" if profile.is_ours else "`torch.compile`"
    return Gain(
        factor,
        f"{compiled} should make it up to {times_words(factor)} as fast: element-wise work, norms and reductions, which it fuses, "
        f"take {percent(share)} % of the step.",
    )


def _fewer_ops(profile: Profile, limit: Mapping[str, Any]) -> Gain | None:
    """On a CPU, the time between ops, which a compiled model spends least on."""
    host_limits = verdict.LAUNCH in verdict_kinds(limit) and not limit["on_device"]
    if not host_limits or profile.config.get("compile", "none") != "none":
        return None
    factor = 1 / max(1 - limit["overhead_share"], 1e-3)
    return Gain(
        factor,
        f"A larger --batch-size, or `--compile model`, has fewer calls for the same work: at most {times_words(factor)} as fast, "
        f"if nothing passed between ops.",
    )


def _device_limits(limit: Mapping[str, Any]) -> bool:
    return verdict.LAUNCH not in verdict_kinds(limit)


_SUGGESTIONS: tuple[Callable[[Profile, Mapping[str, Any]], Gain | None], ...] = (
    *(_captured, _sixteen_bit, _fused_attention, _fused_rest, _fewer_ops),
)

"""The answer for profiled steps, and the sentences of a profile: what limits the step, and what gains most.

`sentences(record.tables, record.fact)` explains one profile, from a record or from a trace.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trainstep.config.machine import machine_spec
from trainstep.grouping import grouped
from trainstep.records.tables import table_lines
from trainstep.report.kit.answer import Answer, compile_option
from trainstep.report.kit.forms import listed, ms_words, percent, ratio_words, times_words
from trainstep.report.kit.notes import disturbed_words, profiler_notes
from trainstep.report.kit.rows import Row, doubts, needless, words
from trainstep.traces import host_track, verdict
from trainstep.traces.kernel_classes import ELEMENT_WISE, IDLE, MATMUL, NORMALISATION, REDUCTION
from trainstep.traces.verdict import BUSY_SHARE, ENQUEUE_SHARE, NEAR_THE_LINE, host_launches

_FUSED = (ELEMENT_WISE, REDUCTION, NORMALISATION)
"""Classes of work that a compiler fuses."""
_NAMED = 3
"""The most cells that get a clause each."""
_MODES = {"step": 2, "forward_backward": 1}
"""How much of training a mode is: advice for a whole step comes before advice for a part of it."""
_WORTH = 1.05
"""The least speed-up that is suggested."""
Columns = Mapping[str, Sequence[Any]]
TableRow = Mapping[str, Any]
GetFact = Callable[[str], Any]
"""A fact's value by its name, or None."""


class Profile(NamedTuple):
    """The profile of a record, or of a foreign trace, which has no config."""

    tables: Mapping[str, Columns]
    fact: GetFact
    config: Mapping[str, Any]
    gpu: str | None

    @property
    def is_ours(self) -> bool:
        """Whether the step's config is known; a foreign trace's is not."""
        return "precision" in self.config

    @property
    def limit(self) -> dict[str, Any] | None:
        """The numbers of the verdict; None if the profile has no verdict."""
        return next(iter(table_lines(self.tables.get("verdict"))), None)

    def class_share(self, *names: str) -> float:
        """The share of the step's time that these classes of work take."""
        lines = table_lines(self.tables.get("classes"))
        return self.share(sum(line["time_s"] for line in lines if line["class"] in names))

    def share(self, time_s: float) -> float:
        """The share of the step that this much profiled work takes."""
        limit, lines = self.limit, table_lines(self.tables.get("classes"))
        if limit and limit["on_device"]:
            whole_s = limit["step_s"]  # the unprofiled step, because a profiler does not slow kernels
        else:
            whole_s = sum(line["time_s"] for line in lines if line["class"] != IDLE)
        return min(1.0, time_s / whole_s) if whole_s else 0.0


class Gain(NamedTuple):
    """A change, and the speed-up of the step that it should bring."""

    factor: float
    sentence: str


def profile_answer(rows: Sequence[Row]) -> Answer | None:
    """The verdict of one cell, or the number of cells for each kind of verdict, with the change that should gain most."""
    profiles = [(row, profile) for row in rows if (profile := profile_of(row)).limit]
    if not profiles:
        return None
    gains = [(gain, row, profile) for row, profile in profiles if (gain := best_gain(profile))]
    if len(profiles) == 1:
        [(_, profile)] = profiles
        return Answer(workload="profile", verdict=_whole(profile), suggestion=gains[0][0].sentence if gains else "")
    unnamed = needless(rows)
    limits = [(row, profile.limit) for row, profile in profiles if profile.limit]
    counts = Counter(verdict_word(limit) for _, limit in limits)
    kinds = listed(f"{count} {'is' if count == 1 else 'are'} {kind}" for kind, count in counts.most_common())
    waiting = [(row, limit) for row, limit in limits if verdict_word(limit) == verdict.LAUNCH and limit["on_device"]]
    if len(limits) > _NAMED and waiting:
        return Answer(
            workload="profile",
            verdict=f"Of {len(limits)} steps, {kinds}. {_waiting_words(waiting, unnamed)}",
            suggestion=_best_words(gains, unnamed),
        )
    clauses = [f"{row.label(without=unnamed)} {_short(limit)}" for row, limit in limits[:_NAMED]]
    more = f"; {len(limits) - _NAMED} more" if len(limits) > _NAMED else ""
    return Answer(
        workload="profile",
        verdict=f"Of {len(limits)} steps, {kinds}: {'; '.join(clauses)}{more}.",
        suggestion=_best_words(gains, unnamed),
    )


def _whole(profile: Profile) -> str:
    """The verdict, with the step's time and the doubt of a disturbed profile."""
    text, step_s = _verdict(profile), (profile.limit or {})["step_s"]
    text += "" if _step({"step_s": step_s}) in text else f" A step takes {ms_words(step_s)}."
    return text + disturbed_words(profile.fact("profiler_slowdown"))


def _waiting_words(waiting: Sequence[tuple[Row, TableRow]], unnamed: Sequence[str]) -> str:
    """`The host limits small 128 (forward_no_grad and step) and 2 more: the GPU works for 35.9 to 72.4 % of each.`"""
    named = list(grouped(waiting, lambda pair: pair[0].label(without=[*unnamed, "mode"])).items())[:_NAMED]
    places = [
        f"{place} ({listed(words(row.point['mode']) for row, _ in alike)})" if "mode" in alike[0][0].point else place
        for place, alike in named
    ]
    left = len(waiting) - sum(len(alike) for _, alike in named)
    shares = sorted(limit["busy_s"] / (limit["step_s"] or math.inf) for _, limit in waiting)
    span = (
        f"{percent(shares[0])} to {percent(shares[-1])} % of each"
        if len(shares) > 1
        else f"{percent(shares[0])} % of it"
    )
    return f"The host limits {listed([*places, *([f'{left} more'] if left else [])])}: the GPU works for {span}."


def _best_words(gains: Sequence[tuple[Gain, Row, Profile]], unnamed: Sequence[str]) -> str:
    """For two kinds of verdict the change that should gain most: of a whole training step, before passes without an optimizer."""

    def rank(gained: tuple[Gain, Row, Profile]) -> tuple[int, float]:
        gain, row, _ = gained
        return _MODES.get(row.record.config.get("mode", "step"), 0), gain.factor

    by_kind = grouped(gains, lambda gained: verdict_word(gained[2].limit or {})).values()
    best = [max(alike, key=rank) for alike in by_kind]
    suggestions = []
    for gain, row, _ in best[:2]:
        doubt = " (whose step is unstable)" if "unstable" in doubts(row.record) else ""
        suggestions.append(f"{row.label(without=unnamed)}{doubt}: {gain.sentence}")
    return " ".join(suggestions)


def trace_answer(tables: Mapping[str, Columns], fact: GetFact) -> list[Answer]:
    """The answer for a trace alone; empty if it has no verdict."""
    profile = Profile(tables, fact, {}, None)
    gain = best_gain(profile)
    suggestion = gain.sentence if gain else ""
    return [Answer(workload="profile", verdict=_whole(profile), suggestion=suggestion)] if profile.limit else []


def profile_of(row: Row) -> Profile:
    """The row's profile."""
    return Profile(row.record.tables, row.record.fact, row.record.config, row.record.environment.gpu)


def best_gain(profile: Profile) -> Gain | None:
    """The change that should gain most; None if the numbers suggest none."""
    limit = profile.limit
    if limit is None or not limit["step_s"]:
        return None
    gains = [gain for suggest in _SUGGESTIONS if (gain := suggest(profile, limit))]
    best = max(gains, key=lambda gain: gain.factor, default=None)
    return best if best and best.factor >= _WORTH else None


def _verdict(profile: Profile) -> str:
    return verdict_sentence(profile.limit or {})


def _short(limit: Mapping[str, Any]) -> str:
    """`is launch-bound (the GPU works for 74.2 % of 35.32 ms)`."""
    if not limit["on_device"]:
        return (
            f"is {verdict_word(limit)} ({percent(1 - limit['overhead_share'])} % of {ms_words(limit['step_s'])} in ops)"
        )
    busy = percent(limit["busy_s"] / (limit["step_s"] or math.inf))
    return f"is {verdict_word(limit)} (the GPU works for {busy} % of {ms_words(limit['step_s'])})"


def _captured(profile: Profile, limit: Mapping[str, Any]) -> Gain | None:
    """The gain of a CUDA graph per step if the host limits it: to the time of a measured replay, else to the device's work."""
    is_captured = profile.config.get("capture", "none") != "none"
    if (
        _device_limits(limit)
        or not limit["on_device"]
        or is_captured
        or profile.config.get("adamw") in ("loop", "foreach")
    ):
        return None
    replay_s = profile.fact("graph_replay_s")
    whole = replay_s and not profile.fact("graph_replay_left_out")
    left_s = replay_s if whole else limit["busy_s"]
    factor = limit["step_s"] / left_s if left_s else 0.0
    why = "its replay as a CUDA graph took" if whole else "the GPU works"
    up_to = "should make {} " if whole else "can make {} at most "
    step = "the profiled step" if limit["profiled_step"] else "the step"
    capture = "`trainstep bench --capture auto`" if profile.is_ours else "Capturing the step as one CUDA graph"
    return Gain(
        factor,
        f"{capture} {up_to.format(step)}{times_words(factor)} as fast: from "
        f"{ms_words(limit['step_s'])} to the {ms_words(left_s)} that {why}.",
    )


def _sixteen_bit(profile: Profile, limit: Mapping[str, Any]) -> Gain | None:
    """The gain of bf16 matmuls if the device limits an fp32 step."""
    spec = machine_spec(profile.gpu)
    if profile.config.get("precision") != "fp32" or spec is None or not limit["on_device"] or not _device_limits(limit):
        return None
    ratio, share = spec.peak_flops["bf16"] / spec.peak_flops["fp32"], profile.class_share(MATMUL)
    factor = 1 / (1 - share * (1 - 1 / ratio))
    return Gain(
        factor,
        f"`--precision bf16_autocast` can make it at most {times_words(factor)} as fast: fp32's matmuls are {percent(share)} "
        f"% of the step and do not use the tensor cores, whose peak in bf16 is {times_words(ratio)} fp32's.",
    )


def _fused_attention(profile: Profile, limit: Mapping[str, Any]) -> Gain | None:
    """The gain of an attention kernel that does not write scores to memory."""
    lines = table_lines(profile.tables.get("attention"))
    share = profile.share(sum(line["time_s"] for line in lines if line["part"] != "matmuls"))
    if not 0 < share < 1 or profile.config.get("attention") != "plain" or not _device_limits(limit):
        return None
    return Gain(
        1 / (1 - share),
        f"`--attention sdpa` can make it at most {times_words(1 / (1 - share))} as fast: softmax, mask, scale and copies of "
        f"plain attention take {percent(share)} % of the step.",
    )


def _fused_rest(profile: Profile, limit: Mapping[str, Any]) -> Gain | None:
    """The gain of a compiler, which fuses element-wise work, norms and reductions."""
    is_tape = not limit["on_device"] and profile.config.get("capture", "none") != "none"  # a tape excludes a compiler
    if profile.config.get("compile", "none") != "none" or not _device_limits(limit) or is_tape:
        return None
    share = profile.class_share(*_FUSED)
    if not 0 < share < 1:
        return None
    factor = 1 / (1 - share)
    option = compile_option(profile.config) if profile.is_ours else "`torch.compile`"
    return Gain(
        factor,
        f"{option} can make it at most {times_words(factor)} as fast: element-wise work, norms and reductions, which it "
        f"fuses, take {percent(share)} % of the step.",
    )


def _fewer_ops(profile: Profile, limit: Mapping[str, Any]) -> Gain | None:
    """The gain of fewer ops on a CPU, where time passes between ops."""
    taken = any(profile.config.get(name, "none") != "none" for name in ("compile", "capture"))
    if _device_limits(limit) or limit["on_device"] or taken:
        return None
    factor = 1 / max(1 - limit["overhead_share"], 1e-3)
    return Gain(
        factor,
        f"A larger --batch-size, or {compile_option(profile.config)}, needs fewer calls for the same work: at most "
        f"{times_words(factor)} as fast, if no time passed between ops.",
    )


def _device_limits(limit: Mapping[str, Any]) -> bool:
    return verdict.LAUNCH not in verdict_kinds(limit)


_SUGGESTIONS: tuple[Callable[[Profile, Mapping[str, Any]], Gain | None], ...] = (
    *(_captured, _sixteen_bit, _fused_attention, _fused_rest, _fewer_ops),
)


def sentences(tables: Mapping[str, Columns], fact: GetFact) -> list[str]:
    """The sentences of a profile: the verdict, the reasons for it, and how the profiler changed the numbers."""
    paragraphs = [verdict_sentence(limit) for limit in table_lines(tables.get("verdict"))]
    paragraphs += _alike(table_lines(tables.get("alike")))
    paragraphs += map(_stall, table_lines(tables.get("stall")))
    paragraphs += [str(fact("attention_split"))] if fact("attention_split") else []
    return [*paragraphs, *_graph_replay(fact), *profiler_notes(fact)]


def verdict_sentence(limit: TableRow) -> str:
    """`Launch-bound: the GPU works ...`, by the current rule from the numbers of a verdict."""
    kinds = verdict_kinds(limit)
    what = kinds[0].capitalize() if len(kinds) == 1 else f"Near the line between {' and '.join(kinds)}"
    return f"{what}: {verdict_reason(limit)}"


def verdict_word(limit: TableRow) -> str:
    """The verdict as a word for a column: one of the four kinds, or `near the line`."""
    kinds = verdict_kinds(limit)
    return kinds[0] if len(kinds) == 1 else NEAR_THE_LINE


def verdict_kinds(limit: TableRow) -> tuple[str, ...]:
    """The verdict of these numbers; two kinds if they are near the line between them."""
    return verdict.kinds_of(verdict.Verdict(**limit))


def verdict_reason(limit: TableRow) -> str:
    """The reason for the verdict, with its numbers."""
    kinds = verdict_kinds(limit)
    if len(kinds) > 1:
        return _near_reason(limit, kinds)
    kind = kinds[0]
    if kind == verdict.COMMUNICATING:
        return f"{percent(limit['exposed_share'])} % of the step is exposed communication, with no computation at the same time."
    if limit["on_device"]:
        if kind == verdict.LAUNCH:
            return _launch_reason(limit)
        busy = f"the GPU works for {_share(limit, 'busy_s')} of {_step(limit)}"
    else:
        overhead = limit["overhead_share"]
        if kind == verdict.LAUNCH:
            between = f"on the CPU {percent(overhead)} % of the profiled step passes between ops"
            return f"{between}, in Python, autograd, views and the profiler."
        busy = f"on the CPU {percent(1 - overhead)} % of the step passes in ops"
    only, rest = ("", "") if kind == verdict.COMPUTE else ("only ", ", the other work mostly moves bytes")
    share = percent(limit["matmul_share"])
    return f"{busy}; {only}{share} % of what it computes is matmuls and fused attention{rest}."


def _near_reason(limit: TableRow, kinds: Sequence[str]) -> str:
    """The share that is close to the line between two kinds, and that line."""
    if verdict.COMMUNICATING in kinds:
        share, line, what = limit["exposed_share"], verdict.EXPOSED_SHARE, "of the step is exposed communication"
    elif verdict.LAUNCH not in kinds:
        what = "of what it computes is matmuls and fused attention"
        share, line = limit["matmul_share"], verdict.MATMUL_SHARE
    elif not limit["on_device"]:
        share, line, what = limit["overhead_share"], verdict.OVERHEAD_SHARE, "of the step passes between ops"
    else:
        launches = f", the host launches for {_share(limit, 'enqueue_s')}" if limit["enqueue_s"] else ""
        works = f"the GPU works for {_share(limit, 'busy_s')} of {_step(limit)}"
        if not verdict.is_near(limit["busy_s"] / (limit["step_s"] or math.inf), BUSY_SHARE):
            return f"{works}{launches} (from {percent(ENQUEUE_SHARE)} % on the host is the limit)."
        return f"{works} (under {percent(BUSY_SHARE)} % it waits){launches}."
    return f"{percent(share)} % {what}, and the line is at {percent(line)} %."


def _share(limit: TableRow, name: str) -> str:
    return f"{percent(limit[name] / (limit['step_s'] or math.inf))} %"


def _step(limit: TableRow) -> str:
    return f"a step of {ms_words(limit['step_s'])}"


def _launch_reason(limit: TableRow) -> str:
    step_s, enqueue_s = limit["step_s"], limit["enqueue_s"]
    reason = f"the GPU works for {_share(limit, 'busy_s')} of {_step(limit)}"
    if limit["profiled_step"]:
        return f"{reason} and waits for the rest, in part because the profiler slows the host."
    if enqueue_s is not None and host_launches(enqueue_s=enqueue_s, step_s=step_s):
        return f"{reason} and waits for the host, which launches for {ms_words(enqueue_s)}."
    return f"{reason} and waits for the rest, although the host does not launch all the time: see where it is blocked."


def _alike(rows: Sequence[TableRow]) -> list[str]:
    """Why forward and backward take equally long although backward computes twice as much; empty if they do not."""
    if not rows:
        return []
    forward, backward = rows
    return [
        f"Forward and backward take equally long ({ms_words(forward['time_s'])} and {ms_words(backward['time_s'])}) "
        f"because each takes the time that the host needs to launch it ({forward['pieces']:,.0f} and "
        f"{backward['pieces']:,.0f} pieces of work); on the GPU they take {ms_words(forward['device_s'])} and "
        f"{ms_words(backward['device_s'])}."
    ]


def _stall(stall: TableRow) -> str:
    """Why a timeline shows the host stalled between backward and optimizer, or that it does not stall."""
    gap, behind = ms_words(stall["gap_s"]), ms_words(stall["behind_s"])
    if stall["kind"] == host_track.BLOCKED:
        waits = ms_words(stall["blocked_s"])
        return f"Between backward and optimizer {gap} pass on the host; for {waits} of it a synchronisation blocks the host."
    if stall["kind"] == host_track.ALLOCATION:
        allocation = ms_words(stall["allocation_s"])
        return f"Between backward and optimizer {gap} pass on the host, {allocation} of it in cudaMalloc."
    if stall["kind"] == host_track.QUEUE_FULL:
        return (
            f"The launch queue was full for {ms_words(stall['queue_full_s'])} of the step: the host cannot run further "
            f"ahead and stalls in a timeline; at the optimizer's first launch the GPU was {behind} behind."
        )
    return f"The host does not stall between backward and optimizer: {gap} pass on it, and the GPU is {behind} behind then."


def _graph_replay(fact: GetFact) -> list[str]:
    """The time of the kernels in the profile, and replayed as one CUDA graph without the host."""
    failed, replay_s, kernels_s = (fact(f"graph_replay_{name}") for name in ("failed", "s", "kernels_s"))
    if failed:
        return [f"No CUDA graph was replayed: {failed}"]
    if not replay_s or kernels_s is None:
        return []
    left_out = fact("graph_replay_left_out")
    return [
        f"Kernels of {fact('graph_replay_phases')}: {ms_words(kernels_s)}; replayed as one CUDA graph: "
        f"{ms_words(replay_s)} (ratio {ratio_words(kernels_s / replay_s)})." + (f" {left_out}" if left_out else "")
    ]
